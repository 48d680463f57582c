"""Functions in integers, as onnxruntime runs them."""

import tempfile
import warnings
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.quantize import nets
from tests.support.processors import x64

from triplane.unified_ir import nn, ops
from triplane.unified_ir.convert.fold import fold
from triplane.unified_ir.convert.residency import product_nodes, residency
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ir.types import int8, uint8
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.rows.movement.shapes import flatten_row
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.quantize import (
    IN_PARTS,
    SCHEMES,
    Range,
    artifact,
    expanded,
    find_sites,
    freeze,
    insert,
    observe,
    scheme,
    site_ranges,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import onnxruntime.quantization as oracle


name_of = attrgetter("name")
every_scheme = pytest.mark.parametrize("row", SCHEMES.values(), ids=name_of)


def quantized(module, x, name="u8s8"):
    frozen = expanded(fold(freeze(module, "predict")), IN_PARTS)
    sites = find_sites(frozen)
    ranges = site_ranges(sites, observe(frozen, sites.roots, {"x": x}))
    return frozen, insert(frozen, sites, ranges, scheme(name))


def decibel(y, q):
    return 10 * np.log10((y**2).sum() / ((y - q) ** 2).sum())


def kinds(frozen):
    return [str(node.op) for node in frozen.function.nodes]


@x64
@pytest.mark.parametrize("make", [nets.lenet, nets.residual])
@pytest.mark.parametrize("opset", [17, 21, 26])
def test_every_product_runs_in_int8_on_x64(make, opset):
    _, made = quantized(make(), nets.images())
    found = residency(artifact(made, OnnxTarget(opset)))
    assert found.all_int8, found
    assert sum(found.integer.get(k, 0) for k in ("QLinearConv", "QGemm")) == len(found.products)
    assert found.casts == {"QuantizeLinear": 1}  # the input; logits leave the last QGemm in float


@x64
def test_the_skip_connection_and_the_average_run_in_int8_too():
    _, made = quantized(nets.residual(), nets.images())
    found = residency(artifact(made))
    assert {"QLinearAdd": 1, "QLinearGlobalAveragePool": 1}.items() <= found.integer.items()


@pytest.mark.parametrize("make", [nets.lenet, nets.residual])
@every_scheme
def test_rounding_leaves_the_answer(make, row):
    x = nets.images()
    plain, made = quantized(make(), x, row.name)
    y, q = (artifact(f).session().run({"x": x})["logits"] for f in (plain, made))
    assert decibel(y, q) > 28 - nets.BIT_DB * (8 - row.weight_bits)


@every_scheme
def test_activations_and_weights_are_stored_as_the_scheme_says(row):
    _, made = quantized(nets.lenet(), nets.images(), row.name)
    zeros = {
        node.inputs[2].type.dtype.numpy
        for node in made.function.nodes
        if node.op.name == "QuantizeLinear"
    }
    assert zeros == {np.dtype(row.activation.numpy)}
    kinds_of_weights = {a.dtype for a in made.weights.values()}
    assert kinds_of_weights == {np.dtype(row.weight.numpy), np.dtype(np.int32)}
    assert made.weights["fc1.weight.int8"].shape == (32, 64)


@every_scheme
def test_the_fused_kernels_mean_what_the_reference_says(row):
    x = nets.images(8)
    _, made = quantized(nets.lenet(), x, row.name)
    args = [made.weights.get(p.name, x) for p in made.function.params]
    (expected,) = run_function(TABLE, made.function, args)
    assert decibel(expected, artifact(made).session().run({"x": x})["logits"]) > 45


def test_relu_and_batch_norm_leave_no_node():
    _, made = quantized(nets.lenet(), nets.images())
    assert not {"Relu", "BatchNormalization"} & set(kinds(made))


def test_the_batch_stays_symbolic():
    _, made = quantized(nets.lenet(), nets.images())
    session = artifact(made).session()
    assert session.inputs[0].shape == ("N", 1, 8, 8)
    assert session.outputs[0].shape == ("N", 10)
    assert session.run({"x": nets.images(3)})["logits"].shape == (3, 10)


def test_one_sample_alone_gives_what_it_gives_in_a_batch():
    x = nets.images(8)
    _, made = quantized(nets.lenet(), x)
    session = artifact(made).session()
    alone = np.concatenate([session.run({"x": x[i : i + 1]})["logits"] for i in range(8)])
    np.testing.assert_array_equal(session.run({"x": x})["logits"], alone)


class Plain(nn.Cell):
    """ReLU directly behind each product, so that both tools round the same tensors."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding="same")
        self.conv2 = nn.Conv2d(4, 6, 3, padding="same")
        self.fc1 = nn.Dense(6 * 4 * 4, 12)
        self.fc2 = nn.Dense(12, 10)

    def construct(self, x):
        x = ops.max_pool(ops.relu(self.conv1(x)), 2)
        x = ops.flatten(ops.relu(self.conv2(x)))
        return self.fc2(ops.relu(self.fc1(x)))


class Feeds(oracle.CalibrationDataReader):  # type: ignore[misc] # onnxruntime ships no types
    def __init__(self, x):
        self.left = iter([{"x": x}])

    def get_next(self):
        return next(self.left, None)


def scales_of(model):
    """(activation scales and zero points, weight arrays) of a model in Q/DQ form."""
    held = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    rounded = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    activations = {(float(held[n.input[1]]), int(held[n.input[2]])) for n in rounded}
    weights = [a for a in held.values() if a.dtype == np.int8 and a.ndim > 1]
    return activations, weights


@pytest.mark.parametrize(
    "row", [row for row in SCHEMES.values() if row.weight_bits in {7, 8}], ids=name_of
)
def test_scales_and_weights_are_those_onnxruntime_quantizes_to(row, tmp_path):
    x = nets.images()
    module = nets.module_of(nets.shaken(Plain()), nets.IMAGE)
    plain, made = quantized(module, x, row.name)
    source, target = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    source.write_bytes(inline_weights(artifact(plain)))
    types = {uint8: oracle.QuantType.QUInt8, int8: oracle.QuantType.QInt8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle.quantize_static(
            source, target, Feeds(x), per_channel=True, activation_type=types[row.activation],
            weight_type=types[row.weight], reduce_range=row.weight_bits == 7,
        )  # fmt: skip
    ours, our_weights = scales_of(onnx.load_from_string(inline_weights(artifact(made))))
    theirs, their_weights = scales_of(onnx.load(target))
    close = [
        any(z == tz and abs(s - ts) <= 1e-6 * ts for ts, tz in theirs) for s, z in sorted(ours)
    ]
    assert len(ours) == 4
    assert all(close), (ours, theirs)
    for w in our_weights:
        assert any(t.shape == w.shape and (t == w).all() for t in their_weights)


def inline_weights(made):
    """A model's bytes with its external weights put inside."""
    model = onnx.load_from_string(made.model)
    for tensor in model.graph.initializer:
        if tensor.name in made.weights:
            tensor.CopyFrom(onnx.numpy_helper.from_array(made.weights[tensor.name], tensor.name))
    return model.SerializeToString()


class Attention(nn.Cell):
    """A product of two activations, and one of a 2-D weight with three axes."""

    def __init__(self):
        super().__init__()
        self.project = nn.Dense(16, 16)
        self.head = nn.Dense(16, 4)

    def construct(self, x):
        h = self.project(x)
        mixed = (h @ h.transpose(0, 2, 1)) @ h
        return self.head(mixed)


@x64
def test_products_of_activations_run_in_int8():
    module = nets.module_of(shaken_small(Attention()), TensorSpec(("N", 5, 16)))
    x = np.random.default_rng(0).standard_normal((16, 5, 16)).astype(np.float32)
    plain, made = quantized(module, x)
    found = residency(artifact(made))
    assert found.all_int8, found
    y, q = (artifact(f).session().run({"x": x})["logits"] for f in (plain, made))
    assert decibel(y, q) > 20


def shaken_small(cell):
    return nets.shaken(cell, seed=3)


class Held(nn.Cell):
    """Products with a reason to stay in float."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def construct(self, x):
        y = self.conv(x)
        return ops.gemm(y.mean([2, 3]), y.mean([2, 3]), transB=1, alpha=0.5)


def test_what_stays_in_float_has_a_reason():
    frozen = fold(freeze(nets.module_of(nets.shaken(Held()), nets.IMAGE), "predict"))
    sites = find_sites(frozen)
    assert list(sites.refused.values()) == ["its weight is computed while it runs"]
    assert len(product_nodes(frozen.function)) == 2


class TwoReaders(nn.Cell):
    """A ReLU whose operand is read twice may not vanish."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding="same")
        self.b = nn.Conv2d(4, 4, 1)

    def construct(self, x):
        y = self.a(x)
        return self.b(ops.relu(y)) - y


def test_a_relu_beside_another_reader_stays():
    x = nets.images()
    plain, made = quantized(nets.module_of(nets.shaken(TwoReaders()), nets.IMAGE), x)
    assert "Relu" in kinds(made)
    y, q = (artifact(f).session().run({"x": x})["logits"] for f in (plain, made))
    assert decibel(y, q) > 30


class Clipped(nn.Cell):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3)
        self.b = nn.Conv2d(4, 4, 1)

    def construct(self, x):
        return self.b(ops.clip(self.a(x) * 1.0, 0.0, 0.25))


