"""Indexing and methods of tensors mean what numpy means, on both engines; misuse is named."""

from typing import Any

import numpy as np
import pytest
from tests.support.computing import computed

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 11
I = np.array([[1, 0], [1, -1]])
J = np.array([2, 0])

# fmt: off
INDICES: dict[str, Any] = {
    "an array": I, "a list": [1, 0, -2], "an array on the second axis": (slice(None), J),
    "two arrays": (np.array([1, 0]), J), "arrays that broadcast": (I, J),
    "arrays apart": (J % 2, slice(None), J), "arrays side by side": (slice(None), J, J + 1),
    "an array and an int": (slice(None), 1, J), "an int apart from an array": (1, slice(None), J),
    "an array and a slice": (I, slice(1, None), slice(None, None, -2)),
    "None and an array": (None, J % 2, ..., 0), "None between": (J % 2, None, J),
    "marks": X > 0, "marks of rows": np.array([True, False]),
    "marks of two axes": X[..., 0] > -5,
    "marks of an axis": (slice(None), np.array([True, False, True]), slice(1, 3)),
    "marks and an int": (0, np.array([True, False, True])),
    "an empty list": [], "ellipsis in the middle": (J % 2, ..., 1),
    "a whole reversal": (slice(None, None, -1), slice(None, None, -1), slice(None, None, -1)),
    "numpy's ints": (np.int64(1), np.int32(-1)),
}
METHODS = {
    "T": lambda x: x.T, "swapaxes": lambda x: x.swapaxes(0, -1),
    "sum": lambda x: x.sum(1), "mean": lambda x: x.mean((0, 2), keepdims=True),
    "max": lambda x: x.max(-1), "min": lambda x: x.min((0, 1)), "prod": lambda x: x.prod(1),
    "var": lambda x: x.var(1), "std": lambda x: x.std((0, 2), keepdims=True),
    "any": lambda x: (x > 11).any(2), "all": lambda x: (x > -11).all(),
    "argmax": lambda x: x.argmax(), "argmin": lambda x: x.argmin(1, keepdims=True),
    "cumsum": lambda x: x.cumsum(2), "clip": lambda x: x.clip(-3.0, 4.0),
    "remainders": lambda x: (x % 3.0) + (-7.5 % (x + 0.5)), "abs": abs,
    "size, ndim": lambda x: x * x.size + x.ndim, "squeeze": lambda x: x[:1].squeeze(0),
}
WHOLE = {
    "remainders": lambda a, b: (a % b) + (7 % b), "quotients": lambda a, b: (a // b) + (7 // b),
    "fractions": lambda a, b: (a / b) + 1 / b, "powers": lambda a, b: a ** 2 + b ** 3,
    "bits": lambda a, b: (a & b) | (a ^ 3) | ~b, "logic": lambda a, b: (a > 0) ^ (b > 0) & ~(a < b),
}
# fmt: on


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
def test_every_index_of_numpy_means_the_same(name, engine_name):
    index = INDICES[name]
    found = computed(lambda x: x[index] * 1.0, X, engine_name=engine_name)
    np.testing.assert_array_equal(found, X[index])


def test_index_arrays_may_be_computed():
    first, second = np.array([1, 0, 1]), np.array([2, -1, 0], np.int32)
    marks = np.array([True, False, True])
    for name in ("onnx", "reference"):
        found = computed(lambda x, i, j: x[i, j], X, first, second, engine_name=name)
        np.testing.assert_array_equal(found, X[first, second])
        found = computed(lambda x, m: x[:, m, 1], X, marks, engine_name=name)
        np.testing.assert_array_equal(found, X[:, marks, 1])
        found = computed(lambda x: x[x > 0.0], X, engine_name=name)
        np.testing.assert_array_equal(found, X[X > 0])
        found = computed(lambda x, n: x[:, n:], X, np.array(2), engine_name=name)
        np.testing.assert_array_equal(found, X[:, 2:])


def test_gradients_pass_through_marks_and_arrays():
    build = Build(TABLE, "f")
    with build:
        x = build.param("x", TensorSpec(("N", 3, 4)))
        y = (x[x > 0.0] ** 2.0).sum() + x[:, J, J + 1].sum() + x[::-1, [0, 0]].sum()
    slope = grad(build.finish({"y": y}), ["x"])
    wanted = np.where(X > 0, 2 * X, 0)
    wanted[:, J, J + 1] += 1
    wanted[:, 0] += 2
    for name in ("onnx", "reference"):
        np.testing.assert_allclose(engine(name).compile(slope)(X)[0], wanted)


@pytest.mark.parametrize("name", METHODS)
def test_methods_mean_what_numpys_mean(name):
    for engine_name in ("onnx", "reference"):
        found = computed(METHODS[name], X, engine_name=engine_name)
        wanted = METHODS[name](X)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_divide_as_pythons(name):
    a, b = np.array([7, -7, 6, -6, 0]), np.array([2, 2, -4, -4, 5])
    for engine_name in ("onnx", "reference"):
        found = computed(WHOLE[name], a, b, engine_name=engine_name)
        np.testing.assert_allclose(found, WHOLE[name](a, b), rtol=1e-6)


def test_what_pytorch_calls_by_another_name():
    def body(x):
        y = x.view(2, 12).unsqueeze(0).expand(5, -1, -1).permute(1, 0, 2).flatten(1)
        return y.masked_fill(y > 3.0, 0.0).astype("float64").astype("float32").detach()

    wanted = np.broadcast_to(X.reshape(2, 1, 12), (2, 5, 12)).reshape(2, 60)
    np.testing.assert_array_equal(computed(body, X), np.where(wanted > 3, 0, wanted))
    np.testing.assert_allclose(
        computed(lambda x: x.var(1, correction=1), X), X.var(1, ddof=1), rtol=1e-5
    )


def test_what_cannot_be_an_index_is_named():
    build = Build(TABLE, "f")
    with build:
        x = build.param("x", TensorSpec((2, 3)))
        for index, words in (
            (2, "index 2 is outside axis 0"), ((0, 0, 0), "has 2 axes, the index names 3"),
            ("a", r"got a str.*test_subscript\.py:\d+"), (True, "a single boolean"),
            (1.5, "got a float"), ((..., ...), "one Ellipsis"),
            (slice(0.5, None), "bound is an int"),
        ):  # fmt: skip
            with pytest.raises(InvalidInput, match=words):
                x[index]
        for array, words in (([0, 5], "outside"), (np.array([0.5]), "float64 tensor")):
            with pytest.raises(InvalidInput, match=words):
                x[array]
        whole = build.param("w", TensorSpec((2,), "int64"))
        with pytest.raises(InvalidInput, match="is a fraction"):
            whole**-1
        assert (whole**0.5).dtype.name == "float32"


def test_a_mask_of_an_open_size_leaves_the_rest_of_the_shape_known():
    build = Build(TABLE, "f")
    with build:
        x = build.param("x", TensorSpec(("N", 3)))
        rows = x[x.sum(1) > 0.0]
        assert rows.shape[1] == 3
        f = build.finish({"y": ops.softmax(rows)})
    given = np.array([[1, 2, 3], [-1, -2, 0], [0, 0, 1]], np.float32)
    found, wanted = (engine(name).compile(f)(given)[0] for name in ("onnx", "reference"))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
