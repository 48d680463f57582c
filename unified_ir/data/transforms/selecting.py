"""Steps that choose, name and join columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from triplane.unified_ir.data.columns import Array, Columns, Field, Schema
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.step import RowStep
from triplane.unified_ir.data.transforms import checks


@dataclass(frozen=True)
class Select(RowStep):
    """Keep the named columns, in that order, and drop the others."""

    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        checks.column_names(self, "columns", self.columns)

    def names_after(self, column: str) -> tuple[str, ...]:
        """See `Step`."""
        return (column,) if column in self.columns else ()

    def schema(self, schema: Schema) -> Schema:
        """See `RowStep`."""
        return {name: checks.column_of(self, schema, name) for name in self.columns}

    def apply(self, block: Columns, draws: RowDraws) -> Columns:
        """See `RowStep`."""
        return {name: block[name] for name in self.columns}


@dataclass(frozen=True)
class Drop(RowStep):
    """Drop the named columns and keep the others."""

    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        checks.column_names(self, "columns", self.columns)

    def names_after(self, column: str) -> tuple[str, ...]:
        """See `Step`."""
        return () if column in self.columns else (column,)

    def schema(self, schema: Schema) -> Schema:
        """See `RowStep`."""
        for name in self.columns:
            checks.column_of(self, schema, name)
        kept = {name: field for name, field in schema.items() if name not in self.columns}
        if not kept:
            raise checks.invalid(self, f"at least one column must remain; all of {sorted(schema)}")
        return kept

    def apply(self, block: Columns, draws: RowDraws) -> Columns:
        """See `RowStep`."""
        return {name: column for name, column in block.items() if name not in self.columns}


@dataclass(frozen=True)
class Rename(RowStep):
    """Call a column by another name, at the same place."""

    column: str
    into: str

    def __post_init__(self) -> None:
        checks.column_name(self, "column", self.column)
        checks.column_name(self, "into", self.into)

    def names_after(self, column: str) -> tuple[str, ...]:
        """See `Step`."""
        return (self._after(column),)

    def schema(self, schema: Schema) -> Schema:
        """See `RowStep`."""
        checks.column_of(self, schema, self.column)
        checks.new_column(self, schema, self.into, [self.column])
        return {self._after(name): field for name, field in schema.items()}

    def apply(self, block: Columns, draws: RowDraws) -> Columns:
        """See `RowStep`."""
        return {self._after(name): column for name, column in block.items()}

    def _after(self, name: str) -> str:
        return self.into if name == self.column else name


@dataclass(frozen=True)
class Joining(RowStep):
    """A step that replaces several columns by one. into: its name, the last of the columns."""

    columns: tuple[str, ...]
    into: str

    def __post_init__(self) -> None:
        checks.column_names(self, "columns", self.columns)
        checks.column_name(self, "into", self.into)

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of a joined sample; InvalidInput if the shapes do not fit."""
        raise NotImplementedError

    def join(self, arrays: Sequence[Array]) -> Array:
        """Return the joined column of arrays of one type."""
        raise NotImplementedError

    def schema(self, schema: Schema) -> Schema:
        """See `RowStep`."""
        fields = [checks.column_of(self, schema, name) for name in self.columns]
        for name, field in zip(self.columns, fields, strict=True):
            checks.fixed(self, name, field)
        checks.new_column(self, schema, self.into, self.columns)
        dtype = np.result_type(*[np.dtype(field.dtype) for field in fields])
        shape = self.shape([cast("tuple[int, ...]", field.shape) for field in fields])
        kept = {name: field for name, field in schema.items() if name not in self.columns}
        return {**kept, self.into: Field(str(dtype), shape)}

    def apply(self, block: Columns, draws: RowDraws) -> Columns:
        """See `RowStep`."""
        arrays = [cast("Array", block[name]) for name in self.columns]
        dtype = np.result_type(*[x.dtype for x in arrays])
        kept = {name: column for name, column in block.items() if name not in self.columns}
        return {**kept, self.into: self.join([x.astype(dtype, copy=False) for x in arrays])}

    def mismatch(self, shapes: Sequence[tuple[int, ...]], rule: str) -> Exception:
        """Return the error of columns whose shapes do not fit."""
        shown = ", ".join(f"{n!r} {list(s)}" for n, s in zip(self.columns, shapes, strict=True))
        return checks.invalid(self, f"{rule}, got {shown}; use Reshape before, or Select")


@dataclass(frozen=True)
class Stack(Joining):
    """Stack K numbers or arrays of one shape to one array (K, ...), as the column `into`.

    The columns are dropped. Their types may differ: the result has numpy's common type, float64
    for int64 and float32, for example.
    """

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """See `Joining`."""
        if len(set(shapes)) > 1:
            raise self.mismatch(shapes, "stacked columns have one shape")
        return (len(shapes), *shapes[0])

    def join(self, arrays: Sequence[Array]) -> Array:
        """See `Joining`."""
        return np.stack(arrays, axis=1)


@dataclass(frozen=True)
class Concatenate(Joining):
    """Join arrays one behind the other along the first axis of a sample, as the column `into`.

    The shapes agree in all axes but the first; a number counts as an array of one. The columns are
    dropped. Their types may differ: the result has numpy's common type.
    """

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """See `Joining`."""
        arrays = [shape or (1,) for shape in shapes]
        if len({shape[1:] for shape in arrays}) > 1:
            raise self.mismatch(shapes, "joined columns agree in all axes but the first")
        return (sum(shape[0] for shape in arrays), *arrays[0][1:])

    def join(self, arrays: Sequence[Array]) -> Array:
        """See `Joining`."""
        return np.concatenate([x if x.ndim > 1 else x[:, None] for x in arrays], axis=1)
