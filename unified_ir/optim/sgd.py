"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.optimizer import SHARE, Checks, Moved, Optimizer, Rule, Slots
from triplane.unified_ir.optim.schedules import COMPUTED

MOMENTUM = "momentum"


@dataclass(frozen=True)
class SGD(Optimizer):
    """v <- momentum v + (1 - dampening) g, p <- p - lr v; with `nesterov`, p - lr (g + momentum v).

    Sutskever et al. 2013 in PyTorch's variant: lr is outside v, and the first v is g without
    dampening. Without momentum there is no slot.
    """

    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0

    checks: ClassVar[Checks] = {"momentum": SHARE, "dampening": SHARE}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise InvalidInput("SGD with nesterov needs a momentum above 0")
        if self.dampening and (self.nesterov or not self.momentum):
            raise InvalidInput("SGD takes dampening only with a momentum and without nesterov")

    def counts(self) -> bool:
        """See `Optimizer`."""
        return super().counts() or bool(self.dampening)

    def used_slots(self) -> tuple[str, ...]:
        """See `Optimizer`."""
        return (MOMENTUM,) if self.momentum else ()

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        lr, share = self.rate(step), None
        if self.dampening:  # the first gradient enters the momentum whole
            assert step is not None
            whole = ops.constant(np.ones((), COMPUTED.get().numpy))
            share = ops.where(step > 0, 1.0 - self.dampening, whole)

        def move(p: Tensor, g: Tensor, slots: Slots) -> Moved:
            if not self.momentum:
                return p - g * lr, {}
            v = slots[MOMENTUM] * self.momentum + (g if share is None else g * share)
            push = g + v * self.momentum if self.nesterov else v
            return p - push * lr, {MOMENTUM: v}

        return move
