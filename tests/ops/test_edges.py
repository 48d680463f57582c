"""Gradients where a formula divides by zero, ties, or writes one place twice.

Expected values are PyTorch's where PyTorch has the operator.
"""

import numpy as np
import pytest
from tests.conformance import checks
from tests.conformance.uses import differentiable, recorded, slope, weighted_sum

from triplane.unified_ir import TensorSpec, grad, graph, ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir.types import ShapeError, TypeMismatch
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.table import TABLE

ENGINES = ("onnx", "reference")
LEVEL = [np.full(n, v, np.float32) for n in (1, 3, 7) for v in (1.0, 0.1, -3e4 / 7)]


def slopes(f, x, name="onnx"):
    """The gradient of the sum of f's results."""
    spec = TensorSpec(x.shape, x.dtype.name)
    function = trace(lambda x: f(x).sum(), spec)
    return engine(name).compile(value_and_grad(function))(x)[1]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("x", LEVEL, ids=lambda x: f"{x.size} of {x[0]:.3g}")
def test_the_deviation_of_equal_values_has_slope_zero(x, name):
    np.testing.assert_array_equal(slopes(ops.std, x, name), np.zeros_like(x))


def test_the_deviation_of_a_constant_row_leaves_the_other_rows_alone():
    x = np.array([[0.3] * 5, [1, 2, 4, 8, 16]], np.float32)
    wanted = (x[1] - x[1].mean()) / (5 * x[1].std())
    found = slopes(lambda x: ops.std(x, 1), x)
    np.testing.assert_array_equal(found[0], np.zeros(5))
    np.testing.assert_allclose(found[1], wanted, rtol=1e-5)


EXTREME = {
    "large": ([1e30, -1e30, 2e30], 1.2472191e30, [0.08908708, -0.4454354, 0.35634834]),
    "small": ([1e-30, -1e-30, 3e-30], 1.6329932e-30, [0.0, -0.40824828, 0.40824828]),
    "equal, the largest": ([3e38] * 3, 0.0, [0.0] * 3),
    "the widest": ([3e38, 3e38, -3e38], 2.828427e38, [0.23570226, 0.23570226, -0.47140452]),
}
"""Values and slopes of torch.std(x, correction=0), PyTorch 2.13; the last two are those of the
formula, where PyTorch has infinity and NaN."""


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", EXTREME)
def test_the_deviation_of_extreme_numbers_neither_overflows_nor_vanishes(case, name):
    values, wanted, slope_ = EXTREME[case]
    x = np.array(values, np.float32)
    function = trace(ops.std, TensorSpec(x.shape))
    y, g = engine(name).compile(value_and_grad(function))(x)
    np.testing.assert_allclose(y, wanted, rtol=1e-6)
    np.testing.assert_allclose(g, slope_, rtol=1e-5, atol=1e-7)


def test_each_row_of_a_deviation_has_a_scale_of_its_own():
    row = np.array([1.5, -0.3, 0.7], np.float32)
    x = row * np.array([[1e30], [1e-30], [1], [0]], np.float32)
    y = graph(lambda x: ops.std(x, 1, correction=1))(x)
    np.testing.assert_allclose(y, np.std(x.astype(np.float64), 1, ddof=1), rtol=1e-6)
    plain = row - row.max()
    usual = np.sqrt(np.square(plain - plain.mean()).sum() / np.float32(2))
    assert y[2] == pytest.approx(usual, rel=1e-7)


@pytest.mark.parametrize("base", [3e13, 1e15, 1.7e18, 1e30])
def test_the_deviation_of_numbers_that_differ_by_little_is_that_of_their_differences(base):
    base = np.float32(base)
    x = (base + np.spacing(base) * np.array([1, 1, 1, 0, 0, 2], np.float32))[None]
    y = graph(lambda x: ops.std(x, 1))(x)
    np.testing.assert_allclose(y, np.std(x.astype(np.float64), 1), rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["celu", "elu", "hard_sigmoid", "hard_swish", "selu", "softsign", "thresholded_relu"],
)
def test_activations_of_parts_have_gradients_in_float64(name):
    f = getattr(ops, name)
    x = np.array([-4.0, -1.0, 0.5, 4.0])
    found, wanted = (slopes(lambda x: f(x) * f(x), x, name) for name in ("onnx", "reference"))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_relu6_of_whole_numbers_is_refused_where_it_is_written():
    with pytest.raises(TypeMismatch, match="takes floats"):
        trace(ops.relu6, TensorSpec((3,), "int32"))


def test_a_deviation_in_float16_does_not_overflow():
    x = np.array([300, -300, 600], np.float16)
    np.testing.assert_allclose(graph(ops.std)(x), np.std(x.astype(np.float64)), rtol=2e-3)


def test_the_variance_of_large_numbers_is_infinite_and_its_slope_is_not():
    """As torch.var(x, correction=0) has it."""
    x = np.array([1e30, -1e30, 2e30], np.float32)
    assert graph(ops.var)(x) == np.inf
    np.testing.assert_allclose(slopes(ops.var, x), [2.2222223e29, -1.1111112e30, 8.888889e29])


@pytest.mark.parametrize("order", [0.5, 1, 1.5, 2, 3])
def test_a_vector_norm_has_slope_zero_at_zero(order):
    found = slopes(lambda x: ops.vector_norm(x, order), np.zeros(3, np.float32))
    np.testing.assert_array_equal(found, np.zeros(3))


