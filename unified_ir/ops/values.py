"""Values on the host, and whether they are what their types say.

A tensor is an array (of str objects for strings), a sequence is a list of arrays, an optional is
None or the value it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import evaluate, is_symbol, symbols
from triplane.unified_ir.ir.types import (
    OWN,
    DType,
    OptionalType,
    SequenceType,
    TensorType,
    is_plain,
    string,
)

HostValue = Any
"""An array; a list of arrays for a sequence; one of them or None for an optional."""
Sizes = Mapping[str, int]
"""The sizes that symbols take in one call."""


def as_host_value(x: Any, type_: TensorType) -> HostValue:
    """Return `x` in the form that values of the type have, without checking what it holds."""
    if isinstance(type_, OptionalType):
        return None if x is None else as_host_value(x, type_.element)
    if isinstance(type_, SequenceType):
        if not isinstance(x, (list, tuple)):
            raise InvalidInput(f"a value of type {type_} is a list of arrays, got {x!r}"[:300])
        return [_array(item, type_.element_dtype) for item in x]
    return _array(x, type_.dtype)


def _array(x: Any, dtype: DType) -> Any:
    array = np.asarray(x)
    return array.astype(np.object_) if dtype == string and array.dtype.kind == "U" else array


def bind(sizes: dict[str, int], type_: TensorType, held: HostValue) -> None:
    """Record the size of each bare symbol of the type; refuse contents that do not fit it."""
    if is_plain(type_):
        _bind_sizes(sizes, type_, held.shape)
    elif isinstance(type_, OptionalType):
        if held is not None:
            bind(sizes, type_.element, held)
    elif isinstance(type_, SequenceType):
        for item in held:
            _check_element(sizes, type_, item)
        if type_.empty and held:
            raise InvalidInput(f"a value of type {type_} holds nothing, got {len(held)} tensors")


def _bind_sizes(sizes: dict[str, int], type_: TensorType, shape: tuple[int, ...]) -> None:
    for dim, size in zip(type_.shape, shape, strict=True):
        if isinstance(dim, int):
            if dim != size:
                raise InvalidInput(f"a value of type {type_} cannot have shape {shape}")
        elif is_symbol(dim):
            if sizes.setdefault(str(dim), size) != size:
                raise InvalidInput(
                    f"symbol {dim} is {sizes[str(dim)]} and {size} in one call; it has one size"
                )
        # Expressions are checked once all their symbols have sizes; an earlier one cannot be.
        elif symbols(dim) <= sizes.keys() and evaluate(dim, sizes) != size:
            raise InvalidInput(
                f"the size {dim} is {evaluate(dim, sizes)} in this call, but the value has {size}: "
                "an axis is too short for what a slice, a split or a window takes of it"
            )


def _check_element(sizes: dict[str, int], type_: SequenceType, item: Any) -> None:
    element = type_.element
    fits = item.dtype == type_.element_dtype.numpy
    if fits and not isinstance(element, DType):
        fits = item.ndim == element.rank and all(
            dim == OWN or _size(sizes, dim, size) == size
            for dim, size in zip(element.shape, item.shape, strict=True)
        )
    if not fits:
        raise InvalidInput(f"a value of type {type_} cannot hold {item.dtype}{list(item.shape)}")


def _size(sizes: dict[str, int], dim: Any, size: int) -> int:
    return sizes.setdefault(str(dim), size) if is_symbol(dim) else evaluate(dim, sizes)
