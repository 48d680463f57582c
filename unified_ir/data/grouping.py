"""Steps that put samples together: batches, padded batches, windows over a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.columns import Column, Columns, Field, Ragged, Rows, Schema
from triplane.unified_ir.data.kinds import is_table
from triplane.unified_ir.data.ordering import check_count
from triplane.unified_ir.data.step import Step, StepContext
from triplane.unified_ir.data.table import Feed, Table
from triplane.unified_ir.data.transforms import checks
from triplane.unified_ir.data.views import (
    Upstream,
    View,
    mapped,
    rows_in_memory,
    rows_view,
    whole_column,
)

MAX_BATCH: Final = 1 << 24
MAX_WINDOW: Final = 1 << 24
LENGTHS: Final = ".length"
"""What follows a column's name in that of the lengths of its padded samples."""


@dataclass(frozen=True)
class Batched(Step):
    """Put `size` samples together; the last batch is smaller, or left out with drop_last."""

    size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_count("batch: size", self.size, 1, MAX_BATCH)

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = rows_view(upstream(context.epoch), "a second batch")
        if is_table(source):
            return _TableBatches(source, self.size, self.drop_last)
        return _FeedBatches(source, self.size, self.drop_last)


@dataclass(frozen=True)
class PaddedBatch(Step):
    """Put `size` samples together and pad those of different length to the longest of the batch.

    length: pad to this size instead; longer samples are refused. fill: the padding. lengths: add
    the true lengths of column c as column "c.length", (N,) int64.
    """

    size: int
    length: int | None = None
    fill: float = 0
    lengths: bool = False
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_count("padded_batch: size", self.size, 1, MAX_BATCH)
        if self.length is not None:
            check_count("padded_batch: length", self.length, 1, MAX_WINDOW)

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        batches = Batched(self.size, self.drop_last).view(upstream, context)
        self._schema(batches.schema)  # refuses the input before anything is read
        return mapped(batches, lambda batch, _: self._padded(batch), self._schema)

    def _padded(self, batch: Columns) -> Columns:
        padded: Columns = {}
        for name, column in batch.items():
            if not isinstance(column, Ragged):
                padded[name] = column
                continue
            padded[name] = column.padded(length=self.length, fill=self.fill)
            if self.lengths:
                padded[name + LENGTHS] = column.lengths
        return padded

    def _schema(self, schema: Schema) -> Schema:
        result: dict[str, Field] = {}
        for name, field in schema.items():
            # Without `length` the size still differs between batches, so it stays open.
            result[name] = (
                replace(field, shape=(self.length, *field.shape[1:])) if field.is_ragged else field
            )
            if field.is_ragged:
                checks.representable(self, "fill", self.fill, field)
            if field.is_ragged and self.lengths:
                checks.new_column(self, schema, name + LENGTHS)
                result[name + LENGTHS] = Field("int64")
        return result


