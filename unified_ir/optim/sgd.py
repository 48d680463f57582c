"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.optimizer import Optimizer, Rule, check_range

MOMENTUM = "momentum"


@dataclass(frozen=True)
class SGD(Optimizer):
    """v <- momentum v + g, p <- p - lr v; with `nesterov`, p <- p - lr (g + momentum v).

    g includes weight_decay p. Sutskever et al. 2013 in PyTorch's form (lr outside v, no dampening).
    Without momentum no slot is kept.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("SGD", "momentum", self.momentum, 0, 1)
        if not self.weight_decay >= 0:
            raise InvalidInput(f"SGD needs weight_decay >= 0, got {self.weight_decay}")
        if self.nesterov and not self.momentum:
            raise InvalidInput("SGD with nesterov needs a momentum above 0")

    def used_slots(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return (MOMENTUM,) if self.momentum else ()

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        lr = self.rate(step)

        def move(
            p: Tensor, g: Tensor, slots: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            if self.weight_decay:
                g = g + p * self.weight_decay
            if not self.momentum:
                return p - g * lr, {}
            v = slots[MOMENTUM] * self.momentum + g
            push = g + v * self.momentum if self.nesterov else v
            return p - push * lr, {MOMENTUM: v}

        return move
