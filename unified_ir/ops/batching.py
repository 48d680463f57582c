"""How a row is applied to many operands at once: the rules of the column `batch`.

Batched tensors have the new axis first; a rule gives outputs that have it first. A row without a
rule is batched through its body, and one without a body runs under a scan over the new axis
(`autodiff/vectorize.py`), which is always right and never fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import Op
from triplane.unified_ir.ops.tensor import Tensor, dims_of, emit


class NeedsScan(Exception):
    """The rule does not cover this use; a scan over the new axis does."""


class Ragged(InvalidInput):
    """Slices of one result would differ in size; a scan of the whole function may still do."""


Vectorized = Callable[
    [Function, Sequence[bool], Dim, Sequence[bool]], tuple[Build, list[Tensor], list[bool]]
]
"""(region, which parameters are batched, size, which results must be) -> its batched form,
unfinished, its results, and which of them are batched."""


@dataclass(frozen=True, slots=True)
class BatchedCall:
    """One node to be applied to batched operands."""

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
        """Axes of one slice of operand `i`."""
        x = self.inputs[i]
        assert x is not None
        return x.rank - self.batched[i]

    def only_first(self) -> None:
        """Goes on only where no other operand than the first is batched."""
        if any(self.batched[1:]):
            raise NeedsScan

    def all(self) -> list[Tensor]:
        """The present operands, the new axis given to those without."""
        return [
            x if b else with_axis(x, self.size)
            for x, b in zip(self.inputs, self.batched, strict=True)
            if x is not None
        ]

    def apply(self, inputs: Sequence[Any], **attrs: Any) -> tuple[Tensor, ...]:
        """The row on other operands."""
        return recorder().apply(self.row, inputs, {**self.attrs, **attrs}, outputs=len(self.types))


def with_axis(x: Tensor, size: Dim) -> Tensor:
    """`x` repeated along a new first axis."""
    return emit("Expand", new_axes(x, 0, 1), dims_of([size, *x.shape]))


def new_axes(x: Tensor, at: int, count: int) -> Tensor:
    """`count` axes of size 1 at position `at`; Reshape would take a size 0 for "as before"."""
    return emit("Unsqueeze", x, np.arange(at, at + count)) if count else x


def elementwise(call: BatchedCall) -> Sequence[Tensor]:
    """Each element on its own, with broadcasting: slices are brought to one number of axes."""
    rank = max(call.rank(i) for i, x in enumerate(call.inputs) if x is not None)

    def aligned(i: int, x: Tensor | None) -> Tensor | None:
        if x is None or not call.batched[i] or call.rank(i) == rank:
            return x
        return new_axes(x, 1, rank - call.rank(i))

    return call.apply([aligned(i, x) for i, x in enumerate(call.inputs)])


def first_elementwise(call: BatchedCall) -> Sequence[Tensor]:
    """As `elementwise` of operand 0, whatever the others say of all elements alike."""
    call.only_first()
    return call.apply(call.inputs)


def reshaped(call: BatchedCall) -> Sequence[Tensor]:
    """The same elements in another shape."""
    call.only_first()
    x = call.inputs[0]
    assert x is not None
    return [emit("Reshape", x, dims_of([x.shape[0], *call.types[0].shape]), allowzero=1)]


def expanded(call: BatchedCall) -> Sequence[Tensor]:
    """Broadcasting to a shape."""
    call.only_first()
    x, shape = call.inputs[0], call.types[0].shape
    assert x is not None
    lifted = new_axes(x, 1, len(shape) - call.rank(0))
    return [emit("Expand", lifted, dims_of([x.shape[0], *shape]))]


def transposed(call: BatchedCall) -> Sequence[Tensor]:
    """Axes in another order."""
    perm = call.attrs.get("perm") or tuple(reversed(range(call.rank(0))))
    return call.apply(call.inputs, perm=(0, *(p + 1 for p in perm)))


def axis_shifted(call: BatchedCall) -> Sequence[Tensor]:
    """Rows that work along the attribute `axis` of operands that have it alike."""
    axis = call.row.full_attrs(call.attrs)["axis"]
    return call.apply(call.all(), axis=axis % max(call.rank(0), 1) + 1)


def first_along_axis(call: BatchedCall) -> Sequence[Tensor]:
    """As `axis_shifted` for rows whose other operands count or measure."""
    call.only_first()
    axis = call.row.full_attrs(call.attrs)["axis"]
    return call.apply(call.inputs, axis=axis % call.rank(0) + 1)


def first_along_operand(call: BatchedCall) -> Sequence[Tensor]:
    """Rows that work along the axis that is operand 1."""
    call.only_first()
    (axis,) = known_ints(call.inputs[1])
    return call.apply([call.inputs[0], np.array(axis % call.rank(0) + 1)])


def axes_shifted(call: BatchedCall) -> Sequence[Tensor]:
    """Reductions, whose axes are operand 1; without it, all axes of a slice."""
    call.only_first()
    full = call.row.full_attrs(call.attrs)
    axes_operand = call.inputs[1] if len(call.inputs) > 1 else None
    axes = [] if axes_operand is None else known_ints(axes_operand)
    if not axes and full.get("noop_with_empty_axes"):
        return call.apply(call.inputs)
    rank = call.rank(0)
    wanted = [a % rank + 1 for a in axes] or list(range(1, rank + 1))
    if not wanted:
        return call.apply([call.inputs[0], np.array([], np.int64)], noop_with_empty_axes=1)
    return call.apply([call.inputs[0], np.array(wanted, np.int64)])


def sliced(call: BatchedCall) -> Sequence[Tensor]:
    """Slice(x, starts, ends, axes, steps)."""
    call.only_first()
    x, starts, ends, *rest = call.inputs
    rank = call.rank(0)
    axes = known_ints(rest[0]) if rest and rest[0] is not None else range(length(starts))
    wanted = np.array([a % rank + 1 for a in axes], np.int64)
    return call.apply([x, starts, ends, wanted, *rest[1:]])


def padded(call: BatchedCall) -> Sequence[Tensor]:
    """Pad(x, pads, value, axes)."""
    call.only_first()
    x, pads, *rest = call.inputs
    rank = call.rank(0)
    value = rest[0] if rest else None
    axes = known_ints(rest[1]) if len(rest) > 1 and rest[1] is not None else range(rank)
    wanted = np.array([a % rank + 1 for a in axes], np.int64)
    if not len(wanted):
        return [x] if x is not None else []
    return call.apply([x, pads, value, wanted])


def gathered(call: BatchedCall) -> Sequence[Tensor]:
    """Gather(x, index): one of the two batched."""
    x, index = call.inputs
    assert x is not None
    assert index is not None
    axis = call.row.full_attrs(call.attrs)["axis"] % call.rank(0)
    if all(call.batched):
        raise NeedsScan
    if call.batched[0]:
        return call.apply([x, index], axis=axis + 1)
    (picked,) = call.apply([x, index], axis=axis)
    rest = [a for a in range(picked.rank) if a != axis]
    return [picked if axis == 0 else picked.transpose(axis, *rest)]


def merged(call: BatchedCall) -> Sequence[Tensor]:
    """Rows whose first operand lists independent samples: two axes of samples become one."""
    call.only_first()
    x = call.inputs[0]
    if x is None or len(call.types) > 1:
        raise NeedsScan
    flat = x.reshape((x.shape[0] * x.shape[1], *x.shape[2:]))
    (y,) = call.apply([flat, *call.inputs[1:]])
    return [y.reshape((x.shape[0], *call.types[0].shape))]


def merged_all(call: BatchedCall) -> Sequence[Tensor]:
    """As `merged` where all operands list the same samples."""
    flat = [x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])) for x in call.all()]
    (y,) = call.apply(flat)
    return [y.reshape((call.size, *call.types[0].shape))]


def multiplied(call: BatchedCall) -> Sequence[Tensor]:
    """MatMul: vectors become matrices of one row or column, batch axes are brought to one rank."""
    a, b = (_matrix(call, i) for i in range(2))
    rank = max(x.rank - call.batched[i] for i, x in enumerate((a, b)))

    def lifted(i: int, x: Tensor) -> Tensor:
        if not call.batched[i] or x.rank - 1 == rank:
            return x
        return new_axes(x, 1, rank + 1 - x.rank)

    (y,) = call.apply([lifted(0, a), lifted(1, b)])
    return [y.reshape((call.size, *call.types[0].shape))]


def _matrix(call: BatchedCall, i: int) -> Tensor:
    """Operand `i` with two axes at least."""
    x = call.inputs[i]
    assert x is not None
    if call.rank(i) > 1:
        return x
    lead = x.shape[:-1]
    return x.reshape((*lead, 1, x.shape[-1]) if i == 0 else (*x.shape, 1))


def known_ints(x: Tensor | None) -> list[int]:
    """The contents of a constant int vector."""
    contents = None if x is None else recorder().known(x)
    if contents is None:
        raise NeedsScan
    items: list[Any] = (
        list(contents) if isinstance(contents, tuple) else list(np.atleast_1d(contents))
    )
    if any(isinstance(d, Expr) for d in items):
        raise NeedsScan
    return [int(i) for i in items]


def length(x: Tensor | None) -> int:
    """How many elements a vector of static size has."""
    assert x is not None
    if not x.shape or not isinstance(x.shape[0], int):
        raise NeedsScan
    return x.shape[0]
