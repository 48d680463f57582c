"""Sizes that only data decide, inside programs; positions and types at their edges."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ir.types import ShapeError, TypeMismatch
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


def test_a_branch_gives_no_size_that_its_own_data_decide():
    def body(x):
        return ops.cond(x.sum() > 0.0, lambda: ops.unique(x), lambda: ops.unique(x))

    with pytest.raises(TypeMismatch, match="depends on data"):
        recorded(body, TensorSpec((4,)))


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


def test_equal_parts_of_an_open_size_are_refused_by_name():
    with pytest.raises(InvalidInput, match="2 equal parts of the size N are not known to exist"):
        recorded(
            lambda x: TABLE["", "Split"].all_outputs(x, outputs=2, num_outputs=2)[0],
            TensorSpec(("N",)),
        )
