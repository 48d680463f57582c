"""Attributes that mean nothing are refused by name while the graph is built."""

from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

IMAGE, KERNEL = (1, 4, 5, 5), (4, 4, 3, 3)


def scales(*values):
    return np.array(values, np.float32)


# fmt: off
WRONG: dict[str, Any] = {  # row, operands (shapes, or known arrays), attributes
    "no groups": ("Conv", [IMAGE, KERNEL], {"group": 0}),
    "no groups transposed": ("ConvTranspose", [IMAGE, KERNEL], {"group": 0}),
    "a padding mode of no name": ("Conv", [IMAGE, KERNEL], {"auto_pad": "SAME"}),
    "too few strides": ("MaxPool", [IMAGE], {"kernel_shape": (2, 2), "strides": (2,)}),
    "a pool wider than its image": ("AveragePool", [IMAGE], {"kernel_shape": (6, 6)}),
    "windows of padding alone": (
        "MaxPool", [(1, 1, 1)], {"kernel_shape": (2,), "dilations": (2,), "pads": (1, 1)}),
    "means of padding alone": (
        "AveragePool", [(1, 1, 1)],
        {"kernel_shape": (2,), "dilations": (2,), "auto_pad": "SAME_UPPER"}),
    "a norm of power 0": ("LpPool", [IMAGE], {"kernel_shape": (2, 2), "p": 0}),
    "a global norm of power 0": ("GlobalLpPool", [IMAGE], {"p": 0}),
    "a norm of power 3": ("LpNormalization", [IMAGE], {"p": 3}),
    "a scale of NaN": ("Resize", [IMAGE, None, scales(1, 1, np.nan, 1)], {}),
    "a scale of 0": ("Resize", [IMAGE, None, scales(1, 1, 0, 1)], {}),
    "an infinite scale": ("Resize", [IMAGE, None, scales(1, 1, np.inf, 1)], {}),
    "a size of 0": ("Resize", [IMAGE, None, None, np.array([1, 4, 0, 5])], {}),
    "an axis twice": ("Resize", [IMAGE, None, scales(2, 2)], {"axes": (2, 2)}),
    "a mode of no name": ("Resize", [IMAGE, None, scales(1, 1, 2, 2)], {"mode": "best"}),
    "a rounding of no name": (
        "Resize", [IMAGE, None, scales(1, 1, 2, 2)], {"nearest_mode": "up"}),
    "a mapping of no name": (
        "Resize", [IMAGE, None, scales(1, 1, 2, 2)], {"coordinate_transformation_mode": "x"}),
    "a policy of no name": (
        "Resize", [IMAGE, None, None, np.array([1, 4, 6, 6])], {"keep_aspect_ratio_policy": "x"}),
    "a grid of another rank": ("GridSample", [IMAGE, (1, 2, 2, 3)], {}),
    "no output": (
        "RoiAlign", [IMAGE, (2, 4), np.zeros(2, np.int64)], {"output_height": 0}),
    "groups that do not divide": ("GroupNormalization", [IMAGE, (4,), (4,)], {"num_groups": 3}),
    "no neighbours": ("LRN", [IMAGE], {"size": 0}),
    "columns of another image": (
        "Col2Im", [(1, 4, 7), np.array([3, 3]), np.array([2, 2])], {}),
    "a form of no name": (
        "ConvGradWeight", [IMAGE, (1, 4, 3, 3)], {"kernel_shape": (3, 3), "form": "x"}),
}
# fmt: on


@pytest.mark.parametrize("what", WRONG)
def test_it_is_refused_by_name(what):
    name, operands, attrs = WRONG[what]
    row = TABLE.get(("", name)) or TABLE["triplane", name]
    build = Build(TABLE)
    with build:
        given = [
            build.param(f"x{i}", TensorSpec(a)) if isinstance(a, tuple) else a
            for i, a in enumerate(operands)
        ]
        with pytest.raises(InvalidInput):
            build.apply(row, given, attrs)


@pytest.mark.parametrize(("x", "w"), [((4, 5), (4, 5)), ((1, 4, 5), KERNEL), (IMAGE, (4, 4, 3))])
def test_an_image_and_a_kernel_of_other_ranks_are_refused_with_both_shapes(x, w):
    build = Build(TABLE)
    operands = [build.param("x", TensorSpec(x)), build.param("w", TensorSpec(w))]
    with build, pytest.raises(ShapeError, match=r"Conv takes x: \(N, C, \.\.\.\) and w: \(O, "):
        build.apply(TABLE["", "Conv"], operands, {})


@pytest.mark.parametrize("attrs", [{"auto_pad": "SAME_UPPER"}, {"kernel_shape": (3, 3)}])
def test_a_kernel_of_open_size_takes_explicit_pads(attrs):
    build = Build(TABLE)
    operands = [build.param("x", TensorSpec(IMAGE)), build.param("w", TensorSpec((4, 4, "K", 3)))]
    with build, pytest.raises(ShapeError, match="a kernel of open size needs explicit pads"):
        build.apply(TABLE["", "Conv"], operands, attrs)
