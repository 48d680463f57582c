"""Rates by element from the history of squared gradients: Adagrad, RMSProp, Adadelta, Adafactor.

All follow PyTorch's variants. Adafactor stores the squares as the product of a row and a column
(Shazeer and Stern 2018).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.optimizer import (
    NOT_NEGATIVE,
    SHARE,
    Checks,
    Decay,
    Moved,
    Optimizer,
    Rule,
    Slots,
    check_positive,
)
from triplane.unified_ir.optim.schedules import Schedule, time_of

SQUARES: Final = "squares"
MEAN: Final = "mean"
MOMENTUM: Final = "momentum"
MOVES: Final = "moves"
ROW: Final = "row"
COLUMN: Final = "column"


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """s <- s + g^2, p <- p - lr / (1 + t lr_decay) g / (sqrt(s) + epsilon) (Duchi et al. 2011).

    t: number of updates before this one. start: initial value of s.
    """

    lr: float | Schedule = 1e-2
    lr_decay: float = 0.0
    start: float = 0.0
    epsilon: float = 1e-10

    slots = (SQUARES,)

    checks: ClassVar[Checks] = {
        "lr_decay": NOT_NEGATIVE,
        "start": NOT_NEGATIVE,
        "epsilon": check_positive,
    }

    def slot_start(self, slot: str) -> float:
        """See `Optimizer`."""
        return self.start

    def counts(self) -> bool:
        """See `Optimizer`."""
        return super().counts() or bool(self.lr_decay)

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        lr = self.rate(step)
        if self.lr_decay:
            assert step is not None
            lr = lr / (time_of(step) * self.lr_decay + 1.0)

        def move(p: Tensor, g: Tensor, slots: Slots) -> Moved:
            s = slots[SQUARES] + g * g
            return p - g / (ops.sqrt(s) + self.epsilon) * lr, {SQUARES: s}

        return move


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """s <- alpha s + (1 - alpha) g^2, u = g / (sqrt(s) + epsilon), p <- p - lr u (Hinton 2012).

    centered: use the variance s - m^2 in place of s, with m the running mean of g (Graves 2013).
    momentum: v <- momentum v + u takes the place of u in the update of p.
    """

    lr: float | Schedule = 1e-2
    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    checks: ClassVar[Checks] = {"alpha": SHARE, "momentum": SHARE, "epsilon": check_positive}

    def used_slots(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return (SQUARES, *[MEAN] * self.centered, *[MOMENTUM] * (self.momentum > 0))

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        lr, left = self.rate(step), 1.0 - self.alpha

        def move(p: Tensor, g: Tensor, slots: Slots) -> Moved:
            s = slots[SQUARES] * self.alpha + g * g * left
            kept, spread = {SQUARES: s}, s
            if self.centered:
                m = kept[MEAN] = slots[MEAN] + (g - slots[MEAN]) * left
                spread = ops.maximum(s - m * m, 0.0)  # rounding may leave it just below 0
            u = g / (ops.sqrt(spread) + self.epsilon)
            if self.momentum:
                u = kept[MOMENTUM] = slots[MOMENTUM] * self.momentum + u
            return p - u * lr, kept

        return move


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """u = g sqrt(d + epsilon) / sqrt(s + epsilon), p <- p - lr u (Zeiler 2012).

    s and d are running means, with weight `rho` for the past, of g^2 and u^2.
    """

    lr: float | Schedule = 1.0
    rho: float = 0.9
    epsilon: float = 1e-6

    slots = (SQUARES, MOVES)

    checks: ClassVar[Checks] = {"rho": SHARE, "epsilon": check_positive}

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        lr, left = self.rate(step), 1.0 - self.rho

        def move(p: Tensor, g: Tensor, slots: Slots) -> Moved:
            s = slots[SQUARES] * self.rho + g * g * left
            u = g * (ops.sqrt(slots[MOVES] + self.epsilon) / ops.sqrt(s + self.epsilon))
            d = slots[MOVES] * self.rho + u * u * left
            return p - u * lr, {SQUARES: s, MOVES: d}

        return move


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor in PyTorch's variant; the last two axes of a tensor that has them are factored.

    With t = 1, 2, ..., w = t^-fade: row <- (1 - w) row + w mean(g^2) along the last axis, column
    the same along the last but one, v = row column / mean(row); of a vector, v itself is kept.
    u = g / sqrt(v), p <- p - min(lr, 1 / sqrt(t)) max(floor, rms(p)) u / max(1, rms(u) / limit).
    Slots: (..., R, 1) and (..., 1, C) for a parameter (..., R, C).
    """

    lr: float | Schedule = 1e-2
    fade: float = 0.8
    floor: float = 1e-3
    limit: float = 1.0
    decay: Decay = field(default="decoupled", kw_only=True)

    slots = (ROW, COLUMN, SQUARES)

    checks: ClassVar[Checks] = {"fade": SHARE, "floor": check_positive, "limit": check_positive}
    decays_in_rule = True  # decoupled decay comes after the size of p is measured

    counts_always = True  # the weight of the past depends on the number of updates

    def slot_types(self, param: TensorType) -> dict[str, TensorType]:
        """See `Optimizer`."""
        if param.rank < 2:
            return {SQUARES: param}
        *lead, rows, columns = param.shape
        return {
            ROW: param.with_shape((*lead, rows, 1)),
            COLUMN: param.with_shape((*lead, 1, columns)),
        }

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        assert step is not None
        t, lr = time_of(step) + 1.0, self.rate(step)
        # t^-fade
        weight = ops.exp(ops.log(t) * -self.fade)
        rho = ops.minimum(1.0 / ops.sqrt(t), lr)
        inside = self.decoupled_in_rule()

        def move(p: Tensor, g: Tensor, slots: Slots) -> Moved:
            v, kept = _variance(g, slots, weight)
            # PyTorch's default eps1: the machine epsilon, squared because v is a square.
            u = g / ops.sqrt(ops.maximum(v, _least(g) ** 2))
            size = ops.maximum(_rms(p), self.floor) * rho
            start = p - p * (lr * inside) if inside else p
            return start - u * (size / ops.maximum(_rms(u) * (1.0 / self.limit), 1.0)), kept

        return move


def _variance(g: Tensor, slots: Slots, weight: Tensor) -> Moved:
    """Return the estimate of g^2, and the slots that it was computed from."""
    squares = g * g
    if SQUARES in slots:
        v = slots[SQUARES] + (squares - slots[SQUARES]) * weight
        return v, {SQUARES: v}
    row = slots[ROW] + (squares.mean([-1], keepdims=True) - slots[ROW]) * weight
    column = slots[COLUMN] + (squares.mean([-2], keepdims=True) - slots[COLUMN]) * weight
    # The best rank-1 estimate of v from its row and column sums is row column^T / sum(row); with
    # means the divisor is mean(row).
    common = ops.maximum(row.mean([-2], keepdims=True), _least(g))
    return row * column / common, {ROW: row, COLUMN: column}


def _least(g: Tensor) -> float:
    return float(np.finfo(g.dtype.numpy).eps)


def _rms(x: Tensor) -> Tensor:
    return ops.sqrt((x * x).mean())
