"""What a value is on the host, and whether it is what its type says.

A tensor is an array (of str objects for strings), a sequence a list of arrays, an optional None or
what it holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import evaluate, is_symbol
from triplane.unified_ir.ir.types import (
    OWN,
    DType,
    OptionalType,
    SequenceType,
    TensorType,
    is_plain,
    string,
)
from triplane.unified_ir.ops.sizes import bind_sizes

HostValue = Any
"""An array; a list of arrays for a sequence; one of them or None for an optional."""


def as_host_value(x: Any, type_: TensorType) -> HostValue:
    """`x` in the form that values of the type have; what it holds is not looked at."""
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
    """Records the size of each bare symbol of the type; refuses contents that are not of it."""
    if is_plain(type_):
        bind_sizes(sizes, type_, held.shape)
    elif isinstance(type_, OptionalType):
        if held is not None:
            bind(sizes, type_.element, held)
    elif isinstance(type_, SequenceType):
        for item in held:
            _check_element(sizes, type_, item)
        if type_.empty and held:
            raise InvalidInput(f"a value of type {type_} holds nothing, got {len(held)} tensors")


def _check_element(sizes: dict[str, int], type_: SequenceType, item: Any) -> None:
    element = type_.element
    if item.dtype != type_.element_dtype.numpy:
        raise InvalidInput(f"a value of type {type_} cannot hold {item.dtype}{list(item.shape)}")
    if isinstance(element, DType):
        return
    if item.ndim != element.rank or not all(
        dim == OWN or _size(sizes, dim, size) == size
        for dim, size in zip(element.shape, item.shape, strict=True)
    ):
        raise InvalidInput(f"a value of type {type_} cannot hold {item.dtype}{list(item.shape)}")


def _size(sizes: dict[str, int], dim: Any, size: int) -> int:
    return sizes.setdefault(str(dim), size) if is_symbol(dim) else evaluate(dim, sizes)