def test_a_clip_becomes_the_range():
    x = nets.images()
    frozen = fold(freeze(nets.module_of(nets.shaken(Clipped()), nets.IMAGE), "predict"))
    sites = find_sites(frozen)
    ranges = site_ranges(sites, observe(frozen, sites.roots, {"x": x}))
    assert Range(0.0, 0.25) in ranges.values()
    made = insert(frozen, sites, ranges, scheme("u8s8"))
    assert "Clip" not in kinds(made)
    y, q = (artifact(f).session().run({"x": x})["logits"] for f in (frozen, made))
    assert decibel(y, q) > 30


def test_the_same_function_gives_the_same_bytes():
    with tempfile.TemporaryDirectory() as folder:
        for i in range(2):
            _, made = quantized(nets.lenet(), nets.images())
            Path(folder, str(i)).write_bytes(artifact(made).model)
        assert Path(folder, "0").read_bytes() == Path(folder, "1").read_bytes()


class SharedConstant(nn.Cell):
    """One constant in an integer sum and in the float result."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 1, 1)
        self.b = nn.Conv2d(1, 1, 1)

    def construct(self, x):
        return self.b(self.a(x) + SHARED) * 0.0 + SHARED


SHARED = np.array([0.123456, 1.0], np.float32)


def test_a_constant_is_rounded_for_its_integer_reader_only():
    x = nets.images(2)[:, :, :, :2]
    module = nets.module_of(nets.shaken(SharedConstant()), TensorSpec(("N", 1, 8, 2)))
    _, made = quantized(module, x)
    assert kinds(made).count("QuantizeLinear") == 5
    y = artifact(made).session().run({"x": x})["logits"]
    np.testing.assert_array_equal(y, np.broadcast_to(SHARED, y.shape))


class Refused(nn.Cell):
    """A product in float between two in integers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Dense(6, 4)
        self.b = nn.Dense(4, 3)

    def construct(self, x):
        return self.b(ops.gemm(self.a(x), x[:4, :4], alpha=0.5))


