"""Everything between a batch's gradients and the next weights, as one value.

In order: division by the loss scale, accumulation over batches, clipping, the optimizer, the moving
average of the weights. Its state is stored as further tensors `optimizer.*` beside the optimizer's
own: `average.PATH` and `sum.PATH` by parameter, and the scalars `scale`, `good`, `rows`, `left`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir import ops
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import TensorType, float32, int64, type_of
from triplane.unified_ir.ops.summaries import SUMMARY
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.optim import (
    STEP,
    Optimizer,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    slot_name,
)
from triplane.unified_ir.optim.clipping import check_limit
from triplane.unified_ir.optim.optimizer import check_range, computed_type
from triplane.unified_ir.train.batches import is_count
from triplane.unified_ir.train.precision import PRECISIONS, LossScale, Precision, all_finite

AVERAGE: Final = "average"
"""Slot: the moving average of a parameter."""
SUM: Final = "sum"
"""Slot: gradients, each weighted by its batch's rows (or counts), summed since the last update."""
ROWS: Final = "optimizer.rows"
"""State: rows in the sums (or their counts in the loss), float32 scalar."""
LEFT: Final = "optimizer.left"
"""State: batches until the next update, int64 scalar; 1 makes the next batch update."""
SCALE: Final = "optimizer.scale"
GOOD: Final = "optimizer.good"
LOSS_SCALE: Final = SUMMARY + "loss_scale"
SKIPPED: Final = SUMMARY + "skipped"
"""Results: the scale of this batch's loss, and whether its update was skipped (1) or not (0)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The operations between gradients and weights; an unset option adds nothing to the graph.

    clip_value, clip_each, clip_norm: limits of each element, of each tensor's norm, of the norm of
    all together. accumulate: batches per update. average: the weight of the past in the moving
    average of the weights.
    """

    optimizer: Optimizer
    clip_value: float | None = None
    clip_each: float | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    precision: Precision = "float32"
    loss_scale: LossScale | None = None
    average: float | None = None

    def __post_init__(self) -> None:
        limits = (("element", self.clip_value), ("norm", self.clip_each), ("norm", self.clip_norm))
        for what, limit in limits:
            if limit is not None:
                check_limit(what, limit)
        if not is_count(self.accumulate, 1):
            raise InvalidInput(f"accumulate must be a whole number >= 1, got {self.accumulate!r}")
        check_choice("precision", self.precision, PRECISIONS)
        if self.loss_scale is not None and self.precision == "float32":
            raise InvalidInput("a loss scale needs precision='float16' or 'bfloat16'; leave it out")
        if self.average is not None:
            check_range("a moving average", "a decay", self.average, 0, 1)

    def state_types(self, params: Mapping[str, TensorType]) -> dict[str, TensorType]:
        """Return the types of all `optimizer.*` state, for parameters by path."""
        count, number = TensorType(int64, ()), TensorType(float32, ())
        frozen = self.optimizer.frozen(params)
        moved = {k: computed_type(t) for k, t in params.items() if k not in frozen}
        types = dict(self.optimizer.state_types(params))
        if self.average is not None:
            types = {STEP: count} | types
            types |= {slot_name(AVERAGE, k): t for k, t in moved.items()}
        if self.loss_scale is not None:
            types |= {SCALE: number, GOOD: count}
        if self.accumulate > 1:
            types |= {slot_name(SUM, k): t for k, t in moved.items()} | {ROWS: number, LEFT: count}
        return types

    def init(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """Return the initial state."""
        types = self.state_types({k: type_of(p) for k, p in params.items()})
        starts = {LEFT: self.accumulate, SCALE: self.loss_scale.start if self.loss_scale else 0}
        zeros = {
            k: np.full(t.concrete({}), starts.get(k, 0), t.dtype.numpy) for k, t in types.items()
        }
        return zeros | self.optimizer.init(params)

    def advance(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        rows: Tensor,
        *,
        counted: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return every next parameter and state tensor, and whether the gradients are finite.

        grads: of the scaled loss, the mean over `rows` samples (float32 scalar). counted: the
        divisor of that mean if it is not `rows`; where it is 0, the gradient counts as 0.
        """
        grads = {k: g.cast(computed_type(g.type).dtype) for k, g in grads.items()}
        if self.loss_scale is not None:
            grads = {k: g / state[SCALE].cast(g.dtype) for k, g in grads.items()}
        fine = all_finite(grads) if self.loss_scale is not None else None
        if self.accumulate == 1:
            results = self._when(fine, params, grads, state)
            return results | self._rescaled(None, fine, state), fine
        own = rows if counted is None else counted
        # The mean over all accumulated samples: mean = sum_b n_b g_b / sum_b n_b. A batch with n_b
        # = 0 has the gradient of a sum, see `Loss.counted`, which is added as it is.
        share = own if counted is None else ops.where(own == 0.0, 1.0, own)
        sums = {k: state[slot_name(SUM, k)] + g * share.cast(g.dtype) for k, g in grads.items()}
        total, left = state[ROWS] + own, state[LEFT] - 1
        due = left <= 0
        divisor = total if counted is None else ops.where(total == 0.0, 1.0, total)
        mean = {k: s / divisor.cast(s.dtype) for k, s in sums.items()}
        # One batch with an infinite gradient makes the whole sum infinite, and the update is
        # skipped.
        ok = all_finite(mean) if self.loss_scale is not None else None
        results = self._when(due if ok is None else ops.logical_and(due, ok), params, mean, state)
        results |= {slot_name(SUM, k): ops.where(due, 0.0, s) for k, s in sums.items()}
        results |= {
            ROWS: ops.where(due, 0.0, total),
            LEFT: ops.where(due, self.accumulate, left),
        }
        return results | self._rescaled(due, ok, state), fine

    def _when(
        self,
        go: Tensor | None,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return the update if `go` is true, else parameters and state unchanged."""
        if go is None:
            return self._update(params, grads, state)
        names: list[str] = []

        def update() -> list[Tensor]:
            results = self._update(params, grads, state)
            names.extend(results)
            return list(results.values())

        def stay() -> list[Tensor]:
            # `cond` records `update` first, so `names` is filled by now.
            return [params[n] if n in params else state[n] for n in names]

        # A branch, not a `where`: while gradients accumulate, the optimizer is not computed at all.
        return dict(zip(names, ops.cond(go, update, stay), strict=True))

    def _update(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        moved, kept = self.optimizer.record_update(params, self._clipped(grads), state)
        if self.average is not None:
            # The first update sets the average to the weights, instead of correcting a start at 0
            # later.
            share = ops.where(state[STEP] > 0, 1.0 - self.average, 1.0)
            for k, p in moved.items():
                mean = state[slot_name(AVERAGE, k)]
                change = (p.cast(mean.dtype) - mean) * share.cast(mean.dtype)
                kept[slot_name(AVERAGE, k)] = mean + change
        return moved | kept

    def _clipped(self, grads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.clip_value is not None:
            grads = clip_by_value(grads, self.clip_value)
        if self.clip_each is not None:
            grads = clip_by_norm(grads, self.clip_each)
        return grads if self.clip_norm is None else clip_by_global_norm(grads, self.clip_norm)

    def _rescaled(
        self, due: Tensor | None, ok: Tensor | None, state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the next scale where an update is due, and the results that report it."""
        if self.loss_scale is None or ok is None:
            return {}
        scale, good = self.loss_scale.after(ok, state[SCALE], state[GOOD])
        skipped = ops.logical_not(ok)
        if due is not None:
            scale = ops.where(due, scale, state[SCALE])
            good = ops.where(due, good, state[GOOD])
            skipped = ops.logical_and(skipped, due)
        measured = {LOSS_SCALE: state[SCALE] * 1.0, SKIPPED: skipped.cast("float32")}
        return {SCALE: scale, GOOD: good} | measured
