"""Learning rates as functions of the number of completed updates, computed inside the graph.

In the formulas t is that number, 0 at the first update; they are evaluated in float32, and in
float64 for parameters of float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal, Self, get_args

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.arguments import check_arguments
from triplane.unified_ir.frontend.binding import holding
from triplane.unified_ir.ir.types import DType, TensorType, float32, int64
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.evaluate import run_node
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor

Shape = Literal["cosine", "line"]
SHAPES: Final[tuple[str, ...]] = get_args(Shape)
_FAR: Final = 2**62
"""More updates than any training makes."""


MEASURED: Final[ContextVar[Mapping[Schedule, Tensor]]] = ContextVar("triplane_rates", default={})  # noqa: B039 - never changed
"""Rates of the schedules that depend on measures, while a graph is recorded."""


COMPUTED: Final[ContextVar[DType]] = ContextVar("triplane_update_dtype", default=float32)
"""The element type in which rates and updates are computed, while a graph is recorded."""


class Schedule:
    """A learning rate that depends on the number of updates done; `a * b` is their product."""

    counted: ClassVar[str] = "a schedule counts updates, not epochs"
    """What the numbers of its fields count, for errors."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return the object without fields; ArgumentError for arguments that do not fit."""
        check_arguments(cls, args, kwargs, advice=cls.counted)
        return super().__new__(cls)

    def __call__(self, step: Tensor) -> Tensor:
        """step: int64 scalar -> scalar of the float type in which the update is computed."""
        raise NotImplementedError

    def at(self, updates: int, measured: Mapping[Schedule, float] | None = None) -> float:
        """Return the rate after that many updates, computed as in the graph.

        measured: the rates of those schedules within this one that depend on measures.
        """
        with (build := Build(TABLE, "rate", run=run_node)):
            step = build.param("t", TensorType(int64, ()), np.array(updates, np.int64))
            rates = {s: ops.constant(np.float32(rate)) for s, rate in (measured or {}).items()}
            with holding(MEASURED, rates):
                return float(self(step))

    def __mul__(self, other: Schedule | float) -> Product:
        return Product(self, other)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Product(Schedule):
    """lr(t) = first(t) second(t), such as a decay times factors of the first updates."""

    first: Schedule
    second: Schedule | float

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        return _value(self.first, step) * _value(self.second, step)


@dataclass(frozen=True)
class Constant(Schedule):
    """lr(t) = value."""

    value: float

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        # A tensor of the graph, as for every schedule; `Optimizer.rate` uses the number itself.
        return time_of(step) * 0.0 + self.value


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
        t = ops.minimum(time_of(step), float(self.steps))
        return self.low + (self.high - self.low) * (0.5 + 0.5 * ops.cos(t * (math.pi / self.steps)))


@dataclass(frozen=True)
class _Decay(Schedule):
    start: float
    factor: float
    steps: int

    def __post_init__(self) -> None:
        _positive(type(self).__name__, self.steps)
        if self.factor <= 0:
            raise InvalidInput(f"{type(self).__name__} needs a factor > 0, got {self.factor}")


@dataclass(frozen=True)
class Exponential(_Decay):
    """lr(t) = start * factor^(t / steps): multiplied by `factor` over `steps` updates, smoothly."""

    steps: int = 1

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        return self.start * ops.exp(time_of(step) * (math.log(self.factor) / self.steps))


@dataclass(frozen=True)
class StepDecay(_Decay):
    """lr(t) = start * factor^floor(t / steps): multiplied by `factor` every `steps` updates."""

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        drops = time_of(ops.div(step, self.steps))
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
        risen = ops.minimum((time_of(step) + 1.0) * (1.0 / self.steps), 1.0)
        return risen * _value(self.after, step)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """lr(t) = low + (high - low) (1 - min(t, steps) / steps)^power: a line where `power` is 1."""

    high: float
    steps: int
    power: float = 1.0
    low: float = 0.0

    def __post_init__(self) -> None:
        _positive("Polynomial", self.steps)
        if not 0 < self.power < math.inf:
            raise InvalidInput(f"Polynomial needs a power > 0, got {self.power}")

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        left = 1.0 - ops.minimum(time_of(step), float(self.steps)) * (1.0 / self.steps)
        shape = left if self.power == 1 else ops.power(ops.maximum(left, 0.0), float(self.power))
        return self.low + (self.high - self.low) * shape


