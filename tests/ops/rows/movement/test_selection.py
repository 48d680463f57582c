"""Sizes that only data decide, inside programs; positions and types at their edges."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ir.types import ShapeError, TypeMismatch
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.check import check_function
from triplane.unified_ir.ops.table import TABLE

X = np.array([[1.0, -2.0, 3.0], [-4.0, 5.0, 6.0]], np.float32)


def recorded(body, *specs):
    build = Build(TABLE, "f")
    with build:
        y = body(*[build.param(f"x{i}", spec) for i, spec in enumerate(specs)])
    return build.finish({"y": y})


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
def test_a_gradient_reads_a_size_although_nobody_reads_the_value(engine_name):
    """The slope of a mean needs how many were selected and none of them."""
    f = recorded(lambda x: ops.masked_select(x, x > 0.0).mean(), TensorSpec(("N", 3)))
    check_function(f)
    slope = grad(f, ["x0"])
    found = engine(engine_name).compile(slope)(X)[0]
    np.testing.assert_allclose(found, (X > 0) / 4)


def test_two_selections_have_two_sizes():
    with pytest.raises(ShapeError, match="against open_"):
        recorded(
            lambda x: ops.masked_select(x, x > 0.0) + ops.masked_select(x, x > 1.0),
            TensorSpec(("N", 3)),
        )


def test_a_scan_stacks_no_rows_whose_own_data_decide_their_size():
    def body(x):
        return ops.scan(lambda total, row: (total, ops.unique(row)), x.sum(), x)[1]

    with pytest.raises(TypeMismatch, match="depends on data"):
        recorded(body, TensorSpec((4, 3)))


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
def test_nothing_selected_is_an_empty_tensor(engine_name):
    f = recorded(lambda x: ops.masked_select(x, x > 100.0), TensorSpec((2, 3)))
    assert engine(engine_name).compile(f)(X)[0].shape == (0,)


@pytest.mark.parametrize("row", ["ScatterND", "ScatterElements"])
@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_half_precision_scatters_on_onnxruntime(row, reduction):
    index = np.array([[1], [0], [1]]) if row == "ScatterND" else np.array([1, 0, 1])
    f = recorded(
        lambda x, u: TABLE["", row](x, index, u, reduction=reduction),
        TensorSpec((3,), "float16"),
        TensorSpec((3,), "float16"),
    )
    x, u = np.array([1, 2, 3], np.float16), np.array([4, 5, 6], np.float16)
    found, wanted = (engine(name).compile(f)(x, u)[0] for name in ("onnx", "reference"))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, wanted)


def test_more_than_there_are_is_refused_when_the_graph_is_built():
    with pytest.raises(ShapeError, match="TopK of 5 along axis 1"):
        recorded(lambda x: ops.top_k(x, 5)[0], TensorSpec((2, 3)))
    with pytest.raises(ShapeError, match="4 marks for the 3 elements"):
        recorded(ops.compress, TensorSpec((3,)), TensorSpec((4,), "bool"))


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
def test_parts_of_an_open_size_are_as_equal_as_they_can_be(engine_name):
    f = recorded(
        lambda x: TABLE["", "Split"].all_outputs(x, outputs=3, num_outputs=3)[2], TensorSpec(("N",))
    )
    program = engine(engine_name).compile(f)
    assert [program(np.ones(n, np.float32))[0].size for n in (3, 8, 9)] == [1, 2, 3]
    with pytest.raises(InvalidInput):
        program(np.ones(1, np.float32))


@pytest.mark.parametrize(
    "index", [slice(None, None, -1), slice(-2, None, -1), slice(1, None, 2), slice(None, None, -3)]
)
def test_slices_of_an_open_axis_mean_what_numpy_means(index):
    f = recorded(lambda x: x[index], TensorSpec(("N", 3)))
    slope = grad(recorded(lambda x: (x[index] ** 2.0).sum(), TensorSpec(("N", 3))), ["x0"])
    for n in (2, 3, 6):
        x = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
        wanted = np.zeros_like(x)
        wanted[index] = 2 * x[index]
        for name in ("onnx", "reference"):
            np.testing.assert_array_equal(engine(name).compile(f)(x)[0], x[index])
            np.testing.assert_array_equal(engine(name).compile(slope)(x)[0], wanted)


def test_rows_that_an_open_axis_does_not_have_are_refused_when_the_graph_runs():
    """Three rows were promised; fewer would go on as something else."""
    f = recorded(lambda x: x[:3] * 2.0, TensorSpec(("N",)))
    g = recorded(lambda x, y: x[: y.shape[0]] * y, TensorSpec(("N",)), TensorSpec(("M",)))
    few, many = np.ones(1, np.float32), np.ones(4, np.float32)
    for name in ("onnx", "reference"):
        assert engine(name).compile(f)(many)[0].shape == (3,)
        with pytest.raises(InvalidInput):
            engine(name).compile(f)(few)
        with pytest.raises(InvalidInput):
            engine(name).compile(g)(few, many)


def test_a_slice_whose_length_is_no_polynomial_is_refused_by_name():
    with pytest.raises(ShapeError, match="count both bounds from the same end"):
        recorded(lambda x: x[4:-3:-1], TensorSpec(("N",)))


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("opset", [17, 21])
def test_an_open_axis_is_padded_by_its_own_elements(mode, opset):
    f = recorded(
        lambda x: TABLE["", "Pad"](x, np.array([2, 1]), None, np.array([0]), mode=mode),
        TensorSpec(("N", 2)),
    )
    slope = grad(
        recorded(
            lambda x: (
                TABLE["", "Pad"](x, np.array([2, 1]), None, np.array([0]), mode=mode)
                * np.arange(14, dtype=np.float32).reshape(7, 2)
            ).sum(),
            TensorSpec((4, 2)),
        ),
        ["x0"],
    )
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    places = np.pad(np.arange(4), (2, 1), mode=mode)
    wanted = np.zeros((4, 2), np.float32)
    np.add.at(wanted, places, np.arange(14, dtype=np.float32).reshape(7, 2))
    made = OnnxEngine(target=OnnxTarget(opset))
    np.testing.assert_array_equal(made.compile(f)(x)[0], x[places])
    np.testing.assert_array_equal(made.compile(slope)(x)[0], wanted)


def test_positions_are_no_more_than_there_are_rows():
    def body(x, i):
        return ops.gather_elements(x, i, axis=1)

    fewer = recorded(body, TensorSpec((3, 4)), TensorSpec((2, 5), "int64"))
    x, i = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([[0, 3, -1, 1, 1]] * 2)
    for name in ("onnx", "reference"):
        np.testing.assert_array_equal(
            engine(name).compile(fewer)(x, i)[0], np.take_along_axis(x[:2], i, 1)
        )
    for lead, rows in ((3, 4), ("N", "M")):
        with pytest.raises(ShapeError, match="within x on all other axes"):
            recorded(body, TensorSpec((lead, 4)), TensorSpec((rows, 1), "int64"))


def test_updates_of_another_shape_than_their_positions_are_refused():
    x, index = TensorSpec((5, 2)), TensorSpec((3, 1), "int64")
    for row, updates in (("ScatterND", (3,)), ("ScatterND", (2, 2)), ("ScatterElements", (3, 2))):
        with pytest.raises(ShapeError, match="needs updates"):
            recorded(TABLE["", row], x, index, TensorSpec(updates))
