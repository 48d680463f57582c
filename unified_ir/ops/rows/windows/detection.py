"""Rows of object detection."""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.unified_ir.ir.types import ShapeError, TensorType, int64
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.samples import fixed, sample

_PLACES = [[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, -0.1, 1, 0.9], [0, 10, 1, 11], [0, 10.1, 1, 11.1]]]
_BOXES = _PLACES * 2
_SCORES = [[[0.9, 0.75, 0.6, 0.95, 0.5]], [[0.1, 0.2, 0.3, 0.45, 0.5]]]


def _non_max_types(call: OpCall) -> tuple[TensorType, ...]:
    boxes, scores = call.type(0).shape, call.type(1).shape
    if len(boxes) != 3 or len(scores) != 3 or boxes[2] != 4:
        raise ShapeError(
            f"{call.row} takes boxes (B, P, 4) and scores (B, C, P), "
            f"got {call.type(0)} and {call.type(1)}"
        )
    if (boxes[0], boxes[1]) != (scores[0], scores[2]):
        raise ShapeError(f"{call.row} takes one score per box, got {call.type(0)}, {call.type(1)}")
    limits = [call.type(i) for i in range(2, len(call.types)) if call.has(i)]
    if any(t.size != 1 for t in limits):
        raise ShapeError(f"{call.row} takes one number per limit, got {limits}")
    return (TensorType(int64, (call.opened(), 3)),)


def _corners(boxes: Any, center: int) -> Any:
    """Return boxes as (low y, low x, high y, high x), whichever diagonal their corners span."""
    if center:
        # (x, y, width, height) -> (y, x) and (height, width) / 2.
        middle, half = boxes[:, 1::-1], boxes[:, :1:-1] / 2
        return np.concatenate([middle - half, middle + half], axis=1)
    ends = boxes[:, :2], boxes[:, 2:]
    return np.concatenate([np.minimum(*ends), np.maximum(*ends)], axis=1)


def _overlap(box: Any, others: Any) -> Any:
    """Return the intersection over union of one box with each of the others."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    shared = np.prod(np.maximum(high - low, 0), axis=1)
    area = np.prod(others[:, 2:] - others[:, :2], axis=1)
    union = np.prod(box[2:] - box[:2]) + area - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def _best_apart(boxes: Any, scores: Any, most: int, iou: float, least: float | None) -> list[int]:
    """Return boxes by falling score, none of which overlaps a better one by more than `iou`."""
    kept: list[int] = []
    # A stable sort: among equal scores the lower index is taken first.
    for i in np.argsort(-scores, kind="stable"):
        if len(kept) == most or (least is not None and not scores[i] > least):
            break
        if not kept or (_overlap(boxes[i], boxes[kept]) <= iou).all():
            kept.append(int(i))
    return kept


def _non_max(
    boxes: Any, scores: Any, most: Any = None, iou: Any = None, least: Any = None,
    *, center_point_box: int,
) -> Any:  # fmt: skip
    # ONNX: without max_output_boxes_per_class (0) no box is selected.
    limit = int(np.ravel(most)[0]) if most is not None else 0
    floor = None if least is None else float(np.ravel(least)[0])
    bound = 0.0 if iou is None else float(np.ravel(iou)[0])
    rows = []
    for b, planes in enumerate(scores):
        corners = _corners(boxes[b], center_point_box)
        for c, plane in enumerate(planes):
            rows += [(b, c, i) for i in _best_apart(corners, plane, max(limit, 0), bound, floor)]
    return np.array(rows, np.int64).reshape(-1, 3)


non_max_suppression = Op(
    name="NonMaxSuppression", kind=OpKind.INDEXING, settings=(2, 3, 4),
    data_dependent_dims=1,
    infer=_non_max_types,
    reference=_non_max,
    samples=(
        sample(fixed(_BOXES, "float32"), fixed(_SCORES, "float32"), fixed([3]),
               fixed([0.5], "float32"), fixed([0.4], "float32")),
        sample(fixed(_BOXES, "float32"), fixed(_SCORES, "float32"), fixed([2]),
               fixed([0.5], "float32"), center_point_box=1),
    ),
)  # fmt: skip
"""boxes (B, P, 4), scores (B, C, P) -> int64 (size, 3): batch, class and box of each one kept."""
