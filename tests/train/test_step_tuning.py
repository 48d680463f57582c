"""A step that suits the machine: within its memory, by its fastest forms, to the same losses."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data, nn, ops, optim, train
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.ir import TensorSpec

DIGITS = data.digits().take(256)
BATCH = 64


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.convs = nn.CellList([nn.Conv2d(1 if i == 0 else 4, 4, 3, padding=1) for i in range(4)])
        self.head = nn.Dense(4, 10)

    def construct(self, x):
        for conv in self.convs:
            x = ops.gelu(conv(x))
        return self.head(x.mean((2, 3)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "triplane" / "tuning.json"


def trainer(**options):
    nn.seed(0)
    loss, optimizer = nn.SoftmaxCrossEntropy(), optim.SGD(0.1, momentum=0.9)
    return train.Trainer(Net(), loss=loss, optimizer=optimizer, **options)


@pytest.mark.parametrize("tune", ["x", "no", 1, None])
def test_tune_is_yes_or_no(tune):
    with pytest.raises(InvalidInput, match="tune must be True or False, got"):
        trainer(tune=tune)


def losses(made):
    return made.fit(DIGITS, epochs=2, batch_size=BATCH, progress="none")["loss"]


def test_a_budget_halves_the_memory_and_keeps_the_losses():
    plain = trainer()
    wanted = losses(plain)
    assert plain.memory_plan is None
    asked = trainer(memory_budget_bytes=1 << 40)
    losses(asked)
    assert asked.memory_plan is not None
    whole = asked.memory_plan.peak_bytes
    lean = trainer(memory_budget_bytes=whole // 2)
    np.testing.assert_allclose(losses(lean), wanted, rtol=1e-4)
    assert lean.memory_plan is not None
    assert lean.memory_plan.fits, str(lean.memory_plan)
    assert lean.memory_plan.again


def test_tuning_measures_and_keeps_the_losses(cache):
    tuned = trainer(tune=True)
    np.testing.assert_allclose(losses(tuned), losses(trainer()), rtol=1e-4)
    assert tuned.tuning is not None
    assert tuned.tuning.measured > 0
    assert cache.exists()
    again = trainer(tune=True)
    losses(again)
    assert again.tuning is not None
    assert (again.tuning.measured, again.tuning.remembered) == (0, tuned.tuning.measured)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_budget_bytes": 0}, "must be >= 1, got 0"),
        ({"memory_budget_bytes": 1000}, r"needs [0-9,]+ bytes .* the budget is 1,000"),
        ({"tune": True, "engine": "reference"}, "need onnxruntime; the engine is 'reference'"),
    ],
)
def test_what_cannot_be_is_told(options, words):
    with pytest.raises(InvalidInput, match=words):
        losses(trainer(**options))


def test_a_gpu_is_not_tuned():
    made = OnnxEngine()
    made.devices = "cuda"  # all that tuning looks at: its measurements are those of a CPU
    with pytest.raises(InvalidInput, match="measure a CPU; the device is 'cuda'"):
        losses(trainer(tune=True, engine=made))


def test_specs_without_a_batch_cannot_be_measured():
    made = trainer(tune=True)
    made.prepare(TensorSpec(("N", 1, 8, 8)), TensorSpec(("N",), "int64"))
    with pytest.raises(InvalidInput, match="need a batch to measure with"):
        made.training_program()
