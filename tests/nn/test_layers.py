"""Layers: shapes, seeding, modes, state."""

from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, mode, nn, ops, trace
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.ir.graph import Role

RNG = np.random.default_rng(3)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


# fmt: off
LAYERS = {
    "Dense":      (lambda: nn.Dense(5, 3), (4, 5), (4, 3)),
    "Dense deep": (lambda: nn.Dense(5, 3, bias=False), (4, 2, 5), (4, 2, 3)),
    "Conv1d":     (lambda: nn.Conv1d(2, 6, 3, stride=2, padding=1), (4, 2, 9), (4, 6, 5)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, dilation=2), (4, 4, 7, 7), (4, 6, 3, 5)),
    "same": (lambda: nn.Conv2d(1, 2, 3, padding="same", stride=2), (4, 1, 7, 8), (4, 2, 4, 4)),
    "MaxPool2d":  (lambda: nn.MaxPool2d(2), (4, 3, 7, 6), (4, 3, 3, 3)),
    "AvgPool2d":  (lambda: nn.AvgPool2d(3, stride=1, padding=1), (4, 3, 5, 5), (4, 3, 5, 5)),
    "Flatten":    (nn.Flatten, (4, 3, 2), (4, 6)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (4, 3), (4, 3)),
    "BatchNorm1d sequence": (lambda: nn.BatchNorm1d(3), (4, 3, 5), (4, 3, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2), (4, 3, 2, 2)),
    "LayerNorm":  (lambda: nn.LayerNorm(5), (4, 2, 5), (4, 2, 5)),
    "Dropout":    (lambda: nn.Dropout(0.25), (4, 6), (4, 6)),
    "GELU":       (nn.GELU, (4, 3), (4, 3)),
    "Sigmoid":    (nn.Sigmoid, (4, 3), (4, 3)),
    "Tanh":       (nn.Tanh, (4, 3), (4, 3)),
    "ReLU":       (nn.ReLU, (4, 3), (4, 3)),
    "Sequential": (lambda: nn.Sequential(nn.Dense(5, 2), nn.ReLU()), (4, 5), (4, 2)),
}
# fmt: on


