"""Composed functions mean what numpy's of that name mean, on both engines and open axes."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import graph, nn, ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops import table
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

X = np.array([[3.0, -1.0, 0.5, 3.0], [0.0, 2.0, -2.5, 1.0], [1.5, 1.5, 4.0, -3.0]], np.float32)
S = X[:, :3]
V = X[0]

# fmt: off
CASES: dict[str, Any] = {  # ours, numpy's
    "sum": (lambda x: ops.sum(x, 0), lambda x: x.sum(0)),
    "mean": (ops.mean, lambda x: x.mean()),
    "amax": (lambda x: ops.amax(x, (0, 1)), lambda x: x.max()),
    "amin": (lambda x: ops.amin(x, 1, keepdims=True), lambda x: x.min(1, keepdims=True)),
    "prod": (lambda x: ops.prod(x, 1), lambda x: x.prod(1)),
    "any": (lambda x: ops.any(x > 2.0, 1), lambda x: (x > 2).any(1)),
    "all": (lambda x: ops.all(x, 1), lambda x: x.all(1)),
    "var": (lambda x: ops.var(x, 1, correction=1), lambda x: x.var(1, ddof=1)),
    "std": (ops.std, lambda x: x.std()),
    "norm 1": (lambda x: ops.vector_norm(x, 1, 1), lambda x: np.linalg.norm(x, 1, 1)),
    "norm 2": (ops.vector_norm, np.linalg.norm),
    "norm 3": (lambda x: ops.vector_norm(x, 3, 1), lambda x: np.linalg.norm(x, 3, 1)),
    "norm inf": (lambda x: ops.vector_norm(x, float("inf"), 1),
                 lambda x: np.linalg.norm(x, np.inf, 1)),
    "logsumexp": (lambda x: ops.logsumexp(x, 1), lambda x: np.log(np.exp(x).sum(1))),
    "cumsum": (lambda x: ops.cumsum(x, 1, reverse=True),
               lambda x: np.flip(np.flip(x, 1).cumsum(1), 1)),
    "cumprod": (lambda x: ops.cumprod(x, 0), lambda x: x.cumprod(0)),
    "sort": (ops.sort, np.sort),
    "sort descending": (lambda x: ops.sort(x, 0, descending=True), lambda x: -np.sort(-x, 0)),
    "argsort": (ops.argsort, lambda x: np.argsort(x, kind="stable")),
    "flip": (lambda x: ops.flip(x, 1), lambda x: np.flip(x, 1)),
    "flip all": (ops.flip, np.flip),
    "roll": (lambda x: ops.roll(x, 5, 0), lambda x: np.roll(x, 5, 0)),
    "roll back": (lambda x: ops.roll(x, -1, 1), lambda x: np.roll(x, -1, 1)),
    "tile": (lambda x: ops.tile(x, (2,)), lambda x: np.tile(x, (2,))),
    "tile wider": (lambda x: ops.tile(x, (2, 1, 3)), lambda x: np.tile(x, (2, 1, 3))),
    "tile the last": (lambda x: ops.tile(x, 3), lambda x: np.tile(x, 3)),
    "repeat": (lambda x: ops.repeat(x, 2, 1), lambda x: np.repeat(x, 2, 1)),
    "repeat never": (lambda x: ops.repeat(x, 0, 1), lambda x: np.repeat(x, 0, 1)),
    "repeat no row": (lambda x: ops.repeat(x, 0, 0), lambda x: np.repeat(x, 0, 0)),
    "split": (lambda x: ops.split(x, [1, 3], 1)[1], lambda x: x[:, 1:]),
    "split evenly": (lambda x: ops.split(x, 3, 1)[0], lambda x: x[:, :2]),
    "unstack": (lambda x: ops.unstack(x, 1)[2], lambda x: x[:, 2]),
    "triu": (lambda x: ops.triu(x, 1), lambda x: np.triu(x, 1)),
    "tril": (ops.tril, np.tril),
    "swapaxes": (lambda x: ops.swapaxes(x, 0, 1), lambda x: x.T),
    "moveaxis": (lambda x: ops.moveaxis(x[None], 0, 2), lambda x: np.moveaxis(x[None], 0, 2)),
    "zeros_like": (ops.zeros_like, np.zeros_like),
    "ones_like": (ops.ones_like, np.ones_like),
    "full_like": (lambda x: ops.full_like(x, 2.5), lambda x: np.full_like(x, 2.5)),
    "masked_fill": (lambda x: ops.masked_fill(x, x > 0.0, 9.0), lambda x: np.where(x > 0, 9, x)),
    "square": (ops.square, lambda x: x * x),
    "count_nonzero": (lambda x: ops.count_nonzero(x, 1), lambda x: np.count_nonzero(x, 1)),
    "exp2": (ops.exp2, np.exp2),
    "silu": (ops.silu, lambda x: x / (1 + np.exp(-x))),
    "log_sigmoid": (lambda x: ops.log_sigmoid(x * 40.0), lambda x: -np.logaddexp(0, -40 * x)),
    "relu6": (lambda x: ops.relu6(x * 3.0), lambda x: np.clip(x * 3, 0, 6)),
    "rsqrt": (lambda x: ops.rsqrt(x * x + 1.0), lambda x: 1 / np.sqrt(x * x + 1)),
    "logarithms": (lambda x: ops.log2(x * x + 1.0) + ops.log10(x * x + 1.0),
                   lambda x: np.log2(x * x + 1) + np.log10(x * x + 1)),
    "is_finite": (lambda x: ops.is_finite(1.0 / x), lambda x: x != 0),
    "linspace": (lambda x: x * ops.linspace(0.0, 1.0, 4), lambda x: x * np.linspace(0, 1, 4)),
}
FIXED: dict[str, Any] = {  # square matrices and vectors
    "diagonal": (S, ops.diagonal, np.diagonal),
    "trace": (S, ops.trace, np.trace),
    "diag": (V, ops.diag, np.diag),
    "eye": (S, lambda x: x + ops.eye(3), lambda x: x + np.eye(3)),
    "outer": (V, lambda x: ops.outer(x, x[:2]), lambda x: np.outer(x, x[:2])),
    "dot": (V, lambda x: ops.dot(x, x), lambda x: np.dot(x, x)),
    "meshgrid": (V, lambda x: ops.meshgrid(x, x[:2])[1],
                 lambda x: np.meshgrid(x, x[:2], indexing="ij")[1]),
    "one_hot beyond": (V, lambda x: ops.one_hot(ops.constant([4, -1, 2]), 4) * x,
                       lambda x: np.stack([0 * x, 0 * x, x * [0, 0, 1, 0]])),
    "arange": (V, lambda x: ops.arange(1, x.shape[0], 2), lambda x: np.arange(1, len(x), 2)),
}
# fmt: on


def computed(body, x, engine_name, *, lead=None):
    build = Build(TABLE, "f")
    with build:
        spec = TensorSpec((lead or x.shape[0], *x.shape[1:]), x.dtype)
        y = body(build.param("x", spec))
    with np.errstate(all="ignore"):
        return engine(engine_name).compile(build.finish({"y": y}))(x)[0]


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_a_function_means_what_numpys_means_for_any_number_of_rows(name, engine_name):
    ours, theirs = CASES[name]
    for lead in (None, "N"):
        found, wanted = computed(ours, X, engine_name, lead=lead), theirs(X)
        assert found.shape == np.shape(wanted)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("engine_name", ["onnx", "reference"])
@pytest.mark.parametrize("name", FIXED)
def test_matrices_and_vectors_mean_what_numpys_mean(name, engine_name):
    x, ours, theirs = FIXED[name]
    found = computed(ours, x, engine_name)
    np.testing.assert_allclose(found, theirs(x), rtol=2e-5)


LABELS = np.array([0, 1, 3])
KERNEL: Any = np.ones((1, 3, 2), np.float32)

# fmt: off
OF_ARRAYS: dict[str, Any] = {  # of(array): the array itself, or a constant made of it
    "cross_entropy": lambda x, of: ops.cross_entropy(x, of(LABELS)),
    "cross_entropy of an array": lambda x, of: ops.cross_entropy(of(X), of(LABELS)) + x[:, 0],
    "negative_log_likelihood": lambda x, of: ops.negative_log_likelihood(x, of(LABELS)),
    "SoftmaxCrossEntropy": lambda x, of: nn.SoftmaxCrossEntropy()(x, of(LABELS)),
    "MSE": lambda x, of: nn.MSE()(x, target=of(X * X)),
    "Huber": lambda x, of: nn.Huber()(of(X * X), x),
    "one_hot": lambda x, of: ops.one_hot(of(LABELS), 4) + x,
    "flatten": lambda x, of: ops.flatten(of(X)) + x,
    "tile": lambda x, of: ops.tile(of(X), [2, 1])[:3] + x,
    "repeat": lambda x, of: ops.repeat(of(X), 2, 0)[:3] + x,
    "flip": lambda x, of: ops.flip(of(X)) + x,
    "count_nonzero": lambda x, of: ops.count_nonzero(of(X)) + x.cast("int64"),
    "rms_norm": lambda x, of: ops.rms_norm(x, of(X[0])),
    "cosine_similarity": lambda x, of: ops.cosine_similarity(of(X * X), x),
    "std": lambda x, of: ops.std(of(X)) + x,
    "conv": lambda x, of: ops.conv(of(X[None]), of(X[None, :, :2])) + x[0, 0],
    "meshgrid": lambda x, of: ops.meshgrid(of(X[0]), of(X[1]))[1] + x[0],
}
# fmt: on


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_an_array_is_an_operand_while_a_graph_is_recorded(name):
    body = OF_ARRAYS[name]
    found = graph(lambda x: body(x, lambda array: array))(X)
    np.testing.assert_array_equal(found, graph(lambda x: body(x, ops.constant))(X))


HALF: Any = 1.5
TEXT: Any = "2"
PAIR: Any = [1, 2]

# fmt: off
NO_WHOLE_NUMBER: Any = [
    (lambda x: x.prod(TEXT), "an axis is one or several whole numbers, got '2'"),
    (lambda x: x.sum(HALF), r"an axis is one or several whole numbers, got 1\.5"),
    (lambda x: x.mean([0, HALF]), "an axis is one or several whole numbers"),
    (lambda x: ops.vector_norm(x, axis=TEXT), "an axis is one or several whole numbers"),
    (lambda x: ops.logsumexp(x, TEXT), "an axis is one or several whole numbers"),
    (lambda x: ops.tile(x, HALF), r"a number of repeats is one or several whole numbers, got 1\.5"),
    (lambda x: ops.tile(x, -1), "repeats must be at least 0, got -1"),
    (lambda x: ops.repeat(x, -1, 0), "repeats must be at least 0, got -1"),
    (lambda x: ops.repeat(x, PAIR, 0), "repeat takes one number of repeats"),
    (lambda x: ops.repeat(x, TEXT, 0), "a number of repeats is one or several whole numbers"),
    (lambda x: ops.conv(x[None], KERNEL, stride=HALF),
     r"a stride is one or several whole numbers, got 1\.5"),
    (lambda x: ops.conv(x[None], KERNEL, padding=[HALF]),
     "a padding is one or several whole numbers"),
    (lambda x: ops.max_pool(x[None], 2, stride=HALF), "a stride is one or several whole numbers"),
    (lambda x: ops.avg_pool(x[None], TEXT), "a window is one or several whole numbers"),
]
# fmt: on


@pytest.mark.parametrize(("body", "said"), NO_WHOLE_NUMBER)
def test_an_option_that_is_no_whole_number_is_refused_by_name(body, said):
    with pytest.raises(InvalidInput, match=said):
        graph(body)(X)


def test_an_open_axis_is_not_unstacked():
    with pytest.raises(InvalidInput, match="unstack needs a fixed axis"):
        computed(lambda x: ops.unstack(x)[0], X, "reference", lead="N")


def test_no_public_name_hides_a_module_of_the_table():
    assert all(isinstance(module, ModuleType) for module in table._modules())


def test_unfold_adds_no_padding_unless_asked():
    x = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
    corners = [[0, 1, 3, 4], [1, 2, 4, 5], [3, 4, 6, 7], [4, 5, 7, 8]]  # by position in the window
    assert graph(lambda x: ops.unfold(x, 2))(x)[0].tolist() == corners
