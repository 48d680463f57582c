# ruff: noqa: ARG005 - a bprop takes operands, results and cotangents, used or not
"""Functions with control flow, which every engine must run and differentiate alike."""

from typing import Any

import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE


def scan_forward(h, xs, w):
    def step(h, x):
        h = ops.tanh(h @ w + x)
        return h, h * h

    h, ys = ops.scan(step, h, xs)
    return h.sum() + (ys * ys).sum()


def scan_reverse(h, xs, w):
    def step(h, x):
        return ops.tanh(h @ w + x), h

    h, ys = ops.scan(step, h, xs, reverse=True)
    return (h * h).sum() + (ys * ys).sum()


def scan_of_tree(h, xs, w):
    """Two carries, two scanned tensors, and a carry the result ignores."""

    def step(carry, item):
        a, b = carry
        x, y = item
        return (ops.tanh(a @ w + x), b + a * y), a * b

    (a, _), ys = ops.scan(step, (h, h * 0.5), (xs, xs * 2.0))
    return (a * a).sum() + ys.sum()


def while_by_value(x, w):
    def go(c):
        return c[1] < 3.0

    def body(c):
        return ops.sin(c[0] @ w), c[1] + 1.0

    y, _ = ops.while_loop(go, body, (x, ops.constant(0.0, x.dtype)))
    return (y * y).sum()


def never(x):
    return ops.while_loop(lambda c: c.sum() > 1e9, ops.exp, x)


def fori(x, w):
    def body(i, c):
        return ops.tanh(c @ w) * (i.cast(c.dtype) + 1.0)

    return ops.exp(ops.fori_loop(4, body, x)).sum()


def branch(x, w):
    return ops.cond(x.sum() > 0.0, lambda x: (ops.sin(x) @ w).sum(), lambda x: (x * x).sum(), x)


def branch_with_captures(x, w):
    scaled = x * 2.0
    return ops.cond(x.sum() > 0.0, lambda: (scaled @ w).sum() + 1.0, lambda: (w * w).sum() + 2.0)


def branch_in_loop(x, w):
    def body(i, c):
        return ops.cond(i == 1, lambda c: ops.tanh(c @ w), lambda c: c * c, c)

    return ops.fori_loop(3, body, x).sum()


def loop_in_scan(h, xs, w):
    def step(h, x):
        h = ops.fori_loop(2, lambda _, c: ops.tanh(c @ w + x), h)
        return h, h.sum()

    h, ys = ops.scan(step, h, xs)
    return (h * h).sum() + (ys * ys).sum()


def own_gradient(x, w):
    def bprop(x, w, y, g):
        return g @ w.transpose(), x.transpose() @ g

    y = ops.custom_gradient(lambda x, w: x @ w, bprop, x, w)
    cube = ops.custom_gradient(lambda x: (x * x * x).sum(), lambda x, y, g: g * 3.0 * x * x, x)
    return (y * y).sum() + cube


def random(*shape):
    return lambda rng: rng.standard_normal(shape) * 0.5


STATE = {"h": random(3), "xs": random(4, 3), "w": random(3, 3)}
PAIR = {"x": random(2, 3), "w": random(3, 3)}
LIFTED = {"x": lambda rng: rng.standard_normal((2, 3)) + 5, "w": random(3, 3)}
SUNK = {"x": lambda rng: rng.standard_normal((2, 3)) - 5, "w": random(3, 3)}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "scan forward": (scan_forward, STATE),
    "scan backward": (scan_reverse, STATE),
    "scan of trees": (scan_of_tree, STATE),
    "scan without trips": (scan_forward, {**STATE, "xs": random(0, 3)}),
    "while": (while_by_value, PAIR),
    "while that never starts": (
        lambda x, w: while_by_value(x, w) + never(x).sum(),
        PAIR,
    ),
    "for": (fori, PAIR),
    "for without trips": (lambda x, w: ops.fori_loop(0, lambda _, c: c @ w, x).sum(), PAIR),
    "if taken": (branch, LIFTED),
    "if not taken": (branch, SUNK),
    "if with captures": (branch_with_captures, LIFTED),
    "else with captures": (branch_with_captures, SUNK),
    "if inside for": (branch_in_loop, PAIR),
    "for inside scan": (loop_in_scan, STATE),
    "own gradient": (own_gradient, PAIR),
}  # fmt: skip


def recorded(name, dtype, *, symbolic=True):
    """The case as a function, `xs` of a symbolic length, and its arguments by name."""
    function, makers = CASES[name]
    rng = np.random.default_rng(0)
    args = {k: make(rng).astype(dtype) for k, make in makers.items()}
    build = Build(TABLE, "f")
    with build:
        params = []
        for k, a in args.items():
            shape = ("T", *a.shape[1:]) if k == "xs" and symbolic else a.shape
            params.append(build.param(k, TensorSpec(shape, a.dtype)))
        made = function(*params)
    return build.finish({"loss": made}), args


def squares(function):
    """The scalar sum of squared gradients of a scalar function."""
    gradients = value_and_grad(function)
    build = Build(TABLE, "squares")
    with build:
        params = [build.param(p.name, p.type) for p in gradients.params]
        _, *found = inline(gradients, params)
        terms = [(g * g).sum() for g in found]
        total = sum(terms[1:], terms[0])
    return build.finish({"loss": total})
