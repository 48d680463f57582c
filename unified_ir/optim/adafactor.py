"""Adafactor: second moments as the product of a row and a column (Shazeer and Stern 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim.optimizer import (
    Decay,
    Optimizer,
    Rule,
    check_positive,
    check_range,
)
from triplane.unified_ir.optim.schedules import Schedule

ROW: Final = "row"
COLUMN: Final = "column"
SQUARES: Final = "squares"
_LEAST: Final = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """PyTorch's form. Of a tensor with two axes or more the last two are factored.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("Adafactor", "fade", self.fade, 0, 1)
        check_positive("Adafactor", "floor", self.floor)
        check_positive("Adafactor", "limit", self.limit)

    def counts(self) -> bool:
        """Always: the past fades by the number of updates."""
        return True

    def slot_types(self, param: TensorType) -> dict[str, TensorType]:
        """See `Optimizer`."""
        if param.rank < 2:
            return {SQUARES: param}
        *lead, rows, columns = param.shape
        return {
            ROW: param.with_shape((*lead, rows, 1)),
            COLUMN: param.with_shape((*lead, 1, columns)),
        }

    def rule_with_decay(self, step: Tensor | None) -> Rule:
        """See `Optimizer`; decoupled decay comes after the size of p was taken."""
        return super().rule_with_decay(step) if self.decay == "coupled" else self.rule(step)

    def rule(self, step: Tensor | None) -> Rule:
        """See `Optimizer`."""
        assert step is not None
        t, lr = step.cast("float32") + 1.0, self.rate(step)
        weight = ops.exp(ops.log(t) * -self.fade)
        rho = ops.minimum(1.0 / ops.sqrt(t), lr)
        inside = self.weight_decay * (self.decay == "decoupled")

        def move(
            p: Tensor, g: Tensor, slots: Mapping[str, Tensor]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            v, kept = _variance(g, slots, weight)
            u = g / ops.sqrt(ops.maximum(v, _LEAST * _LEAST))
            size = ops.maximum(_rms(p), self.floor) * rho
            start = p - p * (lr * inside) if inside else p
            return start - u * (size / ops.maximum(_rms(u) * (1.0 / self.limit), 1.0)), kept

        return move


def _variance(
    g: Tensor, slots: Mapping[str, Tensor], weight: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The estimate of g^2, and the slots it came from."""
    squares = g * g
    if SQUARES in slots:
        v = slots[SQUARES] + (squares - slots[SQUARES]) * weight
        return v, {SQUARES: v}
    row = slots[ROW] + (squares.mean([-1], keepdims=True) - slots[ROW]) * weight
    column = slots[COLUMN] + (squares.mean([-2], keepdims=True) - slots[COLUMN]) * weight
    common = ops.maximum(row.mean([-2], keepdims=True), _LEAST)
    return row * column / common, {ROW: row, COLUMN: column}


def _rms(x: Tensor) -> Tensor:
    return ops.sqrt((x * x).mean())
