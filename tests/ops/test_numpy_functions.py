"""numpy's functions on tensors: operators where they mean the same, else a message that helps."""

import operator

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import grad, graph, mode, ops
from triplane.unified_ir.ops import numpy_functions
from triplane.unified_ir.ops.table import TABLE

RNG = np.random.default_rng(0)
X = RNG.uniform(0.1, 0.9, (3, 4)).astype(np.float32)
A = RNG.uniform(0.1, 0.9, (3, 4)).astype(np.float32)
FLAGS, WHOLE = X > 0.5, RNG.integers(1, 9, (3, 4))

ARGUMENTS = {
    **dict.fromkeys(["logical_and", "logical_or", "logical_xor"], (FLAGS, A > 0.5)),
    **dict.fromkeys(["bitwise_and", "bitwise_or", "bitwise_xor"], (WHOLE, WHOLE[::-1].copy())),
    **dict.fromkeys(["logical_not", "invert"], (FLAGS,)),
    **dict.fromkeys(["floor_divide", "remainder"], (WHOLE, WHOLE[::-1].copy())),
    "arccosh": (X + 1.0,),
    "matmul": (X, A.T.copy()),
}


def arguments(name):
    ufunc = getattr(np, name)
    return ARGUMENTS.get(name, (X, A)[: ufunc.nin])


@pytest.mark.parametrize("name", [*numpy_functions.ROWS, *numpy_functions.METHODS])
def test_a_ufunc_on_tensors_is_the_operator(name):
    ufunc, args = getattr(np, name), arguments(name)
    expected = ufunc(*args)

    @graph
    def call(*xs):
        return ufunc(*xs)

    results = [call(*args)]
    if len(args) == 2:
        results.append(graph(lambda x: ufunc(x, args[1]))(args[0]))
        results.append(graph(lambda x: ufunc(args[0], x))(args[1]))
    for y in results:
        assert y.dtype == expected.dtype
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["onnx", "reference"])
def test_floor_division_of_floats_is_numpys(engine):
    a = np.array([1, 1, 6, -1, 1, 5, -5, 0, 7, np.inf, np.nan, 3e38, 2, -2, 1e8, 0], np.float32)
    b = np.array(
        [0.1, -0.1, 0.1, 0.1, 0.2, 3, 3, 3, 0, 2, 1, -np.inf, np.inf, np.inf, 3, 0], np.float32
    )
    with mode("graph", engine), np.errstate(all="ignore"):
        np.testing.assert_array_equal(graph(lambda x, y: x // y)(a, b), a // b)
        np.testing.assert_array_equal(graph(lambda x: 7.0 // x)(b), np.float32(7) // b)
        slopes = grad(lambda x, y: (x // y).sum(), argnums=(0, 1))(a, b)
    assert all(not slope.any() for slope in slopes)


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.lt,
          operator.le, operator.gt, operator.ge, operator.eq, operator.ne]  # fmt: skip


@pytest.mark.parametrize("function", BINARY, ids=lambda f: f.__name__)
def test_an_array_or_a_numpy_number_before_a_tensor(function):
    for first in (A, A.astype(np.float64), np.float32(0.5), np.float64(0.5)):
        y = graph(lambda x, a=first: function(a, x))(X)
        expected = function(np.asarray(first, np.float32), X)
        assert y.dtype == expected.dtype
        np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_eager_mode_computes_them_too():
    with mode("eager"):
        np.testing.assert_allclose(graph(lambda x: np.tanh(x) + np.shape(x)[0])(X), np.tanh(X) + 3)


def increased(x):
    total = np.zeros((3, 4), np.float32)
    total += x
    return total


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: np.sum(x) * 2.0, r"np.sum takes no tensor.*\(at .*test_numpy.*\); use ops.sum$"),
        (lambda x: np.concatenate([x, x]), r"np.concatenate takes no .*; use ops.concat$"),
        (lambda x: np.linalg.norm(x) * 2.0, r"np.linalg.norm takes no .*; use ops.vector_norm$"),
        (lambda x: np.square(x) * 2.0, "np.square takes no .*; use ops.square$"),
        (lambda x: np.expm1(x) * 2.0, "np.expm1 takes no .*; write it with functions of"),
        (lambda x: np.fft.fft(x) * 2.0, "np.fft.fft takes no .*; write it with functions of"),
        (
            lambda x: np.add.reduce(x) * 2.0,
            r"np.add.reduce takes no tensor \(at .*\); use .* x.sum\(\)",
        ),
        (lambda x: np.exp(x, dtype=np.float64), "np.exp of a tensor takes no dtype .*leave it out"),
        (increased, r"in place \(at .*test_numpy_functions.py:\d+\): write a = a \+ x"),
        (lambda x: np.asarray(x) * 2.0, "a numpy function was called with"),
    ],
)
def test_other_functions_name_the_one_to_use(call, message):
    with pytest.raises(InvalidInput, match=message):
        graph(call)(X)


def test_the_names_in_messages_exist():
    assert {("", row) for row in numpy_functions.ROWS.values()} <= TABLE.keys()
    assert {*numpy_functions.SAME_NAME, *numpy_functions.OTHER_NAMES.values()} <= vars(ops).keys()
    assert all(hasattr(np, name) for name in numpy_functions.SAME_NAME - {"concat", "unstack"})
    for own, reflected in numpy_functions.METHODS.values():
        assert hasattr(ops.Tensor, own)
        assert not reflected or hasattr(ops.Tensor, reflected)
