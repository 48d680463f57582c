import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from tests.conformance.rows import MISSING
from tests.conformance.uses import naming, recorded, uses_of

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.onnx import EmittedInitializer, External, OnnxTarget, emit, serialize
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.runtime.session import Session

ROOT = Path(__file__).parents[2]


def function(specs, body, name="f"):
    build = Build(TABLE, name)
    with build:
        made = body(**{k: build.param(k, spec) for k, spec in specs.items()})
    return build.finish(made)


@pytest.mark.parametrize("levels", [2, 3])
def test_branches_in_branches_with_constant_conditions_are_loaded(levels):
    """onnxruntime 1.31 puts such branches in place of their Ifs, and fails at the second."""

    def nested(x, level):
        chosen = ops.constant(np.array([1.0, float(level)], np.float32)).sum() > 0.0

        def then(x):
            s = ops.sin(x)
            y = ops.tanh(x * s) if level == 1 else nested(x * s, level - 1)
            return y * s + y * x * ops.cos(x)

        return ops.cond(chosen, then, lambda x: x, x)

    made = function({"x": TensorSpec((2,))}, lambda x: {"y": nested(x, levels)})
    x = np.array([0.3, 0.7], np.float32)
    (wanted,) = engine("reference").compile(made)(x)
    np.testing.assert_allclose(engine("onnx").compile(made)(x)[0], wanted, rtol=1e-6)


def loss():
    """A small network with symbolic batch, a loop and integer labels."""

    def body(w, b, x, labels):
        h = ops.max_pool(ops.relu(ops.conv(x, w, b, padding="same")), 2)
        h = ops.fori_loop(2, lambda _, c: ops.tanh(c), ops.flatten(h))
        return {"loss": ops.cross_entropy(h, labels).mean()}

    specs = {
        "w": TensorSpec((2, 1, 3, 3)), "b": TensorSpec((2,)),
        "x": TensorSpec(("N", 1, 4, 4)), "labels": TensorSpec(("N",), "int64"),
    }  # fmt: skip
    return function(specs, body)


