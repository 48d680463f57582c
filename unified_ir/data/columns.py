"""Columns: the arrays of several samples by name, and the schema that says what they hold.

A column of numbers is an array whose first axis counts samples, or a `Ragged` if samples differ in
their first axis. Texts and bytes are arrays of Python's `str` and `bytes` (dtype object).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput

Array = NDArray[Any]
Rows = NDArray[np.int64]

TEXT: Final = "text"
BYTES: Final = "bytes"
_OBJECTS: Final = {TEXT: str, BYTES: bytes}
MAX_COLUMNS: Final = 10_000
MAX_RANK: Final = 8
NUMBERS: Final = "biuf"
"""Kinds of numbers in a column, as numpy names them: booleans, integers, floating point."""


@dataclass(frozen=True, slots=True)
class Field:
    """What a column holds for each sample.

    dtype: numpy's name of the element type, "text" or "bytes". shape: of one sample; a first size
    of None differs between samples. Text and bytes have the shape ().
    """

    dtype: str
    shape: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype in _OBJECTS:
            if self.shape:
                raise InvalidInput(f"a column of {self.dtype} has no shape, got {self.shape}")
            return
        if np.dtype(self.dtype).kind not in NUMBERS:
            raise InvalidInput(f"a column holds numbers, text or bytes, got {self.dtype}")
        if len(self.shape) > MAX_RANK or any(n is None for n in self.shape[1:]):
            raise InvalidInput(
                f"a sample has at most {MAX_RANK} axes of which only the first may differ in size, "
                f"got {self.shape}"
            )

    @property
    def is_ragged(self) -> bool:
        """Whether samples differ in their first axis."""
        return bool(self.shape) and self.shape[0] is None

    @property
    def is_number(self) -> bool:
        """Whether the column holds numbers."""
        return self.dtype not in _OBJECTS

    def __str__(self) -> str:
        sizes = ", ".join("*" if n is None else str(n) for n in self.shape)
        return f"{self.dtype}[{sizes}]" if self.shape else self.dtype


Schema = Mapping[str, Field]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Arrays that differ in their first axis, one behind the other.

    values: (sum of lengths, ...); offsets: (N + 1,) int64; sample k is
    values[offsets[k]:offsets[k + 1]].
    """

    values: Array
    offsets: Rows

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: int) -> Array:
        """Return sample k, a view."""
        if k < 0:
            k += len(self)
        return self.values[self.offsets[k] : self.offsets[k + 1]]

    @property
    def lengths(self) -> Rows:
        """The size of each sample's first axis, (N,) int64."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets."""
        return self.values.nbytes + self.offsets.nbytes

    def take(self, rows: Rows) -> Ragged:
        """Return the samples at `rows`, in that order."""
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        # Position j of the result is in sample k, at j - offsets[k] behind the sample's start.
        starts = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Ragged(self.values[starts + np.arange(offsets[-1])], offsets)

    def padded(self, *, length: int | None = None, fill: float = 0) -> Array:
        """Return (N, length, ...) with `fill` behind each sample; by default the longest fits."""
        longest = int(self.lengths.max(initial=0))
        length = longest if length is None else length
        if longest > length:
            raise InvalidInput(f"samples of up to {longest} cannot be padded to {length}")
        padded = np.full((len(self), length, *self.values.shape[1:]), fill, self.values.dtype)
        padded[np.arange(length) < self.lengths[:, None]] = self.values
        return padded

    @classmethod
    def of(cls, samples: Sequence[Array]) -> Ragged:
        """Join arrays that agree in type and all axes but the first."""
        offsets = offsets_of(np.array([len(a) for a in samples], np.int64))
        return cls(np.concatenate(samples), offsets)


Column = Array | Ragged
Columns = dict[str, Column]


