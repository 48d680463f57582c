"""Gradient buckets: which gradients share an all-reduce, so that the last one ends the earliest.

Gradients are ready one after the other. A bucket is a run of them; its all-reduce starts when its
last gradient is ready and the link is free, and takes alpha + beta * bytes. With E(j) the earliest
end of the first j gradients, r(j) when gradient j is ready and S the bytes before,

    E(j) = min over i < j of max(E(i), r(j)) + alpha + beta * (S(j) - S(i)),

because an earlier end of the first i never delays the others. This takes O(n^2) for n gradients.
Ready times are predicted, or measured on the devices (`ready_times`); costs follow from rates.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.passes.sharding.batch_split import BatchSplit
from triplane.unified_ir.passes.sharding.ready_times import MeasuredTimes
from triplane.unified_ir.passes.sharding.report import WIDTH, bytes_text, time_text
from triplane.unified_ir.passes.sharding.topology import LinkCost

FIRST_BYTES: Final = 1 << 20
CAP_BYTES: Final = 25 << 20
"""Sizes of PyTorch's DistributedDataParallel: its first bucket, and all others."""
MAX_BYTES: Final = 1 << 40
TOLERANCE: Final = 1e-9
"""Share by which two ends may differ and count as equal."""
MAX_COUNTED: Final = 64
"""Buckets up to which their number is made least."""
SHOWN: Final = 12
"""Buckets that the table lists."""
AUTO: Final = "auto"
ONE: Final = "one"
DIGITS: Final = 16
"""Hexadecimal digits of a digest of gradients."""
Times = npt.NDArray[np.float64]
Buckets = tuple[tuple[int, ...], ...]
"""For each all-reduce, the numbers of its gradients in the order in which they are ready."""


@dataclass(frozen=True, slots=True)
class ReadyTensor:
    """A gradient: its bytes, and when the backward pass has it, in seconds from the start."""

    name: str
    size_bytes: int
    ready_s: float


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """alpha + beta * bytes, in seconds."""

    alpha_s: float
    s_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        """Return the time of one all-reduce."""
        return self.alpha_s + self.s_per_byte * size_bytes


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A split into buckets. starts_s, ends_s: of each all-reduce; exposed_s: after all work."""

    what: str
    buckets: Buckets
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    exposed_s: float

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of gradients up to the end of each bucket."""
        return tuple(bucket[-1] + 1 for bucket in self.buckets)


def all_reduce_cost(link: LinkCost, devices: int) -> AllReduceCost:
    """Return the cost of an all-reduce: a reduce-scatter, then an all-gather, over one link."""
    return AllReduceCost(
        2 * link.seconds(devices, 0), 2 * (devices - 1) / devices / link.bytes_per_s
    )


def best_buckets(tensors: Sequence[ReadyTensor], cost: AllReduceCost) -> Buckets:
    """Return the runs of the tensors, in their order, whose last all-reduce ends the earliest.

    tensors: in the order in which they are ready. Of the splits that end as early, it is one with
    the fewest buckets if `MAX_COUNTED` of them are enough.
    """
    if not tensors:
        return ()
    ready = np.array([t.ready_s for t in tensors])
    before = np.cumsum([0, *(t.size_bytes for t in tensors)], dtype=np.float64)
    ends, start = np.zeros(len(before)), [0] * len(before)
    for j in range(1, len(before)):
        candidates = _ends(ends[:j], ready[j - 1], before[: j + 1], cost)
        start[j] = int(np.argmin(candidates))
        ends[j] = candidates[start[j]]
    counted = _fewest(ready, before, cost, ends[-1] * (1 + TOLERANCE))
    return _runs(counted or [start] * len(tensors))


def _fewest(ready: Times, before: Times, cost: AllReduceCost, limit: float) -> list[list[int]]:
    """Return for each bucket where it begins, by where it ends, for the fewest that end in time.

    E of exactly k buckets follows from E of k - 1, see the module.
    """
    ends = np.full(len(before), np.inf)
    ends[0] = 0.0
    starts: list[list[int]] = []
    while ends[-1] > limit and len(starts) < MAX_COUNTED:
        further, start = np.full(len(before), np.inf), [0] * len(before)
        for j in range(1, len(before)):
            candidates = _ends(ends[:j], ready[j - 1], before[: j + 1], cost)
            start[j] = int(np.argmin(candidates))
            further[j] = candidates[start[j]]
        starts.append(start)
        ends = further
    return starts if ends[-1] <= limit else []


