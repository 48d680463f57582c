"""Cells with a strategy: their inputs are cut before their operators read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ops.recorder import recorder, recording
from triplane.unified_ir.ops.source import user_location
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor


def sharded_cell(
    cell: Callable[..., Any],
    strategy: Sequence[Sequence[int] | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a cell on tensors that an Identity with a strategy has cut; arrays are not cut."""
    if not recording():
        return cell(*args, **kwargs)
    operands = (*args, *kwargs.values())
    tensors = [recorder().as_operand(x) if hasattr(x, "__tensor__") else x for x in operands]
    count = sum(isinstance(x, Tensor) for x in tensors)
    if len(strategy) != count:
        place = user_location()
        raise InvalidInput(
            f"{type(cell).__name__}.shard has slices for {len(strategy)} tensors, and the call has "
            f"{count}; give one tuple for each, None for a tensor that stays open"
            f"{f' (at {place})' if place else ''}"
        )
    splits = iter(strategy)
    cut = [_cut(x, next(splits)) if isinstance(x, Tensor) else x for x in tensors]
    return cell(*cut[: len(args)], **dict(zip(kwargs, cut[len(args) :], strict=True)))


def _cut(x: Tensor, slices: Sequence[int] | None) -> Tensor:
    return x if slices is None else TABLE["", "Identity"].shard(slices)(x)
