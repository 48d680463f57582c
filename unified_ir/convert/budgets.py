"""Limits for the cost of a conversion, which fails only if one that was given is exceeded."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.convert.report import Report


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits; None for no budget.

    accuracy_drop: percentage points, checked where an evaluation set is given. latency_ratio,
    size_ratio: int8 / float32.
    """

    accuracy_drop: float = 1.0
    latency_ratio: float | None = None
    size_ratio: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"max_{field.name} must be a number >= 0, got {value}")

    def check(self, report: Report) -> tuple[str, ...]:
        """Return notes on budgets that could not be decided; InvalidInput if one is exceeded."""
        self._check_accuracy(report)
        self._check_size(report)
        return self._check_latency(report)

    def _check_accuracy(self, report: Report) -> None:
        a = report.accuracy
        # The margin is for the rounding of 100 (before - after).
        if a is not None and a.drop_points > self.accuracy_drop + 1e-9:
            raise InvalidInput(
                f"max_accuracy_drop is {self.accuracy_drop} points, but accuracy went from "
                f"{100 * a.before:.2f} % to {100 * a.after:.2f} % ({a.drop_points:.2f} points lost "
                f"on {a.samples} samples); calibrate on more typical samples, allow a larger drop, "
                "or convert without quantize"
            )

    def _check_size(self, report: Report) -> None:
        s = report.size
        if self.size_ratio is None or s.int8 is None:
            return
        ratio = s.int8 / s.float32
        if ratio > self.size_ratio:
            raise InvalidInput(
                f"max_size_ratio is {self.size_ratio}, but int8 takes {s.int8} bytes of "
                f"{s.float32} ({ratio:.3f}); allow a larger ratio or convert without quantize"
            )

    def _check_latency(self, report: Report) -> tuple[str, ...]:
        r, limit, note = report.latency.ratio, self.latency_ratio, ""
        if limit is None or r is None:
            return ()
        # A ratio measured on another kind of machine must not decide.
        if not report.latency.on_target:
            note = f"could not be checked, because this machine is not {report.target}"
        # Only if three quarters of the rounds exceed the limit: noise must not fail a conversion.
        elif r.q1 > limit:
            raise InvalidInput(
                f"max_latency_ratio is {limit}, but int8 takes {r.median:.2f} times as long as "
                f"float32 here ({r.q1:.2f} to {r.q3:.2f} in {report.latency.rounds} interleaved "
                "runs); allow a larger ratio or convert without quantize"
            )
        elif r.q3 > limit:
            note = f"is undecided: int8 / float32 is {r.q1:.2f} to {r.q3:.2f} here"
        return (f"max_latency_ratio {limit} {note}",) if note else ()
