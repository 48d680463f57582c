from typing import Any

import numpy as np
import pytest
from tests.support.computing import computed

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import grad, mode, ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ir.types import ShapeError, TypeMismatch
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 11


def recording(*specs):
    """A build being recorded, and its parameters."""
    build = Build(TABLE, "f")
    return build, [build.param(f"x{i}", spec) for i, spec in enumerate(specs)]


# fmt: off
EXPRESSIONS = {
    "arithmetic": lambda x: (2 - x) * x / 4 + -x - 0.5,
    "reversed": lambda x: 1 / (x + 20) + 3 * x + (1 - x),
    "power": lambda x: x ** 2 + 2.0 ** (x * 0.1),
    "comparisons": lambda x: ((x > 0) & (x <= 5)) | (x < -5) | (x >= 10),
    "equality": lambda x: (x == 1) | ~(x != 2),
    "array on the left": lambda x: np.ones((3, 1), np.float32) * x + np.float32(2),
    "sum, mean": lambda x: x.sum((0,), keepdims=True) + x.mean((-1,), keepdims=True),
}
INDICES = (
    0, -1, slice(1, None), slice(None, None, -1), slice(None, None, 2), (0, 1), (..., 2),
    (..., -1), (slice(None), 1), (None, 0), (slice(None), None, 2), (..., None),
    (-2, ..., slice(1, 3)),
    (slice(None), slice(-2, None), slice(3, 0, -2)),
)
# fmt: on


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
@pytest.mark.parametrize(
    ("x", "sizes", "wanted"),
    [
        ((0, 6), (0, 3), (0, 3)),
        ((4, 0), (0, 4), (0, 4)),
        ((0, 2, 3), (0, -1), (0, 6)),
        ((4, 0), (0, -1), (0, 4)),
        ((2, 0, 3), (-1, 0), (6, 0)),
        ((0, 3), (-1, 3), (0, 3)),
        ((0,), (0, 1, 0), (0, 1, 0)),
    ],
)
def test_a_size_of_zero_is_an_empty_axis(x, sizes, wanted, engine_name):
    zeros = np.zeros(x, np.float32)
    assert computed(lambda x: x.reshape(sizes), zeros, engine_name=engine_name).shape == wanted
    assert computed(lambda x: ops.reshape(x, sizes), zeros, engine_name=engine_name).shape == wanted


@pytest.mark.parametrize("x", [(2, 6), ("N", 6), (0, 0)])
def test_minus_one_beside_an_empty_axis_is_refused_where_any_size_fits(x):
    """numpy and PyTorch refuse it, ONNX's own 0 would keep the size that was there."""
    build, (tensor,) = recording(TensorSpec(x))
    for reshape in (tensor.reshape, tensor.view):
        with build, pytest.raises(ShapeError, match="write the size instead of -1"):
            reshape(0, -1)


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
@pytest.mark.parametrize(
    ("x", "sizes", "feed", "wanted"),
    [
        (("N", 2, 3), lambda n, *_: (n, -1), (0, 2, 3), (0, 6)),
        ((4, "N"), lambda _, n: (n, 4), (4, 0), (0, 4)),
        ((4, "N"), lambda _, n: (n, -1), (4, 0), (0, 4)),
        ((4, "N"), lambda _, n: (n * 4,), (4, 0), (0,)),
        ((4, "N", "M"), lambda _, n, m: (n, m, 4), (4, 0, 2), (0, 2, 4)),
        ((4, "N", "M"), lambda *s: (s[2], -1, 2), (4, 2, 0), (0, 4, 2)),
    ],
)
def test_a_named_size_that_is_zero_in_the_run_is_an_empty_axis(x, sizes, feed, wanted, engine_name):
    build, (tensor,) = recording(TensorSpec(x))
    with build:
        y = tensor.reshape(sizes(*tensor.shape))
    run = engine(engine_name).compile(build.finish({"y": y}))
    assert run(np.zeros(feed, np.float32))[0].shape == wanted


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_operators_mean_what_numpy_means(name, engine_name):
    wanted = EXPRESSIONS[name]
    if name == "sum, mean":
        expected = X.sum(0, keepdims=True) + X.mean(-1, keepdims=True)
    else:
        expected = wanted(X)
    found = computed(wanted, X, engine_name=engine_name)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_basic_indices_mean_what_numpy_means(index):
    found = computed(lambda x: x[index] * 1.0, X)
    np.testing.assert_array_equal(found, X[index])


