import numpy as np
import pytest

from triplane.unified_ir import TensorSpec, ops, trace
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops.rows.movement.slicing import slice_row
from triplane.unified_ir.ops.rows.windows.convolution import conv_transpose_row

X = np.arange(6, dtype=np.float32).reshape(1, 2, 1, 3)


@pytest.mark.parametrize("axes", [(0, 0), (1, -3)])
def test_an_axis_named_twice_is_refused(axes):
    for body in (lambda x: x.sum(axes), lambda x: ops.unsqueeze(x, *axes[:1], *axes[:1])):
        with pytest.raises(ShapeError, match="twice"):
            trace(body, TensorSpec(X.shape))


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_squeeze_without_axes_drops_every_axis_of_size_one(name):
    function = trace(ops.squeeze, TensorSpec(X.shape))
    assert function.results[0].type.shape == (2, 3)
    np.testing.assert_array_equal(engine(name).compile(function)(X)[0], X.squeeze())


def test_tensors_of_different_rank_do_not_concatenate():
    with pytest.raises(ShapeError, match="Concat"):
        trace(lambda x, y: ops.concat([x, y], 1), TensorSpec((2, 3)), TensorSpec((2,)))


def test_a_range_below_zero_is_empty():
    function = trace(lambda x: ops.arange(-3).cast("float32") + x, TensorSpec((1,)))
    assert function.results[0].type.shape == (0,)


@pytest.mark.parametrize("end", [2**31 - 1, 2**63 - 1])
def test_a_slice_to_the_largest_number_goes_to_the_end_of_an_open_axis(end):
    ends = np.array([end])
    function = trace(lambda x: slice_row(x, np.array([1]), ends), TensorSpec(("N",)))
    assert str(function.results[0].type) == "float32[N-1]"


def test_a_negative_pad_takes_away():
    function = trace(lambda x: ops.pad(x, (-1, 2)), TensorSpec((3,)))
    assert str(function.results[0].type) == "float32[4]"
    x = np.array([1.0, 2.0, 3.0], np.float32)
    for name in ("onnx", "reference"):
        np.testing.assert_array_equal(engine(name).compile(function)(x)[0], [2, 3, 0, 0])


WINDOWS = {
    "negative pads": lambda x, w, _: ops.conv(x, w, padding=-1),
    "bias of another size": ops.conv,
    "groups that do not divide": lambda x, w, _: ops.conv(x, w[:, :1], groups=2),
    "a pool of padding alone": lambda x, *_: ops.max_pool(x, 2, padding=2),
}


def test_a_transposed_convolution_with_more_padding_than_output_is_refused():
    with pytest.raises(ShapeError, match="leaves"):
        trace(
            lambda x, w: conv_transpose_row(x, w, pads=(2, 2, 2, 2)),
            TensorSpec((1, 1, 2, 2)),
            TensorSpec((1, 1, 2, 2)),
        )


@pytest.mark.parametrize("body", WINDOWS.values(), ids=WINDOWS)
def test_a_window_no_runtime_accepts_is_refused_while_the_graph_is_built(body):
    specs = TensorSpec((1, 2, 5, 5)), TensorSpec((3, 2, 3, 3)), TensorSpec((2,))
    with pytest.raises(ShapeError, match=r"test_shape_rules\.py"):
        trace(body, *specs)
