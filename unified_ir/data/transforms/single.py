"""Steps that replace one column, the form of most of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from triplane.unified_ir.data.columns import Array, Column, Columns, Field, Ragged, Rows, Schema
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.step import RowStep
from triplane.unified_ir.data.transforms import checks


@dataclass(frozen=True)
class ColumnStep(RowStep):
    """A step that computes one column from itself. column: its name."""

    column: str

    def __post_init__(self) -> None:
        checks.column_name(self, "column", self.column)
        self.check()

    def check(self) -> None:
        """Check the step's own fields."""

    def after(self, field: Field) -> Field:
        """Return what the column holds after the step; InvalidInput if it does not fit."""
        raise NotImplementedError

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """Return the column after the step."""
        raise NotImplementedError

    def schema(self, schema: Schema) -> Schema:
        """See `RowStep`."""
        return {**schema, self.column: self.after(checks.column_of(self, schema, self.column))}

    def apply(self, block: Columns, draws: RowDraws) -> Columns:
        """See `RowStep`."""
        return {**block, self.column: self.compute(block[self.column], draws)}


@dataclass(frozen=True)
class Augmentation(ColumnStep):
    """A step that changes samples at random, in each epoch in another way, for training only."""

    @property
    def is_random(self) -> bool:
        """See `Step`."""
        return True


def values_of(column: Column) -> Array:
    """Return the values of all samples, whether they differ in size or not."""
    return column.values if isinstance(column, Ragged) else column


def mapped(column: Column, function: Callable[[Array], Array]) -> Column:
    """Return the column after a function of each value by itself."""
    if isinstance(column, Ragged):
        return Ragged(function(column.values), column.offsets)
    return function(column)


def row_of(column: Column, wrong: Array, rows: Rows) -> tuple[int, Array]:
    """Return the row of the first wrong value, and the value. wrong: bool, like the values."""
    values = values_of(column)
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    k = place[0]
    if isinstance(column, Ragged):
        k = int(np.searchsorted(column.offsets, k, side="right")) - 1
    return int(rows[k]), values[place]
