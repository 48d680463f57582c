"""Corners of convolutions, pools and quantization on XLA, against the reference engine."""

import ml_dtypes
import numpy as np
import pytest
from tests.support.xla import agrees

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import emit

pytestmark = pytest.mark.long  # compiling takes long


def node(name, *args, **attrs):
    """One node of the operands, as a function."""
    build = Build(TABLE, name)
    with build:
        y = emit(name, *(build.param(f"x{i}", type_of(a)) for i, a in enumerate(args)), **attrs)
    return build.finish({"y": y})


def slopes(name, *args, **attrs):
    """The gradients of a weighted sum of one node."""
    build = Build(TABLE, name)
    with build:
        y = emit(name, *(build.param(f"x{i}", type_of(a)) for i, a in enumerate(args)), **attrs)
        total = (y * normal(*y.shape)).sum()
    return value_and_grad(build.finish({"y": total}), [f"x{i}" for i in range(len(args))])


def normal(*shape):
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("x", "w", "attrs"),
    [
        ((2, 3, 6, 5), (6, 1, 3, 2), {"group": 3, "strides": (2, 1), "pads": (1, 0, 0, 1)}),
        ((2, 3, 7, 8), (3, 1, 3, 3), {"group": 3, "strides": (3, 2), "dilations": (2, 1)}),
        ((2, 4, 5, 6), (3, 4, 1, 1), {"strides": (2, 3)}),
        ((2, 1, 5, 6), (3, 1, 3, 2), {"pads": (1, 1, 2, 0)}),
        ((1, 1, 5), (1, 1, 3), {"strides": (2,)}),
        ((2, 4, 6), (6, 2, 2), {"group": 2, "strides": (3,)}),
    ],
    ids=["multiplied", "depthwise", "products", "one channel", "one of each", "grouped"],
)
def test_convolutions_by_other_means_agree(x, w, attrs):
    agrees(slopes("Conv", normal(*x), normal(*w), **attrs), [normal(*x), normal(*w)])


def test_transposed_depthwise_convolution_agrees():
    args = [normal(2, 3, 4, 3), normal(3, 1, 3, 2)]
    attrs = {"group": 3, "strides": (2, 3), "pads": (1, 0, 2, 1), "output_padding": (1, 0)}
    agrees(node("ConvTranspose", *args, **attrs), args)


@pytest.mark.parametrize(
    "attrs",
    [
        {"kernel_shape": (3, 2), "strides": (2, 1), "dilations": (1, 2), "pads": (1, 1, 0, 1)},
        {"kernel_shape": (9, 8), "pads": (4, 3, 4, 4)},
        {"kernel_shape": (12, 10), "strides": (12, 10)},
        {"kernel_shape": (2, 1), "strides": (11, 9)},
    ],
    ids=["overlapping", "large", "whole", "sparse"],
)
def test_gradient_of_a_pool_goes_to_the_first_of_equal_maxima(attrs):
    x = np.round(normal(2, 2, 12, 10))
    agrees(slopes("MaxPool", x, **attrs), [x])


def test_maximum_of_a_plane_of_minus_infinity_is_in_the_plane():
    x = np.full((1, 1, 3, 3), -np.inf, np.float32)
    row = next(row for row in TABLE.values() if row.name == "MaxPool")
    build = Build(TABLE, "f")
    with build:
        attrs = {"kernel_shape": (2, 2), "pads": (1, 1, 1, 1)}
        y, where = row.all_outputs(build.param("x", type_of(x)), outputs=2, **attrs)
    agrees(build.finish({"y": y, "where": where}), [x])


def test_position_outside_an_unpooled_plane_is_refused():
    args = [normal(1, 1, 2), np.array([[[0, 4]]])]
    function = node("MaxUnpool", *args, kernel_shape=(2,), strides=(2,))
    with pytest.raises(InvalidInput, match="MaxUnpool"):
        engine("xla").compile(function)(*args)


@pytest.mark.parametrize("codes", ["int4", "uint2", "float8_e4m3fn", "float8_e5m2fnuz"])
def test_narrow_codes_agree(codes):
    x, zero = normal(4, 6) * 30, np.zeros((4, 3), getattr(ml_dtypes, codes))
    step = np.full((4, 3), 0.3, np.float32)
    agrees(node("QuantizeLinear", x, step, zero, axis=1, block_size=2), [x, step, zero], atol=0)


def test_quantizing_in_half_precision_rounds_each_quotient():
    x, step = normal(50, 20) * 30, np.array(0.31, np.float32)
    function = node("QuantizeLinear", x, step, output_dtype=3, precision=10)
    agrees(function, [x, step], rtol=0, atol=0)


def test_sums_of_integers_are_exact():
    a = np.full((2, 4000), 255, np.uint8)
    b, a_zero = np.full((4000, 3), -127, np.int8), np.array(1, np.uint8)
    agrees(node("MatMulInteger", a, b, a_zero), [a, b, a_zero], rtol=0, atol=0)


def test_boxes_that_choose_their_number_of_samples_are_refused_with_the_way_out():
    args = [normal(1, 2, 8, 8), np.array([[0, 0, 4, 6]], np.float32), np.array([0])]
    with pytest.raises(InvalidInput, match=r"RoiAlign .*; pass a sampling_ratio, such as 2, in"):
        engine("xla").compile(node("RoiAlign", *args))
