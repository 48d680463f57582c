"""Steps that turn classes and texts into numbers: lookup, one-hot vectors, tokens."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.unified_ir.data.columns import (
    MAX_RANK,
    TEXT,
    Array,
    Column,
    Field,
    Ragged,
    offsets_of,
)
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.step import RowStep
from triplane.unified_ir.data.transforms import checks
from triplane.unified_ir.data.transforms.single import ColumnStep, mapped, row_of, values_of

MAX_CLASSES: Final = 1_000_000
MAX_WORD: Final = 1024
"""Characters of an entry of a vocabulary."""
UNITS: Final = ("characters", "words")
_INT64: Final = {"low": -(2**63), "high": 2**63 - 1}
_ABSENT: Final = -1


@dataclass(frozen=True)
class OneHot(ColumnStep):
    """Turn each class k in 0..classes-1 into a vector (classes,) that is 1 at k and 0 elsewhere.

    Integers of shape S become S + (classes,) of `dtype`. Another class raises InvalidInput with
    its row.
    """

    classes: int
    dtype: str = "float32"

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.whole(self, "classes", self.classes, low=1, high=MAX_CLASSES)
        checks.one_of(self, "dtype", self.dtype, checks.DTYPES)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.numeric(self, self.column, field, "iu")
        if len(field.shape) == MAX_RANK:
            raise checks.invalid(self, f"column {self.column!r} has {MAX_RANK} axes already")
        return checks.limited(self, self.column, Field(self.dtype, (*field.shape, self.classes)))

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        wrong = (x < 0) | (x >= self.classes)
        if wrong.any():
            row, value = row_of(column, wrong, draws.rows)
            raise checks.invalid(
                self,
                f"column {self.column!r} must hold 0..{self.classes - 1}, got {value} in row "
                f"{row}; raise classes, or use Lookup before",
            )
        return mapped(column, self._vectors)

    def _vectors(self, x: Array) -> Array:
        vectors = np.zeros((x.size, self.classes), self.dtype)
        vectors[np.arange(x.size), x.ravel()] = 1
        return vectors.reshape(*x.shape, self.classes)


@dataclass(frozen=True)
class Lookup(ColumnStep):
    """Replace each text or integer by its place in `values`, int64 from 0.

    values: different texts, or different integers. unknown: the number of every other value;
    without it, another value raises InvalidInput with its row.
    """

    values: tuple[str | int, ...]
    unknown: int | None = None

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.several(self, "values", self.values, most=checks.MAX_VALUES)
        _check_entries(self, "values", self.values, str if self.is_text else int)
        for value in () if self.is_text else self.values:
            checks.whole(self, "values", value, **_INT64)
        if self.unknown is not None:
            checks.whole(self, "unknown", self.unknown, **_INT64)

    @property
    def is_text(self) -> bool:
        """Whether the values are texts, and no integers."""
        return isinstance(self.values[0], str)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        if self.is_text and field.dtype != TEXT:
            raise checks.invalid(
                self,
                f"column {self.column!r} must hold text, like values, got {field}; give integers "
                "as values",
            )
        if not self.is_text:
            checks.numeric(self, self.column, field, "iu")
        # As int64, the largest of these would be negative and might equal one of `values`.
        if field.dtype == "uint64":
            raise checks.invalid(self, f"column {self.column!r} holds uint64; Cast it to int64")
        return Field("int64", field.shape)

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        codes = self._of_texts(x) if self.is_text else _places(*self._sorted, x)
        absent = codes == _ABSENT
        if absent.any():
            if self.unknown is None:
                row, value = row_of(column, absent, draws.rows)
                raise _not_listed(self, "values", value, row)
            codes[absent] = self.unknown
        return Ragged(codes, column.offsets) if isinstance(column, Ragged) else codes

    @cached_property
    def _index(self) -> dict[Any, int]:
        return {value: k for k, value in enumerate(self.values)}

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return _in_order(self.values)

    def _of_texts(self, x: Array) -> NDArray[np.int64]:
        return np.fromiter(map(self._index.get, x, repeat(_ABSENT)), np.int64, len(x))


@dataclass(frozen=True)
class Tokenize(ColumnStep):
    """Split each text into characters or words, and replace each by its place in `vocabulary`.

    Text becomes int64 of shape (number of tokens,), which differs between samples: use Pad after.
    unit: "characters" (Unicode code points) or "words" (what white space separates). Case and
    punctuation are kept. unknown: the number of every other token; without it, another token
    raises InvalidInput with its row.
    """

    vocabulary: tuple[str, ...]
    unit: str = "characters"
    unknown: int | None = None

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.one_of(self, "unit", self.unit, UNITS)
        checks.several(self, "vocabulary", self.vocabulary, most=checks.MAX_VALUES)
        _check_entries(self, "vocabulary", self.vocabulary, str)
        for entry in self.vocabulary:
            if entry.split() != [entry] if self.unit == "words" else len(entry) != 1:
                rule = "words without white space" if self.unit == "words" else "single characters"
                raise checks.invalid(self, f"vocabulary must hold {rule}, got {entry!r}")
        if self.unknown is not None:
            checks.whole(self, "unknown", self.unknown, **_INT64)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        if field.dtype != TEXT:
            raise checks.invalid(self, f"column {self.column!r} must hold text, got {field}")
        return Field("int64", (None,))

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        texts: Sequence[Any] = values_of(column).tolist()
        if self.unit == "words":
            texts = [text.split() for text in texts]
        tokens = Ragged(
            self._of_words(texts) if self.unit == "words" else self._of_characters(texts),
            offsets_of(np.fromiter(map(len, texts), np.int64, len(texts))),
        )
        absent = tokens.values == _ABSENT
        if absent.any():
            if self.unknown is None:
                raise self._refused(texts, tokens, absent, draws)
            tokens.values[absent] = self.unknown
        return tokens

    @cached_property
    def _index(self) -> dict[str, int]:
        return {entry: k for k, entry in enumerate(self.vocabulary)}

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return _in_order([ord(entry) for entry in self.vocabulary])

    def _of_words(self, texts: Sequence[list[str]]) -> NDArray[np.int64]:
        words = [word for text in texts for word in text]
        return np.fromiter(map(self._index.get, words, repeat(_ABSENT)), np.int64, len(words))

    def _of_characters(self, texts: Sequence[str]) -> NDArray[np.int64]:
        # Lone surrogates are characters too, if a reader let them pass.
        coded = "".join(texts).encode("utf-32-le", "surrogatepass")
        return _places(*self._sorted, np.frombuffer(coded, "<u4"))

    def _refused(
        self, texts: Sequence[Sequence[str]], tokens: Ragged, absent: Array, draws: RowDraws
    ) -> Exception:
        j = int(np.argmax(absent))
        k = int(np.searchsorted(tokens.offsets, j, side="right")) - 1
        token = texts[k][j - int(tokens.offsets[k])]
        return _not_listed(self, "vocabulary", token, int(draws.rows[k]))


def _check_entries(step: RowStep, name: str, entries: tuple[Any, ...], kind: type) -> None:
    """Require different entries of one type, texts or integers."""
    for entry in entries:
        if type(entry) is not kind:
            word = "text" if kind is str else "an integer"
            raise checks.invalid(
                step, f"each entry of {name} must be {word}, got {reprlib.repr(entry)}"
            )
        if isinstance(entry, str) and len(entry) > MAX_WORD:
            raise checks.invalid(
                step, f"{name} has an entry of {len(entry)} characters, the limit is {MAX_WORD}"
            )
    if len(set(entries)) != len(entries):
        (twice, _), *_ = Counter(entries).most_common(1)
        raise checks.invalid(step, f"{name} lists {reprlib.repr(twice)} twice; list each once")


def _in_order(values: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the values in order, and the place of each before."""
    array = np.array(values, np.int64)
    order = np.argsort(array, kind="stable")
    return array[order], order


def _places(ordered: NDArray[np.int64], order: NDArray[np.int64], x: Array) -> NDArray[np.int64]:
    """Return the place of each number, or _ABSENT."""
    x = x.astype(np.int64, copy=False)
    nearest = np.searchsorted(ordered, x).clip(max=len(ordered) - 1)
    return np.where(ordered[nearest] == x, order[nearest], _ABSENT)


def _not_listed(step: ColumnStep, name: str, value: Any, row: int) -> Exception:
    shown = str(value)[:80]
    return checks.invalid(
        step,
        f"{name} does not list {shown!r}, in row {row} of column {step.column!r}; add it, or set "
        "unknown to a number for all others",
    )