def offsets_of(lengths: Rows) -> Rows:
    """Return (N + 1,) sums of the lengths before each sample, from 0."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def field_of(column: Column) -> Field:
    """Return what a column holds; an array of objects is text or bytes by its first element."""
    if isinstance(column, Ragged):
        return Field(str(column.values.dtype), (None, *column.values.shape[1:]))
    if column.dtype == object:
        kinds = {type(x) for x in column.ravel()[:1]} or {str}
        for name, kind in _OBJECTS.items():
            if kinds == {kind} and column.ndim == 1:
                return Field(name)
        raise InvalidInput(
            f"an array of objects holds str or bytes in one axis, got {kinds.pop().__name__} in "
            f"{column.shape}"
        )
    if column.ndim == 0:
        raise InvalidInput("a column has a first axis that counts samples, got a single number")
    return Field(str(column.dtype), column.shape[1:])


def ragged_of(schema: Schema) -> set[str]:
    """Return the columns whose samples differ in their first axis."""
    return {name for name, field in schema.items() if field.is_ragged}


def schema_of(columns: Mapping[str, Column]) -> dict[str, Field]:
    """Return what each column holds."""
    return {name: field_of(column) for name, column in columns.items()}


def count(columns: Mapping[str, Column]) -> int:
    """Return the number of samples; InvalidInput unless all columns agree in it."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        shown = dict(list(lengths.items())[:8])
        raise InvalidInput(f"columns have one entry per sample; their lengths differ: {shown}")
    return next(iter(lengths.values()))


def take(columns: Mapping[str, Column], rows: Rows) -> Columns:
    """Return the samples at `rows`, in that order."""
    return {
        name: column.take(rows) if isinstance(column, Ragged) else column[rows]
        for name, column in columns.items()
    }


def part(columns: Mapping[str, Column], start: int, stop: int) -> Columns:
    """Return samples start..stop-1, as views where they are arrays."""
    return {
        name: column.take(np.arange(start, min(stop, len(column))))
        if isinstance(column, Ragged)
        else column[start:stop]
        for name, column in columns.items()
    }


def joined(blocks: Sequence[Mapping[str, Column]]) -> Columns:
    """Return blocks of the same schema one behind the other."""
    if len(blocks) == 1:
        return dict(blocks[0])
    return {name: _joined([block[name] for block in blocks]) for name in blocks[0]}


def sample(columns: Mapping[str, Column], k: int) -> dict[str, Any]:
    """Return sample k: an array, number, text or bytes by name."""
    return {name: column[k] for name, column in columns.items()}


def stacked(samples: Sequence[Mapping[str, Any]], ragged: Collection[str] = ()) -> Columns:
    """Return samples as columns; arrays that differ in their first axis become `Ragged`.

    ragged: columns that become it even if these samples have one length.
    """
    names = samples[0].keys()
    for k, one in enumerate(samples):
        if one.keys() != names:
            raise InvalidInput(
                f"samples have the same columns; the first has {sorted(names)}, sample {k} after "
                f"it has {sorted(one)}"
            )
    return {
        name: _column(name, [one[name] for one in samples], ragged=name in ragged) for name in names
    }


def n_bytes(columns: Mapping[str, Column]) -> int:
    """Return the bytes that columns hold; text counts a byte per character."""
    return sum(
        sum(map(len, column))
        if isinstance(column, np.ndarray) and column.dtype == object
        else column.nbytes
        for column in columns.values()
    )


def _joined(parts: Sequence[Column]) -> Column:
    if not any(isinstance(p, Ragged) for p in parts):
        return np.concatenate(parts)  # type: ignore[arg-type]
    # Samples that happened to have one length may be an array.
    ragged = [p if isinstance(p, Ragged) else Ragged.of(list(p)) for p in parts]
    lengths = np.concatenate([p.lengths for p in ragged])
    return Ragged(np.concatenate([p.values for p in ragged]), offsets_of(lengths))


def _column(name: str, values: Sequence[Any], *, ragged: bool) -> Column:
    if isinstance(values[0], str | bytes):
        column = np.empty(len(values), object)
        column[:] = values
        return column
    arrays = [np.asarray(v) for v in values]
    kinds = {(a.dtype, a.shape[1:], a.ndim) for a in arrays}
    if len(kinds) > 1 or arrays[0].dtype.kind not in NUMBERS:
        shown = ", ".join(sorted(f"{dtype}{list(a)}" for dtype, a, _ in kinds)[:4])
        raise InvalidInput(
            f"samples agree in type and in all axes but the first; column {name!r} holds {shown}"
        )
    if len({a.shape[:1] for a in arrays}) > 1 or (ragged and arrays[0].ndim):
        return Ragged.of(arrays)
    return np.stack(arrays)