def test_nothing_is_rounded_for_a_product_that_stays_in_float():
    module = nets.module_of(nets.shaken(Refused()), TensorSpec((4, 6)))
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    _, made = quantized(module, x)
    assert kinds(made).count("QuantizeLinear") == 2


class Unrolled(nn.Cell):
    """One weight in three steps."""

    def __init__(self):
        super().__init__()
        self.step = nn.Dense(16, 16)
        self.head = nn.Dense(16, 4)

    def construct(self, x):
        for _ in range(3):
            x = ops.relu(self.step(x)) + x
        return self.head(x)


@x64
def test_a_weight_that_is_used_three_times_is_stored_once():
    module = nets.module_of(nets.shaken(Unrolled()), TensorSpec(("N", 16)))
    x = np.random.default_rng(1).standard_normal((32, 16)).astype(np.float32)
    frozen, made = quantized(module, x)
    stored = artifact(made)
    names = [name for name in stored.weights if name.startswith("step.weight")]
    assert names == ["step.weight.int8"]
    assert residency(stored).all_int8
    y = stored.session().run({"x": x})["logits"]
    wanted = artifact(frozen).session().run({"x": x})["logits"]
    assert decibel(wanted, y) > 25


def test_no_two_weights_of_an_integer_graph_are_equal():
    module = nets.module_of(nets.shaken(Unrolled()), TensorSpec(("N", 16)))
    x = np.random.default_rng(1).standard_normal((32, 16)).astype(np.float32)
    _, made = quantized(module, x)
    kept = [(a.dtype.str, a.shape, a.tobytes()) for a in artifact(made).weights.values()]
    assert len(set(kept)) == len(kept)


