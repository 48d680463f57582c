"""Dimensions: an int, or a normalized integer polynomial over named symbols.

Invariant: dimensions are compared by normal form, so `(2*N+2)//2 == N+1` and equality needs no
solver. Equal forms always mean equal sizes; without floor division, different forms also mean
different sizes. Symbols stand for sizes >= 0. A floor division that cannot be simplified becomes an
atom; anything else (min, max, comparison) is refused rather than guessed. The text of a dimension
reads back as the same dimension. The limits below hold for every expression, so that untrusted text
cannot make one explode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from triplane.proto.errors import InvalidInput

MAX_EXPRESSION_CHARS: Final = 256
MAX_NESTING: Final = 16
"""Floor divisions inside one another."""
MAX_TERMS: Final = 64
MAX_DEGREE: Final = 32
MAX_DIM: Final = 2**62
_MAX_COEFFICIENT: Final = 2**63
# Each nested floor division writes at most two pairs: around an operand, and around the quotient
# where it is a factor. The text of every valid dimension therefore reads back.
_MAX_PARENTHESES: Final = 2 * MAX_NESTING + 2

Monomial = tuple[tuple["str | FloorDiv", int], ...]
"""Atoms with their powers, sorted by text; the empty monomial is the constant 1."""


@dataclass(frozen=True)
class FloorDiv:
    """An irreducible `numerator // denominator`."""

    numerator: Dim
    denominator: Dim

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    # Cached, because monomials are sorted by the text of their atoms in every product.
    @cached_property
    def _text(self) -> str:
        return f"{_wrapped(self.numerator)}//{_wrapped(self.denominator)}"


@dataclass(frozen=True)
class Expr:
    """A polynomial that is not a constant; created by `symbol` and arithmetic, never directly."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Dim) -> Dim:
        return _sum(self, other)

    __radd__ = __add__

    def __mul__(self, other: Dim) -> Dim:
        return _product(self, other)

    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return _product(self, -1)

    def __sub__(self, other: Dim) -> Dim:
        return _sum(self, _product(other, -1))

    def __rsub__(self, other: Dim) -> Dim:
        return _sum(other, -self)

    def __floordiv__(self, other: Dim) -> Dim:
        return floor_div(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floor_div(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return self - floor_div(self, other) * other

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    @cached_property
    def _text(self) -> str:
        text = "".join(_signed_term(m, c) for m, c in self.terms)
        return text.removeprefix("+")


Dim = int | Expr


def symbol(name: str) -> Expr:
    """Return the symbol `name`, an identifier such as `N`."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        raise InvalidInput(f"a symbolic dimension is an identifier, got {name!r}; write e.g. 'N'")
    return Expr(((((name, 1),), 1),))


def as_dim(x: int | str | Expr) -> Dim:
    """Read a size: an int >= 0, a symbol or expression as text, or a Dim."""
    if isinstance(x, str):
        x = parse(x)
    if isinstance(x, Expr):
        return x
    # A bool is an int in Python, so True would pass as the size 1.
    if isinstance(x, bool) or int(x) != x or not 0 <= x <= MAX_DIM:
        raise InvalidInput(f"a dimension is an int in 0..2**62 or a symbol, got {x!r}")
    return int(x)


def symbols(dim: Dim) -> frozenset[str]:
    """Return the symbols that the value of `dim` depends on."""
    if isinstance(dim, int):
        return frozenset()
    names: set[str] = set()
    for monomial, _ in dim.terms:
        for atom, _ in monomial:
            if isinstance(atom, str):
                names.add(atom)
            else:
                names |= symbols(atom.numerator) | symbols(atom.denominator)
    return frozenset(names)


def is_symbol(dim: Dim) -> bool:
    """Return whether `dim` is a bare symbol, which a value of that shape then defines."""
    match dim:
        case Expr(terms=((((str(), 1),), 1),)):  # one term: one symbol to the power of 1, times 1
            return True
    return False


OPEN_PREFIX: Final = "open_"
"""Prefix of the names of data-dependent sizes; the node that produces one names it."""


def is_open(dim: Dim) -> bool:
    """Return whether a size depends on a data-dependent one."""
    return any(name.startswith(OPEN_PREFIX) for name in symbols(dim))


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Return the value of `dim` if each symbol has the given size."""
    if isinstance(dim, int):
        return dim
    return sum(
        c * math.prod(_atom_value(atom, sizes) ** power for atom, power in monomial)
        for monomial, c in dim.terms
    )


def substitute(dim: Dim, replacement: Mapping[str, Dim]) -> Dim:
    """Replace symbols in `dim` by other dimensions."""
    # Most sizes of a graph mention none of the replaced symbols, so they are not expanded again.
    if isinstance(dim, int) or not symbols(dim) & replacement.keys():
        return dim
    total: Dim = 0
    for monomial, c in dim.terms:
        term: Dim = c
        for atom, power in monomial:
            for _ in range(power):
                term = _product(term, _substitute_atom(atom, replacement))
        total = _sum(total, term)
    return total


def floor_div(a: Dim, b: Dim) -> Dim:
    """Return `a // b` in normal form; exact factors are divided out."""
    if isinstance(b, int) and b == 0:
        raise InvalidInput(f"dimension divided by zero: {a} // 0")
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    quotient = _exact_quotient(a, b)
    if quotient is not None:
        return quotient
    if isinstance(b, int):
        # A polynomial divisor that does not divide exactly stays a quotient: without the signs and
        # bounds of the symbols nothing can be split off.
        return _floor_div_by_int(a, b)
    return _irreducible(a, b)


def product(dims: tuple[Dim, ...] | list[Dim]) -> Dim:
    """Return the product of sizes; 1 for none."""
    total: Dim = 1
    for d in dims:
        total = _product(total, d)
    return total


def ceil_div(a: Dim, b: int) -> Dim:
    """Return the smallest integer not below a / b."""
    return floor_div(_sum(a, b - 1), b)


def _wrapped(dim: Dim) -> str:
    # A negative number needs parentheses: the grammar has a sign only at the beginning of a sum.
    plain = dim >= 0 if isinstance(dim, int) else is_symbol(dim)
    return str(dim) if plain else f"({dim})"


def _irreducible(a: Dim, b: Dim) -> Dim:
    if max(_nesting(a), _nesting(b)) >= MAX_NESTING:
        raise InvalidInput(f"a dimension nests at most {MAX_NESTING} floor divisions")
    return _from_terms({((FloorDiv(a, b), 1),): 1})


def _nesting(dim: Dim) -> int:
    atoms = [] if isinstance(dim, int) else [atom for m, _ in dim.terms for atom, _ in m]
    inner = [a for a in atoms if isinstance(a, FloorDiv)]
    return max((1 + max(_nesting(a.numerator), _nesting(a.denominator)) for a in inner), default=0)


def _atom_value(atom: str | FloorDiv, sizes: Mapping[str, int]) -> int:
    if isinstance(atom, str):
        if atom not in sizes:
            raise InvalidInput(f"symbol {atom!r} has no size here; known: {sorted(sizes)}")
        return sizes[atom]
    divisor = evaluate(atom.denominator, sizes)
    if divisor == 0:
        raise InvalidInput(f"dimension {atom} divides by zero for sizes {dict(sizes)}")
    return evaluate(atom.numerator, sizes) // divisor


def _substitute_atom(atom: str | FloorDiv, replacement: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, str):
        return replacement.get(atom, symbol(atom))
    return floor_div(
        substitute(atom.numerator, replacement), substitute(atom.denominator, replacement)
    )


def _terms(d: Dim) -> dict[Monomial, int]:
    if isinstance(d, int):
        return {(): d} if d else {}
    return dict(d.terms)


def _order(monomial: Monomial) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Sort key: graded lexicographic, largest first. Products keep it, so long division ends."""
    return (-_degree(monomial), tuple((str(atom), -power) for atom, power in monomial))


def _degree(monomial: Monomial) -> int:
    return sum(power for _, power in monomial)


def _from_terms(terms: Mapping[Monomial, int]) -> Dim:
    kept = {m: c for m, c in terms.items() if c}
    if not kept:
        return 0
    if kept.keys() == {()}:
        return kept[()]
    # Bounds for text from outside: "(a+b+c+d)*(a+b+c+d)*..." within the limit of characters would
    # otherwise expand into thousands of terms.
    if (
        len(kept) > MAX_TERMS
        or any(abs(c) >= _MAX_COEFFICIENT for c in kept.values())
        or any(_degree(m) > MAX_DEGREE for m in kept)
    ):
        raise InvalidInput(
            f"a dimension has at most {MAX_TERMS} terms of degree {MAX_DEGREE} with 63-bit "
            f"coefficients, this one has {len(kept)} terms"
        )
    return Expr(tuple(sorted(kept.items(), key=lambda item: _order(item[0]))))


def _sum(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    terms = _terms(a)
    for m, c in _terms(b).items():
        terms[m] = terms.get(m, 0) + c
    return _from_terms(terms)


def _times(a: Monomial, b: Monomial) -> Monomial:
    powers: dict[str | FloorDiv, int] = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(powers.items(), key=lambda item: str(item[0])))


def _product(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    terms: dict[Monomial, int] = {}
    for m, c in _terms(a).items():
        for n, d in _terms(b).items():
            mn = _times(m, n)
            terms[mn] = terms.get(mn, 0) + c * d
    return _from_terms(terms)


def _divide_monomial(a: Monomial, b: Monomial) -> Monomial | None:
    powers: dict[str | FloorDiv, int] = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) - power
        if powers[atom] < 0:
            return None
    return tuple((atom, p) for atom, p in powers.items() if p)


def _exact_quotient(a: Dim, b: Dim) -> Dim | None:
    """Return the polynomial q with a == q*b, or None (long division by the leading term)."""
    rest, quotient = a, _from_terms({})
    # a = q b implies lead(a) = lead(q) lead(b). Each step cancels the leading term of the rest,
    # which the order of monomials makes strictly smaller.
    lead, lead_coefficient = min(_terms(b).items(), key=lambda item: _order(item[0]))
    for _ in range(MAX_TERMS):
        if rest == 0:
            return quotient
        m, c = min(_terms(rest).items(), key=lambda item: _order(item[0]))
        factor = _divide_monomial(m, lead)
        if factor is None or c % lead_coefficient:
            return None
        step = _from_terms({factor: c // lead_coefficient})
        quotient = _sum(quotient, step)
        rest = _sum(rest, _product(_product(step, b), -1))
    return None


def _floor_div_by_int(a: Dim, b: int) -> Dim:
    """Split (b*P + R) // b into P + R // b with the coefficients of R in 0..b-1, then reduce.

    A remainder of the form (x // d + c) // b becomes (x + c*d) // (b*d), so nested strides merge.
    """
    if b <= 0:
        raise InvalidInput(f"dimension divided by {b}; the divisor must be positive")
    # Python's // and % round toward minus infinity, so the remainders are in 0..b-1 for negative
    # coefficients too.
    whole = _from_terms({m: c // b for m, c in _terms(a).items()})
    rest = {m: c % b for m, c in _terms(a).items() if c % b}
    constant = rest.pop((), 0)
    if not rest:
        return whole
    # With X an integer, (g X + k) // (g b') = (X + k // g) // b'. This is why the constant, which
    # was left out of the gcd, may be rounded down.
    g = math.gcd(b, *rest.values())
    reduced = {m: c // g for m, c in rest.items()}
    reduced[()] = constant // g
    return _sum(whole, _merged(_from_terms(reduced), b // g))


def _merged(a: Dim, b: int) -> Dim:
    terms = _terms(a)
    c = terms.pop((), 0)
    # An int denominator is positive, which `_floor_div_by_int` requires of it. Only then does (x //
    # d + c) // b = (x + c d) // (b d) hold.
    for monomial, coefficient in terms.items():
        atom, power = monomial[0]
        single = len(terms) == coefficient == len(monomial) == power == 1
        if single and isinstance(atom, FloorDiv) and isinstance(atom.denominator, int):
            return floor_div(_sum(atom.numerator, c * atom.denominator), b * atom.denominator)
    return _irreducible(a, b)


def _signed_term(monomial: Monomial, c: int) -> str:
    factors = [atom for atom, power in monomial for _ in range(power)]
    texts = [str(a) for a in factors]
    # "2*N//3" would read back as (2*N)//3, so a quotient is in parentheses wherever it has a
    # coefficient or another factor. Powers are repeated factors.
    if len(factors) > 1 or abs(c) != 1:
        texts = [f"({a})" if isinstance(a, FloorDiv) else a for a in factors]
    if abs(c) != 1 or not factors:
        texts.insert(0, str(abs(c)))
    return ("-" if c < 0 else "+") + "*".join(texts)


_TOKEN: Final = re.compile(r"\s*(\d+|[A-Za-z_]\w*|//|[-+*()])", re.ASCII)


def parse(text: str) -> Dim:
    """Read the text form: ints, symbols, `+ - * //` and parentheses."""
    if len(text) > MAX_EXPRESSION_CHARS:
        raise InvalidInput(
            f"a dimension has at most {MAX_EXPRESSION_CHARS} characters, got {len(text)}"
        )
    stripped = text.strip()
    # Whatever the tokens do not cover is an error. Without re.ASCII, \d and \w would also accept
    # the digits and letters of other scripts.
    unread = _TOKEN.sub("", stripped)
    if unread:
        raise InvalidInput(f"cannot read dimension {text!r} at {unread!r}")
    dim, rest = _parse_sum(_TOKEN.findall(stripped), 0)
    if rest:
        raise InvalidInput(f"cannot read dimension {text!r} after {rest[0]!r}")
    if isinstance(dim, int) and abs(dim) > MAX_DIM:
        raise InvalidInput(f"a dimension is at most 2**62, got {text!r}")
    return dim


def _parse_sum(tokens: list[str], depth: int) -> tuple[Dim, list[str]]:
    # Stops "((((..." before Python's recursion limit does.
    if depth > _MAX_PARENTHESES:
        raise InvalidInput(f"a dimension nests at most {_MAX_PARENTHESES} parentheses")
    sign = 1
    if tokens and tokens[0] == "-":
        sign, tokens = -1, tokens[1:]
    total, tokens = _parse_product(tokens, depth)
    total = _product(total, sign)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens[0] == "+" else -1
        term, tokens = _parse_product(tokens[1:], depth)
        total = _sum(total, _product(term, sign))
    return total, tokens


def _parse_product(tokens: list[str], depth: int) -> tuple[Dim, list[str]]:
    # * and // have equal precedence and associate to the left, as in Python.
    total, tokens = _parse_atom(tokens, depth)
    while tokens and tokens[0] in ("*", "//"):
        factor, rest = _parse_atom(tokens[1:], depth)
        total = _product(total, factor) if tokens[0] == "*" else floor_div(total, factor)
        tokens = rest
    return total, tokens


def _parse_atom(tokens: list[str], depth: int) -> tuple[Dim, list[str]]:
    if not tokens:
        raise InvalidInput("a dimension ends where a size, a symbol or '(' was expected")
    head, rest = tokens[0], tokens[1:]
    if head == "(":
        inner, rest = _parse_sum(rest, depth + 1)
        if not rest or rest[0] != ")":
            raise InvalidInput("a dimension has an unclosed '('")
        return inner, rest[1:]
    if head.isdigit():
        return int(head), rest
    if head in "+-*//)":
        raise InvalidInput(f"a dimension has {head!r} where a size or a symbol was expected")
    return symbol(head), rest
