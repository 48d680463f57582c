import numpy as np
import pytest
from tests.golden.files.make import PARENT, STEP, V1, WEIGHTS, X, Y, every_dtype, make

from triplane.unified_ir.files.container import Container
from triplane.unified_ir.files.tensors import as_tensor
from triplane.unified_ir.runtime import Bundle, Plan

DIGESTS = {
    "model.tpm": "63d947ff0e50c139b7260d072fabc9a08f1beb4544c919b9abc93e05bdd55c52",
    "digits.bundle": "a770781cbfa324056f0ad18b6e2f439e251adca844e80d8de771da10443dd396",
    "digits.plan": "5e8c214508ee39dbdcc98c60f997df491a21eaede553e642c9f3b2b358d09bf6",
    "state.checkpoint": "9a55fb0368c83e7b83b783ea307efc35e5eb3e3e6d261668647663cb263e2027",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_generator_reproduces_every_byte(tmp_path, name):
    assert make(tmp_path) == DIGESTS
    assert (tmp_path / name).read_bytes() == (V1 / name).read_bytes()


def test_model_file_of_version_1_is_readable():
    file = Container(V1 / "model.tpm", kind="model", expected_digest=DIGESTS["model.tpm"])
    file.verify()
    assert bytes(file.part("module.pb")) == bytes(range(256))
    assert dict(file.manifest.properties) == {"made_by": "golden", "größe": "1"}
    assert file.manifest.parent == PARENT
    found = file.tensors("weights.safetensors")
    assert found.keys() == every_dtype().keys()
    for name, value in every_dtype().items():
        want = as_tensor(value)
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape)
        assert found[name].data.tobytes() == want.data.tobytes()
    roles = {t.name: t.role for t in file.manifest.tensors if t.role}
    assert roles == {"float32": "parameter", "float64": "personal", "int64": "buffer"}


def test_bundle_of_version_1_serves():
    bundle = Bundle.load(V1 / "digits.bundle", expected_digest=DIGESTS["digits.bundle"])
    assert bundle.check_goldens() == 0
    np.testing.assert_array_equal(bundle.predict(x=X)["y"], Y)
    assert bundle.labels == {"y": ("cat", "dog")}
    assert bundle.description.preprocessing[0].params == (("factor", (0.0625,)),)
    assert bundle.weights["w"].data.tolist() == WEIGHTS["w"].tolist()


def test_plan_of_version_1_learns_from_a_saved_state():
    plan = Plan.load(V1 / "digits.plan", expected_digest=DIGESTS["digits.plan"])
    assert plan.run("local_update", STEP)["loss"] == 2
    plan.load_state(V1 / "state.checkpoint")
    assert plan.steps == 0
    assert plan.evaluate(STEP)["loss"] == 0
    assert plan.limits.max_steps == 100
