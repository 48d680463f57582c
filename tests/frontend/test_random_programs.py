"""Random programs with nested conditions and loops mean in a graph what they mean in Python.

Values are small whole numbers, so every engine computes them exactly and no comparison is close.
"""

import linecache
import textwrap
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triplane.unified_ir import grad, graph, jvp, mode, ops, vmap
from triplane.unified_ir.ops.trees import leaves

NUMBER = count()
FLOATS = ("a", "b", "c")
HEADER = """\
def program(x, n):
    a, b, c, k = x[0], x[1], 0.0, 0
"""
FOOTER = """\
    return a + 100.0 * b, c, k
"""


@st.composite
def value(draw):
    left, right = draw(st.sampled_from((*FLOATS, "x[2]"))), draw(st.sampled_from((*FLOATS, "2.0")))
    sign = draw(st.sampled_from("+-*"))
    return f"ops.clip({left} {sign} {right} + x[0] * 0.0, -9.0, 9.0)"


@st.composite
def condition(draw, depth=1):
    kind = draw(st.integers(0, 4 if depth else 1))
    name = draw(st.sampled_from((*FLOATS, "k")))
    limit = draw(st.integers(-3, 6))
    if kind < 2:
        sign = draw(st.sampled_from(("<", ">=", "==")))
        return f"{name} {sign} {limit if name == 'k' else float(limit)}"
    inner = draw(condition(depth - 1))
    if kind == 2:
        return f"not ({inner})"
    if kind == 3:
        return f"-3.0 < {name if name != 'k' else 'a'} <= {float(limit)}"
    return f"({inner}) {draw(st.sampled_from(('and', 'or')))} ({draw(condition(depth - 1))})"


@st.composite
def block(draw, depth, in_loop):
    size = draw(st.integers(1, 3))
    return "\n".join(draw(statement(depth, in_loop)) for _ in range(size))


@st.composite
def statement(draw, depth, in_loop):
    plain = ["assign", "assign", "count", "expression"]
    leave = ["leave", "leave"] if in_loop else ["return"]
    nested = ["if", "if", "while", "range", "unrolled", "over", "enumerate"] if depth else []
    kind = draw(st.sampled_from([*plain, *leave, *nested]))
    if kind == "assign":
        return f"{draw(st.sampled_from(FLOATS))} = {draw(value())}"
    if kind == "count":
        return f"k = k + {draw(st.integers(1, 2))}"
    if kind == "expression":
        name = draw(st.sampled_from(FLOATS))
        return f"{name} = {draw(value())} if {draw(condition())} else {draw(value())}"
    if kind in {"leave", "return"}:
        how = draw(st.sampled_from(["break", "continue", "return"])) if in_loop else "return"
        how = "return a * 7.0 + x[0] * 0.0, b + x[0] * 0.0, k" if how == "return" else how
        return f"if {draw(condition())}:\n    {how}"
    body = textwrap.indent(draw(block(depth - 1, in_loop or kind != "if")), "    ")
    if kind == "if":
        other = textwrap.indent(draw(block(depth - 1, in_loop)), "    ")
        tail = f"\nelse:\n{other}" if draw(st.booleans()) else ""
        return f"if {draw(condition())}:\n{body}{tail}"
    trips = f"t{next(NUMBER)}"
    if kind == "while":
        head = (
            f"{trips} = 0\nwhile {trips} < 3 and ({draw(condition())}):\n    {trips} = {trips} + 1"
        )
    else:
        over = {
            "range": "range(n)",
            "unrolled": "range(2)",
            "over": "x",
            "enumerate": "enumerate(x)",
        }
        names = {"over": "c", "enumerate": f"{trips}, c"}.get(kind, trips)
        head = f"for {names} in {over[kind]}:"
    return f"{head}\n{body}"


def compiled(text):
    """The program as a function whose source can be found."""
    name = f"<program {next(NUMBER)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space = {"ops": ops}
    exec(compile(text, name, "exec"), space)
    return space["program"]


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 2 // 5)
@given(block(2, in_loop=False), st.integers(0, 3), st.integers(-2, 2))
def test_random_programs_agree_between_python_and_graph(body, n, shift):
    f = graph(compiled(HEADER + textwrap.indent(body, "    ") + "\n" + FOOTER))
    x = np.array([1.0, -2.0, 3.0], np.float32) + np.float32(shift)
    with mode("eager"):
        want = [np.asarray(v) for v in f(x, np.int64(n))]
    for engine in ("reference", "onnx"):
        with mode("graph", engine):
            got = f(x, np.int64(n))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a), b, err_msg=f"{engine}\n{body}")


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 8)
@given(block(2, in_loop=False), st.integers(0, 3))
def test_gradients_and_batches_of_random_programs_follow_the_path_that_python_takes(body, n):
    program = graph(compiled(HEADER + textwrap.indent(body, "    ") + "\n" + FOOTER))
    rows = np.array([[1.0, -2.0, 3.0], [0.0, 2.0, -1.0], [3.0, 3.0, 1.0]], np.float32)

    def f(x):
        first, c, _ = program(x, np.int64(n))
        return first + 3.0 * c

    def tangent(x):
        return jvp(f)(x, np.array([1.0, 10.0, 100.0], np.float32))

    for transform in (graph(f), grad(f), tangent):
        with mode("eager"):
            want = [leaves(graph(transform)(x)) for x in rows]
        with mode("graph", "reference"):
            one = [leaves(graph(transform)(x)) for x in rows]
            many = leaves(vmap(transform)(rows))
        for k, batch in enumerate(many):
            for row, a, b in zip(batch, want, one, strict=True):
                np.testing.assert_allclose(b[k], a[k], rtol=1e-5, err_msg=f"graph\n{body}")
                np.testing.assert_allclose(row, a[k], rtol=1e-5, err_msg=f"vmap\n{body}")
