import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.runtime.graphs import external, model
from tests.runtime.samples import WEIGHTS, X, Y, bundle_spec, make_bundle

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import container
from triplane.unified_ir.files.tensors import StoredTensor
from triplane.unified_ir.runtime import Bundle, Constraints, Session, TensorInfo, weight_offsets
from triplane.unified_ir.runtime.bundle import encoded_report, write_with_report


def test_bundle_gives_back_what_was_put_in(tmp_path):
    digest = make_bundle(tmp_path / "b")
    bundle = Bundle.load(tmp_path / "b", expected_digest=digest)
    assert bundle.digest == digest
    assert bundle.description == bundle_spec().description
    assert bundle.labels == {"y": ("cat", "dog")}
    assert bundle.report == {"latency_ms": 0.25, "nodes": ["MatMul"]}
    assert bundle.adapt is None
    assert {name: w.data.tolist() for name, w in bundle.weights.items()} == {
        name: w.tolist() for name, w in WEIGHTS.items()
    }


def test_bundle_predicts_and_passes_its_goldens(tmp_path):
    make_bundle(tmp_path / "b")
    bundle = Bundle.load(tmp_path / "b")
    np.testing.assert_allclose(bundle.predict(x=X)["y"], Y)
    np.testing.assert_allclose(bundle.predict(X)["y"], Y)
    for more, given in (((X,), {}), ((), {"x": X})):
        with pytest.raises(InvalidInput, match=r"predict takes \['x'\]; pass them by name"):
            bundle.predict(X, *more, **given)
    assert bundle.check_goldens() <= 1e-5
    with pytest.raises(InvalidInput, match="x: float32"):
        bundle.predict(x=X[0])


def test_unzipped_bundle_loads_in_a_stock_runtime(tmp_path):
    make_bundle(tmp_path / "b")
    with zipfile.ZipFile(tmp_path / "b") as file:
        file.extractall(tmp_path / "out")
    session = Session(tmp_path / "out" / "model.onnx")
    np.testing.assert_allclose(session.run({"x": X})["y"], Y)


