"""Adam and AdamW, with the bias corrections folded into two scalars.

Slots hold M = m / (1 - beta1) and V = v / (1 - beta2) of Kingma and Ba 2015, so that an update
is M <- beta1 M + g, V <- beta2 V + g^2, p <- p - a M / (sqrt(V) + e) with, for update t = 1, 2, ...

    c = sqrt((1 - beta2) / (1 - beta2^t)),  a = lr (1 - beta1) / ((1 - beta1^t) c),  e = epsilon / c

which is the paper's algorithm 1 with two passes over each tensor fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.optimizer import Optimizer, Rule, check_range
from triplane.unified_ir.optim.schedules import Schedule

FIRST: Final = "m"
SECOND: Final = "v"


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1); `weight_decay` p is added to the gradient.

    Slots: m / (1 - beta1) and v / (1 - beta2), see the module.
    """

    lr: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    slots = (FIRST, SECOND)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_range(name, "beta1", self.beta1, 0, 1)
        check_range(name, "beta2", self.beta2, 0, 1)
        if not (self.epsilon > 0 and self.weight_decay >= 0):
            raise InvalidInput(
                f"{name} needs epsilon > 0 and weight_decay >= 0, got {self.epsilon} and "
                f"{self.weight_decay}"
            )

    def counts(self) -> bool:
        """Always: the bias corrections depend on the number of updates."""
        return True

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        assert step is not None
        scale, epsilon = self._scalars(step)
        shrink = self._shrink(step)

        def move(
            p: Tensor, g: Tensor, slots: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            g = self._decayed(p, g)
            m = slots[FIRST] * self.beta1 + g
            v = slots[SECOND] * self.beta2 + g * g
            start = p if shrink is None else p * shrink
            return start - m / (ops.sqrt(v) + epsilon) * scale, {FIRST: m, SECOND: v}

        return move

    def _scalars(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """a and e of the module's formula."""
        t = step.cast("float32") + 1.0
        left1, left2 = _one_minus_power(self.beta1, t), _one_minus_power(self.beta2, t)
        inverse = ops.sqrt(left2 * (1.0 / (1.0 - self.beta2)))
        return inverse / left1 * (1.0 - self.beta1) * self.rate(step), inverse * self.epsilon

    def _decayed(self, p: Tensor, g: Tensor) -> Tensor:
        return g + p * self.weight_decay if self.weight_decay else g

    def _shrink(self, step: Tensor) -> Tensor | float | None:
        return None


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); slots as `Adam`'s.

    p <- p (1 - lr weight_decay) - a M / (sqrt(V) + e).
    """

    weight_decay: float = 1e-2

    def _decayed(self, p: Tensor, g: Tensor) -> Tensor:
        return g

    def _shrink(self, step: Tensor) -> Tensor | float | None:
        if not self.weight_decay:
            return None
        lr = self.rate(step)
        return 1.0 - lr * self.weight_decay


def _one_minus_power(base: float, t: Tensor) -> Tensor:
    """1 - base^t for 0 <= base < 1, without the cancellation that float32 has where it is small.

    1 - exp(-y) = 2 u / (1 + u) with u = tanh(y / 2).
    """
    if base == 0.0:
        return t * 0.0 + 1.0
    u = ops.tanh(t * (-0.5 * math.log(base)))
    return u * 2.0 / (u + 1.0)