def graphs(graph):
    """The graph and every subgraph of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)


NOT_INFERRED = {
    "MeanVarianceNormalization",  # onnx 1.23 keeps its default axes from its body
    "STFT",  # onnx 1.23 counts both sides where `onesided` is left to its default
}
"""Rows whose shapes onnx itself infers wrongly, so that its full check fails."""


@pytest.mark.slow
@pytest.mark.parametrize("opset", [17, 21, 26])
def test_every_sample_gives_a_model_that_passes_the_full_check(opset):
    for use in uses_of():
        if {str(use), str(use.row)} & MISSING[opset]:
            continue
        with naming(f"{use} at opset {opset}"):
            model = emit(recorded(use, np.float32)[0], target=OnnxTarget(opset))
            onnx.checker.check_model(model, full_check=str(use.row) not in NOT_INFERRED)
            assert [(i.domain, i.version) for i in model.opset_import] == [("", opset)]
            domains = {n.domain for g in graphs(model.graph) for n in g.node}
            assert domains <= {""}, f"only ai.onnx, found {domains}"


@pytest.mark.parametrize("opset", range(17, 27))
def test_a_gradient_passes_the_full_check_at_every_opset(opset):
    model = emit(value_and_grad(loss(), ["w", "b"]), target=OnnxTarget(opset))
    onnx.checker.check_model(model, full_check=True)
    Session(serialize(model))


def test_opsets_outside_the_stated_range_are_refused():
    for opset in (16, 27):
        with pytest.raises(InvalidInput, match="opsets 17 to 26"):
            OnnxTarget(opset)


FINGERPRINT = """
import hashlib
from tests.onnx.test_emit import fingerprint
print(fingerprint())
"""


def fingerprint():
    """A digest of the bytes of a gradient graph."""
    data = serialize(emit(value_and_grad(loss(), ["w", "b"])))
    return hashlib.sha256(data).hexdigest()


@pytest.mark.slow
def test_fresh_processes_give_the_same_bytes_whatever_their_hash_seed():
    path = os.pathsep.join([str(ROOT / ".ci" / "namespace"), str(ROOT)])
    found = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.strip()
        for seed in ("0", "1", "4242")
    }  # fmt: skip
    assert found == {fingerprint()}


def test_every_value_has_one_name_and_the_signature_keeps_its_own():
    model = emit(value_and_grad(loss(), ["w", "b"]))
    assert [i.name for i in model.graph.input] == ["w", "b", "x", "labels"]
    assert [o.name for o in model.graph.output] == ["loss", "grad.w", "grad.b"]
    names = [out for g in graphs(model.graph) for n in g.node for out in n.output]
    names += [t.name for g in graphs(model.graph) for t in g.initializer]
    names += [i.name for g in graphs(model.graph) for i in g.input]
    assert len(names) == len(set(names))


def test_the_new_value_of_a_parameter_carries_the_suffix():
    f = function({"w": TensorSpec((2,))}, lambda w: {"w": w * 2.0, "y": w.sum()})
    assert [o.name for o in emit(f).graph.output] == ["w:next", "y"]


def test_initializers_are_held_inline_or_point_into_the_weights_file(tmp_path):
    specs = {"w": TensorSpec((2, 3)), "b": TensorSpec((3,)), "x": TensorSpec(("N", 2))}
    f = function(specs, lambda w, b, x: {"y": x @ w + b})
    w, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)
    model = emit(
        f,
        initializers={
            "w": EmittedInitializer(w, External(64, w.nbytes)),
            "b": EmittedInitializer(b),
        },
    )
    assert [i.name for i in model.graph.input] == ["x"]
    held = {t.name: t for t in model.graph.initializer}
    np.testing.assert_array_equal(numpy_helper.to_array(held["b"]), b)
    assert held["w"].data_location == TensorProto.EXTERNAL
    assert not held["w"].raw_data
    where = {e.key: e.value for e in held["w"].external_data}
    assert where == {"location": "weights.safetensors", "offset": "64", "length": "24"}
    (tmp_path / "weights.safetensors").write_bytes(bytes(64) + w.tobytes())
    (tmp_path / "model.onnx").write_bytes(serialize(model))
    x = np.ones((4, 2), np.float32)
    for session in (Session(tmp_path / "model.onnx"), Session(serialize(model), weights={"w": w})):
        np.testing.assert_allclose(session.run({"x": x})["y"], x @ w + b)


def test_arithmetic_of_sizes_is_read_off_shapes_at_run_time():
    def body(x, y):
        n, m = x.shape
        sizes = ops.shape(ops.zeros((n + m, n * m, n // 2 + 1)))
        flat = ops.concat([ops.reshape(x, (n * m,)), ops.reshape(y, (m,))])
        return {"sizes": sizes, "flat": flat, "tail": flat[3:]}

    f = function({"x": TensorSpec(("N", "M")), "y": TensorSpec(("M",))}, body)
    for n, m in ((2, 3), (5, 1)):
        args = np.ones((n, m), np.float32), np.zeros(m, np.float32)
        for name in ("onnx", "reference"):
            sizes, flat, tail = engine(name).compile(f)(*args)
            assert list(sizes) == [n + m, n * m, n // 2 + 1]
            assert flat.shape == (n * m + m,)
            assert tail.shape == (n * m + m - 3,)


def test_a_size_that_no_value_shows_is_refused_naming_it():
    f = function({"x": TensorSpec(("N*2",))}, lambda x: {"y": ops.zeros((x.shape[0] // 2,))})
    with pytest.raises(InvalidInput, match="bare dimension N"):
        emit(f)


def test_unused_parameters_stay_in_the_signature():
    f = function(
        {"x": TensorSpec((2,)), "unused": TensorSpec((3,))}, lambda **given: {"y": given["x"]}
    )
    assert [i.name for i in emit(f).graph.input] == ["x", "unused"]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", ["Div", "Mod"])
def test_the_least_integer_over_minus_one_does_not_end_the_process(name, dtype):
    spec = TensorSpec(("N",), dtype)
    row = TABLE["", name]
    divided = function({"a": spec, "b": spec}, lambda a, b: {"y": row(a, b)})
    least = np.iinfo(dtype).min
    a = np.array([least, least, 7, -7, 7, least], dtype)
    b = np.array([-1, 1, -1, 2, -2, least], dtype)
    wanted = engine("reference").compile(divided)(a, b)[0]
    found = Session(serialize(emit(divided))).run({"a": a, "b": b})["y"]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["Div", "Mod"])
@pytest.mark.parametrize("on", ["onnx", "reference"])
def test_an_integer_over_zero_is_refused_on_every_engine(name, on):
    spec = TensorSpec(("N",), "int64")
    row = TABLE["", name]
    program = engine(on).compile(function({"a": spec, "b": spec}, lambda a, b: {"y": row(a, b)}))
    with pytest.raises(InvalidInput, match="by zero"):
        program(np.array([1, 2]), np.array([1, 0]))


def test_division_by_integers_that_are_written_down_stays_one_node():
    spec = TensorSpec(("N",), "int64")
    halved = function({"a": spec}, lambda a: {"y": TABLE["", "Mod"](TABLE["", "Div"](a, 2), 3)})
    assert sorted(n.op_type for n in emit(halved).graph.node) == ["Div", "Mod"]


def test_one_number_beside_trailing_axes_of_one_has_a_rank_beyond_them():
    """onnxruntime 1.31 takes sixty times as long beside a scalar."""
    specs = {"w": TensorSpec((6, 5, 1, 1)), "rate": TensorSpec(()), "v": TensorSpec((6, 5))}

    def body(w, rate, v):
        return {"a": w * 0.9 - rate * w, "b": v * 0.9, "c": ops.maximum(rate, w), "d": w * w}

    made = function(specs, body)
    model = onnx.shape_inference.infer_shapes(emit(made), strict_mode=True)
    ranks = {i.name: len(i.type.tensor_type.shape.dim) for i in model.graph.value_info}
    ranks |= {i.name: len(i.type.tensor_type.shape.dim) for i in model.graph.input}
    ranks |= {t.name: len(t.dims) for t in model.graph.initializer}
    pairs = [
        sorted(ranks[name] for name in n.input)
        for n in model.graph.node
        if n.op_type in {"Mul", "Sub", "Max"}
    ]
    assert sorted(pairs) == [[0, 2], [3, 4], [3, 4], [3, 4], [4, 4], [4, 4]]
    rng = np.random.default_rng(0)
    args = [rng.normal(size=p.type.concrete({})).astype(np.float32) for p in made.params]
    for found, wanted in zip(
        engine("onnx").compile(made)(*args), engine("reference").compile(made)(*args), strict=True
    ):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ["ReduceL2", "ReduceMax"])
def test_axes_that_are_computed_are_refused_before_opset_18(name):
    """They would be lost: there axes are an attribute, and without one all axes are reduced."""
    row = TABLE["", name]
    specs = {"x": TensorSpec(("N", 3, 4))}
    f = function(specs, lambda x: {"y": row(x, ops.shape(x)[1:2] - 2, keepdims=0)})
    with pytest.raises(InvalidInput, match="takes only constant axes before opset 18"):
        emit(f, target=OnnxTarget(opset=17))
