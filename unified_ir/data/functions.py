"""Steps with functions of the user's, filters by a comparison, and the cache."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.columns import Columns, Rows, Schema
from triplane.unified_ir.data.kinds import is_feed, is_table
from triplane.unified_ir.data.step import Step, StepContext
from triplane.unified_ir.data.table import MAX_MEMORY_BYTES, ArrayTable, Feed, Table
from triplane.unified_ir.data.views import (
    Reordered,
    Upstream,
    View,
    blocks_of,
    mapped,
    rows_view,
    source_rows,
    table_of,
)

COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, eq=False)
class PythonFunction:
    """A Python function in a pipeline: its JSON form is its name, MODULE:NAME.

    Equal only to the same function: an object with `__call__` may compare equal to another one that
    computes something else, and need not be hashable.
    """

    call: Callable[..., Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonFunction) and self.call is other.call

    def __hash__(self) -> int:
        return id(self.call)

    @property
    def name(self) -> str:
        """MODULE:NAME of the function."""
        module = getattr(self.call, "__module__", None) or "?"
        name = getattr(self.call, "__qualname__", None) or type(self.call).__qualname__
        return f"{module}:{name}"


@dataclass(frozen=True)
class Map(Step):
    """Pass each sample, after batch each batch, through a Python function.

    The function takes a dict of columns and returns a dict, or it takes (dict, generator) with
    random=True, where the generator depends on seed, epoch and sample alone. Columns that the
    result lacks are dropped. ragged: columns of samples that differ in their first axis, beside
    those that differ before.
    """

    function: PythonFunction
    random: bool = False
    ragged: tuple[str, ...] = ()

    @property
    def is_random(self) -> bool:
        """See `Step`."""
        return self.random

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = upstream(context.epoch)
        if is_table(source) or is_feed(source):
            ragged = {*self.ragged, *columns.ragged_of(source.schema)}
            return mapped(
                source, lambda block, rows: self._rows(block, rows, context, ragged), None
            )
        return mapped(source, lambda batch, rows: self._batch(batch, rows, context), None)

    def _rows(
        self, block: Columns, rows: Rows, context: StepContext, ragged: Collection[str]
    ) -> Columns:
        if not len(rows):
            return block
        results = []
        draws = context.draws(rows)
        for k in range(len(rows)):
            more = (draws.generator(k),) if self.random else ()
            results.append(self._call(columns.sample(block, k), *more))
        result = columns.stacked(results, ragged)
        for name in columns.ragged_of(columns.schema_of(result)) - set(ragged):
            raise InvalidInput(
                f"{self.function.name} returns {name!r} with first axes that differ between "
                f"samples; pad them, or state map(..., ragged=({name!r},))"
            )
        return result

    def _batch(self, batch: Columns, rows: Rows, context: StepContext) -> Columns:
        more = (context.draws(rows).generator(0),) if self.random else ()
        result = {k: _as_column(v) for k, v in self._call(dict(batch), *more).items()}
        columns.count(result)
        return result

    def _call(self, sample: dict[str, Any], *more: Any) -> dict[str, Any]:
        result = self.function.call(sample, *more)
        if not isinstance(result, Mapping) or not result:
            raise InvalidInput(
                f"{self.function.name} returns the sample as a dict of columns, such as "
                f'{{"x": ..., "y": ...}}; got {type(result).__name__}'
            )
        return dict(result)


@dataclass(frozen=True)
class Filter(Step):
    """Keep the samples for which a Python function of the sample returns true.

    Of a source that is read by number, all samples are tried once, before the first is used, and
    again in each epoch only if a step before the filter is random.
    """

    function: PythonFunction

    @property
    def is_filter(self) -> bool:
        """See `Step`."""
        return True

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        return filtered(upstream, context, self._mask, "filter")

    def _mask(self, block: Columns) -> NDArray[np.bool_]:
        n = columns.count(block)
        return np.array(
            [bool(self.function.call(columns.sample(block, k))) for k in range(n)], bool
        )


@dataclass(frozen=True)
class Where(Step):
    """Keep the samples whose number or text in `column` compares with `value`, as in "<" 3."""

    column: str
    comparison: str
    value: float | int | str | bool

    def __post_init__(self) -> None:
        if self.comparison not in COMPARISONS:
            raise InvalidInput(
                f"where compares by {', '.join(COMPARISONS)}, got {self.comparison!r}"
            )

    @property
    def is_filter(self) -> bool:
        """See `Step`."""
        return True

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        field = upstream(context.epoch).schema.get(self.column)
        kind = "text" if isinstance(self.value, str) else "number"
        if field is None or field.shape or kind != ("number" if field.is_number else field.dtype):
            raise InvalidInput(
                f"where compares one number or text per sample with {self.value!r}; column "
                f"{self.column!r} is {field or 'absent'}"
            )
        return filtered(upstream, context, self._mask, "where")

    def _mask(self, block: Columns) -> NDArray[np.bool_]:
        compare = COMPARISONS[self.comparison]
        return np.asarray(compare(block[self.column], self.value), bool)


@dataclass(frozen=True)
class Cache(Step):
    """Keep all samples in memory when they are first needed, for this and all later epochs.

    Steps before it must not be random, since every epoch would see the same draws.
    """

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        if context.random:
            raise InvalidInput(
                "cache keeps what the first epoch computed, and a step before it is random; put "
                "cache before that step"
            )
        source = table_of(upstream(context.epoch), "cache", "is read in order")
        return CachedTable(source, context)


@dataclass(frozen=True, eq=False)
class CachedTable:
    """A table that is held in memory from its first use on."""

    table: Table
    context: StepContext

    @property
    def schema(self) -> Schema:
        """See `Table`."""
        return self.table.schema

    def __len__(self) -> int:
        return len(self.table)

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        return self.held.take(rows)

    def column(self, name: str) -> columns.Column:
        """Return a column of all rows."""
        return self.held.columns[name]

    def rows_in(self, source: View) -> columns.Rows | None:
        """Return the numbers of its rows in `source`; see `source_rows`."""
        return source_rows(self.table, source)

    @cached_property
    def held(self) -> ArrayTable:
        """Return all rows in memory. InvalidInput beyond MAX_MEMORY_BYTES."""
        table: ArrayTable = self.context.memory.get(
            ("cache", self.context.key), lambda: in_memory(self.table, "cache")
        )
        return table


def in_memory(view: Table | Feed, what: str) -> ArrayTable:
    """Read all rows. InvalidInput beyond MAX_MEMORY_BYTES, or if there are none."""
    blocks, size = [], 0
    for block in blocks_of(view):
        size += columns.n_bytes(block)
        if size > MAX_MEMORY_BYTES:
            raise InvalidInput(
                f"{what} holds at most {MAX_MEMORY_BYTES} bytes in memory, and the samples take "
                "more; write them as records, which are mapped: `triplane data convert`"
            )
        blocks.append(block)
    if not blocks:
        raise InvalidInput(f"{what}: there are no samples")
    return ArrayTable(columns.joined(blocks))


def filtered(
    upstream: Upstream,
    context: StepContext,
    mask: Callable[[Columns], NDArray[np.bool_]],
    step: str,
) -> View:
    """Return the rows for which `mask` of their block is true."""
    source = rows_view(upstream(context.epoch), step)
    if is_feed(source):
        return _FilteredFeed(source, mask)
    key = (step, context.key)

    def kept() -> NDArray[np.int64]:
        masks = [mask(block) for block in blocks_of(source)]
        return np.flatnonzero(np.concatenate(masks)) if masks else np.zeros(0, np.int64)

    # The rows of random epochs are not kept: each is used in one epoch.
    return Reordered(source, kept if context.random else lambda: context.memory.get(key, kept))


@dataclass(frozen=True, eq=False)
class _FilteredFeed:
    feed: Feed
    mask: Callable[[Columns], NDArray[np.bool_]]

    @property
    def schema(self) -> Schema:
        """See `Feed`."""
        return self.feed.schema

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`. The rows before `start` are tried too: how many pass is not known before."""
        for block in self.feed.blocks(0):
            rows = np.flatnonzero(self.mask(block))
            used = min(start, len(rows))
            start -= used
            if len(rows) > used:
                yield columns.take(block, rows[used:])


def _as_column(value: Any) -> columns.Column:
    return value if isinstance(value, columns.Ragged) else np.asarray(value)
