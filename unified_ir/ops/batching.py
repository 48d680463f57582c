"""Rules of the column `batch`: how vmap applies a row to batches of operands.

Batched tensors have the new axis first, and so do the outputs of a rule. A row without a rule is
batched through its body; one without a body runs in a scan over the new axis
(`autodiff/vectorize.py`), which is always correct but slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import Op
from triplane.unified_ir.ops.tensor import Tensor, dims_of, emit


class NeedsScan(Exception):
    """The rule does not cover this use; a scan over the new axis does."""


class RaggedResult(InvalidInput):
    """Slices of one result would differ in size; a scan of the whole function may still work."""


Vectorized = Callable[
    [Function, Sequence[bool], Dim, Sequence[bool]], tuple[Build, list[Tensor], list[bool]]
]
"""(region, which parameters are batched, size, which results must be batched) -> its batched form
as an unfinished graph, its results, and which of them are batched."""


@dataclass(frozen=True, slots=True)
class BatchedCall:
    """One node that is applied to batched operands."""

    row: Op
    inputs: tuple[Tensor | None, ...]
    batched: tuple[bool, ...]
    """Which operands have the new axis."""
    attrs: Mapping[str, Any]
    regions: tuple[Function, ...]
    types: tuple[TensorType, ...]
    """Output types of one slice."""
    size: Dim
    vectorized: Vectorized

    def rank(self, i: int) -> int:
        """Return the number of axes of one slice of operand `i`."""
        x = self.inputs[i]
        assert x is not None
        return x.rank - self.batched[i]

    def only_first(self) -> Tensor:
        """Return the first operand; a scan is needed if any other is batched."""
        x = self.inputs[0]
        if x is None or any(self.batched[1:]):
            raise NeedsScan
        return x

    def all(self) -> list[Tensor]:
        """Return the present operands, each with the new axis."""
        return [
            x if b else with_axis(x, self.size)
            for x, b in zip(self.inputs, self.batched, strict=True)
            if x is not None
        ]

    def apply(self, inputs: Sequence[Any], **attrs: Any) -> tuple[Tensor, ...]:
        """Apply the row to other operands."""
        return recorder().apply(self.row, inputs, {**self.attrs, **attrs}, outputs=len(self.types))


def with_axis(x: Tensor, size: Dim) -> Tensor:
    """Repeat `x` along a new first axis."""
    return emit("Expand", new_axes(x, 0, 1), dims_of([size, *x.shape]))


def new_axes(x: Tensor, at: int, count: int) -> Tensor:
    """Insert `count` axes of size 1 at `at`; Reshape would read a size 0 as "unchanged"."""
    return emit("Unsqueeze", x, np.arange(at, at + count)) if count else x


def elementwise(call: BatchedCall) -> Sequence[Tensor]:
    """Batch rows that compute each element on its own: all slices get the same number of axes."""
    rank = max(call.rank(i) for i, x in enumerate(call.inputs) if x is not None)
    # numpy aligns shapes from the right. A batched operand of lower rank gets its missing axes
    # after the batch axis, so that the batch axes of all operands meet.
    aligned = [
        x if x is None or not call.batched[i] else new_axes(x, 1, rank - call.rank(i))
        for i, x in enumerate(call.inputs)
    ]
    return call.apply(aligned)


def first_elementwise(call: BatchedCall) -> Sequence[Tensor]:
    """Like `elementwise` for operand 0; the other operands hold for all elements alike."""
    call.only_first()
    return call.apply(call.inputs)


def reshaped(call: BatchedCall) -> Sequence[Tensor]:
    """Batch rows that only change the shape."""
    x = call.only_first()
    return [emit("Reshape", x, dims_of([x.shape[0], *call.types[0].shape]), allowzero=1)]


def expanded(call: BatchedCall) -> Sequence[Tensor]:
    """Batch the broadcasting to a shape."""
    x, shape = call.only_first(), call.types[0].shape
    lifted = new_axes(x, 1, len(shape) - call.rank(0))
    return [emit("Expand", lifted, dims_of([x.shape[0], *shape]))]


def transposed(call: BatchedCall) -> Sequence[Tensor]:
    """Batch a permutation of axes."""
    perm = call.attrs.get("perm") or tuple(reversed(range(call.rank(0))))
    return call.apply(call.inputs, perm=(0, *(p + 1 for p in perm)))


def axis_shifted(call: BatchedCall) -> Sequence[Tensor]:
    """Batch rows that work along the attribute `axis` of all operands."""
    axis = call.row.full_attrs(call.attrs)["axis"]
    return call.apply(call.all(), axis=axis % max(call.rank(0), 1) + 1)


def first_along_axis(call: BatchedCall) -> Sequence[Tensor]:
    """Like `axis_shifted` for rows whose other operands are numbers."""
    call.only_first()
    axis = call.row.full_attrs(call.attrs)["axis"]
    return call.apply(call.inputs, axis=axis % call.rank(0) + 1)


def first_along_operand(call: BatchedCall) -> Sequence[Tensor]:
    """Batch rows that work along the axis that is operand 1."""
    x = call.only_first()
    (axis,) = known_ints(call.inputs[1])
    return call.apply([x, np.array(axis % call.rank(0) + 1)])


def axes_shifted(call: BatchedCall) -> Sequence[Tensor]:
    """Batch reductions, whose axes are operand 1; by default they are all axes of a slice."""
    x = call.only_first()
    axes_operand = call.inputs[1] if len(call.inputs) > 1 else None
    axes = [] if axes_operand is None else known_ints(axes_operand)
    if not axes and call.row.full_attrs(call.attrs).get("noop_with_empty_axes"):
        return call.apply(call.inputs)
    wanted = _shifted(call, axes or range(call.rank(0)))
    # An empty list of axes means "all" unless noop_with_empty_axes is set.
    return (
        call.apply([x, wanted]) if len(wanted) else call.apply([x, wanted], noop_with_empty_axes=1)
    )


def sliced(call: BatchedCall) -> Sequence[Tensor]:
    """Batch Slice(x, starts, ends, axes, steps)."""
    x = call.only_first()
    _, starts, ends, *rest = call.inputs
    axes = known_ints(rest[0]) if rest and rest[0] is not None else range(length(starts))
    return call.apply([x, starts, ends, _shifted(call, axes), *rest[1:]])


def padded(call: BatchedCall) -> Sequence[Tensor]:
    """Batch Pad(x, pads, value, axes)."""
    x = call.only_first()
    pads, value, axes_operand = (*call.inputs[1:], None, None)[:3]
    axes = range(call.rank(0)) if axes_operand is None else known_ints(axes_operand)
    # Without axes there is nothing to pad, and the operator reads an empty list as "all".
    return call.apply([x, pads, value, _shifted(call, axes)]) if len(axes) else [x]


def _shifted(call: BatchedCall, axes: Sequence[int]) -> Array:
    """Return axes of a slice of operand 0 as axes of the batch."""
    return np.array([a % call.rank(0) + 1 for a in axes], np.int64)


def gathered(call: BatchedCall) -> Sequence[Tensor]:
    """Batch Gather(x, index), if one of the two is batched."""
    x, index = call.inputs
    assert x is not None
    assert index is not None
    axis = call.row.full_attrs(call.attrs)["axis"] % call.rank(0)
    # Each slice would need its own indices; GatherND with batch_dims is another row.
    if all(call.batched):
        raise NeedsScan
    if call.batched[0]:
        return call.apply([x, index], axis=axis + 1)
    (picked,) = call.apply([x, index], axis=axis)
    # The axes of the index, batch first, stand where `axis` was; only the batch moves to the front.
    rest = [a for a in range(picked.rank) if a != axis]
    return [picked if axis == 0 else picked.transpose(axis, *rest)]


def merged(call: BatchedCall) -> Sequence[Tensor]:
    """Batch rows whose first operand lists independent samples: two axes of samples become one."""
    x = call.only_first()
    if len(call.types) > 1:
        raise NeedsScan
    flat = x.reshape((x.shape[0] * x.shape[1], *x.shape[2:]))
    (y,) = call.apply([flat, *call.inputs[1:]])
    return [y.reshape((x.shape[0], *call.types[0].shape))]


def merged_all(call: BatchedCall) -> Sequence[Tensor]:
    """Like `merged` for rows whose operands all list the same samples."""
    flat = [x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])) for x in call.all()]
    (y,) = call.apply(flat)
    return [y.reshape((call.size, *call.types[0].shape))]


def multiplied(call: BatchedCall) -> Sequence[Tensor]:
    """Batch MatMul: vectors become matrices of one row or column, batch axes get one rank."""
    a, b = (_matrix(call, i) for i in range(2))
    # MatMul broadcasts leading axes from the right, as `elementwise` does.
    rank = max(x.rank - call.batched[i] for i, x in enumerate((a, b)))
    lifted = [
        new_axes(x, 1, rank + 1 - x.rank) if call.batched[i] else x for i, x in enumerate((a, b))
    ]
    (y,) = call.apply(lifted)
    return [y.reshape((call.size, *call.types[0].shape))]


def _matrix(call: BatchedCall, i: int) -> Tensor:
    """Return operand `i` as a matrix at least."""
    x = call.inputs[i]
    assert x is not None
    if call.rank(i) > 1:
        return x
    lead = x.shape[:-1]
    return x.reshape((*lead, 1, x.shape[-1]) if i == 0 else (*x.shape, 1))


def known_ints(x: Tensor | None) -> list[int]:
    """Return the contents of a constant int vector."""
    contents = None if x is None else recorder().known(x)
    if contents is None:
        raise NeedsScan
    items: Any = contents if isinstance(contents, tuple) else np.atleast_1d(contents)
    if any(isinstance(d, Expr) for d in items):
        raise NeedsScan
    return [int(i) for i in items]


def length(x: Tensor | None) -> int:
    """Return how many elements a vector of static size has."""
    assert x is not None
    if not x.shape or not isinstance(x.shape[0], int):
        raise NeedsScan
    return x.shape[0]
