"""`ReduceOnPlateau`: a rate that falls when a measure of the epochs stops improving.

The rate is a scalar of the optimizer's state, `optimizer.plateau`, which the compiled step only
reads. After each epoch the trainer computes it from the whole history, so a resumed run has the
same rates, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Final, Literal, get_args

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.frontend.binding import holding
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.schedules import MEASURED, Schedule

PLATEAU: Final = "optimizer.plateau"
"""State: the current rate of a `ReduceOnPlateau`, float32 scalar; a second one has the suffix .1"""
SHARES: Final = ("accuracy", "acc", "f1", "precision", "recall", "top5", "r2")
"""Measures for which a larger value is better."""
Better = Literal["smaller", "larger"]
Change = Literal["relative", "absolute"]


def sign_of(owner: str, measure: str, better: Better | None) -> float:
    """Return 1 if smaller values of the measure are better, -1 if larger ones are."""
    if better is not None:
        check_choice(f"{owner}'s better", better, get_args(Better))
    share = measure.rpartition(".")[2] in SHARES
    return -1.0 if (better or ("larger" if share else "smaller")) == "larger" else 1.0


@dataclass(frozen=True)
class ReduceOnPlateau(Schedule):
    """`start`, times `factor` whenever `measure` has not improved for over `patience` epochs.

    measure: a column of the trainer's history. A value improves on the best one if it is better by
    more than min_change |best| (change="relative") or min_change ("absolute"). After a reduction,
    `cooldown` epochs are not counted. low: the least rate. better: "smaller" or "larger"; by
    default larger for accuracies and other shares. Counts and defaults are those of PyTorch's
    ReduceLROnPlateau.
    """

    start: float
    measure: str = "validation.loss"
    _: KW_ONLY
    factor: float = 0.1
    patience: int = 10
    min_change: float = 1e-4
    change: Change = "relative"
    cooldown: int = 0
    low: float = 0.0
    better: Better | None = None

    counted: ClassVar[str] = "patience and cooldown count epochs"

    def __post_init__(self) -> None:
        sign_of("ReduceOnPlateau", self.measure, self.better)
        check_choice("ReduceOnPlateau's change", self.change, get_args(Change))
        numbers = (self.start, self.factor, self.low, self.min_change)
        counts = (self.patience, self.cooldown)
        are_numbers = all(isinstance(n, Real) for n in numbers)
        if not are_numbers or not all(isinstance(n, Integral) for n in counts):
            raise InvalidInput(
                "ReduceOnPlateau takes numbers, and whole ones as patience and cooldown, got "
                f"start {self.start!r}, factor {self.factor!r}, low {self.low!r}, min_change "
                f"{self.min_change!r}, patience {self.patience!r}, cooldown {self.cooldown!r}"
            )
        if not (0 < self.start < math.inf and 0 < self.factor < 1 and 0 <= self.low <= self.start):
            raise InvalidInput(
                "ReduceOnPlateau needs start > 0, 0 < factor < 1 and low in [0, start], got "
                f"{self.start}, {self.factor}, {self.low}"
            )
        if not (self.patience >= 0 and self.cooldown >= 0 and 0 <= self.min_change < math.inf):
            raise InvalidInput(
                "ReduceOnPlateau needs patience, cooldown and min_change >= 0, got "
                f"{self.patience}, {self.cooldown}, {self.min_change}"
            )

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`; within `reading` only."""
        del step
        rate = MEASURED.get().get(self)
        if rate is None:
            raise InvalidInput(
                "the rate of ReduceOnPlateau depends on measures, so it is known only to an "
                "optimizer that a Trainer runs; use a schedule that counts updates, such as Cosine"
            )
        return rate

    def rate_after(self, values: Sequence[float]) -> float:
        """Return the rate after epochs with these values of the measure, in order."""
        sign = sign_of("ReduceOnPlateau", self.measure, self.better)
        rate, best, bad, cooling = self.start, math.inf, 0, 0
        for value in values:
            if self._improves(sign * value, best):
                best, bad = sign * value, 0
            else:
                bad += 1
            if cooling:
                cooling, bad = cooling - 1, 0
            if bad > self.patience:
                rate, cooling, bad = max(rate * self.factor, self.low), self.cooldown, 0
        return rate

    def _improves(self, value: float, best: float) -> bool:
        if math.isinf(best):
            return value < best
        margin = self.min_change * (abs(best) if self.change == "relative" else 1.0)
        return value < best - margin


def named(rates: Sequence[Any]) -> dict[str, ReduceOnPlateau]:
    """Return the different `ReduceOnPlateau` in learning rates by the names of their state."""
    distinct = dict.fromkeys(p for lr in rates for p in _within(lr))
    return {f"{PLATEAU}.{k}" if k else PLATEAU: p for k, p in enumerate(distinct)}


def reading(
    schedules: Mapping[str, ReduceOnPlateau], state: Mapping[str, Tensor]
) -> AbstractContextManager[None]:
    """Let these schedules return their tensors in `state` within the block."""
    rates: dict[Schedule, Tensor] = {p: state[name] for name, p in schedules.items()}
    return holding(MEASURED, rates)


def _within(lr: Any) -> Iterator[ReduceOnPlateau]:
    """Yield the `ReduceOnPlateau` of which a schedule is made."""
    if isinstance(lr, ReduceOnPlateau):
        yield lr
    elif isinstance(lr, Schedule):
        for value in vars(lr).values():
            for part in value if isinstance(value, tuple) else (value,):
                yield from _within(part)
