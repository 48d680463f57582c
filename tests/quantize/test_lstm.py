"""LSTM layers on int8 weights, as onnxruntime runs them."""

from itertools import product

import numpy as np
import onnx
import pytest
from tests.quantize import nets

from triplane.unified_ir import nn, ops
from triplane.unified_ir.convert.fold import fold
from triplane.unified_ir.convert.residency import product_nodes, residency
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.onnx import DYNAMIC_LSTM, OnnxTarget
from triplane.unified_ir.ops.rows.recurrence.recurrent import lstm
from triplane.unified_ir.quantize import (
    SCHEMES,
    artifact,
    find_sites,
    freeze,
    insert,
    noise,
    observe,
    scheme,
    site_ranges,
)
from triplane.unified_ir.quantize.scheme import quantize_gates

STEPS, ROWS, INPUTS, HIDDEN = 6, 3, 24, 64
FULL = OnnxTarget(operators=frozenset({DYNAMIC_LSTM}))


class Layer(nn.Cell):
    """One LSTM of ONNX, whose three results are one; x: (T, N, inputs) or (N, T, inputs)."""

    def __init__(
        self, *, directions=1, bias=True, peepholes=False, hidden=HIDDEN, loud=False, **options
    ):
        super().__init__()
        rng = np.random.default_rng(3)
        bound = 1 / np.sqrt(hidden)

        def drawn(*shape):
            return nn.Parameter(rng.uniform(-bound, bound, shape).astype(np.float32))

        self.w = drawn(directions, 4 * hidden, INPUTS)
        if loud:
            self.w.array[:, 3] *= 30.0
        self.r = drawn(directions, 4 * hidden, hidden)
        self.b = drawn(directions, 8 * hidden) if bias else None
        self.p = drawn(directions, 3 * hidden) if peepholes else None
        self.options = {"hidden_size": hidden, **options}

    def construct(self, x, lens=None, h=None, c=None):
        y, last, cell = lstm.all_outputs(
            x, self.w, self.r, self.b, lens, h, c, self.p, outputs=3, **self.options
        )
        return ops.concat([v.reshape((-1,)) for v in (y, last, cell)])


def module(cell, **more):
    first, second = (ROWS, STEPS) if cell.options.get("layout") else (STEPS, ROWS)
    specs = {"x": TensorSpec((first, second, INPUTS)), **more}
    return nets.module_of(cell, *specs.values(), result="y"), specs


def in_integers(frozen, feeds, name="u8s8", operators=FULL.operators):
    sites = find_sites(frozen, operators)
    ranges = site_ranges(sites, observe(frozen, sites.roots, feeds))
    return sites, insert(frozen, sites, ranges, scheme(name))


def decibel(y, q):
    return 10 * np.log10((y**2).sum() / ((y - q) ** 2).sum())


def operators_of(model):
    return [(node.domain, node.op_type) for node in onnx.load_from_string(model).graph.node]


def compared(cell, name="u8s8", least=35.0, **given):
    """Runs a layer in float and in int8 on the same inputs."""
    specs = {n: TensorSpec(v.shape, str(v.dtype)) for n, v in given.items()}
    made, specs = module(cell, **specs)
    rng = np.random.default_rng(5)
    x = rng.standard_normal(specs["x"].shape).astype(np.float32)
    frozen = fold(freeze(made, "predict"))
    names = [p.name for p in frozen.inputs]
    feeds = dict(zip(names, (x, *given.values()), strict=True))
    sites, integer = in_integers(frozen, feeds, name)
    assert not sites.refused
    held = artifact(integer, FULL)
    assert ("com.microsoft", "DynamicQuantizeLSTM") in operators_of(held.model)
    assert ("", "LSTM") not in operators_of(held.model)
    (y,) = artifact(frozen).session().run(feeds).values()
    (q,) = held.session().run(feeds).values()
    assert q.shape == y.shape
    assert decibel(y, q) > least


def states(directions, *, layout=0):
    rng = np.random.default_rng(6)
    shape = (ROWS, directions, HIDDEN) if layout else (directions, ROWS, HIDDEN)
    return {n: rng.uniform(-1, 1, shape).astype(np.float32) for n in ("h", "c")}