@pytest.mark.parametrize("name", LAYERS)
def test_graph_and_eager_agree_on_every_layer(name):
    make, given, expected = LAYERS[name]
    cell, x = make(), normal(*given)
    before = {k: p.array for k, p in cell.parameters().items()}
    graphed = cell(x)
    after = {k: p.array for k, p in cell.parameters().items()}
    cell.load(before)
    with mode("eager"):
        eager = cell(x)
    assert graphed.shape == expected
    np.testing.assert_allclose(graphed, eager, rtol=1e-5, atol=1e-6)
    for k, p in cell.parameters().items():
        np.testing.assert_allclose(p.array, after[k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_a_symbolic_batch(name):
    make, given, expected = LAYERS[name]
    function = trace(make(), TensorSpec(("N", *given[1:])))
    assert list(map(str, function.result("y").type.shape)) == ["N", *map(str, expected[1:])]


def test_one_seed_gives_one_set_of_bits():
    def weights(number):
        nn.seed(number)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dense(7, 5), nn.LSTM(3, 4), nn.Dropout(0.1))
        return {k: p.array for k, p in net.parameters().items()}

    first, again, other = weights(7), weights(7), weights(8)
    assert all(np.array_equal(first[k], again[k]) for k in first)
    assert not any(np.array_equal(first[k], other[k]) for k in first)


def test_starting_weights_are_these_bits():
    """Numbers from raw Philox words: no release of numpy may change them."""
    layer = nn.Dense(3, 2, rng=np.random.Generator(np.random.Philox(key=1)))
    assert layer.weight.array.tobytes().hex() == "884368beb028ce3ea24bcbbe449b0abf30a4ec3e1d6904bf"
    assert layer.bias.array.tobytes().hex() == "c4e5903e5d0296be"


def test_layers_start_within_one_over_root_fan_in():
    nn.seed(0)
    conv = nn.Conv2d(4, 64, 3, groups=2)
    assert conv.weight.array.shape == (64, 2, 3, 3)
    for array in (conv.weight.array, conv.bias.array):
        assert np.abs(array).max() <= 18**-0.5
    assert abs(conv.weight.array.std() - (3 * 18) ** -0.5) < 0.01


@pytest.mark.parametrize(
    ("init", "std"),
    [
        (nn.KaimingUniform(), (2 / 300) ** 0.5),
        (nn.KaimingNormal(gain=1.0), 300**-0.5),
        (nn.GlorotUniform(), (2 / 500) ** 0.5),
        (nn.GlorotNormal(), (2 / 500) ** 0.5),
        (nn.Normal(0.3), 0.3),
        (nn.Uniform(0.3), 0.3 / 3**0.5),
        (nn.ConstantInitializer(2.0), 0.0),
    ],
)
def test_initializers_have_the_spread_they_state(init, std):
    made = init((200, 300), np.random.Generator(np.random.Philox(key=2)))
    assert made.dtype == np.float32
    assert abs(made.std() - std) <= 0.01 * std
    assert abs(made.mean() - getattr(init, "value", 0.0)) <= 0.02 * std


@pytest.mark.parametrize("init", [nn.GlorotUniform(), nn.GlorotNormal()])
def test_fans_of_a_convolution_count_the_positions_of_its_kernel(init):
    weight = init((60, 20, 3, 5), np.random.Generator(np.random.Philox(key=2)))
    std = (2 / ((20 + 60) * 3 * 5)) ** 0.5
    assert abs(weight.std() - std) <= 0.02 * std


def test_dropout_drops_its_share_and_moves_its_key_on():
    nn.seed(0)
    cell, x = nn.Dropout(0.25), np.ones((100, 100), np.float32)
    keys = [cell.key.array.copy()]
    first, second = cell(x), cell(x)
    keys.append(cell.key.array.copy())
    assert not np.array_equal(*keys)
    assert not np.array_equal(first, second)
    assert set(np.unique(first)) == {0.0, np.float32(1 / 0.75)}
    assert abs((first == 0).mean() - 0.25) < 0.02


@pytest.mark.parametrize("engine_name", ["reference", "ascend"])
def test_dropout_drops_the_same_elements_on_every_engine(engine_name):
    cell, x = nn.Dropout(0.5), np.ones((7, 9), np.float32)
    start = cell.key.array
    expected, key = cell(x), cell.key.array
    cell.key = start
    with mode("graph", engine_name):
        assert np.array_equal(cell(x), expected)
    assert np.array_equal(cell.key.array, key)


def test_evaluation_neither_drops_nor_moves_statistics():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).eval()
    x = normal(4, 3)
    before = {k: p.array.copy() for k, p in net.parameters().items()}
    np.testing.assert_allclose(net(x), x / np.float32(1 + 1e-5) ** 0.5, rtol=1e-6)
    assert all(np.array_equal(p.array, before[k]) for k, p in net.parameters().items())


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 2, 2)])
def test_running_statistics_take_the_unbiased_variance(shape):
    cell = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(3, momentum=0.25)
    x = normal(*shape) * 3 + 1
    cell(x)
    rows = np.moveaxis(x, 1, -1).reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(cell.running_mean.array, 0.25 * rows.mean(0), rtol=1e-5)
    expected = 0.75 + 0.25 * rows.var(0, ddof=1)
    np.testing.assert_allclose(cell.running_var.array, expected, rtol=1e-5)


def test_a_single_row_leaves_batch_norm_finite():
    cell = nn.BatchNorm1d(3)
    assert np.array_equal(cell(normal(1, 3)), np.zeros((1, 3), np.float32))
    np.testing.assert_allclose(cell.running_var.array, 0.9, rtol=1e-6)


def test_state_has_roles():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    roles = {k: (p.role, p.trainable) for k, p in net.parameters().items()}
    assert roles == {
        "0.weight": (Role.PARAMETER, True),
        "0.bias": (Role.PARAMETER, True),
        "0.running_mean": (Role.BUFFER, False),
        "0.running_var": (Role.BUFFER, False),
        "1.key": (Role.KEY, False),
    }


def test_personal_parameters_are_trained():
    own = nn.Personal(np.zeros(3))
    assert (own.role, own.trainable) == (Role.PERSONAL, True)


