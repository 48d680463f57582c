# mypy: disable-error-code="operator,assignment"
"""jvp, Hessian-vector products, checkpoint, auxiliary results: on every side, nested, by line."""

import inspect
from functools import partial

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, grad, graph, nn, ops, trace, value_and_grad, vjp
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.frontend import checkpoint, custom_vjp, hessian_vector_product, jvp

from .sides import everywhere, floats, on_side, slope

X, V = floats(0.5, -1.0, 2.0), floats(1.0, 0.25, -2.0)
RNG = np.random.default_rng(0)


def tower(x):
    return (ops.tanh(x * x) * ops.sin(x)).sum()


def branching(x):
    y = ops.exp(x * 0.5) if x.sum() > 0.0 else x * x
    return (y * x).sum()


def scanning(x):
    total = x.sum() * 0.0
    for v in x:
        total = total * v + ops.sin(v)
    return total


def counting(x):
    y = x
    while (y * y).sum() < 50.0:
        y = y * 1.5 + ops.tanh(x)
    return y.sum()


PROGRAMS = [tower, branching, scanning, counting]


@pytest.mark.parametrize("f", PROGRAMS)
def test_jvp_is_the_slope_along_the_tangent(f):
    value, moved = everywhere(jvp(f), X, V)
    np.testing.assert_allclose(value, everywhere(graph(f), X), rtol=1e-5)
    np.testing.assert_allclose(moved, slope(graph(f), X.astype(np.float64), V), rtol=1e-4)


@pytest.mark.parametrize("f", PROGRAMS)
def test_jvp_and_vjp_agree_on_inner_products(f):
    with on_side("reference", "float64"):
        x, v = X.astype(np.float64), V.astype(np.float64)
        _, moved = jvp(f)(x, v)
        _, (pulled,) = vjp(f)(x, np.float64(1.7))
    np.testing.assert_allclose(moved * 1.7, (pulled * v).sum(), rtol=1e-10)


def _symmetric_hessian(f):
    def of(x):
        return [grad(lambda y, k=k: grad(f)(y)[k])(x) for k in range(3)]

    return graph(of)


