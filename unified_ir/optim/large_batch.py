"""Optimizers whose step does not grow with the gradient: LAMB by tensor, Lion by element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from triplane.unified_ir import ops
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.adam import FIRST, SECOND, one_minus_power
from triplane.unified_ir.optim.optimizer import (
    Decay,
    Optimizer,
    Rule,
    check_positive,
    check_range,
)
from triplane.unified_ir.optim.schedules import Schedule

MEAN: Final = "mean"


@dataclass(frozen=True)
class LAMB(Optimizer):
    """p <- p - lr |p| / |u| u with u = m / (sqrt(v) + epsilon) + weight_decay p (You et al. 2020).

    m and v are Adam's corrected means; the norms are of the whole tensor, and where either is 0 the
    ratio is 1. Slots: m / (1 - beta1) and v / (1 - beta2) without the corrections. Decay that is
    decoupled, the default, enters u as in the paper.
    """

    lr: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    decay: Decay = field(default="decoupled", kw_only=True)

    slots = (FIRST, SECOND)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("LAMB", "beta1", self.beta1, 0, 1)
        check_range("LAMB", "beta2", self.beta2, 0, 1)
        check_positive("LAMB", "epsilon", self.epsilon)

    def counts(self) -> bool:
        """Always: the bias corrections depend on the number of updates."""
        return True

    def rule_with_decay(self, step: Tensor | None) -> Rule:
        """See `Optimizer`; decoupled decay is part of the rule itself."""
        return super().rule_with_decay(step) if self.decay == "coupled" else self.rule(step)

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        assert step is not None
        lr, inside = self.rate(step), self.weight_decay * (self.decay == "decoupled")
        t = step.cast("float32") + 1.0
        first = (1.0 - self.beta1) / one_minus_power(self.beta1, t)
        second = (1.0 - self.beta2) / one_minus_power(self.beta2, t)

        def move(
            p: Tensor, g: Tensor, slots: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            m = slots[FIRST] * self.beta1 + g
            v = slots[SECOND] * self.beta2 + g * g
            u = m * first / (ops.sqrt(v * second) + self.epsilon)
            if inside:
                u = u + p * inside
            return p - u * (_trust(p, u) * lr), {FIRST: m, SECOND: v}

        return move


def _trust(p: Tensor, u: Tensor) -> Tensor:
    """|p| / |u|, or 1 where either is 0."""
    top, bottom = ops.sqrt((p * p).sum()), ops.sqrt((u * u).sum())
    both = ops.logical_and(top > 0.0, bottom > 0.0)
    return ops.where(both, top / ops.where(both, bottom, 1.0), 1.0)


@dataclass(frozen=True)
class Lion(Optimizer):
    """p <- p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g) (Chen et al. 2023).

    Then m <- beta2 m + (1 - beta2) g.
    """

    lr: float | Schedule = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    decay: Decay = field(default="decoupled", kw_only=True)

    slots = (MEAN,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("Lion", "beta1", self.beta1, 0, 1)
        check_range("Lion", "beta2", self.beta2, 0, 1)

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        lr = self.rate(step)

        def move(
            p: Tensor, g: Tensor, slots: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            m = slots[MEAN]
            push = ops.sign(m * self.beta1 + g * (1.0 - self.beta1))
            return p - push * lr, {MEAN: m * self.beta2 + g * (1.0 - self.beta2)}

        return move
