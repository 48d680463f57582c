"""Planes whose sizes are computed while a graph runs, or open under strides: right or refused."""

from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops, trace
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE

RNG = np.random.default_rng(2)
ENGINES = ["onnx", "reference"]


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


# fmt: off
COMPUTED: dict[str, Any] = {  # row: operands (None: absent; settings are vectors), attributes
    "Resize": (
        (normal(1, 2, 4, 5), None, None, np.array([7, 3])), {"axes": (2, 3), "mode": "linear"}),
    "CenterCropPad": ((normal(2, 7, 4), np.array([4, 7])), {"axes": (1, 2)}),
    "AffineGrid": ((normal(2, 2, 3), np.array([2, 3, 3, 4])), {"align_corners": 1}),
    "Col2Im": ((normal(2, 12, 6), np.array([3, 4]), np.array([2, 2])), {}),
    "MaxUnpool": (
        (normal(1, 1, 2, 2), np.array([[[[0, 3], [10, 9]]]]), np.array([1, 1, 5, 6])),
        {"kernel_shape": (2, 2), "strides": (2, 2)}),
}
# fmt: on


def recorded(name, *, known):
    operands, attrs = COMPUTED[name]
    build, args = Build(TABLE), []
    with build:
        given = []
        for i, a in enumerate(operands):
            if a is None or (known and i and a.ndim == 1):
                given.append(a)
            else:
                given.append(build.param(f"x{i}", TensorSpec(a.shape, a.dtype)))
                args.append(a)
        y = build.apply(TABLE["", name], given, attrs)[0]
    return build.finish({"y": y}), args


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("op", COMPUTED)
def test_sizes_computed_in_the_run_give_what_known_ones_give(op, name):
    function, args = recorded(op, known=False)
    assert any("open" in str(d) for d in function.results[0].type.shape)
    settled, fewer = recorded(op, known=True)
    (wanted,) = run_function(TABLE, settled, fewer)
    (found,) = engine(name).compile(function)(*args)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


# fmt: off
OPEN = {  # functions of x: (1, 2, H, W) with open H and W, and of w: (2, 2, 3, 3)
    "conv of stride 2": lambda x, w: ops.conv(x, w, stride=2, padding=1),
    "conv of stride 3 without padding": lambda x, w: ops.conv(x, w, stride=3),
    "conv same of stride 2": lambda x, w: ops.conv(x, w, stride=2, padding="same"),
    "transposed conv": lambda x, w: ops.conv_transpose(x, w, stride=2, padding=1),
    "max pool": lambda x, _: ops.max_pool(x, 3, stride=2, padding=1),
    "max pool in ceil mode": lambda x, _: ops.max_pool(x, 2, stride=2, ceil_mode=True),
    "max pool in ceil mode of a long stride": lambda x, _: ops.max_pool(
        x, 2, stride=3, padding=1, ceil_mode=True),
    "mean pool": lambda x, _: ops.avg_pool(x, 3, stride=2, padding=1),
    "mean pool in ceil mode": lambda x, _: ops.avg_pool(x, 3, stride=2, ceil_mode=True),
    "resize by 1.5": lambda x, _: ops.resize(x, scale=1.5, mode="bilinear"),
    "resize to double": lambda x, _: ops.resize(
        x, (2 * x.shape[2], x.shape[3]), mode="bicubic"),
    "group norm": lambda x, w: ops.instance_norm(x, w[0, :, 0, 0], w[1, :, 0, 0]),
}
# fmt: on


@pytest.mark.parametrize("what", OPEN)
def test_an_open_plane_gives_the_values_and_gradients_of_a_fixed_one(what):
    w = normal(2, 2, 3, 3)

    def loss(x, w):
        y = OPEN[what](x, w)
        return (y * y).sum()

    spec = TensorSpec(w.shape)
    both = value_and_grad(trace(loss, TensorSpec((1, 2, "H", "W")), spec))
    programs = [engine(name).compile(both) for name in ENGINES]
    for plane in ((5, 6), (6, 7), (7, 8)):
        x = normal(1, 2, *plane)
        wanted = run_function(TABLE, value_and_grad(trace(loss, TensorSpec(x.shape), spec)), [x, w])
        for program in programs:
            for found, right in zip(program(x, w), wanted, strict=True):
                np.testing.assert_allclose(found, right, rtol=2e-4, atol=2e-4)


def test_a_stride_beyond_the_window_over_an_open_size_is_refused_with_its_way_out():
    function = trace(
        lambda x: ops.conv(x, ops.ones((1, 1, 1, 2)), stride=3, padding="same").sum(),
        TensorSpec((1, 1, "H", "W")),
    )
    with pytest.raises(InvalidInput, match="fix the size"):
        value_and_grad(function)
