"""Where the time of an epoch's input goes, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.columns import Columns, Rows
from triplane.unified_ir.data.kinds import is_batches, is_feed, is_table
from triplane.unified_ir.data.views import View

if TYPE_CHECKING:
    from triplane.unified_ir.data.dataset import Dataset


@dataclass(frozen=True)
class StepTime:
    """Processor time of one step: in seconds, and per sample in microseconds."""

    step: str
    seconds: float
    us_per_sample: float


@dataclass(frozen=True)
class DataProfile:
    """Processor time by step, over a number of samples, all in one thread.

    seconds: wall time of the reading as a whole.
    """

    steps: tuple[StepTime, ...]
    samples: int
    batches: int
    seconds: float

    def text(self) -> str:
        """Return a table, a line for each step."""
        total = sum(s.seconds for s in self.steps) or 1.0
        width = max(len(s.step) for s in self.steps)
        rate = self.samples / max(self.seconds, 1e-9)
        head = f"{self.samples:,} samples in {self.batches} batches: {self.seconds:.3f} s, "
        lines = [f"{head}{rate:,.0f} samples/s in one thread"]
        for s in self.steps:
            share, us = 100 * s.seconds / total, s.us_per_sample
            lines.append(f"  {s.step:{width}}  {share:5.1f} %  {us:9.2f} us/sample")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "samples": self.samples,
            "batches": self.batches,
            "seconds": self.seconds,
            "steps": [vars(s) for s in self.steps],
        }

    __repr__ = __str__ = text


@dataclass(eq=False)
class _Clock:
    """Processor time by step, where a step's time leaves out that of the steps before it."""

    own: dict[int, float] = field(default_factory=dict)
    inner: list[float] = field(default_factory=lambda: [0.0])

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Count the time of the block for a step."""
        self.inner.append(0.0)
        start = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - start
            within = self.inner.pop()
            self.own[number] = self.own.get(number, 0.0) + spent - within
            self.inner[-1] += spent


class _Timed:
    """A view whose reading is timed; the base of one class for each kind of view."""

    def __init__(self, view: Any, number: int, clock: _Clock) -> None:
        self._view, self._number, self._clock = view, number, clock

    @property
    def schema(self) -> Any:
        return self._view.schema

    def _timed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._clock.running(self._number):
                item = next(iterator, None)
            if item is None:
                return
            yield item


class _TimedTable(_Timed):
    def __len__(self) -> int:
        return len(self._view)

    def take(self, rows: Rows) -> Columns:
        with self._clock.running(self._number):
            result: Columns = self._view.take(rows)
            return result


class _TimedFeed(_Timed):
    def blocks(self, start: int) -> Iterator[Columns]:
        return self._timed(self._view.blocks(start))


class _TimedBatches(_Timed):
    def __len__(self) -> int:
        return len(self._view)

    def batch(self, k: int) -> Columns:
        with self._clock.running(self._number):
            result: Columns = self._view.batch(k)
            return result

    def rows_of(self, k: int) -> Rows:
        rows: Rows = self._view.rows_of(k)
        return rows


class _TimedBatchFeed(_Timed):
    def batches(self, start: int) -> Iterator[tuple[Rows, Columns]]:
        return self._timed(self._view.batches(start))


def profile(dataset: Dataset, batches: int, size: int) -> DataProfile:
    """Read up to `batches` batches in this thread and return where the time went, by step."""
    from triplane.unified_ir.data.registry import step_text

    if batches < 1:
        raise InvalidInput(f"profile reads at least 1 batch, got {batches}")
    clock = _Clock()
    prepared = dataset.for_training(size)
    opened = replace(prepared.opened(), probe=lambda view, n: _timed(view, n, clock))
    start = time.perf_counter()
    sizes = [columns.count(batch) for batch in islice(opened.batches(0), batches)]
    seconds = time.perf_counter() - start
    names = [f"read {dataset.origin.name}", *map(step_text, prepared.steps)]
    total = max(1, sum(sizes))
    steps = tuple(
        StepTime(name, clock.own.get(k, 0.0), 1e6 * clock.own.get(k, 0.0) / total)
        for k, name in enumerate(names)
    )
    return DataProfile(steps, sum(sizes), len(sizes), seconds)


def _timed(view: View, number: int, clock: _Clock) -> View:
    if is_table(view):
        return _TimedTable(view, number, clock)
    if is_feed(view):
        return _TimedFeed(view, number, clock)
    return (_TimedBatches if is_batches(view) else _TimedBatchFeed)(view, number, clock)
