"""Paths that are no files and files that are sound but say what cannot be."""

import os
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.attacks import forge
from tests.runtime.graphs import model
from tests.runtime.samples import X, bundle_spec, make_bundle, make_plan, plan_spec, samples

from triplane.proto import files_pb2 as pb
from triplane.proto.disk import write_atomic
from triplane.proto.errors import Corrupt, InvalidInput, Unavailable
from triplane.unified_ir.files import container, tensors
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime import Bundle, Constraints, Plan, Session


def test_device_or_pipe_is_never_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidInput, match="cannot become a file"):
        write_atomic(pipe, b"x")
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", [".", "a\0b"])
def test_name_that_no_file_can_have_is_refused(name, tmp_path):
    with pytest.raises(InvalidInput, match="cannot become a file"):
        write_atomic(tmp_path / name if name != "." else Path(name), b"x")


@pytest.mark.parametrize("path", ["a\0b", "/sys/kernel/mm/transparent_hugepage/enabled"])
def test_what_cannot_be_opened_or_mapped_is_unavailable(path):
    if path.startswith("/") and not Path(path).exists():
        pytest.skip("this system has no such pseudo-file")
    with pytest.raises(Unavailable, match="could not"):
        Container(path, kind="plan")


def test_shape_of_a_million_dimensions_is_refused_before_it_becomes_a_tuple(tmp_path):
    message = pb.Manifest(format_version=1, kind="model")
    message.tensors.add(part="t.safetensors", name="a", shape=[1] * 1_000_000)
    forge.write(tmp_path / "f", message)
    with pytest.raises(Corrupt, match="rank 1000000 out of range"):
        Container(tmp_path / "f", kind="model")


def test_header_in_another_encoding_than_utf8_is_refused():
    text = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.encode("utf-16-le")
    with pytest.raises(Corrupt, match="not JSON of tensors"):
        tensors.unpack(len(text).to_bytes(8, "little") + text + bytes(4), "part")


def test_writer_refuses_the_tensor_name_that_readers_take_for_metadata():
    with pytest.raises(InvalidInput, match="__metadata__"):
        tensors.pack("t.safetensors", {"__metadata__": np.zeros(1, np.float32)})


def test_parent_that_is_no_digest_is_refused_by_the_writer(tmp_path):
    with pytest.raises(InvalidInput, match="64 lower-case"):
        container.write(tmp_path / "f", "model", [], parent=" " * 2 + "ab" * 31)


def saved_state(tmp_path, plan, *, steps="1", names=("w", "seen")):
    """Write a sound checkpoint of `plan` with what was changed."""
    values = {name: x for name, x in plan.state().items() if name in names}
    part = container.tensor_part("state.safetensors", values, dict.fromkeys(values, "parameter"))
    properties = {"steps": steps, "spent_s": "0"}
    container.write(tmp_path / "s", "checkpoint", [part], properties=properties, parent=plan.digest)
    return tmp_path / "s"


def test_saved_state_that_lacks_a_tensor_is_corrupt_and_changes_nothing(tmp_path):
    make_plan(tmp_path / "p")
    plan = Plan.load(tmp_path / "p")
    with pytest.raises(Corrupt, match=r"holds \['w'\]"):
        plan.load_state(saved_state(tmp_path, plan, names=("w",)))
    assert plan.steps == 0


def test_saved_step_count_beyond_a_float_is_corrupt(tmp_path):
    make_plan(tmp_path / "p")
    plan = Plan.load(tmp_path / "p")
    with pytest.raises(Corrupt, match="no number"):
        plan.load_state(saved_state(tmp_path, plan, steps="9" * 400))


def test_step_counts_that_no_loop_can_take_are_refused(tmp_path):
    make_plan(tmp_path / "p", steps={"local_update": 2**63})
    with pytest.raises(Corrupt, match="steps by default"):
        Plan.load(tmp_path / "p")
    make_plan(tmp_path / "p")
    with pytest.raises(InvalidInput, match="0 to"):
        Plan.load(tmp_path / "p").adapt([samples(4)], steps=-1)


def test_infinite_golden_passes_only_the_same_infinity(tmp_path):
    make_bundle(tmp_path / "b", golden_outputs={"y": np.full((2, 2), np.inf, np.float32)})
    with pytest.raises(Corrupt, match="off by inf"):
        Bundle.load(tmp_path / "b").check_goldens()
    x = np.full_like(X, np.inf)
    y = np.full((2, 2), np.inf, np.float32)
    make_bundle(tmp_path / "b", golden_inputs={"x": x}, golden_outputs={"y": y})
    assert Bundle.load(tmp_path / "b").check_goldens() == 0.0


def test_runtime_too_old_for_a_bundle_is_not_called_damage_of_its_goldens(tmp_path):
    spec = bundle_spec()
    description = type(spec.description)(
        name="digits", version="1", target="t", inputs=spec.description.inputs,
        outputs=spec.description.outputs, constraints=Constraints(min_version="999"),
    )  # fmt: skip
    make_bundle(tmp_path / "b", description=description)
    with pytest.raises(InvalidInput, match="needs onnxruntime >= 999"):
        Bundle.load(tmp_path / "b").check_goldens()


def test_result_that_numpy_cannot_hold_leaves_the_state_and_is_invalid_input():
    nodes = [
        helper.make_node("Add", ["w", "x"], ["w:next"]),
        helper.make_node("Cast", ["x"], ["r"], to=TensorProto.BFLOAT16),
    ]
    types = {"r": TensorProto.BFLOAT16}
    data = model(nodes, {"x": (2,), "w": (2,)}, {"w:next": (2,), "r": (2,)}, types=types)
    loop = Session(data).loop({"w": np.zeros(2, np.float32)})
    with pytest.raises(InvalidInput, match="bfloat16"):
        loop.step(x=np.ones(2, np.float32))
    assert not loop.state()["w"].any()


def test_only_onnx_is_read_as_a_graph_and_nothing_is_printed(tmp_path, capfd):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "m.ort")
    options.log_severity_level = 4
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(plan_spec().entries["predict"], options)
    with pytest.raises(Corrupt, match="refused the model"):
        Session((tmp_path / "m.ort").read_bytes())
    assert capfd.readouterr() == ("", "")


def test_values_a_graph_refuses_write_nothing_to_the_terminal(capfd):
    nodes = [helper.make_node("Gather", ["t", "i"], ["y"])]
    types = {"i": TensorProto.INT64}
    table = {"t": np.zeros(3, np.float32)}
    session = Session(model(nodes, {"i": ("N",)}, {"y": ("N",)}, table, types=types))
    with pytest.raises(InvalidInput, match="out of data bounds"):
        session.run({"i": np.array([9])})
    assert capfd.readouterr() == ("", "")