def _runs(starts: Sequence[Sequence[int]]) -> Buckets:
    """Return the buckets, the last of which ends with the last tensor."""
    end, runs = len(starts[0]) - 1, []
    for start in reversed(starts):
        if end:
            runs.append(tuple(range(start[end], end)))
        end = start[end]
    return tuple(reversed(runs))


def _ends(ends: Times, ready_s: float, before: Times, cost: AllReduceCost) -> Times:
    """Return the end of a bucket up to here for each place where it may begin.

    ends: when the tensors before that place are done. before: bytes up to each place, and here.
    """
    took: Times = cost.alpha_s + cost.s_per_byte * (before[-1] - before[:-1])
    free: Times = np.maximum(ends, ready_s)
    return free + took


def capped_buckets(
    tensors: Sequence[ReadyTensor], cap_bytes: int, first_bytes: int | None = None
) -> Buckets:
    """Return runs that end where they reach a number of bytes; the first one may have its own."""
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    held, limit = 0, cap_bytes if first_bytes is None else first_bytes
    for k, tensor in enumerate(tensors):
        current.append(k)
        held += tensor.size_bytes
        if held >= limit:
            buckets.append(tuple(current))
            current, held, limit = [], 0, cap_bytes
    return (*buckets, tuple(current)) if current else tuple(buckets)


def timeline(
    what: str, buckets: Buckets, tensors: Sequence[ReadyTensor], cost: AllReduceCost, work_s: float
) -> BucketPlan:
    """Return when each all-reduce runs, and how long the last one runs after work_s of work."""
    starts, ends, free = [], [], 0.0
    for bucket in buckets:
        start = max(free, *(tensors[k].ready_s for k in bucket))
        free = start + cost.seconds(sum(tensors[k].size_bytes for k in bucket))
        starts.append(start)
        ends.append(free)
    return BucketPlan(what, buckets, tuple(starts), tuple(ends), max(0.0, free - work_s))


def check_buckets(value: Any) -> str | int:
    """Return how to form buckets: "auto", "one", or a number of bytes; InvalidInput otherwise."""
    if isinstance(value, str) and value in {AUTO, ONE}:
        return value
    if type(value) is int and 1 <= value <= MAX_BYTES:
        return value
    raise InvalidInput(
        f"buckets is 'auto', 'one', or the bytes of a bucket from 1 to {MAX_BYTES:,}, got {value!r}"
    )


class GradientBuckets:
    """The gradients of a step whose batch is split, and how their all-reduces may be grouped."""

    def __init__(
        self, split: BatchSplit, cost: AllReduceCost, measured: MeasuredTimes | None = None
    ) -> None:
        """cost: of an all-reduce among the devices of the split. measured: None to predict."""
        self.split, self.cost, self.measured = split, cost, measured
        self.parts = split.gradients()
        self.predicted_s = [p.ready_s for p in self.parts]
        ready_s = self.predicted_s if measured is None else measured.ready_s(self.predicted_s)
        self.tensors = [
            ReadyTensor(p.name, p.size_bytes, at) for p, at in zip(self.parts, ready_s, strict=True)
        ]

    @property
    def digest(self) -> str:
        """Return what tells these gradients, over as many devices, from those of other steps."""
        lines = [str(self.split.devices), *(f"{p.size_bytes} {p.name}" for p in self.parts)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]

    @property
    def source(self) -> str:
        """Say where the ready times come from."""
        if self.measured is None:
            return "predicted"
        count, runs = len(self.measured.numbers), self.measured.runs
        each = f"runs of the step that end with each of {count} results"
        return f"measured, the median of {runs} {each}"

    @property
    def backward_s(self) -> float:
        """Return when the last gradient is ready."""
        return max((t.ready_s for t in self.tensors), default=0.0)

    def chosen(self, how: str | int) -> BucketPlan:
        """Return the buckets of a choice, see `check_buckets`."""
        if how == AUTO:
            return self._plan("planned", best_buckets(self.tensors, self.cost))
        if how == ONE:
            return self._plan("one all-reduce", (tuple(range(len(self.tensors))),))
        return self._plan(f"{bytes_text(int(how))} each", capped_buckets(self.tensors, int(how)))

    def ending_at(self, what: str, ends: Sequence[int]) -> BucketPlan:
        """Return the buckets with these `BucketPlan.ends`."""
        return self._plan(what, tuple(tuple(range(a, b)) for a, b in pairwise((0, *ends))))

    def compared(self) -> list[BucketPlan]:
        """Return the planned buckets and the usual ones."""
        usual = capped_buckets(self.tensors, CAP_BYTES, FIRST_BYTES)
        single = tuple((k,) for k in range(len(self.tensors)))
        return [
            self.chosen(AUTO),
            self._plan("25 MiB, the first 1 MiB", usual),
            self.chosen(ONE),
            self._plan("one for each gradient", single),
        ]

    def _plan(self, what: str, buckets: Buckets) -> BucketPlan:
        filled = tuple(b for b in buckets if b)
        return timeline(what, filled, self.tensors, self.cost, self.backward_s)


