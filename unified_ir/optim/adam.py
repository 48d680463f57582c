"""Adam and AdamW, with the bias corrections folded into two scalars.

Slots hold M = m / (1 - beta1) and V = v / (1 - beta2) of Kingma and Ba 2015, so that an update
is M <- beta1 M + g, V <- beta2 V + g^2, p <- p - a M / (sqrt(V) + e) with, for update t = 1, 2, ...

    c = sqrt((1 - beta2) / (1 - beta2^t)),  a = lr (1 - beta1) / ((1 - beta1^t) c),  e = epsilon / c

which is the paper's algorithm 1 with two passes over each tensor fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from triplane.unified_ir import ops
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.optimizer import (
    Decay,
    Optimizer,
    Rule,
    check_positive,
    check_range,
)
from triplane.unified_ir.optim.schedules import Schedule

FIRST: Final = "m"
SECOND: Final = "v"
LARGEST: Final = "largest"


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

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_range(name, "beta1", self.beta1, 0, 1)
        check_range(name, "beta2", self.beta2, 0, 1)
        check_positive(name, "epsilon", self.epsilon)

    def counts(self) -> bool:
        """Always: the bias corrections depend on the number of updates."""
        return True

    def used_slots(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return (FIRST, SECOND, LARGEST) if self.amsgrad else (FIRST, SECOND)

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        assert step is not None
        scale, epsilon = self._scalars(step)

        def move(
            p: Tensor, g: Tensor, slots: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            m = slots[FIRST] * self.beta1 + g
            v = slots[SECOND] * self.beta2 + g * g
            kept = {FIRST: m, SECOND: v}
            if self.amsgrad:
                v = kept[LARGEST] = ops.maximum(slots[LARGEST], v)
            return p - m / (ops.sqrt(v) + epsilon) * scale, kept

        return move

    def _scalars(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """a and e of the module's formula."""
        t = step.cast("float32") + 1.0
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
    """1 - base^t for 0 <= base < 1, without the cancellation that float32 has where it is small.

    1 - exp(-y) = 2 u / (1 + u) with u = tanh(y / 2).
    """
    if base == 0.0:
        return t * 0.0 + 1.0
    u = ops.tanh(t * (-0.5 * math.log(base)))
    return u * 2.0 / (u + 1.0)