def test_an_int_tensor_gathers_along_the_first_axis():
    ids = np.array([[1, 0], [1, 1]])
    np.testing.assert_array_equal(computed(lambda x, i: x[i], X, ids), X[ids])


def test_indices_that_numpy_would_refuse_are_refused():
    build, (x,) = recording(TensorSpec((2, 3)))
    with build:
        for index in (2, (0, 0, 0), (slice(None), -4)):
            with pytest.raises(InvalidInput):
                x[index]
        with pytest.raises(InvalidInput, match="ints, slices, None, Ellipsis and arrays of ints"):
            x["a"]


def test_python_numbers_take_the_element_type_of_the_tensor():
    build, (half, whole) = recording(TensorSpec((2,), "float16"), TensorSpec((2,), "int32"))
    with build:
        assert (half * 2.5 + 1).dtype.name == "float16"
        assert (whole * 2 + 1).dtype.name == "int32"
        with pytest.raises(TypeMismatch, match=r"mixes int32 with the float 2\.5; cast"):
            whole * 2.5
        with pytest.raises(TypeMismatch, match="needs one element type"):
            half + whole


ONES: Any = np.ones((4, 4))
BESIDE = {
    "mul": lambda x: x * ONES[:2, :3],
    "an array first": lambda x: ONES[:2, :3] * x,
    "a numpy number": lambda x: x * np.float64(2.5),
    "a comparison": lambda x: ops.where(x > ONES[0, :3], x, ONES[0, :3]),
    "concat": lambda x: ops.concat([x, ONES[:1, :3]]),
    "matmul": lambda x: x @ ONES[:3, :4],
    "linear": lambda x: ops.linear(x, ONES[:4, :3], ONES[0]),
    "clip": lambda x: ops.clip(x, np.float64(0), np.float64(1)),
    "huber": lambda x: ops.huber(x, ONES[:2, :3]),
    "layer_norm": lambda x: ops.layer_norm(x, ONES[0, :3], ONES[0, :3]),
    "scatter": lambda x: ops.scatter_nd(x, np.array([[0]]), ONES[:1, :3]),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", BESIDE)
def test_a_float64_array_takes_the_float_type_of_the_tensors_beside_it(case, dtype):
    build, (x,) = recording(TensorSpec((2, 3), dtype))
    with build:
        assert BESIDE[case](x).dtype.name == dtype


def test_a_gradient_at_a_float64_array_takes_float64_constants():
    x = np.arange(6.0).reshape(2, 3)
    found = grad(lambda v: (v * x + np.ones(3)).sum())(x)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, x)
    with mode("graph", "reference", floats="float64"):
        assert grad(lambda v: (v * x + np.ones(3)).sum())(x).dtype == np.float64


def test_a_float64_tensor_is_not_converted():
    build, (x, wide, half) = recording(
        TensorSpec((2,)), TensorSpec((2,), "float64"), TensorSpec((2,), "float16")
    )
    with build:
        with pytest.raises(TypeMismatch, match=r"float32.*float64.*cast one"):
            x * wide
        with pytest.raises(TypeMismatch, match=r"float16.*float64.*cast one"):
            half * np.ones(2)
        with pytest.raises(TypeMismatch, match=r"float32.*float64.*cast one"):
            x * ops.constant(np.ones(2))


def test_two_symbols_never_broadcast_against_each_other():
    build, (x, y) = recording(TensorSpec(("N", 3)), TensorSpec(("M", 3)))
    with (
        build,
        pytest.raises(ShapeError, match=r"\(N, 3\) and \(M, 3\): N against M; give both the same"),
    ):
        x + y


def test_errors_name_the_operator_the_shapes_and_the_users_line():
    build, (x, y) = recording(TensorSpec((2, 3)), TensorSpec((2, 3)))
    with (
        build,
        pytest.raises(ShapeError, match=r"MatMul.*float32\[2,3\] @ float32\[2,3\].*test_tensor.py"),
    ):
        x @ y


def test_attributes_are_checked_by_name_and_kind():
    build, (x,) = recording(TensorSpec((2, 3)))
    with build:
        with pytest.raises(InvalidInput, match="Softmax has no attribute 'axes'; it has axis"):
            ops.softmax(x, axes=1)  # type: ignore[call-arg]
        with pytest.raises(InvalidInput, match=r"Softmax.axis must be of kind INT, got 'last'"):
            ops.softmax(x, axis="last")  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="needs the attribute 'to'"):
            TABLE["", "Cast"](x)
        with pytest.raises(InvalidInput, match=r"Add takes 2 operands, got 1: Add\(a, b, /\)"):
            TABLE["", "Add"](x)