def table(buckets: GradientBuckets) -> Iterator[str]:
    """Yield the comparison and the planned buckets as lines of at most 80 columns."""
    total = bytes_text(sum(t.size_bytes for t in buckets.tensors))
    ready, alpha = time_text(buckets.backward_s), time_text(buckets.cost.alpha_s)
    rate = f"{bytes_text(1 / buckets.cost.s_per_byte)}/s" if buckets.cost.s_per_byte else "no limit"
    count = len(buckets.tensors)
    yield f"gradient buckets: {count} results, {total}, the last ready after {ready};"
    yield f"an all-reduce over {buckets.split.devices} devices takes {alpha} + bytes / ({rate})"
    yield from textwrap.wrap(f"ready times: {buckets.source}", WIDTH)
    yield from _measured_lines(buckets)
    yield ""
    yield f"{'buckets':26}{'all-reduces':>12}{'largest':>10}{'end':>10}{'exposed':>10}"
    plans = buckets.compared()
    for plan in plans:
        sizes = _sizes(plan, buckets.tensors)
        yield (
            f"{plan.what:26}{len(plan.buckets):12}{bytes_text(max(sizes, default=0)):>10}"
            f"{time_text(plan.ends_s[-1] if plan.ends_s else 0):>10}"
            f"{time_text(plan.exposed_s):>10}"
        )
    yield ""
    yield from _planned_lines(plans[0], buckets)


def _measured_lines(buckets: GradientBuckets) -> Iterator[str]:
    """Yield a line for each measured gradient, with what was predicted for it."""
    if buckets.measured is None:
        return
    yield ""
    yield f"{'result':>9}{'measured':>10}{'predicted':>11}  its name"
    for k, seconds in zip(buckets.measured.numbers, buckets.measured.seconds, strict=True):
        predicted, name = time_text(buckets.predicted_s[k]), buckets.tensors[k].name
        yield f"{k + 1:9}{time_text(seconds):>10}{predicted:>11}  {name[:48]}"


def _planned_lines(best: BucketPlan, buckets: GradientBuckets) -> Iterator[str]:
    yield f"{'planned':9}{'results':>8}{'bytes':>10}{'start':>10}{'end':>10}  the last to be ready"
    sizes = _sizes(best, buckets.tensors)
    for k, bucket in enumerate(best.buckets[:SHOWN]):
        begin, end = time_text(best.starts_s[k]), time_text(best.ends_s[k])
        last = buckets.tensors[bucket[-1]].name
        yield (
            f"{k + 1:<9}{len(bucket):8}{bytes_text(sizes[k]):>10}{begin:>10}{end:>10}  {last[:31]}"
        )
    if (more := len(best.buckets) - SHOWN) > 0:
        yield f"{more} more" + (" (--json has all)" if buckets.measured is None else "")


def _sizes(plan: BucketPlan, tensors: Sequence[ReadyTensor]) -> list[int]:
    return [sum(tensors[k].size_bytes for k in bucket) for bucket in plan.buckets]


def record(buckets: GradientBuckets) -> dict[str, Any]:
    """Return the gradients and the compared plans as a record ready for JSON."""
    return {
        "devices": buckets.split.devices,
        "backward_seconds": buckets.backward_s,
        "alpha_seconds": buckets.cost.alpha_s,
        "seconds_per_byte": buckets.cost.s_per_byte,
        "ready_times": buckets.source,
        "gradients": [
            {"name": t.name, "bytes": t.size_bytes, "ready_seconds": t.ready_s}
            for t in buckets.tensors
        ],
        "plans": [
            {"what": p.what, "buckets": [list(b) for b in p.buckets], "start_seconds":
             list(p.starts_s), "end_seconds": list(p.ends_s), "exposed_seconds": p.exposed_s}
            for p in buckets.compared()
        ],
    }  # fmt: skip


def planned_buckets(
    split: BatchSplit, link: LinkCost, measured: MeasuredTimes | None = None
) -> GradientBuckets:
    """Return the buckets of a split whose devices are joined by a link; see `GradientBuckets`."""
    return GradientBuckets(split, all_reduce_cost(link, split.devices), measured)