@pytest.mark.parametrize("f", PROGRAMS)
def test_a_hessian_vector_product_is_the_hessian_times_the_vector(f):
    with on_side("reference", "float64"):
        x, v = X.astype(np.float64), V.astype(np.float64)
        wanted = np.stack(_symmetric_hessian(f)(x)) @ v
        product = hessian_vector_product(f)(x, v)
        _, forward = jvp(grad(f))(x, v)
    np.testing.assert_allclose(product, wanted, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(forward, wanted, rtol=1e-9, atol=1e-12)


def test_products_with_several_arguments_have_their_trees():
    def f(w, x):
        return ((w["a"] @ x) ** 2.0).sum() + (w["b"] * x).sum() ** 3.0

    w = {"a": RNG.standard_normal((2, 3)), "b": RNG.standard_normal(3)}
    v = {"a": RNG.standard_normal((2, 3)), "b": RNG.standard_normal(3)}
    x, u = X.astype(np.float64), V.astype(np.float64)
    with on_side("reference", "float64"):
        hw, hx = hessian_vector_product(f, (0, 1))(w, x, (v, u))
        value, moved = jvp(f)(w, x, (v, None))
        gw, _ = grad(f, (0, 1))(w, x)
    assert set(hw) == {"a", "b"}
    assert hx.shape == (3,)
    np.testing.assert_allclose(moved, sum((gw[k] * v[k]).sum() for k in w))
    assert value.shape == ()


def test_jvp_passes_integers_by_and_knows_constants():
    def f(x, i):
        return {"y": ops.gather(x, i) * 2.0, "i": i + 1, "c": ops.ones((2,))}

    with on_side("onnx"):
        value, moved = jvp(f)(X, np.array([2, 0]), (V, None))
    assert value["i"].tolist() == [3, 1]
    assert (moved["i"].tolist(), moved["c"].tolist()) == ([0, 0], [0, 0])
    np.testing.assert_array_equal(moved["y"], V[[2, 0]] * 2)


def test_a_custom_gradient_is_pushed_as_the_transpose_of_its_rule():
    @custom_vjp(lambda *_, g, **__: g * 10.0)
    def odd(x):
        return x * x

    assert float(jvp(odd)(np.float32(3.0), np.float32(1.0))[1]) == 10.0


def test_forward_mode_graphs_hold_no_backward_pass():
    made = trace(lambda x, v: jvp(lambda z: ops.tanh(ops.matmul(z, z)))(x, v)[1],
                 TensorSpec((3, 3)), TensorSpec((3, 3)))  # fmt: skip
    assert sum(n.op.name == "MatMul" for n in made.nodes) == 3


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = nn.Dense(3, 3)
        self.calls = nn.Buffer(np.zeros((), np.float32))

    def construct(self, x):
        self.calls = self.calls + 1.0
        return ops.tanh(self.inner(ops.tanh(self.inner(x))))


def test_checkpoint_keeps_values_gradients_and_buffers():
    layer = Layer()

    def through(f):
        return lambda x: (f(f(x)) ** 2.0).sum()

    plain, kept = value_and_grad(through(layer)), value_and_grad(through(checkpoint(layer)))
    wanted, found = plain(X), kept(X)
    assert float(layer.calls.array) == 4
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    again = grad(lambda x: (grad(through(checkpoint(layer)))(x) ** 2.0).sum())
    np.testing.assert_allclose(
        again(X), grad(lambda x: (grad(through(layer))(x) ** 2.0).sum())(X), rtol=1e-4
    )


def test_transforms_of_a_cell_reach_its_state_however_they_are_wrapped():
    dense = nn.Dense(3, 3)
    for f in (vjp(dense), graph(lambda x, g: vjp(dense)(x, g + 0.0)), partial(vjp(dense))):
        value, (pulled,) = graph(f)(X[None], V[None])
        np.testing.assert_allclose(value, dense(X[None]), rtol=1e-6)
        np.testing.assert_allclose(pulled, V[None] @ dense.weight.array, rtol=1e-5)


def _nodes(graph_proto):
    for node in graph_proto.node:
        yield node, graph_proto
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def test_checkpoint_computes_again_in_what_the_runtime_really_runs(tmp_path):
    import onnx

    from triplane.unified_ir.runtime.session import SessionOptions

    def loss(x, f):
        for _ in range(3):
            x = f(x)
        return (x * x).sum()

    def layer(x):
        return ops.sin(ops.exp(x))

    counts = {}
    for name, f in (("plain", layer), ("kept", checkpoint(layer))):
        made = trace(lambda x, f=f: grad(lambda z: loss(z, f))(x), TensorSpec((4,)))
        path = tmp_path / f"{name}.onnx"
        OnnxEngine(options=SessionOptions(optimized_model_path=path)).compile(made)
        nodes = [n.op_type for n, _ in _nodes(onnx.load(path).graph)]
        counts[name] = nodes.count("Exp")
    assert counts == {"plain": 3, "kept": 6}


def deep(f):
    """Three functions, one inside the other."""

    def middle(x):
        return f(lambda y: f(ops.tanh)(y * ops.sin(y)))(x * x)

    return f(middle)


def test_nested_checkpoints_keep_values_and_gradients_of_both_orders():
    plain, kept = deep(lambda f: f), deep(checkpoint)
    np.testing.assert_allclose(graph(kept)(X), graph(plain)(X), rtol=1e-6)
    for wrap in (
        lambda f: grad(lambda x: f(x).sum()),
        lambda f: grad(lambda x: (grad(lambda y: f(y).sum())(x) ** 2.0).sum()),
    ):
        np.testing.assert_allclose(wrap(kept)(X), wrap(plain)(X), rtol=1e-5)


def test_a_checkpoint_under_a_plain_sum_computes_again(tmp_path):
    """The cotangent of a sum is constant; the runtime must not see that the branch is too."""
    import onnx

    from triplane.unified_ir.runtime.session import SessionOptions

    kept = checkpoint(lambda x: ops.sin(ops.exp(x)))
    made = trace(grad(lambda z: kept(kept(z)).sum()), TensorSpec((4,)))
    path = tmp_path / "kept.onnx"
    OnnxEngine(options=SessionOptions(optimized_model_path=path)).compile(made)
    nodes = [n.op_type for n, _ in _nodes(onnx.load(path).graph)]
    assert nodes.count("If") == 2


def test_auxiliary_results_come_back_and_are_not_differentiated():
    def f(x):
        y = x * x
        return y.sum(), {"y": y, "n": (y > 1.0).cast("int64").sum()}

    for side in ("eager", "onnx"):
        with on_side(side):
            (value, aux), g = value_and_grad(f, has_aux=True)(X)
            g2, aux2 = grad(f, has_aux=True)(X)
        assert (float(value), int(aux["n"])) == (5.25, 1)
        np.testing.assert_array_equal(g, 2 * X)
        np.testing.assert_array_equal(g2, g)
        np.testing.assert_array_equal(aux2["y"], X * X)


def test_a_wrong_call_of_a_transform_names_the_users_line():
    lines, first = inspect.getsourcelines(test_a_wrong_call_of_a_transform_names_the_users_line)
    cases = [
        ("not a scalar", lambda: grad(lambda x: x * 2.0)(X)),
        ("no pair", lambda: grad(lambda x: x.sum(), has_aux=True)(X)),
        ("no such argument", lambda: grad(lambda x: x.sum(), 1)(X)),
        ("an integer", lambda: grad(lambda x: x.sum())(np.array([1, 2]))),
        ("a tangent's shape", lambda: jvp(lambda x: x)(X, X[:2])),
        ("too few tangents", lambda: jvp(lambda x, y: x * y)(X, X, X)),
        ("a cotangent's shape", lambda: vjp(lambda x: x)(X, X[:2])),
    ]
    for what, call in cases:
        line = first + next(i for i, text in enumerate(lines) if f'"{what}"' in text)
        with pytest.raises(InvalidInput, match=rf"\(at .*test_transforms.py:{line}\)"):
            call()