@dataclass(frozen=True)
class Windowed(Step):
    """Make each sample of `size` consecutive samples, `stride` apart: (N, ...) -> (M, size, ...).

    ahead: also give the same window `ahead` samples later, as the column `into`, for models that
    predict what comes next; the source then has one column. Windows that do not fit are left out.
    within: columns of one text or number for each sample, such as the name of a file or a person;
    no window crosses a change in them, and each has their value.
    """

    size: int
    stride: int = 1
    ahead: int = 0
    into: str = "next"
    within: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("window: size", self.size, 1, MAX_WINDOW)
        check_count("window: stride", self.stride, 1)
        check_count("window: ahead", self.ahead, 0, MAX_WINDOW)

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = rows_view(upstream(context.epoch), "window")
        self.schema(source.schema)
        if is_table(source):
            return _WindowTable(source, self)
        return _WindowFeed(source, self)

    @property
    def span(self) -> int:
        """Number of consecutive samples that one window reads."""
        return self.size + self.ahead

    def schema(self, schema: Schema) -> Schema:
        """Return the schema after the step."""
        joined = {name: field for name, field in schema.items() if name not in self.within}
        for name in self.within:
            if name not in schema or schema[name].shape:
                raise InvalidInput(
                    f"window with within={self.within} needs one text or number for each sample in "
                    f"these columns; {name!r} is {schema.get(name, 'absent')}"
                )
        for name, field in joined.items():
            if field.is_ragged or not field.is_number:
                raise InvalidInput(
                    f"window joins numbers of one shape; column {name!r} is {field}; pad it or "
                    "look it up in a vocabulary first"
                )
        if self.ahead and len(joined) != 1:
            raise InvalidInput(
                f"window with ahead= takes one column, there are {', '.join(joined)}; select one"
            )
        if self.ahead and self.into in schema:
            raise InvalidInput(
                f"window with into={self.into!r} would write over the column of that name; choose "
                "another name"
            )
        result = {k: replace(f, shape=(self.size, *f.shape)) for k, f in joined.items()}
        if self.ahead:
            result[self.into] = next(iter(result.values()))
        return result | {name: schema[name] for name in self.within}

    def split(self, block: Columns, n: int) -> Columns:
        """Return `n` windows of a block that holds their samples one behind the other."""
        result: Columns = {}
        for name, column in block.items():
            assert isinstance(column, np.ndarray)
            if name in self.within:
                result[name] = column[:: self.span]
                continue
            both = column.reshape(n, self.span, *column.shape[1:])
            result[name] = both[:, : self.size]
            if self.ahead:
                result[self.into] = both[:, self.ahead :]
        return result


def overlap_of(steps: Iterable[Step]) -> int:
    """Return how many windows before one share samples with it, by all steps that make windows.

    A single sample that is the last target of a window and begins the next one does not count, as
    in texts: it is no target twice.
    """
    span = stride = 1
    ahead = 0
    for step in steps:
        if isinstance(step, Windowed):
            span += (step.span - 1) * stride
            ahead += step.ahead * stride
            stride *= step.stride
    return 0 if span - stride <= min(ahead, 1) else -(-span // stride) - 1


@dataclass(frozen=True, eq=False)
class _TableBatches:
    table: Table
    size: int
    drop_last: bool

    @property
    def schema(self) -> Schema:
        """See `Batches`."""
        return self.table.schema

    def __len__(self) -> int:
        n = len(self.table)
        return n // self.size if self.drop_last else -(-n // self.size)

    def batch(self, k: int) -> Columns:
        """See `Batches`."""
        # Small networks train on columns in memory in 50 us a step, of which the way through the
        # views would take 3.
        if self._in_memory is not None:
            held, order = self._in_memory
            start = k * self.size
            return columns.take(held, order[start : start + self.size])
        return self.table.take(self.rows_of(k))

    @cached_property
    def _in_memory(self) -> tuple[Mapping[str, Column], Rows] | None:
        return rows_in_memory(self.table)

    def rows_of(self, k: int) -> Rows:
        """See `Batches`."""
        start = k * self.size
        return np.arange(start, min(start + self.size, len(self.table)))


@dataclass(frozen=True, eq=False)
class _FeedBatches:
    feed: Feed
    size: int
    drop_last: bool

    @property
    def schema(self) -> Schema:
        """See `BatchFeed`."""
        return self.feed.schema

    def batches(self, start: int) -> Iterator[tuple[Rows, Columns]]:
        """See `BatchFeed`."""
        at = start * self.size
        for block in _exactly(self.feed.blocks(at), self.size):
            n = columns.count(block)
            if n == self.size or not self.drop_last:
                yield np.arange(at, at + n), block
            at += n


def _exactly(blocks: Iterator[Columns], size: int) -> Iterator[Columns]:
    """Return the same rows in blocks of `size`; the last may be smaller."""
    held: list[Columns] = []
    rows = 0
    for block in blocks:
        held.append(block)
        rows += columns.count(block)
        if rows < size:
            continue
        whole = columns.joined(held)
        end = rows - rows % size
        for at in range(0, end, size):
            yield columns.part(whole, at, at + size)
        held = [columns.part(whole, end, rows)] if rows > end else []
        rows -= end
    if rows:
        yield columns.joined(held)


@dataclass(frozen=True, eq=False)
class _WindowTable:
    table: Table
    window: Windowed

    @property
    def schema(self) -> Schema:
        """See `Table`."""
        return self.window.schema(self.table.schema)

    def __len__(self) -> int:
        if self.window.within:
            return len(self._starts)
        return _n_windows(len(self.table), self.window)

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        starts = self._starts[rows] if self.window.within else rows * self.window.stride
        numbers = (starts[:, None] + np.arange(self.window.span)).ravel()
        return self.window.split(self.table.take(numbers), len(rows))

    @cached_property
    def _starts(self) -> Rows:
        """The first sample of each window, of runs of samples that are equal in `within`."""
        keys = {name: whole_column(self.table, name) for name in self.window.within}
        ends = _ends_of_runs(keys, len(self.table))
        parts = [
            begin + self.window.stride * np.arange(_n_windows(end - begin, self.window))
            for begin, end in pairwise([0, *ends.tolist()])
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts])