@pytest.mark.parametrize(
    ("direction", "bias", "lengths", "started"),
    list(product(["forward", "reverse", "bidirectional"], *[[True, False]] * 3)),
)
def test_a_layer_in_int8_gives_what_it_gives_in_float(direction, bias, lengths, started):
    directions = 2 if direction == "bidirectional" else 1
    cell = Layer(directions=directions, bias=bias, direction=direction)
    given = {"lens": np.array([STEPS, 1, 3], np.int32)} if lengths else {}
    if started:
        if not lengths:
            given["lens"] = np.full(ROWS, STEPS, np.int32)
        given |= states(directions)
    compared(cell, **given)


@pytest.mark.parametrize(
    ("options", "directions"),
    [
        ({"peepholes": True}, 1),
        ({"peepholes": True, "direction": "bidirectional"}, 2),
        ({"clip": 0.4}, 1),
        ({"input_forget": 1}, 1),
        ({"layout": 1}, 1),
        ({"layout": 1, "direction": "bidirectional"}, 2),
        ({"activations": ("HardSigmoid", "Softsign", "Relu")}, 1),
        (
            {
                "activations": ("HardSigmoid", "ScaledTanh", "Affine"),
                "activation_alpha": (0.3, 1.1, 0.9),
                "activation_beta": (0.4, 0.8, 0.1),
            },
            1,
        ),
    ],
)
def test_options_of_a_layer_keep_their_meaning_in_int8(options, directions):
    compared(Layer(directions=directions, **options))


def test_the_state_after_a_sequence_of_no_steps_is_the_first_one_in_int8_too():
    compared(Layer(), lens=np.array([STEPS, 0, 2], np.int32), **states(1))


@pytest.mark.parametrize("row", SCHEMES.values(), ids=lambda row: row.name)
def test_every_scheme_keeps_the_answer(row):
    compared(Layer(), row.name, 34.0 - nets.BIT_DB * (8 - row.weight_bits))


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_one_loud_gate_leaves_the_others_their_resolution(direction):
    compared(Layer(directions=1 + (direction != "forward"), direction=direction, loud=True))


@pytest.mark.parametrize("loud", [False, True])
def test_the_kernel_gets_one_scale_where_rows_are_alike_and_else_one_a_row(loud):
    made, _ = module(Layer(directions=2, direction="bidirectional", loud=loud))
    _, integer = in_integers(fold(freeze(made, "predict")), {})
    graph = onnx.load_from_string(artifact(integer, FULL).model).graph
    (node,) = (n for n in graph.node if n.op_type == "DynamicQuantizeLSTM")
    shapes = {t.name: tuple(t.dims) for t in graph.initializer}
    of_w, of_r = (2, 4 * HIDDEN) if loud else (2,), (2,)
    assert [shapes[name] for name in node.input[-4:]] == [of_w, of_w, of_r, of_r]


def test_weights_are_stored_in_int8_in_the_order_of_the_kernel():
    made, _ = module(Layer(directions=2, direction="bidirectional", loud=True))
    frozen = fold(freeze(made, "predict"))
    _, integer = in_integers(frozen, {})
    held = artifact(integer, FULL)
    found = {name: (a.dtype.name, a.shape) for name, a in held.weights.items()}
    assert found["w.int8"] == ("int8", (2, INPUTS, 4 * HIDDEN))
    assert found["r.int8"] == ("int8", (2, HIDDEN, 4 * HIDDEN))
    w = frozen.weights["w"].transpose(0, 2, 1)
    scale = np.abs(w).max(axis=1, keepdims=True) / 127
    assert np.abs(held.weights["w.int8"] * scale - w).max() <= scale.max() / 2 * 1.001
    assert np.abs(held.weights["w.int8"]).max() == 127
    assert "w" not in held.weights


def test_a_layer_of_zeros_is_stored_as_zeros():
    cell = Layer()
    cell.w.array[:] = 0.0
    made, _ = module(cell)
    _, integer = in_integers(fold(freeze(made, "predict")), {})
    assert not integer.weights["w.int8"].any()


def test_seven_bits_leave_the_ends_of_the_weights_unused():
    made, _ = module(Layer())
    _, integer = in_integers(fold(freeze(made, "predict")), {}, "u8s7")
    assert {np.abs(integer.weights[name]).max() for name in ("w.int8", "r.int8")} == {64}


