"""Sizes that a program knows and inference cannot, because only the data decide them.

A program asserts such a size. The assertion is checked when the program runs, on every engine; it
never changes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, as_dim
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, Op, OpCall, OpKind
from triplane.unified_ir.ops.tensor import Tensor


def _asserted(call: OpCall) -> tuple[TensorType, ...]:
    x, dims = call.type(0), call.attrs["dims"]
    if len(dims) != x.rank or any(
        isinstance(a, int) and isinstance(b, int) and a != b
        for a, b in zip(x.shape, dims, strict=True)
    ):
        raise ShapeError(f"{call.row} asserts that {x} has the sizes {dims}, which it cannot have")
    return (x.with_shape(dims),)


def _checked(x: Any, *, dims: tuple[int, ...]) -> Any:
    if x.shape != tuple(dims):
        raise InvalidInput(f"a tensor was asserted to have shape {tuple(dims)}, but has {x.shape}")
    return x


def _emit_sized(context: EmissionContext, node: Node) -> None:
    """Emit a Reshape per asserted axis, which fails if the number of elements differs."""
    (name,) = context.inputs(node)
    (x,), (y,) = node.inputs, node.outputs
    assert x is not None
    shape = list(x.type.shape)
    for axis, size in enumerate(y.type.shape):
        # One axis at a time: a single Reshape to all sizes would accept (2, 6) asserted as (3, 4).
        if shape[axis] != size:
            shape[axis] = size
            name = context.emit("Reshape", name, context.dims(shape), allowzero=1)
    context.names[y] = name


sized = Op(
    name="Sized",
    computes="x; a run in which it has other sizes than `dims` fails",
    kind=OpKind.MOVEMENT,
    emit=_emit_sized,
    domain=DOMAIN,
    operands=("T",),
    attrs={"dims": AttrSpec("DIMS", required=True)},
    infer=_asserted,
    reference=_checked,
    xla=lambda k, x, *, dims: _checked(x, dims=dims),
    vjp=lambda g, y, x, dims: (assume_shape(g, x.shape),),
)


def assume_shape(x: Tensor, shape: Sequence[Dim | str]) -> Tensor:
    """Return `x`, known to have these sizes; a run in which it has others fails and shows both."""
    dims = tuple(as_dim(d) for d in shape)
    return x if dims == x.shape else sized(x, dims=dims)
