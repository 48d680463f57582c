# mypy: disable-error-code="operator,assignment,call-overload,attr-defined"
"""vmap of functions and cells: nested, with gradients, through control flow, refused by line."""

import inspect

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, grad, graph, jvp, nn, ops, trace, value_and_grad, vmap
from triplane.unified_ir.frontend import checkpoint, custom_vjp

from .sides import everywhere, floats, on_side

RNG = np.random.default_rng(1)
X = RNG.standard_normal((4, 3)).astype(np.float32)
Y = RNG.standard_normal((4, 3)).astype(np.float32)


@graph
def branching(v):
    return ops.exp(v * 0.5) if v.sum() > 0.0 else v * v


@graph
def looping(v):
    y = v
    while (y * y).sum() < 20.0:
        y = y * 1.5 + ops.tanh(v)
    return y


@graph
def leaving(v):
    total = v * 0.0
    for k in range(5):
        total = total + v * (k + 1).cast("float32") if hasattr(k, "cast") else total + v * (k + 1.0)
        if total.sum() > 3.0:
            return total * 2.0
    return total


@graph
def scanning(v):
    total = v.sum() * 0.0
    for x in v:
        total = total * x + ops.sin(x)
    return total


@graph
def shared_trips(v):
    y = v
    for _ in range(ops.constant(3)):
        y = y * 1.25 + v
    return y


@graph
def deep(v):
    y = v * 0.0
    for x in v:
        y = y + ops.tanh(x * v) if x > 0.0 else y - v
    return y


@custom_vjp(lambda x, *, g, **_: ops.clip(g * x, -1.0, 1.0))
def clipped(x):
    return x * 2.0


PROGRAMS = [
    branching, looping, leaving, scanning, shared_trips, deep, clipped, checkpoint(looping),
    lambda v: {"a": v, "b": (v[0], v[1:] * v[:-1])},
    lambda v: ops.softmax(v @ ops.constant(X.T)),
    lambda v: ops.gather(v, ops.argmax(v)),
]  # fmt: skip


def stacked(f, xs):
    from triplane.unified_ir.ops.trees import leaves, rebuild

    rows = [f(x) for x in xs]
    columns = zip(*(leaves(r) for r in rows), strict=True)
    return rebuild(rows[0], [np.stack(c) for c in columns])