@dataclass(frozen=True, eq=False)
class _WindowFeed:
    feed: Feed
    window: Windowed

    @property
    def schema(self) -> Schema:
        """See `Feed`."""
        return self.window.schema(self.feed.schema)

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`. With `within` the windows before `start` are counted, not skipped."""
        if not self.window.within:
            yield from self._windows(self.feed.blocks(start * self.window.stride))
            return
        for block in chain.from_iterable(map(self._windows, self._runs())):
            n = columns.count(block)
            if start < n:
                yield columns.part(block, start, n)
            start = max(0, start - n)

    def _windows(self, blocks: Iterable[Columns]) -> Iterator[Columns]:
        window = self.window
        held: Columns = {}
        skip = 0  # samples between two windows that do not overlap
        for block in blocks:
            whole = columns.joined([held, block]) if held else block
            n = columns.count(whole)
            if skip >= n:
                held, skip = {}, skip - n
                continue
            count = _n_windows(n - skip, window)
            if count:
                numbers = skip + np.arange(count)[:, None] * window.stride + np.arange(window.span)
                yield window.split(columns.take(whole, numbers.ravel()), count)
            used = skip + count * window.stride
            held = columns.part(whole, used, n) if used < n else {}
            skip = max(0, used - n)

    def _runs(self) -> Iterator[Iterator[Columns]]:
        """Return the blocks of each run of samples that are equal in `within`."""
        number = 0

        def numbered() -> Iterator[tuple[int, Columns]]:
            nonlocal number
            last: list[Any] | None = None
            for block in self.feed.blocks(0):
                keys = {name: block[name] for name in self.window.within}
                n = columns.count(block)
                first = [column[0] for column in keys.values()]
                number += last is not None and first != last
                last = [column[n - 1] for column in keys.values()]
                for k, (begin, end) in enumerate(pairwise([0, *_ends_of_runs(keys, n).tolist()])):
                    number += k > 0
                    yield number, columns.part(block, begin, end)

        for _, run in groupby(numbered(), key=itemgetter(0)):
            yield (block for _, block in run)


def _n_windows(n: int, window: Windowed) -> int:
    """Return how many windows fit into n consecutive samples."""
    return max(0, (n - window.span) // window.stride + 1)


def _ends_of_runs(keys: Mapping[str, Column], n: int) -> Rows:
    """Return behind which samples a column of `keys` changes, and n."""
    changes = np.zeros(max(0, n - 1), bool)
    for column in keys.values():
        assert isinstance(column, np.ndarray)
        changes |= np.asarray(column[1:] != column[:-1], bool)
    return np.append(np.flatnonzero(changes) + 1, n)


def as_arrays(batch: Columns, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return columns of a batch as arrays; InvalidInput names one that is not an array."""
    for name in names:
        if name not in batch:
            raise InvalidInput(
                f"the model takes column {name!r}, but a batch has {', '.join(batch)}; a function "
                "may have dropped it; state .roles(inputs, targets)"
            )
        if isinstance(batch[name], Ragged):
            raise InvalidInput(
                f"samples of column {name!r} differ in length; put them together with "
                "padded_batch(size) in place of batch"
            )
    return tuple([batch[name] for name in names])
