"""Dimensions: arithmetic agrees with integers, forms are normal, text reads back."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir import dims
from triplane.unified_ir.ir.dims import Expr, evaluate, floor_div, parse, substitute, symbol

N, M, H = symbol("N"), symbol("M"), symbol("H")
SIZES = st.fixed_dictionaries({name: st.integers(0, 50) for name in "NMH"})


@st.composite
def trees(draw, depth=4):
    """A dimension and the same computation on plain integers."""
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.sampled_from(["N", "M", "H"]) | st.integers(-9, 9))
        if isinstance(leaf, str):
            return symbol(leaf), lambda sizes: sizes[leaf]
        return leaf, lambda _: leaf
    a, fa = draw(trees(depth=depth - 1))
    kind = draw(st.sampled_from("+-*/s"))
    if kind == "/":
        d = draw(st.integers(1, 7))
        return floor_div(a, d), lambda sizes: fa(sizes) // d
    if kind == "s":
        return floor_div(a, N + 1), lambda sizes: fa(sizes) // (sizes["N"] + 1)
    b, fb = draw(trees(depth=depth - 1))
    made = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}[kind]
    return made(a, b), lambda sizes: made(fa(sizes), fb(sizes))


@given(trees(), SIZES)
def test_arithmetic_agrees_with_integers(tree, sizes):
    dim, plain = tree
    assert evaluate(dim, sizes) == plain(sizes)


@pytest.mark.slow
@given(trees())
def test_text_reads_back_as_the_same_dimension(tree):
    dim, _ = tree
    if len(str(dim)) <= dims.MAX_EXPRESSION_CHARS:
        assert parse(str(dim)) == dim
        assert str(parse(str(dim))) == str(dim)


@pytest.mark.slow
@given(trees(), trees(), trees())
def test_forms_are_normal(x, y, z):
    a, b, c = x[0], y[0], z[0]
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert (a + b) * c == a * c + b * c
    assert a - a == 0
    if b != 0:
        assert floor_div(a * b, b) == a


@pytest.mark.slow
@given(trees(), trees(depth=2), SIZES)
def test_substitution_agrees_with_evaluation(x, y, sizes):
    dim, other = x[0], y[0]
    inner = evaluate(other, sizes)
    try:
        wanted = evaluate(dim, {**sizes, "N": inner})
        found = evaluate(substitute(dim, {"N": other}), sizes)
    except InvalidInput:  # N + 1 may become zero below a division
        return
    assert found == wanted


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        ((2 * N + 2) // 2, "N+1"),
        ((N * N - 1) // (N - 1), "N+1"),
        (2 * (N // 3), "2*(N//3)"),
        ((N // 2) * (M // 3), "(M//3)*(N//2)"),
        (floor_div(-3, N), "(-3)//N"),
        (((H + 1) // 2 + 1) // 2, "(H+3)//4"),
        (N * M + M * M - 3, "M*M+M*N-3"),
        (N % 4, "N-4*(N//4)"),
        (N - N, "0"),
    ],
)
def test_the_form_is(dim, text):
    assert str(dim) == text
    assert parse(text) == dim


def test_two_symbols_are_two_dimensions():
    assert N != M
    assert N * M == M * N


@pytest.mark.parametrize(
    ("f", "match"),
    [
        (lambda: floor_div(N, 0), "divided by zero"),
        (lambda: floor_div(N, -2), "must be positive"),
        (lambda: evaluate(floor_div(N, M), {"N": 3, "M": 0}), "divides by zero"),
        (lambda: evaluate(N, {"M": 1}), "'N' has no size"),
        (lambda: symbol("a b"), "identifier"),
        (lambda: symbol("N\n"), "identifier"),
        (lambda: dims.as_dim(-1), "0..2"),
        (lambda: dims.as_dim(True), "0..2"),
    ],
)
def test_misuse_is_named(f, match):
    with pytest.raises(InvalidInput, match=match):
        f()


def deepest():
    dim: dims.Dim = N
    for _ in range(40):
        dim = floor_div(dim * N + 1, 2)
    return dim


HOSTILE = [
    "",
    "N+",
    "(N",
    "N)",
    "N N",
    "N**2",
    "a b",
    "1//0",
    "N//(M-M)",
    "\u0663",
    "N" * 257,
    "9" * 200,
    "*".join(["(a+b+c+d+e)"] * 20),
    "*".join(["N"] * 120),
    "(" * 100 + "N" + ")" * 100,
    "//".join(["(a+b)"] * 40),
    "4611686018427387904*4611686018427387904*N",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_refused(text):
    with pytest.raises(InvalidInput):
        parse(text)


def test_nesting_is_bounded_when_built():
    with pytest.raises(InvalidInput, match="at most"):
        deepest()


@given(st.text("abNM0123456789+-*/() ", max_size=dims.MAX_EXPRESSION_CHARS))
def test_any_text_is_read_or_refused_quickly(text):
    start = time.process_time()
    try:
        dim = parse(text)
    except InvalidInput:
        dim = 0
    assert time.process_time() - start < 1
    assert isinstance(dim, (int, Expr))