def close(found, wanted):
    from triplane.unified_ir.ops.trees import leaves

    for a, b in zip(leaves(found), leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("f", PROGRAMS)
def test_a_batch_gives_what_a_python_loop_gives(f):
    for side in ("eager", "onnx", "reference"):
        with on_side(side):
            close(vmap(f)(X), stacked(graph(f), X))


def total(f):
    def of(v):
        made = f(v)
        return (made * made).sum() if hasattr(made, "sum") else made["a"].sum()

    return of


@pytest.mark.slow
@pytest.mark.parametrize("f", PROGRAMS)
def test_gradients_inside_and_outside_of_vmap(f):
    wanted = stacked(grad(total(f)), X)
    for side in ("eager", "onnx"):
        with on_side(side):
            close(vmap(grad(total(f)))(X), wanted)
            close(grad(lambda xs: vmap(total(f))(xs).sum())(X), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("f", [branching, looping, scanning])
def test_second_orders_pass_through_vmap(f):
    def twice(v):
        return grad(lambda w: (grad(total(f))(w) ** 2.0).sum())(v)

    np.testing.assert_allclose(vmap(twice)(X), stacked(graph(twice), X), rtol=1e-3, atol=1e-3)
    value, moved = jvp(vmap(total(f)))(X, Y)
    rows = [jvp(total(f))(x, y) for x, y in zip(X, Y, strict=True)]
    np.testing.assert_allclose(value, [r[0] for r in rows], rtol=1e-4)
    np.testing.assert_allclose(moved, [r[1] for r in rows], rtol=1e-4, atol=1e-4)


def test_axes_of_arguments_and_results():
    def f(a, b, c):
        return {"s": (a["u"] * b).sum() + c, "v": a["u"] * c, "k": ops.ones((2,))}

    a = {"u": X.T.copy(), "w": floats(1.0)}
    made = everywhere_tree(
        vmap(f, in_axes=({"u": 1, "w": None}, None, 0), out_axes={"s": 0, "v": -1, "k": None}),
        a, Y[0], Y[:, 1],
    )  # fmt: skip
    np.testing.assert_allclose(made["s"], (X * Y[0]).sum(1) + Y[:, 1], rtol=1e-5)
    np.testing.assert_allclose(made["v"], (X * Y[:, 1:2]).T, rtol=1e-5)
    assert made["k"].shape == (2,)


def everywhere_tree(f, *args):
    found = {}
    for side in ("eager", "onnx", "reference"):
        with on_side(side):
            found[side] = f(*args)
    for made in found.values():
        close(made, found["eager"])
    return found["eager"]


def test_vmaps_nest_over_both_axes():
    outer = vmap(vmap(lambda a, b: (a * b).sum(), in_axes=(None, 0)), in_axes=(0, None))
    np.testing.assert_allclose(everywhere(outer, X, Y), X @ Y.T, rtol=1e-5)
    pairs = vmap(vmap(lambda a, b: looping(a * b).sum(), in_axes=(None, 0)), in_axes=(0, None))
    with on_side("reference"):
        wanted = [[float(graph(lambda a, b: looping(a * b).sum())(a, b)) for b in Y] for a in X]
    np.testing.assert_allclose(pairs(X, Y), wanted, rtol=1e-4)


def test_a_batch_may_have_a_symbolic_size():
    made = trace(vmap(grad(lambda v: (ops.tanh(v) ** 2.0).sum())), TensorSpec(("N", 3)))
    assert [str(r.type) for r in made.results] == ["float32[N,3]"]
    assert not {"Scan", "Loop"} & {n.op.name for n in made.nodes}


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding="same")
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Dense(2, 3)

    def construct(self, x):
        x = ops.relu(self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


def test_per_sample_gradients_of_a_networks_input_are_batched():
    net = Layer().eval()
    images = RNG.standard_normal((5, 1, 1, 6, 6)).astype(np.float32)

    def loss(image):
        return (net(image) ** 2.0).sum()

    np.testing.assert_allclose(
        vmap(grad(loss))(images), stacked(grad(loss), images), rtol=1e-4, atol=1e-5
    )


def test_a_buffer_that_would_differ_from_sample_to_sample_is_refused():
    images = RNG.standard_normal((5, 2, 1, 6, 6)).astype(np.float32)
    with pytest.raises(InvalidInput, match=r"buffer .* depends on the sample.*\.eval\(\) \(at "):
        vmap(Layer())(images)


def test_results_whose_size_depends_on_values_are_refused_by_name():
    from triplane.unified_ir.ops.table import TABLE

    boxes = RNG.random((2, 1, 4, 4)).astype(np.float32)
    scores = RNG.random((2, 1, 1, 4)).astype(np.float32)

    def kept(b, s):
        return TABLE["", "NonMaxSuppression"](b, s, np.array([2]))

    with pytest.raises(InvalidInput, match=r"NonMaxSuppression \(at .*test_vmap.py:\d+\) gives"):
        vmap(kept)(boxes, scores)
    counts = vmap(lambda b, s: kept(b, s).cast("float32").sum())(boxes, scores)
    np.testing.assert_allclose(
        counts, [graph(lambda b, s: kept(b, s).cast("float32").sum())(b, s)
                 for b, s in zip(boxes, scores, strict=True)],
    )  # fmt: skip


def test_wrong_axes_name_the_users_line():
    lines, first = inspect.getsourcelines(test_wrong_axes_name_the_users_line)

    def f(a, b):
        return a + b

    cases = [
        ("sizes differ", lambda: vmap(f)(X, Y[:2])),
        ("nothing mapped", lambda: vmap(f, in_axes=None)(X, Y)),
        ("no such axis", lambda: vmap(f, in_axes=(2, 0))(X, Y)),
        ("entries", lambda: vmap(f, in_axes=(0,))(X, Y)),
        ("a tree of axes", lambda: vmap(f, in_axes=({"a": 0}, 0))(X, Y)),
        ("a shared result", lambda: vmap(f, out_axes=None)(X, Y)),
        ("a result's axis", lambda: vmap(f, out_axes=5)(X, Y)),
    ]
    for what, call in cases:
        line = first + next(i for i, text in enumerate(lines) if f'"{what}"' in text)
        with pytest.raises(InvalidInput, match=rf"\(at .*test_vmap.py:{line}\)"):
            call()


def test_values_and_gradients_of_a_batch_are_one_graph_of_large_products():
    w = RNG.standard_normal((3, 8)).astype(np.float32)
    f = vmap(value_and_grad(lambda w, v: (ops.tanh(v @ w) ** 2.0).sum()), in_axes=(None, 0))
    values, grads = f(w, X)
    assert (values.shape, grads.shape) == ((4,), (4, 3, 8))
    for k in range(4):
        value, g = value_and_grad(lambda w, v: (ops.tanh(v @ w) ** 2.0).sum())(w, X[k])
        np.testing.assert_allclose(values[k], value, rtol=1e-5)
        np.testing.assert_allclose(grads[k], g, rtol=1e-4, atol=1e-6)


def test_a_padded_sample_keeps_its_place_under_every_axis_of_samples():
    padded = vmap(lambda v: ops.pad(v, [1, 2]), 1, 1)
    found = everywhere(padded, X.T.copy())
    np.testing.assert_array_equal(found, np.pad(X, ((0, 0), (1, 2))).T)


def test_axes_of_a_dict_need_its_keys():
    f = vmap(lambda tree: tree["a"] + 1.0, in_axes=({"b": 0},))
    with pytest.raises(InvalidInput, match="in the structure of what they belong to"):
        f({"a": X})
