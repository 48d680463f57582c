"""Sizes that symbols take in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import evaluate, is_symbol, symbols
from triplane.unified_ir.ir.types import TensorType

Sizes = Mapping[str, int]


def bind_sizes(sizes: dict[str, int], type_: TensorType, shape: Sequence[int]) -> None:
    """Records the size of each bare symbol of `type_`; two sizes for one symbol are refused."""
    for dim, size in zip(type_.shape, shape, strict=True):
        if isinstance(dim, int):
            if dim != size:
                raise InvalidInput(f"a value of type {type_} cannot have shape {tuple(shape)}")
        elif is_symbol(dim) and sizes.setdefault(str(dim), size) != size:
            raise InvalidInput(
                f"symbol {dim} is {sizes[str(dim)]} and {size} in one call; sizes named alike agree"
            )
        elif not is_symbol(dim) and symbols(dim) <= sizes.keys() and evaluate(dim, sizes) != size:
            raise InvalidInput(
                f"a size {dim} is {evaluate(dim, sizes)} for this call and {size} was found: an "
                "axis is too short for what a slice, a split or a window takes of it"
            )