def test_an_embedding_gives_rows_of_its_table():
    table = nn.Embedding(5, 3)
    ids = np.array([[0, 4], [2, 2]])
    assert np.array_equal(table(ids), table.weight.array[ids])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Dense(0, 3), "Dense needs inputs to be a whole number >= 1, got 0"),
        (
            lambda: nn.Dense(3, 2.5),  # type: ignore[arg-type]
            "outputs to be a whole number >= 1, got 2.5",
        ),
        (lambda: nn.Conv2d(3, 4, 3, groups=2), "groups to divide inputs and outputs, got 2"),
        (lambda: nn.Conv2d(3, 4, (3,)), "Conv2d takes a kernel with 2 sizes"),
        (lambda: nn.Conv1d(3, 4, 0), r"kernel\[0\]"),
        (lambda: nn.Dropout(1.0), r"p_drop must be in \[0, 1\), got 1.0"),
        (lambda: nn.BatchNorm2d(3, momentum=2.0), r"momentum must be in \[0, 1\]"),
        (lambda: nn.seed(-1), "a seed must be in"),
        (lambda: nn.RandomKey([1, 2]), r"uint32\[2\], got int64\[2\]"),
        (lambda: nn.KaimingNormal()((3,), nn.generator()), "has fans, got shape"),
        (
            lambda: nn.Uniform(1.0)((3,), np.random.Generator(np.random.MT19937(0))),
            "64-bit raw words",
        ),
        (
            lambda: nn.BatchNorm2d(3)(normal(2, 3)),
            r"BatchNorm2d\(3\) takes x: \(N, 3, H, W\), got float32\[2,3\] \(at .*test_layers.py:",
        ),
        (lambda: nn.BatchNorm1d(3)(normal(2, 4)), r"\(N, 3\) or \(N, 3, L\), got float32\[2,4\]"),
        (lambda: nn.Dense(9, 3)(normal(2, 8)), r"Dense\(9, 3\) takes x: \(..., 9\), got float32"),
        (lambda: nn.Conv2d(3, 4, 1)(normal(2, 1, 5, 5)), r"\(N, 3, H, W\), got float32\[2,1,5,5\]"),
        (
            lambda: nn.Conv2d(3, 4, 1)(normal(2, 5, 6, 3)),
            r"got float32\[2,5,6,3\] .*channels are the last axis.*x\.transpose\(0, 3, 1, 2\)",
        ),
        (
            lambda: nn.Conv2d(3, 4, 1)(normal(2, 3, 7)),
            r"got float32\[2,3,7\] .*; Conv1d takes x: \(N, 3, L\)",
        ),
        (lambda: nn.Conv1d(3, 4, 1)(normal(2, 3)), r"Conv1d\(3, 4, ...\) takes x: \(N, 3, L\)"),
        (lambda: nn.LSTM(3, 4)(normal(2, 3)), r"LSTM\(3, 4\) takes x: \(N, T, 3\)"),
        (lambda: nn.GRUCell(3, 4)(normal(2, 5), normal(2, 4)), r"takes x: \(N, 3\), got"),
    ],
)
def test_what_makes_no_layer_is_refused(make, said):
    with pytest.raises(InvalidInput, match=said):
        make()


def test_a_cell_reads_its_state_as_tensors_in_construct():
    class Scaled(nn.Cell):
        factor: Any
        calls: Any

        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(np.array([2.0, 3.0]))
            self.calls = nn.Buffer(np.zeros((), np.int64))

        def construct(self, x):
            self.calls = self.calls + 1
            return ops.relu(x) * self.factor

    cell = Scaled()
    for _ in range(3):
        y = cell(np.array([[1.0, -1.0]], np.float32))
    assert np.array_equal(y, [[2.0, 0.0]])
    assert cell.calls.array == 3


@pytest.mark.parametrize("training", [True, False])
def test_a_gradient_through_batch_norm_broadcasts_nothing_over_planes(training):
    """onnxruntime takes up to ten times as long for a product of (N, C, 2, 2) and (C, 1, 1)."""

    def loss(x, g, scale, bias):
        if training:
            y = ops.batch_norm_training(x, scale, bias)[0]
        else:
            y = ops.batch_norm(x, bias, scale, scale, bias)
        return (y * g).sum()

    plane, vector = TensorSpec(("N", 3, 2, 2)), TensorSpec((3,))
    made = trace(loss, plane, plane, vector, vector)
    made = value_and_grad(made, [made.param_names[0]], of=made.result_names[0])
    planes = [n for n in made.nodes if n.outputs[0].type.rank > 1]
    products = [n for n in planes if n.op.name in {"Mul", "Add"}]
    assert products
    assert all(v is not None and v.type.rank in {0, 4} for n in products for v in n.inputs)