class Gated(nn.Cell):
    """An inverted residual with a gate by channel."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.wide = nn.Conv2d(1, 8, 3, padding="same")
        self.gate = nn.Conv2d(8, 8, 1)
        self.narrow = nn.Conv2d(8, 4, 1)
        self.head = nn.Dense(4, 10)

    def construct(self, x):
        x = self.activation(self.wide(x))
        gate = ops.sigmoid(self.gate(ops.global_average_pool(x)))
        x = self.activation(self.narrow(x * gate))
        return self.head(ops.flatten(ops.global_average_pool(x)))


ACTIVATIONS = {
    "silu": ops.silu,
    "leaky_relu": lambda x: ops.leaky_relu(x, alpha=0.1),
    "hard_swish": ops.hard_swish,
    "relu6": ops.relu6,
}


@x64
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_between_products_nothing_leaves_the_integers(name):
    module, x = nets.module_of(nets.shaken(Gated(ACTIVATIONS[name])), nets.IMAGE), nets.images()
    frozen, made = quantized(module, x)
    found = residency(artifact(made))
    assert found.all_int8, found
    assert set(found.other) <= {"Reshape", "Squeeze", "Transpose"}, found
    assert sum(found.casts.values()) == 1, found
    wanted = artifact(frozen).session().run({"x": x})["logits"]
    assert decibel(wanted, artifact(made).session().run({"x": x})["logits"]) > 20


class Shuffled(Gated):
    """Its halves exchanged after a gate of straight lines, flattened as exporters do."""

    def construct(self, x):
        x = self.activation(self.wide(x))
        gate = ops.hard_sigmoid(self.gate(ops.global_average_pool(x)))
        halves = ops.split(x * gate, 2, axis=1)
        x = self.activation(self.narrow(ops.concat(halves[::-1], axis=1)))
        return self.head(flatten_row(ops.global_average_pool(x)))


@x64
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_parts_and_straight_lines_stay_on_integers(name):
    module = nets.module_of(nets.shaken(Shuffled(ACTIVATIONS[name])), nets.IMAGE)
    x = nets.images()
    frozen, made = quantized(module, x)
    found = residency(artifact(made))
    assert found.all_int8, found
    assert set(found.other) <= {"Flatten", "Reshape", "Split", "Transpose"}, found
    assert sum(found.casts.values()) == 1, found
    scalings = found.integer.get("QLinearMul", 0)
    assert scalings == {"leaky_relu": 1, "relu6": 1}.get(name, 3), "only products of two tensors"
    wanted = artifact(frozen).session().run({"x": x})["logits"]
    assert decibel(wanted, artifact(made).session().run({"x": x})["logits"]) > 20


MOVES = {
    "transpose": lambda x: x.transpose(0, 1, 3, 2),
    "max pool": lambda x: ops.max_pool(x, 2),
    "reshape": lambda x: x.reshape((-1, 4, 4, 16)),
    "none": lambda x: x,
}
CLAMPS: dict[str, Any] = {
    "relu": ops.relu,
    "clip": lambda x: ops.clip(x, 0.0, 0.7),
    "relu6": ops.relu6,
}


@x64
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("clamp", CLAMPS)
def test_a_clamp_after_a_scaled_product_clamps_also_behind_a_move(move, clamp):
    class Scaled(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(1, 4, 3, padding="same")
            self.last = nn.Conv2d(4, 4, 3, padding="same")

        def construct(self, x):
            return self.last(CLAMPS[clamp](MOVES[move](self.first(x) * 0.5 * 3.0)))

    x = nets.images()
    frozen, made = quantized(nets.module_of(nets.shaken(Scaled()), nets.IMAGE), x)
    wanted = artifact(frozen).session().run({"x": x})["logits"]
    assert decibel(wanted, artifact(made).session().run({"x": x})["logits"]) > 20