def test_a_symbolic_tensor_has_no_truth_value_and_no_array():
    build, (x,) = recording(TensorSpec((2,)))
    with build:
        with pytest.raises(InvalidInput, match=r"use ops\.cond"):
            bool(x.sum() > 0)
        with pytest.raises(InvalidInput, match="eager"):
            x.numpy()


def test_a_tensor_of_another_graph_is_refused():
    _, (foreign,) = recording(TensorSpec((2,)))
    build, (x,) = recording(TensorSpec((2,)))
    with build, pytest.raises(InvalidInput, match="belongs to the graph"):
        x + foreign


def test_summaries_are_named_scalars_without_gradient():
    build, (x,) = recording(TensorSpec((3,)))
    with build:
        ops.scalar_summary("mean", x.mean())
        with pytest.raises(InvalidInput, match="recorded twice"):
            ops.scalar_summary("mean", x.mean())
        with pytest.raises(InvalidInput, match="takes a scalar"):
            ops.scalar_summary("all", x)
    assert list(build.effects) == ["summary/mean"]


def test_numpys_functions_are_refused_with_ours_named():
    build, (x,) = recording(TensorSpec(("N", 4)))
    with build:
        for use in (
            lambda: np.reshape(x, (-1, 2)),
            lambda: np.asarray(x),
            lambda: np.concatenate([x, x]),
        ):
            with pytest.raises(
                InvalidInput, match=r"graph; use the function|use ops\.(reshape|concat)$"
            ):
                use()


def test_a_recorded_value_is_no_number_yet_and_never_changes():
    build, (x,) = recording(TensorSpec(("N",)))
    with build:
        for use in (lambda: float(x.sum()), lambda: int(x.sum())):
            with pytest.raises(InvalidInput, match=r"needs a number at \S*test_tensor.py:\d+"):
                use()
        with pytest.raises(InvalidInput, match=r"use ops\.where or ops\.scatter_nd"):
            x[0] = 1.0


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
def test_means_of_whole_numbers_are_fractions(dtype):
    x = np.array([[1, 0, 1], [1, 1, 3]]).astype(dtype)
    for body in (
        lambda t: t.mean(),
        lambda t: t.mean(np.int64(1)),
        lambda t: t.std((0, 1)),
        lambda t: t.var(np.int64(0)),
    ):
        found = computed(body, x)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, body(x), rtol=1e-6)


def test_a_python_number_is_divided_by_any_whole_type():
    x = np.array([-3, 2, 5], np.int32)
    assert computed(lambda t: -7 // t, x).tolist() == (-7 // x).tolist()


def test_an_axis_that_is_not_there_is_not_transposed():
    _, (x,) = recording(TensorSpec((2, 3)))
    with pytest.raises(InvalidInput, match=r"2 axes, transpose names \(0, 3\)"):
        x.transpose(0, 3)
    with pytest.raises(InvalidInput, match="2 axes, swapaxes names 0 and 3"):
        x.swapaxes(0, 3)
    for wrong in (
        ops.sort,
        ops.unstack,
        lambda x, a: ops.roll(x, 1, a),
        lambda x, a: ops.split(x, 2, a),
    ):
        with pytest.raises(ShapeError, match="axis 3 is outside"):
            wrong(x, 3)


def test_norms_of_a_zero_vector_have_slope_zero():
    for order in (3, 4.5):
        slope = grad(lambda v, order=order: ops.vector_norm(v, order))(np.zeros(3, np.float32))
        assert slope.tolist() == [0.0, 0.0, 0.0]
    _, (x,) = recording(TensorSpec((3,)))
    with pytest.raises(InvalidInput, match="order above 0"):
        ops.vector_norm(x, -np.inf)


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
def test_an_open_axis_without_rows_is_rolled(engine_name):
    build, (x,) = recording(TensorSpec(("N", 3)))
    with build:
        y = ops.roll(x, 2, 0)
    run = engine(engine_name).compile(build.finish({"y": y}))
    assert run(np.zeros((0, 3), np.float32))[0].shape == (0, 3)
    rows = X[0, :, :3].copy()
    assert run(rows)[0].tolist() == np.roll(rows, 2, 0).tolist()
