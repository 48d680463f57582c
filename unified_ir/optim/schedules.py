"""Learning rates as functions of the number of updates done, computed inside the graph.

t is that number, 0 at the first update; each formula is in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.ops.tensor import Tensor


class Schedule:
    """A learning rate that depends on the number of updates done."""

    def __call__(self, step: Tensor) -> Tensor:
        """step: int64 scalar -> float32 scalar."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    """lr(t) = value."""

    value: float

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        return _time(step) * 0.0 + self.value


@dataclass(frozen=True)
class Cosine(Schedule):
    """From `high` down to `low` over `steps` updates (Loshchilov and Hutter 2017).

    lr(t) = low + (high - low) (1 + cos(pi min(t, steps) / steps)) / 2.
    """

    high: float
    steps: int
    low: float = 0.0

    def __post_init__(self) -> None:
        _positive("Cosine", self.steps)

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        t = ops.minimum(_time(step), float(self.steps))
        return self.low + (self.high - self.low) * (0.5 + 0.5 * ops.cos(t * (math.pi / self.steps)))


@dataclass(frozen=True)
class Exponential(Schedule):
    """lr(t) = start * factor^(t / steps): multiplied by `factor` over `steps` updates, smoothly."""

    start: float
    factor: float
    steps: int = 1

    def __post_init__(self) -> None:
        _positive("Exponential", self.steps)
        if self.factor <= 0:
            raise InvalidInput(f"Exponential needs a factor > 0, got {self.factor}")

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        return self.start * ops.exp(_time(step) * (math.log(self.factor) / self.steps))


@dataclass(frozen=True)
class StepDecay(Schedule):
    """lr(t) = start * factor^floor(t / steps): multiplied by `factor` every `steps` updates."""

    start: float
    factor: float
    steps: int

    def __post_init__(self) -> None:
        _positive("StepDecay", self.steps)
        if self.factor <= 0:
            raise InvalidInput(f"StepDecay needs a factor > 0, got {self.factor}")

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        drops = (step / self.steps).cast("float32")
        return self.start * ops.exp(drops * math.log(self.factor))


@dataclass(frozen=True)
class Warmup(Schedule):
    """lr(t) = after(t) (t + 1) / steps while t < steps, then after(t)."""

    steps: int
    after: Schedule | float

    def __post_init__(self) -> None:
        _positive("Warmup", self.steps)

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        risen = ops.minimum((_time(step) + 1.0) * (1.0 / self.steps), 1.0)
        return risen * (self.after(step) if isinstance(self.after, Schedule) else self.after)


def _time(step: Tensor) -> Tensor:
    return step.cast("float32")


def _positive(name: str, steps: int) -> None:
    if steps < 1:
        raise InvalidInput(f"{name} needs steps >= 1, got {steps}")