def test_layers_with_the_same_weights_share_their_integers():
    class Twice(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def construct(self, x):
            return self.layer(x) + self.layer(x * 0.5)

    spec = TensorSpec((STEPS, ROWS, INPUTS))
    frozen = fold(freeze(nets.module_of(Twice(), spec, result="y"), "predict"))
    _, integer = in_integers(frozen, {})
    held = artifact(integer, FULL)
    integers = [name for name, a in held.weights.items() if a.dtype == np.int8]
    assert sorted(integers) == ["layer.r.int8", "layer.w.int8"]
    kinds = [kind for _, kind in operators_of(held.model)]
    assert kinds.count("DynamicQuantizeLSTM") == 2


def test_a_runtime_without_the_operator_keeps_the_layer_in_float():
    made, _ = module(Layer())
    frozen = fold(freeze(made, "predict"))
    sites, integer = in_integers(frozen, {}, operators=())
    (node,) = product_nodes(frozen.function)
    assert sites.refused == {node: "the target's runtime has no LSTM on integers"}
    assert {domain for domain, _ in operators_of(artifact(integer, FULL).model)} == {""}


def test_integers_of_a_layer_mean_the_same_where_the_operator_is_missing():
    made, specs = module(Layer(directions=2, direction="bidirectional"))
    frozen = fold(freeze(made, "predict"))
    _, integer = in_integers(frozen, {})
    x = np.random.default_rng(5).standard_normal(specs["x"].shape).astype(np.float32)
    with_it, without = artifact(integer, FULL), artifact(integer)
    assert {domain for domain, _ in operators_of(without.model)} == {""}
    (y,) = without.session().run({"x": x}).values()
    (q,) = with_it.session().run({"x": x}).values()
    assert decibel(y, q) > 35


def test_a_layer_that_gains_nothing_stays_in_float():
    made, _ = module(Layer(hidden=16))
    sites = find_sites(fold(freeze(made, "predict")), FULL.operators)
    assert list(sites.refused.values()) == [
        "it has 2560 weights a direction; fewer than 16384 run faster in float"
    ]


def test_a_layer_without_inputs_stays_in_float():
    class Empty(Layer):
        def construct(self, x, lens=None, h=None, c=None):
            return lstm(x[..., :0], self.w, self.r, self.b, **self.options)

    cell = Empty()
    cell.w = nn.Parameter(np.zeros((1, 4 * HIDDEN, 0), np.float32))
    made, _ = module(cell)
    sites = find_sites(freeze(made, "predict"), FULL.operators)
    assert list(sites.refused.values()) == ["it has no inputs or no units"]


def test_a_layer_whose_weight_is_computed_stays_in_float():
    class Computed(Layer):
        def construct(self, x, lens=None, h=None, c=None):
            w = self.w * ops.mean(x)
            return lstm(x, w, self.r, self.b, **self.options)

    made, _ = module(Computed())
    sites = find_sites(fold(freeze(made, "predict")), FULL.operators)
    assert list(sites.refused.values()) == ["its weights are computed while it runs"]


def test_the_kernel_of_a_layer_is_read_off_the_optimized_graph():
    made, _ = module(Layer())
    _, integer = in_integers(fold(freeze(made, "predict")), {})
    found = residency(artifact(integer, FULL))
    assert found.products == ("DynamicQuantizeLSTM",)
    assert found.integer == {"DynamicQuantizeLSTM": 1}
    assert found.all_int8


def test_noise_of_a_layer_is_that_of_the_kernel_which_runs():
    made, specs = module(Layer())
    frozen = fold(freeze(made, "predict"))
    x = np.random.default_rng(5).standard_normal(specs["x"].shape).astype(np.float32)
    sites = find_sites(frozen, FULL.operators)
    values = [product_nodes(frozen.function)[0].outputs[0]]
    levels = [
        noise(frozen, sites, {}, scheme("u8s8"), values, {"x": x}, target=target)[0] or 0.0
        for target in (FULL, OnnxTarget())
    ]
    assert 35 < levels[0] < levels[1] - 1


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
def test_one_scale_is_chosen_by_proportion_whatever_the_size_of_the_weights(size):
    row = np.full((1, 32, 4), size, np.float32)
    alike, loud = row, row.copy()
    loud[0, 0] *= 100.0
    scales = [quantize_gates(w, scheme("u8s8"))[1] for w in (alike, loud)]
    assert [len(np.unique(s)) for s in scales] == [1, 2]
