"""Convolutions and pools over random windows: gradient graphs on onnxruntime against numpy."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.conformance.checks import FIRST, SECOND, agree, central_difference
from tests.conformance.uses import slope

from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE

CONV, POOL, MEAN = (TABLE["", n] for n in ("Conv", "MaxPool", "AveragePool"))
pytestmark = pytest.mark.slow
searched = settings(max_examples=settings().max_examples // 2)
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


@st.composite
def windows(draw, *, axes=None, dilated=True):
    """Attributes and a spatial size that the window fits into at least once."""
    n = draw(st.integers(1, 2)) if axes is None else axes
    kernel = draw(st.tuples(*[st.integers(1, 4)] * n))
    strides = draw(st.tuples(*[st.integers(1, 3)] * n))
    dilations = draw(st.tuples(*[st.integers(1, 2)] * n)) if dilated else (1,) * n
    pads = draw(st.tuples(*[st.integers(0, 2)] * (2 * n)))
    sizes = draw(st.tuples(*[st.integers(1, 9)] * n))
    for i in range(n):
        span = (kernel[i] - 1) * dilations[i] + 1
        assume(sizes[i] + pads[i] + pads[n + i] >= span)
        assume(max(pads[i], pads[n + i]) < kernel[i])
        assume(sizes[i] >= dilations[i] or not pads[i])  # else windows of padding alone
    return kernel, {"strides": strides, "dilations": dilations, "pads": pads}, sizes


def recorded(arrays, body, *, batch=None):
    """The randomly weighted sum of `body`'s result; the first array's first axis is `batch`."""
    build = Build(TABLE, "f")
    with build:
        params = []
        for i, (name, a) in enumerate(arrays.items()):
            shape = (batch or a.shape[0], *a.shape[1:]) if i == 0 else a.shape
            params.append(build.param(name, TensorSpec(shape, a.dtype)))
        y = body(*params)
        rng = np.random.default_rng(3)
        weight = rng.standard_normal(y.shape[1:]).astype(y.dtype.numpy)
        total = (y * weight).sum()
    return build.finish({"loss": total})


def engines_agree(arrays, body):
    f = value_and_grad(recorded(arrays, body, batch="N"))
    args = list(arrays.values())
    wanted = engine("reference").compile(f)(*args)
    agree(engine("onnx").compile(f)(*args), wanted, "window", close=CLOSE)


def slopes_hold(arrays, body):
    """First and second order along random directions, in float64."""
    arrays = {k: a.astype(np.float64) for k, a in arrays.items()}
    f = recorded(arrays, body)
    rng = np.random.default_rng(4)
    directions = {k: rng.standard_normal(a.shape) for k, a in arrays.items()}
    for scalar, bound in ((f, FIRST), (slope(f, list(arrays), directions), SECOND)):
        _, *gs = run_function(TABLE, value_and_grad(scalar), list(arrays.values()))
        for (name, v), g in zip(directions.items(), gs, strict=True):
            want = central_difference(TABLE, scalar, arrays, name, v)
            assert abs((g * v).sum() - want) <= bound * max(1, abs(want)), name


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@searched
@given(windows(), st.sampled_from([(1, 1, 1), (3, 2, 1), (4, 6, 2), (3, 3, 3)]))
def test_convolutions_of_any_window_and_their_gradients_agree(window, channels):
    kernel, attrs, sizes = window
    inputs, outputs, group = channels
    arrays = {
        "x": random(0, 2, inputs, *sizes),
        "w": random(1, outputs, inputs // group, *kernel),
        "b": random(2, outputs),
    }

    def body(x, w, b):
        return CONV(x, w, b, group=group, **attrs)

    engines_agree(arrays, body)
    slopes_hold(arrays, body)


@searched
@given(windows(), st.booleans(), st.integers(0, 1))
def test_maxima_of_any_window_with_ties_agree(window, ties, ceil_mode):
    kernel, attrs, sizes = window
    x = random(0, 2, 2, *sizes)
    arrays = {"x": np.round(x) if ties else x}
    engines_agree(arrays, lambda x: POOL(x, kernel_shape=kernel, ceil_mode=ceil_mode, **attrs))


@searched
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 11), st.integers(1, 11), st.booleans())
def test_maxima_of_disjoint_windows_agree_whatever_is_left_over(kh, kw, h, w, ties):
    assume(kh <= h and kw <= w)
    x = random(0, 2, 2, h, w)
    arrays = {"x": np.round(x) if ties else x}
    engines_agree(arrays, lambda x: ops.max_pool(x, (kh, kw)))


@searched
@given(windows(), st.integers(0, 1), st.integers(0, 1))
def test_means_of_any_window_agree(window, count_include_pad, ceil_mode):
    kernel, attrs, sizes = window
    options = {**attrs, "count_include_pad": count_include_pad, "ceil_mode": ceil_mode}

    def body(x):
        return MEAN(x, kernel_shape=kernel, **options)

    arrays = {"x": random(0, 2, 2, *sizes)}
    engines_agree(arrays, body)
    slopes_hold(arrays, body)


@searched
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)
)
def test_transposed_convolutions_agree(size, kernel, stride, pad, extra):
    assume(extra < stride)
    assume((size - 1) * stride + kernel + extra > 2 * pad)
    row = TABLE["", "ConvTranspose"]
    arrays = {"x": random(0, 2, 4, size), "w": random(1, 4, 3, kernel)}

    def body(x, w):
        return row(x, w, strides=(stride,), pads=(pad, pad), output_padding=(extra,))

    engines_agree(arrays, body)
    slopes_hold(arrays, body)
