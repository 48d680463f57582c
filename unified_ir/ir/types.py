"""Element types and tensor types. One literal table holds every property of an element type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, as_dim, evaluate, product, symbols

MAX_RANK: Final = 16


class ShapeError(InvalidInput):
    """Shapes that an operator cannot combine."""


class TypeMismatch(InvalidInput):
    """Element types that an operator cannot combine."""


@dataclass(frozen=True)
class DType:
    """An element type: `kind` is one of bool, int, uint, float; `onnx` its TensorProto number."""

    name: str
    kind: str
    bits: int
    onnx: int
    host: Any
    """The numpy scalar type that holds one element on the host."""

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype; sub-byte and 8-bit float types come from ml_dtypes."""
        dtype: np.dtype[Any] = np.dtype(self.host)
        return dtype

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    @property
    def is_float(self) -> bool:
        """Whether gradients flow through values of this type."""
        return self.kind == "float"


# fmt: off
_ROWS: Final = (
    DType("bool",       "bool",   8,  9, np.bool_),
    DType("int4",       "int",    4, 22, ml_dtypes.int4),
    DType("int8",       "int",    8,  3, np.int8),
    DType("int16",      "int",   16,  5, np.int16),
    DType("int32",      "int",   32,  6, np.int32),
    DType("int64",      "int",   64,  7, np.int64),
    DType("uint4",      "uint",   4, 21, ml_dtypes.uint4),
    DType("uint8",      "uint",   8,  2, np.uint8),
    DType("uint16",     "uint",  16,  4, np.uint16),
    DType("uint32",     "uint",  32, 12, np.uint32),
    DType("uint64",     "uint",  64, 13, np.uint64),
    DType("float8e4m3fn", "float", 8, 17, ml_dtypes.float8_e4m3fn),
    DType("float8e5m2", "float",  8, 19, ml_dtypes.float8_e5m2),
    DType("bfloat16",   "float", 16, 16, ml_dtypes.bfloat16),
    DType("float16",    "float", 16, 10, np.float16),
    DType("float32",    "float", 32,  1, np.float32),
    DType("float64",    "float", 64, 11, np.float64),
)
# fmt: on
DTYPES: Final[Mapping[str, DType]] = {row.name: row for row in _ROWS}
BY_ONNX: Final[Mapping[int, DType]] = {row.onnx: row for row in _ROWS}
_BY_NUMPY: Final[Mapping[np.dtype[Any], DType]] = {np.dtype(row.host): row for row in _ROWS}
assert len(DTYPES) == len(BY_ONNX) == len(_BY_NUMPY) == len(_ROWS)

bool_ = DTYPES["bool"]
int32 = DTYPES["int32"]
int64 = DTYPES["int64"]
uint8 = DTYPES["uint8"]
int8 = DTYPES["int8"]
uint32 = DTYPES["uint32"]
float16 = DTYPES["float16"]
float32 = DTYPES["float32"]
float64 = DTYPES["float64"]


def as_dtype(x: DType | DTypeLike | str) -> DType:
    """Reads an element type from a DType, its name, or anything numpy takes for a dtype."""
    if isinstance(x, DType):
        return x
    if isinstance(x, str) and x in DTYPES:
        return DTYPES[x]
    try:
        return _BY_NUMPY[np.dtype(x)]
    except (TypeError, KeyError):
        raise InvalidInput(f"no element type {x!r}; known: {', '.join(DTYPES)}") from None


@dataclass(frozen=True)
class TensorType:
    """An element type and a shape of `Dim`s; `str` gives e.g. `float32[N,1,28,28]`."""

    dtype: DType
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    __repr__ = __str__

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> Dim:
        """Number of elements."""
        return product(self.shape)

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols in the shape."""
        return frozenset().union(*(symbols(d) for d in self.shape))

    def concrete(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape as ints, for the given sizes of symbols."""
        return tuple(evaluate(d, sizes) for d in self.shape)

    def with_shape(self, shape: Iterable[Dim]) -> TensorType:
        """Same element type, another shape."""
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: DType) -> TensorType:
        """Same shape, another element type."""
        return TensorType(dtype, self.shape)


def TensorSpec(
    shape: Iterable[int | str | Dim], dtype: DType | DTypeLike | str = float32
) -> TensorType:
    """A tensor type from sizes and symbol names: `TensorSpec(("N", 1, 28, 28))`."""
    dims = tuple(as_dim(d) for d in shape)
    if len(dims) > MAX_RANK:
        raise InvalidInput(f"a tensor has at most {MAX_RANK} axes, got {len(dims)}")
    return TensorType(as_dtype(dtype), dims)


def type_of(array: np.ndarray[Any, Any]) -> TensorType:
    """The type of a host array."""
    return TensorType(as_dtype(array.dtype), array.shape)
