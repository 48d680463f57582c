"""Steps that decide which samples come, and in which order: shuffling, samplers, parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.columns import Columns, Rows, Schema
from triplane.unified_ir.data.kinds import is_feed, is_table
from triplane.unified_ir.data.randomness import permutation, words
from triplane.unified_ir.data.step import Step, StepContext
from triplane.unified_ir.data.table import BLOCK, Feed, Table
from triplane.unified_ir.data.views import (
    Reordered,
    Strided,
    Upstream,
    View,
    rows_view,
    source_rows,
    table_of,
    whole_column,
)

IN_ORDER: Final = "is read in order; write it as records first: `triplane data convert`"
MAX_BUFFER: Final = 1 << 24
MAX_REPEATS: Final = 1 << 32
MAX_COUNT: Final = 1 << 53
"""Limit for numbers of samples, so that sums of them fit into 64 bits."""
MAX_DRAWS: Final = 1 << 30
"""Limit for the samples that a sampler draws in an epoch, 8 bytes each."""


@dataclass(frozen=True)
class Shuffle(Step):
    """Put the samples in an order that depends on the run's seed and the epoch.

    A source that is read by number is permuted as a whole. One that is read in order passes through
    a buffer of `buffer` samples, from which the next is drawn; that is not a uniform permutation.
    seed: fixed, in place of the run's.
    """

    buffer: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.buffer is not None:
            check_count("shuffle: buffer", self.buffer, 1, MAX_BUFFER)
        if self.seed is not None:
            check_count("shuffle: seed", self.seed, 0, 2**64 - 1)

    @property
    def is_random(self) -> bool:
        """See `Step`."""
        return True

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = rows_view(upstream(context.epoch), "shuffle")
        seed = context.seed if self.seed is None else self.seed
        if is_table(source):
            n = len(source)
            return Reordered(source, lambda: permutation(n, seed, context.epoch), n)
        if self.buffer is None:
            raise InvalidInput(
                "shuffle needs buffer=N for a source that is read in order: N samples are held in "
                "memory, and the next is drawn from them"
            )
        return _Buffered(source, self.buffer, seed, context.epoch)


@dataclass(frozen=True, eq=False)
class _Buffered:
    """A feed through a buffer from which the next sample is drawn."""

    feed: Feed
    size: int
    seed: int
    epoch: int

    @property
    def schema(self) -> Schema:
        """See `Feed`."""
        return self.feed.schema

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`. The rows before `start` are read too, since they decide what is drawn."""
        key = np.array([self.seed, self.epoch], np.uint64)
        draw = np.random.Philox(key=key)
        pool: list[dict[str, Any]] = []
        out: list[dict[str, Any]] = []
        shuffled = _shuffled(_samples(self.feed), pool, self.size, draw)
        ragged = columns.ragged_of(self.schema)
        for number, one in enumerate(shuffled):
            if number >= start:
                out.append(one)
            if len(out) == BLOCK:
                yield columns.stacked(out, ragged)
                out = []
        if out:
            yield columns.stacked(out, ragged)


def _samples(feed: Feed) -> Iterator[dict[str, Any]]:
    for block in feed.blocks(0):
        for k in range(columns.count(block)):
            yield columns.sample(block, k)


def _shuffled(
    samples: Iterator[dict[str, Any]],
    pool: list[dict[str, Any]],
    size: int,
    draw: np.random.Philox,
) -> Iterator[dict[str, Any]]:
    for one in samples:
        if len(pool) < size:
            pool.append(one)
            continue
        at = int(draw.random_raw()) % size
        yield pool[at]
        pool[at] = one
    while pool:
        at = int(draw.random_raw()) % len(pool)
        pool[at], pool[-1] = pool[-1], pool[at]
        yield pool.pop()


@dataclass(frozen=True)
class Take(Step):
    """Keep the first `count` samples."""

    count: int

    def __post_init__(self) -> None:
        check_count("take: count", self.count, 1)

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = rows_view(upstream(context.epoch), "take")
        if is_table(source):
            return Strided(source, 0, 1, min(self.count, len(source)))
        return _Limited(source, 0, self.count)


@dataclass(frozen=True)
class Skip(Step):
    """Leave out the first `count` samples."""

    count: int

    def __post_init__(self) -> None:
        check_count("skip: count", self.count, 0)

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = rows_view(upstream(context.epoch), "skip")
        if is_table(source):
            start = min(self.count, len(source))
            return Strided(source, start, 1, len(source) - start)
        return _Limited(source, self.count, None)