def test_a_vector_norm_below_order_one_passes_zeros_by():
    found = slopes(lambda x: ops.vector_norm(x, 0.5), np.array([0, 1, 4], np.float32))
    np.testing.assert_allclose(found, [0.0, 3.0, 1.5], rtol=1e-6)


@pytest.mark.parametrize("name", ENGINES)
def test_an_overwritten_update_has_gradient_zero(name):
    place, factor = np.array([1, 1, 2, -2]), np.array([1, 10, 100, 1000], np.float32)
    x, updates = np.zeros(4, np.float32), np.array([5, 6, 7, 8], np.float32)
    specs = (TensorSpec((4,)), TensorSpec((4,)))

    def elements(x, u):
        return (ops.scatter_elements(x, place, u, axis=0) * factor).sum()

    def nd(x, u):
        return (ops.scatter_nd(x, place[:, None], u) * factor).sum()

    for f in (elements, nd):
        value, d_x, d_updates = engine(name).compile(value_and_grad(trace(f, *specs)))(x, updates)
        assert value == 6 * 10 + 8 * 100
        np.testing.assert_array_equal(d_x, [1, 0, 0, 1000])
        np.testing.assert_array_equal(d_updates, [0, 10, 0, 100])


@pytest.mark.parametrize(
    ("shape", "sizes"), [((0, 2, 3), (0, -1)), ((2, 0, 3), (0, 0, -1)), ((4, 0), (-1, 0))]
)
def test_the_row_of_reshape_refuses_what_onnx_finds_undetermined(shape, sizes):
    row = TABLE["", "Reshape"]
    with pytest.raises(ShapeError, match="next to an empty axis -1 may be any size"):
        trace(lambda x: row(x, np.array(sizes)), TensorSpec(shape))


def test_a_whole_number_to_a_negative_whole_power_is_cut_off():
    x = np.array([-2, -1, 0, 3], np.int64)
    np.testing.assert_array_equal(graph(lambda x: 2**x)(x), [0, 0, 1, 8])
    np.testing.assert_array_equal(graph(lambda x: (-1) ** x)(x), [1, -1, 1, -1])


FILLS = {"zeros": 0.0, "ones": 1.0, "minus ones": -1.0, "equal": 0.3}
FIRST = [use for use in differentiable() if use.number == 0]


@pytest.mark.parametrize("use", FIRST, ids=str)
def test_a_finite_value_of_equal_operands_has_the_gradient_of_its_slope(use):
    """Finite, but where the slope is not: that of a square root at 0 is infinite, never NaN."""
    function, args = recorded(use, np.float64)
    scalar, names = weighted_sum(function, np.float64), use.smooth(args)
    if scalar is None or not names:
        return
    program = ReferenceEngine().compile(value_and_grad(scalar, names))
    for name in names:
        for fill, value in FILLS.items():
            given = {**args, name: np.full_like(args[name], value)}
            y, *found = program(*given.values())
            if np.isfinite(y) and not all(np.isfinite(g).all() for g in found):
                assert not any(np.isnan(g).any() for g in found), (name, fill)
                assert is_vertical(program, given, name, y), (name, fill)


def is_vertical(program, given, name, y):
    """Whether the quotient of differences grows without limit as the step shrinks."""

    def quotient(step):
        moved = ({**given, name: given[name] + way} for way in (step, -step))
        values = [program(*args.values())[0] for args in moved]
        return max((abs(v - y) / step for v in values if np.isfinite(v)), default=0.0)

    return quotient(1e-8) > 10 * quotient(1e-4)


NORMS = [
    use
    for use in differentiable()
    if str(use.row)
    in {"BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization"}
]


@pytest.mark.parametrize("opset", [17, 21, 26])
@pytest.mark.parametrize("use", NORMS, ids=str)
def test_norms_of_float64_have_gradients_of_both_orders_on_onnxruntime(use, opset):
    function, args = recorded(use, np.float64)
    scalar, names = weighted_sum(function, np.float64), use.smooth(args)
    directions = {n: np.ones_like(args[n]) for n in names}
    first = value_and_grad(scalar, names)
    second = value_and_grad(slope(scalar, names, directions), names)
    for f in (function, first, second):
        wanted = ReferenceEngine().compile(f)(*args.values())
        found = OnnxEngine(target=OnnxTarget(opset)).compile(f)(*args.values())
        checks.agree(found, wanted, str(use), close={"rtol": 1e-9, "atol": 1e-9})


def test_a_gradient_of_a_gradient_of_the_deviation_is_finite_at_equal_values():
    def inner(v):
        return ops.std(v)

    found = grad(lambda v: (grad(inner)(v) * v).sum())(np.ones(3, np.float32))
    assert np.isfinite(found).all()


EMPTY = {
    "std": lambda x: ops.std(x, 0),
    "mean": lambda x: x.mean(0),
    "norm": lambda x: ops.vector_norm(x, 0.5, 0),
    "scatter": lambda x: ops.scatter_elements(x, np.zeros((3, 0), np.int64), x * 2.0, axis=0),
    "reshape": lambda x: x.reshape(5, 0, 2),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("what", EMPTY)
def test_a_gradient_of_no_elements_has_none(what, name):
    assert slopes(EMPTY[what], np.zeros((3, 0), np.float32), name).shape == (3, 0)


def test_a_reshape_to_a_size_that_is_not_there_is_refused_by_name():
    row = TABLE["", "Reshape"]
    with pytest.raises(ShapeError, match="a 0 keeps the size of an axis"):
        trace(lambda x: row(x, np.array([2, 3, 0])), TensorSpec((2, 3)))
