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
from triplane.unified_ir.ops.inline import inline
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


def row(name):
    return TABLE["", name]


# fmt: off
SECOND: dict[str, Any] = {  # functions of x: (2, 6) and of a setting that only the run knows
    "Reshape": (lambda x, s: row("Reshape")(x * x, s), np.array([4, -1])),
    "Expand": (lambda x, s: row("Expand")(x[:1], s), np.array([4, 6])),
    "Expand of fewer axes": (lambda x, s: row("Expand")(x[0], s), np.array([3, 6])),
    "Slice": (lambda x, s: row("Slice")(x, s, np.array([5]), np.array([1])), np.array([1])),
    "Slice of stride 2": (
        lambda x, s: row("Slice")(x, s, np.array([6]), np.array([1]), np.array([2])),
        np.array([1])),
    "TopK": (row("TopK"), np.array([3])),
    "TopK of both": (lambda x, s: row("TopK").all_outputs(x, s, outputs=2)[0], np.array([3])),
    "Unsqueeze": (row("Unsqueeze"), np.array([1])),
    "Squeeze": (lambda x, s: row("Squeeze")(x[:1], s), np.array([0])),
    "Split": (lambda x, s: row("Split").all_outputs(x, s, outputs=2)[1], np.array([1, 1])),
    "Resize": (
        lambda x, s: row("Resize")(ops.unsqueeze(x, 0, 1), None, None, s),
        np.array([1, 1, 4, 12])),
    "compress": (lambda x, s: ops.compress(x, s > 2, 1), np.arange(6)),
    "nonzero": (lambda x, s: ops.gather(x, row("NonZero")(s).reshape(-1), axis=1), np.arange(6)),
    "both in a row": (
        lambda x, s: row("Reshape")(
            row("Reshape")(x, s)[:2] ** 2.0, s[::-1] - np.array([0, 2])), np.array([4, 3])),
}
# fmt: on


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("what", SECOND)
def test_settings_computed_in_the_run_have_gradients_of_both_orders(what, name):
    make, setting = SECOND[what]
    x = normal(2, 6)
    dtype = x.dtype if name == "onnx" else np.dtype(np.float64)

    def loss(x, s):
        return (ops.sin(make(x, s)) ** 2.0).sum()

    def both(function):
        first = value_and_grad(function, ["x"])
        build = Build(TABLE)
        with build:
            params = [build.param(p.name, p.type) for p in first.params]
            slope = inline(first, params)[1]
            total = build.finish({"total": (slope * slope * slope).sum()})
        return [first, value_and_grad(total, ["x"])]

    specs = TensorSpec(x.shape, dtype), TensorSpec(setting.shape, setting.dtype)
    computed = both(trace(loss, *specs))
    known = both(trace(lambda x: loss(x, setting), specs[0]))
    for one, other in zip(computed, known, strict=True):
        (wanted,) = run_function(TABLE, other, [x.astype(dtype)])[1:]
        (found,) = engine(name).compile(one)(x.astype(dtype), setting)[1:]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# fmt: off
REFUSED: dict[str, Any] = {
    "Tile": (2,), "Pad": (4,), "ReduceSum": (1,), "ReduceMax": (1,), "ReduceL2": (1,),
    "ReduceMean": (1,), "ReduceProd": (1,), "CenterCropPad": (2,),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_a_gradient_that_needs_its_settings_says_so(name):
    specs = TensorSpec((2, 6)), TensorSpec(REFUSED[name], "int64")
    function = trace(lambda x, s: row(name)(x, s).sum(), *specs)
    with pytest.raises(InvalidInput, match=r"gradient of .* known when|constant amounts|only with"):
        value_and_grad(function, ["x"])


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


def test_resize_takes_a_size_or_a_scale():
    with Build(TABLE, "f") as build:
        x = build.param("x", TensorSpec((1, 1, 4, 4)))
        both: dict[str, Any] = {"size": (8, 8), "scale": 2.0}
        for wrong in ({}, both):
            with pytest.raises(InvalidInput, match="either size or scale"):
                ops.resize(x, **wrong)


@pytest.mark.parametrize(
    ("options", "last"),
    [({}, 2), ({"onesided": 1}, 2), ({"inverse": 1}, 2), ({"onesided": 1, "inverse": 1}, 1)],
)
def test_a_transform_along_a_computed_axis_knows_whether_it_is_complex(options, last):
    with Build(TABLE, "f") as build:
        real = options == {"onesided": 1}
        x = build.param("x", TensorSpec((3, 8, 1 if real else 2)))
        axis = build.param("axis", TensorSpec((), "int64"))
        attrs = {"inverse": 0, "onesided": 0, **options}
        (y,) = build.apply(TABLE["", "DFT"], [x, None, axis], attrs)
        assert y.shape[-1] == last
