"""NaN, infinity and nothing at all: where the engines agree, and where they are known not to."""

import warnings

import numpy as np
import pytest

from triplane.unified_ir import ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
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
