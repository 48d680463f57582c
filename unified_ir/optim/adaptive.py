"""Rates by element from the history of squares: Adagrad, RMSProp, Adadelta; PyTorch's forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from triplane.unified_ir import ops
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.optimizer import Optimizer, Rule, check_positive, check_range
from triplane.unified_ir.optim.schedules import Schedule

SQUARES: Final = "squares"
MEAN: Final = "mean"
MOMENTUM: Final = "momentum"
MOVES: Final = "moves"


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """s <- s + g^2, p <- p - lr / (1 + t lr_decay) g / (sqrt(s) + epsilon) (Duchi et al. 2011).

    t: updates done before this one. start: what s begins at.
    """

    lr: float | Schedule = 1e-2
    lr_decay: float = 0.0
    start: float = 0.0
    epsilon: float = 1e-10

    slots = (SQUARES,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("Adagrad", "lr_decay", self.lr_decay, 0, float("inf"))
        check_range("Adagrad", "start", self.start, 0, float("inf"))
        check_positive("Adagrad", "epsilon", self.epsilon)

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
            lr = lr / (step.cast("float32") * self.lr_decay + 1.0)

        def move(
            p: Tensor, g: Tensor, slots: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            s = slots[SQUARES] + g * g
            return p - g / (ops.sqrt(s) + self.epsilon) * lr, {SQUARES: s}

        return move


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """s <- alpha s + (1 - alpha) g^2, u = g / (sqrt(s) + epsilon), p <- p - lr u (Hinton 2012).

    centered: the variance s - m^2 stands for s, with m the mean of g in the same way (Graves 2013).
    momentum: v <- momentum v + u moves the parameter.
    """

    lr: float | Schedule = 1e-2
    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("RMSProp", "alpha", self.alpha, 0, 1)
        check_range("RMSProp", "momentum", self.momentum, 0, 1)
        check_positive("RMSProp", "epsilon", self.epsilon)

    def used_slots(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return (SQUARES, *[MEAN] * self.centered, *[MOMENTUM] * (self.momentum > 0))

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        lr, left = self.rate(step), 1.0 - self.alpha

        def move(
            p: Tensor, g: Tensor, slots: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            s = slots[SQUARES] * self.alpha + g * g * left
            kept, spread = {SQUARES: s}, s
            if self.centered:
                m = kept[MEAN] = slots[MEAN] + (g - slots[MEAN]) * left
                spread = ops.maximum(s - m * m, 0.0)  # rounding may leave it just below
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("Adadelta", "rho", self.rho, 0, 1)
        check_positive("Adadelta", "epsilon", self.epsilon)

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        lr, left = self.rate(step), 1.0 - self.rho

        def move(
            p: Tensor, g: Tensor, slots: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            s = slots[SQUARES] * self.rho + g * g * left
            u = g * (ops.sqrt(slots[MOVES] + self.epsilon) / ops.sqrt(s + self.epsilon))
            d = slots[MOVES] * self.rho + u * u * left
            return p - u * lr, {SQUARES: s, MOVES: d}

        return move