def test_same_spec_gives_same_bytes_and_the_report_stays_outside_the_content(tmp_path):
    assert make_bundle(tmp_path / "a") == make_bundle(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    make_bundle(tmp_path / "c", report={"latency_ms": 99})
    a, c = Bundle.load(tmp_path / "a"), Bundle.load(tmp_path / "c")
    assert a.content_digest == c.content_digest
    assert a.digest != c.digest
    make_bundle(tmp_path / "d", golden_outputs={"y": Y + 1})
    assert Bundle.load(tmp_path / "d").content_digest != a.content_digest


@pytest.mark.parametrize(
    ("goldens", "message"),
    [
        ({"y": Y + np.float32(0.01)}, "output 'y' is off by 0.0"),
        ({"y": np.full_like(Y, np.nan)}, "off by nan"),
        ({"y": Y[:1]}, r"is float32\(2, 2\), not float32\(1, 2\)"),
        ({"z": Y}, "outputs must be some of"),
        ({}, "no golden outputs"),
    ],
)
def test_goldens_outside_the_tolerance_are_corrupt(tmp_path, goldens, message):
    make_bundle(tmp_path / "b", golden_outputs=goldens)
    with pytest.raises(Corrupt, match=message):
        Bundle.load(tmp_path / "b").check_goldens()


def test_bundle_for_a_newer_runtime_is_refused_before_its_graph_is_read(tmp_path):
    description = bundle_spec().description
    for constraints in (Constraints(min_version="99.0"), Constraints(runtime="other")):
        make_bundle(
            tmp_path / "b", description=replace(description, constraints=constraints), model=b"-"
        )
        with pytest.raises(InvalidInput, match="here is onnxruntime"):
            Bundle.load(tmp_path / "b").session()


def test_graph_that_is_not_the_described_one_is_corrupt(tmp_path):
    other = replace(bundle_spec().description, inputs=(TensorInfo("x", "float32", ("N", 4)),))
    make_bundle(tmp_path / "b", description=other)
    with pytest.raises(Corrupt, match=r"model.onnx': its inputs or outputs"):
        Bundle.load(tmp_path / "b").session()


def test_bfloat16_weights_reach_the_graph(tmp_path):
    bits = (np.array([1.5, -2], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    weights = {"w": StoredTensor("bfloat16", bits)}
    (offset, length) = weight_offsets(weights)["w"]
    nodes = [
        helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "wide"], ["y"]),
    ]
    graph = model(
        nodes,
        {"x": ("N", 2)},
        {"y": ("N", 2)},
        external=[external("w", TensorProto.BFLOAT16, (2,), offset, length)],
    )
    description = replace(bundle_spec().description, inputs=(TensorInfo("x", "float32", ("N", 2)),))
    x = np.ones((1, 2), np.float32)
    make_bundle(
        tmp_path / "b",
        description=description,
        model=graph,
        weights=weights,
        golden_inputs={"x": x},
        golden_outputs={"y": np.array([[1.5, -2]], np.float32)},
    )
    assert Bundle.load(tmp_path / "b").check_goldens() == 0


@pytest.mark.parametrize("changes", [{}, {"adapt": b"another graph"}], ids=["plain", "adapt"])
def test_with_the_report_of_another_conversion_a_bundle_is_the_other_one(tmp_path, changes):
    first, second, again = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    make_bundle(first, report={"latency_ms": 0.1 + 0.2, "name": "é"}, **changes)
    make_bundle(second, report={"latency_ms": 7}, **changes)
    assert first.read_bytes() != second.read_bytes()
    write_with_report(second, again, encoded_report(Bundle.load(first).report))
    assert again.read_bytes() == first.read_bytes()


def test_adaptation_graph_travels_along(tmp_path):
    make_bundle(tmp_path / "b", adapt=b"another graph")
    assert Bundle.load(tmp_path / "b").adapt == b"another graph"


def test_steps_of_adaptation_without_a_graph_are_refused(tmp_path):
    described = replace(bundle_spec().description, adapt_steps=3)
    make_bundle(tmp_path / "b", description=described)
    with pytest.raises(Corrupt, match=r"3 steps of adaptation, but there is no part 'adapt\.onnx'"):
        Bundle.load(tmp_path / "b")


def test_golden_input_that_is_no_input_is_refused_when_written(tmp_path):
    with pytest.raises(InvalidInput, match="golden inputs"):
        make_bundle(tmp_path / "b", golden_inputs={"q": X})
    assert list(tmp_path.iterdir()) == []


def test_golden_outputs_without_elements_pass(tmp_path):
    make_bundle(tmp_path / "b", golden_inputs={"x": X[:0]}, golden_outputs={"y": Y[:0]})
    assert Bundle.load(tmp_path / "b").check_goldens() == 0


def parts_of(path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist() if name != "manifest.pb"}


def rewrite(path, parent: str = "cd" * 32, **changes: bytes | None) -> None:
    """Write the bundle again, well-formed as a container, with other parts ("bundle_pb=")."""
    parts = parts_of(path)
    goldens = container.Container(path, kind="bundle").tensors("goldens.safetensors")
    for key, data in changes.items():
        name = key.replace("_", ".")
        if data is None:
            del parts[name]
        else:
            parts[name] = data
    made = [
        container.tensor_part(name, goldens if name.startswith("goldens") else WEIGHTS)
        if name.endswith(".safetensors")
        else container.part(name, data)
        for name, data in parts.items()
    ]
    container.write(path, "bundle", made, parent=parent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"report_json": None}, "a bundle has parts"),
        ({"extra_bin": b""}, "a bundle has parts"),
        ({"report_json": b"{"}, "'report.json': not JSON"),
        ({"report_json": b"[" * 100_000}, "'report.json': not JSON"),
        ({"report_json": b" " * (4 << 20) + b"{}"}, "at most 4194304 are read"),
        ({"bundle_pb": b"\xff\xff"}, "'bundle.pb': not a Bundle message"),
        ({"bundle_pb": b"\xf8\x07\x01"}, "'bundle.pb': has fields this version does not know"),
        ({"bundle_pb": b"\0" * (2 << 20)}, "at most 1048576 are read"),
        ({"bundle_pb": b""}, "model digest is not the manifest's parent"),
        ({"parent": "00" * 32}, "model digest is not the manifest's parent"),
    ],
)
def test_forged_parts_in_a_sound_container_are_refused(tmp_path, changes, message):
    make_bundle(tmp_path / "b")
    rewrite(tmp_path / "b", **changes)
    with pytest.raises(Corrupt, match=message):
        Bundle.load(tmp_path / "b")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_tolerance_that_would_pass_anything_or_nothing_is_refused(tmp_path, value):
    description = bundle_spec().description
    tolerance = replace(description.tolerance, relative=value)
    make_bundle(tmp_path / "b", description=replace(description, tolerance=tolerance))
    with pytest.raises(Corrupt, match="must be a finite number >= 0"):
        Bundle.load(tmp_path / "b")


def test_report_with_nan_is_not_written_as_broken_json(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        make_bundle(tmp_path / "b", report={"x": float("nan")})
    make_bundle(tmp_path / "b", report={"b": 1, "a": 2})
    assert json.loads(parts_of(tmp_path / "b")["report.json"]) == {"a": 2, "b": 1}
