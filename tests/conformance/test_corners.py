"""NaN, infinity and nothing at all: where the engines agree, and where they are known not to."""

import warnings

import numpy as np
import pytest

from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ir.types import float16, float32, float64
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

NAN, INF = np.nan, np.inf
ODD = np.array([[NAN, 1, -2, 0], [INF, 1, -INF, -0.0], [NAN] * 4, [2, 1, NAN, 1]], np.float32)
NOTHING = np.zeros((3, 0), np.float32)


def row(name, **attrs):
    return lambda x: TABLE["", name](x, **attrs)


def reduced(name):
    return lambda x: TABLE["", name](x, np.array([1]), keepdims=0)


def pairs(pool):
    return lambda x: pool(x.reshape((-1, 1, 1, 4)), (1, 2))


# fmt: off
AGREED = {  # each also for rows of no elements, unless a shape stands in the way
    "relu": ops.relu, "exp": ops.exp, "sigmoid": row("Sigmoid"), "tanh": row("Tanh"),
    "sign": row("Sign"), "round": row("Round"), "erf": row("Erf"), "softplus": row("Softplus"),
    "max": lambda x: TABLE["", "Max"](x, 0.5), "min": lambda x: TABLE["", "Min"](0.5, x),
    "clip": lambda x: TABLE["", "Clip"](x, np.float32(-1), np.float32(1)),
    "clip_below": lambda x: TABLE["", "Clip"](x, np.float32(-1)),
    "clip_above": lambda x: TABLE["", "Clip"](x, None, np.float32(1)),
    "clip_nothing": lambda x: TABLE["", "Clip"](x, np.float32(-INF), np.float32(INF)),
    "clip_to_infinity": lambda x: TABLE["", "Clip"](x, np.float32(INF)),
    "clip_to_the_lower": lambda x: TABLE["", "Clip"](x, np.float32(-INF), np.float32(-INF)),
    "less": lambda x: x < 0.5, "equal": lambda x: x == 0.5,
    "where": lambda x: ops.where(x > 0.0, x, 0.0),
    "softmax": row("Softmax", axis=1), "log_softmax": row("LogSoftmax", axis=1),
    "sum": reduced("ReduceSum"), "l1": reduced("ReduceL1"), "squares": reduced("ReduceSumSquare"),
    "prod": reduced("ReduceProd"), "elu": row("Elu"), "softsign": row("Softsign"),
    "thresholded_relu": row("ThresholdedRelu"), "swish": row("Swish"), "is_inf": row("IsInf"),
    "cumsum": lambda x: TABLE["", "CumSum"](x, 1), "cumprod": lambda x: TABLE["", "CumProd"](x, 1),
    "tile": lambda x: TABLE["", "Tile"](x, np.array([2, 1])), "flip": lambda x: x[::-1],
    "triu": row("Trilu"), "nonzero": lambda x: ops.nonzero(x > 0.5),
    "selected": lambda x: ops.masked_select(x, x > 0.5),
}
ON_NUMBERS = {  # agreed on NaN, not on nothing, or the other way round
    "mean": reduced("ReduceMean"), "avg_pool": pairs(ops.avg_pool),
}
ON_NOTHING = {"reduce_max": reduced("ReduceMax"), "reduce_min": reduced("ReduceMin")}
KNOWN = {  # (function, rows, why): the reference keeps to NumPy
    "a maximum over NaN": (reduced("ReduceMax"), ODD, "onnxruntime compares; NaN compares false"),
    "a minimum over NaN": (reduced("ReduceMin"), ODD, "as above"),
    "the place of a maximum over NaN": (row("ArgMax", axis=1, keepdims=0), ODD, "as above"),
    "a pooled maximum over NaN": (
        pairs(ops.max_pool), ODD, "as above; in a vector the NaN may win, so it is by position"),
    "a bound that is NaN": (
        lambda x: TABLE["", "Clip"](x, None, np.float32(NAN)), ODD, "as above; PyTorch gives NaN",
    ),
    "the mean of nothing": (reduced("ReduceMean"), NOTHING, "undefined in ONNX; 0 there, NaN here"),
}
# fmt: on


def on_both(body, x):
    build = Build(TABLE, "f")
    with build:
        y = body(build.param("x", TensorSpec(("N", x.shape[1] or "M"))))
    f = build.finish({"y": y})
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # numpy's, of the values that this is about
        return [engine(name).compile(f)(x)[0] for name in ("onnx", "reference")]


@pytest.mark.parametrize("name", [*AGREED, *ON_NUMBERS])
def test_engines_agree_on_nan_and_infinity(name):
    found, wanted = on_both({**AGREED, **ON_NUMBERS}[name], ODD)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", [*AGREED, *ON_NOTHING])
def test_engines_agree_on_rows_of_no_elements(name):
    found, wanted = on_both({**AGREED, **ON_NOTHING}[name], NOTHING)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("what", KNOWN)
def test_a_known_difference_is_still_one(what):
    """Red when a newer onnxruntime ends it: then it belongs to the agreed ones above."""
    body, x, why = KNOWN[what]
    found, wanted = on_both(body, x)
    assert not np.array_equal(found, wanted, equal_nan=wanted.dtype.kind == "f"), why


BOUNDS = [(-1.0, None), (None, 1.0), (-INF, None), (None, INF), (-INF, INF), (INF, -INF)]
KINDS = [float16, float32, float64]


@pytest.mark.parametrize("name", ["onnx", "ascend"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_clip_and_its_slopes_agree_on_infinite_bounds_and_values(name, dtype, low, high):
    """An absent bound is infinity, and what is infinite is not beyond it."""
    kept = {k: v for k, v in (("low", low), ("high", high)) if v is not None}
    build = Build(TABLE, "loss")
    with build:
        x = build.param("x", TensorSpec((6,), dtype))
        bounds = {k: build.param(k, TensorSpec((), dtype)) for k in kept}
        y = TABLE["", "Clip"](x, bounds.get("low"), bounds.get("high"))
        weights = np.array([1, 2, 3, 4, 5, 6], dtype.numpy)
        f = build.finish({"loss": (y * weights).sum(), "y": y})
    grad = value_and_grad(f, ["x", *kept], of="loss")
    args = [np.array([NAN, INF, -INF, 0, 2, -2], dtype.numpy)]
    args += [np.array(v, dtype.numpy) for v in kept.values()]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found, wanted = (engine(e).compile(grad)(*args) for e in (name, "reference"))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
