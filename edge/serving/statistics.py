"""Counters of one model version, recorded once per call and read by statistics and metrics.

Durations are in nanoseconds of `time.perf_counter_ns`. Recording takes one lock, and its memory
does not grow with traffic, because there are few batch sizes and status codes.
"""

import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

_STEPS: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SECONDS_BUCKETS: Final = tuple(round(step * part, 6) for step in _STEPS for part in (1, 2.5, 5))
ROWS_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)


@dataclass(slots=True)
class DurationTotal:
    """A count and a total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Add one duration."""
        self.count += 1
        self.ns += ns


@dataclass(slots=True)
class Histogram:
    """Counts by bucket, the last one unbounded, and the sum of all values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count `value` in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDurations:
    """Durations of the parts of one answered call, in ns."""

    queue: int
    decode: int
    infer: int
    encode: int

    @property
    def total(self) -> int:
        """Time from the call's arrival to its encoded answer."""
        return self.queue + self.decode + self.infer + self.encode


class Statistics:
    """Counters of one version. Readers hold `lock` while they read several fields."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.codes: dict[str, int] = {}
        self.success, self.fail = DurationTotal(), DurationTotal()
        self.queue, self.decode = DurationTotal(), DurationTotal()
        self.infer, self.encode = DurationTotal(), DurationTotal()
        self.batches: dict[int, DurationTotal] = {}
        self.rows = 0
        self.last_inference_ms = 0
        self.call_seconds = Histogram(SECONDS_BUCKETS)
        self.queue_seconds = Histogram(SECONDS_BUCKETS)
        self.batch_rows = Histogram(ROWS_BUCKETS)

    def answered(self, rows: int, timing: CallDurations, *, now_ms: int) -> None:
        """Record a call that was answered."""
        with self.lock:
            self.codes["OK"] = self.codes.get("OK", 0) + 1
            self.success.add(timing.total)
            self.queue.add(timing.queue)
            self.decode.add(timing.decode)
            self.infer.add(timing.infer)
            self.encode.add(timing.encode)
            self.rows += rows
            self.last_inference_ms = now_ms
            self.call_seconds.add(timing.total / 1e9)
            self.queue_seconds.add(timing.queue / 1e9)

    def failed(self, code: str, total_ns: int) -> None:
        """Record a call that ended with status `code`."""
        with self.lock:
            self.codes[code] = self.codes.get(code, 0) + 1
            self.fail.add(total_ns)
            self.call_seconds.add(total_ns / 1e9)

    def executed(self, rows: int, infer_ns: int) -> None:
        """Record one run of the model over `rows` rows, of one call or of several."""
        with self.lock:
            self.batches.setdefault(rows, DurationTotal()).add(infer_ns)
            self.batch_rows.add(rows)