@dataclass(frozen=True, eq=False)
class _Limited:
    """Rows first..first+count-1 of a feed; all from `first` on if count is None."""

    feed: Feed
    first: int
    count: int | None

    @property
    def schema(self) -> Schema:
        """See `Feed`."""
        return self.feed.schema

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`."""
        left = math.inf if self.count is None else self.count - start
        if left <= 0:
            return
        for block in self.feed.blocks(self.first + start):
            n = columns.count(block)
            yield block if n <= left else columns.part(block, 0, int(left))
            left -= n
            if left <= 0:
                return


@dataclass(frozen=True)
class Pick(Step):
    """Keep the samples with these numbers, in this order."""

    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.rows, default=0) < 0:
            raise InvalidInput(f"pick takes the numbers of samples, from 0, got {min(self.rows)}")

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = table_of(upstream(context.epoch), "pick", IN_ORDER)
        if max(self.rows, default=-1) >= len(source):
            raise InvalidInput(f"pick: sample {max(self.rows)} of {len(source)} does not exist")
        return Reordered(source, lambda: np.array(self.rows, np.int64), len(self.rows))


@dataclass(frozen=True)
class Repeat(Step):
    """Give all samples `times` times in an epoch, each time in a new random order if shuffled."""

    times: int

    def __post_init__(self) -> None:
        check_count("repeat: times", self.times, 1, MAX_REPEATS)

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        first = context.epoch * self.times
        source = rows_view(upstream(first), "repeat")
        if is_table(source):
            if context.varies:
                raise InvalidInput(
                    "repeat needs as many samples in each epoch, and a filter after a random step "
                    "may keep another number; put repeat before the filter, which gives the same"
                )
            if len(source) * self.times > MAX_COUNT:
                raise InvalidInput(
                    f"repeat: {len(source)} samples {self.times} times are more than {MAX_COUNT}"
                )
            return _RepeatedTable(source, upstream, first, self.times)
        return _RepeatedFeed(source, upstream, first, self.times)


@dataclass(frozen=True, eq=False)
class _RepeatedTable:
    table: Table
    upstream: Upstream
    first: int
    times: int

    @property
    def schema(self) -> Schema:
        """See `Table`."""
        return self.table.schema

    def __len__(self) -> int:
        return len(self.table) * self.times

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        if not len(rows):
            return self.table.take(rows)
        rounds, within = np.divmod(rows, len(self.table))
        numbers = np.unique(rounds)
        parts = []
        for number in numbers:
            table = self.upstream(self.first + int(number))
            assert is_table(table)
            parts.append(table.take(within[rounds == number]))
        if len(parts) == 1:
            return parts[0]
        # The parts hold the rows sorted by round; `place` says where each row is in them.
        place = np.empty(len(rows), np.int64)
        place[np.argsort(rounds, kind="stable")] = np.arange(len(rows))
        return columns.take(columns.joined(parts), place)

    def rows_in(self, source: View) -> Rows | None:
        """Return the numbers of its rows in `source`; see `source_rows`."""
        parts = []
        for number in range(self.times):
            rows = source_rows(self.upstream(self.first + number), source)
            if rows is None:
                return None
            parts.append(rows)
        return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class _RepeatedFeed:
    feed: Feed
    upstream: Upstream
    first: int
    times: int

    @property
    def schema(self) -> Schema:
        """See `Feed`."""
        return self.feed.schema

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`. The rows before `start` are read too, since a feed has no known length."""
        left = start
        for number in range(self.times):
            feed = self.upstream(self.first + number)
            assert is_feed(feed)
            for block in feed.blocks(0):
                n = columns.count(block)
                if n > left:
                    yield columns.part(block, left, n)
                left = max(0, left - n)


@dataclass(frozen=True)
class Sharded(Step):
    """Keep the part of one of `of` processes: samples rank, rank + of, rank + 2 of, ...

    All parts have floor(N / of) samples, so that the processes take equally many steps; the last
    samples that do not divide are left out. Put it after shuffle, which then differs by epoch.
    """

    rank: int
    of: int

    def __post_init__(self) -> None:
        check_count("shard: of", self.of, 1)
        check_count("shard: rank", self.rank, 0, self.of - 1)

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = table_of(upstream(context.epoch), "shard", IN_ORDER)
        return Strided(source, self.rank, self.of, len(source) // self.of)


@dataclass(frozen=True)
class Weighted(Step):
    """Draw `count` samples (by default N) with replacement, by the numbers in a column.

    column: weights >= 0, one number for each sample.
    """

    column: str
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            check_count("weighted: count", self.count, 1, MAX_DRAWS)

    @property
    def is_random(self) -> bool:
        """See `Step`."""
        return True

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = table_of(upstream(context.epoch), "weighted", IN_ORDER)
        weights = _numbers(source, self.column, "weighted").astype(np.float64)
        bad = ~(np.isfinite(weights) & (weights >= 0))
        if bad.any() or not weights.sum() > 0:
            shown = f"sample {int(bad.argmax())} has {weights[bad.argmax()]}" if bad.any() else "0"
            raise InvalidInput(
                f"weights are finite, >= 0 and not all 0; in column {self.column!r}: {shown}"
            )
        return _drawn(source, weights, self.count, context)


@dataclass(frozen=True)
class Balanced(Step):
    """Draw `count` samples (by default N) with replacement, each class equally often.

    column: the class of each sample, a whole number or a text.
    """

    column: str
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            check_count("balanced: count", self.count, 1, MAX_DRAWS)

    @property
    def is_random(self) -> bool:
        """See `Step`."""
        return True

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = table_of(upstream(context.epoch), "balanced", IN_ORDER)
        which, n = _groups(source, self.column, "balanced")
        counts = np.bincount(which, minlength=n)
        return _drawn(source, 1.0 / counts[which], self.count, context)


@dataclass(frozen=True)
class Split(Step):
    """Hold out `fraction` of the samples by `seed`; keep them, or with held_out=False the rest.

    column: a whole number for each sample; each of its values contributes its share of
    ceil(fraction * N). group: a text or whole number for each sample; groups are held out whole,
    ceil(fraction * groups) of them. Both parts keep the original order.
    """

    fraction: float
    held_out: bool
    seed: int = 0
    column: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        if self.column is not None and self.group is not None:
            raise InvalidInput("split takes a column of classes or one of groups, not both")

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        if context.random:
            raise InvalidInput(
                "split holds out the same samples in every epoch, and a step before it is random; "
                "put split before that step"
            )
        source = table_of(upstream(context.epoch), "split", IN_ORDER)
        mask: NDArray[np.bool_] = context.memory.get(
            (context.key, self.fraction, self.seed, self.column, self.group),
            lambda: self._mask(source) if self.group is None else self._groups_mask(source),
        )
        rows = np.flatnonzero(mask == self.held_out)
        return Reordered(source, lambda: rows, len(rows))

    def _mask(self, source: Table) -> NDArray[np.bool_]:
        """Return which samples are held out, (N,) bool."""
        n = len(source)
        if not n:
            raise InvalidInput(
                "there is no sample to split: the source is empty or shorter than one window"
            )
        held_out = np.zeros(n, dtype=bool)
        classes = np.zeros(n, np.int64)
        if self.column is not None:
            classes = _numbers(source, self.column, "split").astype(np.int64)
        for label, count in _shares(classes, self.fraction).items():
            members = np.flatnonzero(classes == label)
            # Classes below 0, such as -1 for "unknown", have a stream of their own too.
            order = permutation(len(members), self.seed, label % 2**64)
            held_out[members[order[:count]]] = True
        if held_out.all():
            raise InvalidInput(f"holding out {self.fraction} of {n} samples leaves none")
        return held_out

    def _groups_mask(self, source: Table) -> NDArray[np.bool_]:
        """Return which samples are held out, (N,) bool; each group is as a whole."""
        assert self.group is not None
        which, n = _groups(source, self.group, "split")
        count = math.ceil(round(self.fraction * n, 9))
        if count == n:
            raise InvalidInput(
                f"holding out {self.fraction} of the {n} groups in {self.group!r} leaves none"
            )
        held_out = np.zeros(n, dtype=bool)
        held_out[permutation(n, self.seed, 0)[:count]] = True
        return held_out[which]


def _shares(y: NDArray[np.int64], fraction: float) -> dict[int, int]:
    """Return how many samples of each class to hold out, by largest remainders."""
    classes, counts = np.unique(y, return_counts=True)
    # 0.07 * 100 is 7.000000000000001, whose ceiling would be 8.
    wanted = math.ceil(round(fraction * len(y), 9))
    exact = counts * (wanted / max(1, len(y)))
    shares = np.floor(exact).astype(int)
    missing = wanted - int(shares.sum())
    # The largest remainders first; equal ones in the order of the classes.
    shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    return {int(k): int(v) for k, v in zip(classes, shares, strict=True)}


def _drawn(
    source: Table, weights: NDArray[np.float64], count: int | None, context: StepContext
) -> View:
    """Return rows drawn with replacement in proportion to their weights."""
    ends = np.cumsum(weights)
    n = len(source) if count is None else count
    # The stream of the epoch's order is (seed, epoch); another seed keeps the two independent.
    u = (words(n, context.seed ^ (context.number + 1), context.epoch) >> np.uint64(11)) * 2.0**-53
    order = np.searchsorted(ends, u * ends[-1], side="right")
    rows = np.minimum(order, len(source) - 1).astype(np.int64)
    return Reordered(source, lambda: rows, n)


def _groups(source: Table, name: str, step: str) -> tuple[NDArray[np.intp], int]:
    """Return the number of each sample's value among the sorted values, and how many there are."""
    column = whole_column(source, name)
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "iubO":
        raise InvalidInput(
            f"{step} needs a whole number or a text for each sample; column {name!r} is "
            f"{source.schema[name]}"
        )
    values, which = np.unique(column, return_inverse=True)
    return which, len(values)


def _numbers(source: Table, name: str, step: str) -> NDArray[Any]:
    column = whole_column(source, name)
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "iubf":
        raise InvalidInput(
            f"{step} needs one number per sample; column {name!r} is {source.schema[name]}"
        )
    return column


def check_fraction(fraction: float) -> None:
    """Refuse a share of samples to hold out that would leave one part empty."""
    if not 0.0 < fraction < 1.0:
        raise InvalidInput(f"split needs a fraction between 0 and 1, got {fraction}")


def check_count(what: str, value: int, least: int, most: int = MAX_COUNT) -> None:
    """Refuse anything but a whole number in the range; the field may come from a JSON file."""
    if type(value) is not int or value < least:
        raise InvalidInput(f"{what} must be a whole number >= {least}, got {value!r}")
    if value > most:
        raise InvalidInput(f"{what} must be at most {most}, got {value}")
