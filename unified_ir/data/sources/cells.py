"""Cells of text tables as columns: which type fits a column, and conversion without surprises.

Numbers are ASCII with a point, blanks around them allowed. Patterns are matched before Python's own
conversion, which also takes `1_000` and digits of other scripts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data.columns import TEXT, Array

INT64: Final = "int64"
FLOAT64: Final = "float64"
BOOL: Final = "bool"
CELL_TYPES: Final = (INT64, FLOAT64, BOOL, TEXT)
_MISSING: Final = r"(?: *+|[nN][aA][nN])"
# Possessive repetition (`++`, `*+`) keeps the time linear in the length of hostile cells.
_WHOLE: Final = r" *+[+-]?\d{1,19}+ *+"
_EXPONENT: Final = r"(?:[eE][+-]?\d{1,4}+)"
_DIGITS: Final = r"\d{1,400}+"
_DECIMALS: Final = rf"(?:{_DIGITS}\.\d{{0,400}}+|\.{_DIGITS})"
_BROKEN: Final = rf"(?:{_DECIMALS}{_EXPONENT}?|{_DIGITS}{_EXPONENT})"
_NUMBER: Final = rf" *+[+-]?(?:{_BROKEN}|{_DIGITS}) *+"
# float64 has 15 digits, so longer whole numbers among decimals would silently lose some.
_SHORT_NUMBER: Final = rf" *+[+-]?(?:{_BROKEN}|\d{{1,15}}+) *+"
_TRUTH: Final = r" *+(?:[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]) *+"
_BETWEEN: Final = "\x1f"
INT64_RANGE: Final = range(-(2**63), 2**63)


def _column(cell: str) -> re.Pattern[str]:
    return re.compile(rf"(?:(?:{cell}|{_MISSING}){_BETWEEN})*+", re.ASCII)


_IS_MISSING: Final = re.compile(_MISSING)
_ALL_MISSING: Final = re.compile(rf"(?:{_MISSING}{_BETWEEN})*+")
_INFERRED: Final = {INT64: _column(_WHOLE), FLOAT64: _column(_SHORT_NUMBER), BOOL: _column(_TRUTH)}
_STATED: Final = {INT64: _WHOLE, FLOAT64: _NUMBER, BOOL: _TRUTH}
_CELL: Final = {name: re.compile(cell, re.ASCII) for name, cell in _STATED.items()}
_CONVERT: Final[dict[str, Callable[[str], Any]]] = {
    INT64: int,
    FLOAT64: float,
    BOOL: lambda cell: cell.strip().lower() == "true",
}


@dataclass(slots=True)
class TypeInference:
    """The types that fit all cells of a column up to now, and whether any cell holds a value."""

    types: tuple[str, ...] = (INT64, FLOAT64, BOOL)
    seen: bool = False

    def add(self, cells: Sequence[str]) -> None:
        """Take more cells of the column into account."""
        if not self.types:
            return
        joined = _BETWEEN.join(cells) + _BETWEEN
        if joined.count(_BETWEEN) != len(cells):
            self.types = ()
            return
        self.types = tuple(name for name in self.types if _fits(name, joined, cells))
        self.seen = self.seen or _ALL_MISSING.fullmatch(joined) is None

    @property
    def type(self) -> str:
        """The first type that fits, else text; a column without any value is text."""
        return self.types[0] if self.types and self.seen else TEXT


def _fits(name: str, joined: str, cells: Sequence[str]) -> bool:
    if not _INFERRED[name].fullmatch(joined):
        return False
    if name != INT64 or max(map(len, cells)) < 19:
        return True
    return all(_IS_MISSING.fullmatch(cell) or int(cell) in INT64_RANGE for cell in cells)


def converted(
    cells: Sequence[str], type_name: str, missing: float | None, place: Callable[[int], str]
) -> Array:
    """Return cells as a column (N,) of that type, `missing` for each one without a value.

    place: names cell k in errors. InvalidInput: a cell has no value and `missing` is None, or it
    does not fit the type. In a column of text an empty cell is the empty text.
    """
    if type_name == TEXT:
        column = np.empty(len(cells), object)
        column[:] = cells
        return column
    pattern, convert = _CELL[type_name], _CONVERT[type_name]
    values = [
        convert(cell) if pattern.fullmatch(cell) else _instead(cell, type_name, missing, place, k)
        for k, cell in enumerate(cells)
    ]
    try:
        column = np.array(values, type_name)
    except OverflowError:
        k = next(k for k, value in enumerate(values) if value not in INT64_RANGE)
        raise InvalidInput(f"{place(k)}: {cells[k]} does not fit int64; read it as text") from None
    if not np.isfinite(column).all():
        k = int(np.isfinite(column).argmin())
        raise InvalidInput(f"{place(k)}: {cells[k][:40]} does not fit float64; read it as text")
    return column


def _instead(
    cell: str, type_name: str, missing: float | None, place: Callable[[int], str], k: int
) -> Any:
    if not _IS_MISSING.fullmatch(cell):
        raise InvalidInput(
            f"{place(k)}: {cell[:40]!r} is not of type {type_name}; correct it, or read the column "
            "as text"
        )
    whole = type_name == FLOAT64 or (missing is not None and float(missing).is_integer())
    if missing is None or type_name == BOOL or not whole:
        raise InvalidInput(
            f"{place(k)}: there is no value ({cell[:8]!r}) in a column of {type_name}; state "
            "missing=, the number of that type to take for it, remove the row, or choose columns "
            "without gaps (--x)"
        )
    return int(missing) if type_name == INT64 else missing


def type_with_missing(type_name: str, missing: float | None) -> str:
    """Return the type of an inferred column if `missing` is to be stored in it."""
    fits = missing is None or float(missing).is_integer()
    return FLOAT64 if type_name == INT64 and not fits else type_name