@dataclass(frozen=True)
class Piecewise(Schedule):
    """lr(t) = rates[k] with k the number of `bounds` <= t; one rate more than bounds."""

    bounds: tuple[int, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", _rising("Piecewise", self.bounds))
        object.__setattr__(self, "rates", tuple(map(float, self.rates)))
        if len(self.rates) != len(self.bounds) + 1:
            raise InvalidInput(
                f"Piecewise needs one rate more than bounds, got {len(self.rates)} rates and "
                f"{len(self.bounds)} bounds"
            )

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        table = ops.constant(np.array(self.rates, COMPUTED.get().numpy))
        return ops.gather(table, _passed(step, self.bounds))


@dataclass(frozen=True)
class MultiStep(Schedule):
    """lr(t) = start * factor^k with k the number of `bounds` <= t."""

    start: float
    factor: float
    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", _rising("MultiStep", self.bounds))

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        rates = tuple(self.start * self.factor**k for k in range(len(self.bounds) + 1))
        return Piecewise(self.bounds, rates)(step)


@dataclass(frozen=True)
class CosineRestarts(Schedule):
    """`Cosine` repeated, each time `growth` times as long (Loshchilov and Hutter 2017).

    The first takes `steps` updates; growth: a whole number.
    """

    high: float
    steps: int
    growth: int = 1
    low: float = 0.0

    def __post_init__(self) -> None:
        _positive("CosineRestarts", self.steps)
        if self.growth < 1 or self.growth != int(self.growth):
            raise InvalidInput(f"CosineRestarts needs a whole growth >= 1, got {self.growth}")

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        if self.growth == 1:
            # In int64: a float32 cannot hold every whole number above 2^24.
            since = step - ops.div(step, self.steps) * self.steps
            share = time_of(since) * (1.0 / self.steps)
        else:
            starts, lengths = self._rounds()
            k = _passed(step, starts[1:])
            since = step - ops.gather(ops.constant(np.array(starts, np.int64)), k)
            share = time_of(since) / time_of(ops.gather(ops.constant(np.array(lengths)), k))
        return self.low + (self.high - self.low) * (0.5 + 0.5 * ops.cos(share * math.pi))

    def _rounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where rounds start and how long they are, up to the limit of int64."""
        starts, lengths = [0], [self.steps]
        while starts[-1] + lengths[-1] < _FAR:
            starts.append(starts[-1] + lengths[-1])
            lengths.append(lengths[-1] * self.growth)
        return tuple(starts), tuple(lengths)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """From high / first up to `high` in the share `rise` of `steps`, then down (Smith 2018).

    It ends at high / first / last and stays there; both ways along half a cosine, or along a line.
    """

    high: float
    steps: int
    rise: float = 0.3
    first: float = 25.0
    last: float = 1e4
    shape: Shape = "cosine"

    def __post_init__(self) -> None:
        _positive("OneCycle", self.steps)
        check_choice("OneCycle's shape", self.shape, SHAPES)
        if not 1 < self.rise * self.steps < self.steps - 1 or min(self.first, self.last) <= 0:
            raise InvalidInput(
                "OneCycle needs more than one update on either side of its top and first, last > "
                f"0; got {self.rise} of {self.steps} updates, {self.first}, {self.last}"
            )

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        # The turning point is a fraction of an update, as in PyTorch's OneCycleLR.
        low, top, end = self.high / self.first, self.rise * self.steps - 1, self.steps - 1
        t = ops.minimum(time_of(step), float(end))
        up = self._between(low, self.high, t * (1.0 / top))
        down = self._between(self.high, low / self.last, (t - top) * (1.0 / (end - top)))
        return ops.where(t <= top, up, down)

    def _between(self, start: float, end: float, share: Tensor) -> Tensor:
        if self.shape == "line":
            return start + (end - start) * share
        return end + (start - end) * (0.5 + 0.5 * ops.cos(share * math.pi))


@dataclass(frozen=True)
class Chained(Schedule):
    """One schedule after another: the next begins, from its own update 0, at each of `bounds`."""

    schedules: tuple[Schedule | float, ...]
    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", tuple(self.schedules))
        object.__setattr__(self, "bounds", _rising("Chained", self.bounds))
        if len(self.schedules) != len(self.bounds) + 1:
            raise InvalidInput(
                f"Chained needs one schedule more than bounds, got {len(self.schedules)} and "
                f"{len(self.bounds)}"
            )

    def __call__(self, step: Tensor) -> Tensor:
        """See `Schedule`."""
        lr = _value(self.schedules[0], step)
        for begin, following in zip(self.bounds, self.schedules[1:], strict=True):
            # `where` evaluates both schedules at every step, so the later one must not see negative
            # numbers.
            since = ops.maximum(step - begin, 0)
            lr = ops.where(step >= begin, _value(following, since), lr)
        return lr


def time_of(step: Tensor) -> Tensor:
    """Return the number of updates as a scalar of the type in which the update is computed."""
    return step.cast(COMPUTED.get())


def _value(lr: Schedule | float, step: Tensor) -> Tensor:
    if isinstance(lr, Schedule):
        return lr(step).cast(COMPUTED.get())  # a state, or a user's own schedule, is of float32
    return time_of(step) * 0.0 + float(lr)


def _passed(step: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Return how many of `bounds` are <= step, as an int64 scalar."""
    if not bounds:
        return step * 0
    return (step >= np.array(bounds, np.int64)).cast("int64").sum()


def _rising(name: str, bounds: Sequence[int]) -> tuple[int, ...]:
    values = tuple(bounds)
    if any(b < 1 or b != int(b) for b in values) or any(a >= b for a, b in pairwise(values)):
        raise InvalidInput(f"{name} needs integer increasing bounds >= 1, got {list(values)}")
    return tuple(map(int, values))


def _positive(name: str, steps: int) -> None:
    if steps < 1:
        raise InvalidInput(f"{name} needs steps >= 1, got {steps}")
