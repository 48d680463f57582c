"""Steps that change the shape of each sample: reshape, transpose, pad, crop, resize."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.unified_ir.data.columns import (
    MAX_RANK,
    Array,
    Column,
    Columns,
    Field,
    Ragged,
    Schema,
    offsets_of,
)
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.step import RowStep
from triplane.unified_ir.data.transforms import checks
from triplane.unified_ir.data.transforms.single import ColumnStep, values_of
from triplane.unified_ir.files.resize import MAX_RESIZED_SIDE, resized

MAX_LENGTH: Final = 1 << 24
"""Entries of a padded sample."""


@dataclass(frozen=True)
class Reshape(ColumnStep):
    """Give each sample another shape with as many elements, in the same order; -1 is computed.

    shape: of a sample, without the axis of samples; at most one size is -1.
    """

    shape: tuple[int, ...]

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.several(self, "shape", self.shape, least=0, most=MAX_RANK)
        for n in self.shape:
            checks.whole(self, "shape", n, low=-1, high=checks.MAX_SAMPLE_BYTES)
        if self.shape.count(-1) > 1:
            raise checks.invalid(self, f"shape has at most one -1, got {self.shape}")

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.fixed(self, self.column, field)
        n = math.prod(size or 0 for size in field.shape)
        known = math.prod(size for size in self.shape if size != -1)
        # With a size of 0 beside it, -1 could be any number.
        computed = n // known if known else 0
        shape = tuple(computed if size == -1 else size for size in self.shape)
        if math.prod(shape) != n or (-1 in self.shape and not known):
            raise checks.invalid(
                self, f"column {self.column!r} is {field}, {n} elements; shape {self.shape} differs"
            )
        return Field(field.dtype, shape)

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        field = self.after(Field(str(x.dtype), x.shape[1:]))
        return x.reshape(len(x), *[n or 0 for n in field.shape])


@dataclass(frozen=True)
class Transpose(ColumnStep):
    """Reorder the axes of each sample: axis k of the result is axis `axes[k]` of the sample.

    Axes count from 0 without the axis of samples: (2, 0, 1) turns (H, W, C) into (C, H, W).
    """

    axes: tuple[int, ...]

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.several(self, "axes", self.axes, most=MAX_RANK)
        for axis in self.axes:
            checks.whole(self, "axes", axis, low=0, high=MAX_RANK - 1)
        if sorted(self.axes) != list(range(len(self.axes))):
            raise checks.invalid(
                self, f"axes must hold each of 0..{len(self.axes) - 1} once, got {self.axes}"
            )

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.fixed(self, self.column, field, len(self.axes))
        return Field(field.dtype, tuple(field.shape[axis] for axis in self.axes))

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        return np.ascontiguousarray(x.transpose(0, *[axis + 1 for axis in self.axes]))


@dataclass(frozen=True)
class Pad(RowStep):
    """Pad samples of different lengths with `fill` behind, to (length, ...).

    length: of the first axis of each sample after the step. lengths: the name of a column int64
    that receives the lengths before padding. A longer sample raises InvalidInput with its row,
    or loses what is behind `length` if `cut` is true.
    """

    column: str
    length: int
    fill: float = 0
    lengths: str | None = None
    cut: bool = False

    def __post_init__(self) -> None:
        checks.column_name(self, "column", self.column)
        checks.whole(self, "length", self.length, low=1, high=MAX_LENGTH)
        checks.number(self, "fill", self.fill)
        checks.flag(self, "cut", self.cut)
        if self.lengths is not None:
            checks.column_name(self, "lengths", self.lengths)

    def schema(self, schema: Schema) -> Schema:
        """See `RowStep`."""
        field = checks.column_of(self, schema, self.column)
        checks.numeric(self, self.column, field)
        checks.representable(self, "fill", self.fill, field)
        if not field.shape:
            raise checks.invalid(self, f"column {self.column!r} must have an axis, got {field}")
        if not self.cut and (field.shape[0] or 0) > self.length:
            raise checks.invalid(
                self,
                f"column {self.column!r} is {field}, longer than {self.length}; raise length or "
                "set cut",
            )
        padded = Field(field.dtype, (self.length, *field.shape[1:]))
        after = {**schema, self.column: checks.limited(self, self.column, padded)}
        if self.lengths is not None:
            checks.new_column(self, schema, self.lengths)
            after[self.lengths] = Field("int64")
        return after

    def apply(self, block: Columns, draws: RowDraws) -> Columns:
        """See `RowStep`."""
        column = block[self.column]
        samples = column if isinstance(column, Ragged) else _ragged(column)
        lengths = samples.lengths
        if lengths.max(initial=0) > self.length:
            samples = self._cut(samples, draws)
        padded = samples.padded(length=self.length, fill=self.fill)
        after: Columns = {**block, self.column: padded}
        if self.lengths is not None:
            after[self.lengths] = np.minimum(lengths, self.length)
        return after

    def _cut(self, samples: Ragged, draws: RowDraws) -> Ragged:
        if not self.cut:
            k = int(np.argmax(samples.lengths > self.length))
            raise checks.invalid(
                self,
                f"row {draws.rows[k]} of column {self.column!r} has length {samples.lengths[k]}, "
                f"more than {self.length}; raise length, or set cut to drop the rest",
            )
        offsets = offsets_of(np.minimum(samples.lengths, self.length))
        starts = np.repeat(samples.offsets[:-1] - offsets[:-1], np.diff(offsets))
        return Ragged(samples.values[starts + np.arange(offsets[-1])], offsets)


@dataclass(frozen=True)
class CenterCrop(ColumnStep):
    """Cut the middle of size (height, width) out of each image (C, H, W).

    The upper left corner is at ((H - height) // 2, (W - width) // 2).
    """

    size: tuple[int, int]

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.size(self, self.size, most=MAX_RESIZED_SIDE)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.fixed(self, self.column, field, 3)
        channels, *sides = field.shape
        if any((n or 0) < size for n, size in zip(sides, self.size, strict=True)):
            raise checks.invalid(
                self, f"column {self.column!r} is {field}, smaller than {self.size}; use Resize"
            )
        return Field(field.dtype, (channels, *self.size))

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        top, left = self.corner(x.shape[2], x.shape[3])
        height, width = self.size
        return np.ascontiguousarray(x[:, :, top : top + height, left : left + width])

    def corner(self, height: int, width: int) -> tuple[int, int]:
        """Return the first row and column that are kept of an image of that size."""
        return (height - self.size[0]) // 2, (width - self.size[1]) // 2


@dataclass(frozen=True)
class Resize(ColumnStep):
    """Resize each image (C, H, W) to size (height, width): linear, with antialiasing.

    uint8 or float32, and of the same type after. See `files.resize` for the formula, which is
    ONNX's; bytes are rounded, halves to even.
    """

    size: tuple[int, int]

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.size(self, self.size, most=MAX_RESIZED_SIDE)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.fixed(self, self.column, field, 3)
        if field.dtype not in {"uint8", "float32"} or 0 in field.shape:
            raise checks.invalid(
                self,
                f"column {self.column!r} must hold images (C, H, W) of uint8 or float32, got "
                f"{field}; use Cast before",
            )
        after = Field(field.dtype, (field.shape[0], *self.size))
        # Intermediate results are float32.
        checks.limited(self, self.column, Field("float32", after.shape))
        return after

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        return resized(values_of(column), self.size)


def _ragged(x: Array) -> Ragged:
    """Return samples of one length as `Ragged`."""
    offsets = np.arange(len(x) + 1) * x.shape[1]
    return Ragged(x.reshape(-1, *x.shape[2:]), offsets)
