"""Updates by running means of gradients: Adam, AdamW, LAMB (scaled by tensor), Lion (by sign).

Adam folds the bias corrections into two scalars: slots hold M = m / (1 - beta1) and
V = v / (1 - beta2) of Kingma and Ba 2015, so that an update is M <- beta1 M + g,
V <- beta2 V + g^2, p <- p - a M / (sqrt(V) + e) with, for update t = 1, 2, ...

    c = sqrt((1 - beta2) / (1 - beta2^t)),  a = lr (1 - beta1) / ((1 - beta1^t) c),  e = epsilon / c

which is the paper's algorithm 1 with two passes fewer over each tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final

from triplane.unified_ir import ops
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.optimizer import (
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

FIRST: Final = "m"
SECOND: Final = "v"
LARGEST: Final = "largest"
MEAN: Final = "mean"


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1).

    amsgrad: divide by the largest v so far (Reddi et al. 2018), kept in a third slot.
    Slots: m / (1 - beta1) and v / (1 - beta2), see the module.
    """

    lr: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    amsgrad: bool = False

    checks: ClassVar[Checks] = {"beta1": SHARE, "beta2": SHARE, "epsilon": check_positive}

    counts_always = True  # for the bias corrections

    def used_slots(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return (FIRST, SECOND, LARGEST) if self.amsgrad else (FIRST, SECOND)

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        assert step is not None
        scale, epsilon = self._scalars(step)

        def move(p: Tensor, g: Tensor, slots: Slots) -> Moved:
            m = slots[FIRST] * self.beta1 + g
            v = slots[SECOND] * self.beta2 + g * g
            kept = {FIRST: m, SECOND: v}
            if self.amsgrad:
                v = kept[LARGEST] = ops.maximum(slots[LARGEST], v)
            return p - m / (ops.sqrt(v) + epsilon) * scale, kept

        return move

    def _scalars(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and e of the module's formula."""
        t = time_of(step) + 1.0
        left1, left2 = one_minus_power(self.beta1, t), one_minus_power(self.beta2, t)
        inverse = ops.sqrt(left2 * (1.0 / (1.0 - self.beta2)))
        return inverse / left1 * (1.0 - self.beta1) * self.rate(step), inverse * self.epsilon


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); slots as `Adam`'s.

    p <- p (1 - lr weight_decay) - a M / (sqrt(V) + e).
    """

    weight_decay: float = field(default=1e-2, kw_only=True)
    decay: Decay = field(default="decoupled", kw_only=True)


def one_minus_power(base: float, t: Tensor) -> Tensor:
    """Return 1 - base^t for 0 <= base < 1, exact where the result is small too.

    1 - exp(-y) = 2 u / (1 + u) with u = tanh(y / 2).
    """
    if base == 0.0:
        return t * 0.0 + 1.0
    # ONNX has no Expm1, and 1 - base^t cancels: for base 0.999 and t = 1 it loses three of the
    # seven digits of float32.
    u = ops.tanh(t * (-0.5 * math.log(base)))
    return u * 2.0 / (u + 1.0)


@dataclass(frozen=True)
class LAMB(Optimizer):
    """p <- p - lr |p| / |u| u with u = m / (sqrt(v) + epsilon) + weight_decay p (You et al. 2020).

    m and v are Adam's corrected means. The norms are those of the whole tensor; if either is 0, the
    ratio is 1. Slots: m / (1 - beta1) and v / (1 - beta2) without the corrections. Decoupled decay,
    the default, enters u as in the paper.
    """

    lr: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    decay: Decay = field(default="decoupled", kw_only=True)

    slots = (FIRST, SECOND)

    checks: ClassVar[Checks] = {"beta1": SHARE, "beta2": SHARE, "epsilon": check_positive}
    decays_in_rule = True  # decay is a part of u, whose norm scales the update

    counts_always = True  # for the bias corrections

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        assert step is not None
        lr, inside = self.rate(step), self.decoupled_in_rule()
        t = time_of(step) + 1.0
        first = (1.0 - self.beta1) / one_minus_power(self.beta1, t)
        second = (1.0 - self.beta2) / one_minus_power(self.beta2, t)

        def move(p: Tensor, g: Tensor, slots: Slots) -> Moved:
            m = slots[FIRST] * self.beta1 + g
            v = slots[SECOND] * self.beta2 + g * g
            # Corrected here and not by scalars as in Adam: the norm of u must be that of the
            # paper's u.
            u = m * first / (ops.sqrt(v * second) + self.epsilon)
            if inside:
                u = u + p * inside
            return p - u * (_trust(p, u) * lr), {FIRST: m, SECOND: v}

        return move


def _trust(p: Tensor, u: Tensor) -> Tensor:
    """Return |p| / |u|, or 1 where either is 0."""
    top, bottom = ops.sqrt((p * p).sum()), ops.sqrt((u * u).sum())
    both = ops.logical_and(top > 0.0, bottom > 0.0)
    # `where` evaluates both operands, so the divisor is made safe first.
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

    checks: ClassVar[Checks] = {"beta1": SHARE, "beta2": SHARE}

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        lr = self.rate(step)

        def move(p: Tensor, g: Tensor, slots: Slots) -> Moved:
            m = slots[MEAN]
            push = ops.sign(m * self.beta1 + g * (1.0 - self.beta1))
            return p - push * lr, {MEAN: m * self.beta2 + g * (1.0 - self.beta2)}

        return move
