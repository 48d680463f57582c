"""Element types; types of tensors, sequences and optionals.

One literal table holds every property of an element type. A sequence or an optional is a
`TensorType` without axes whose `dtype` is not numeric: code for tensors passes it through
unchanged, and a rule that accepts one checks for its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, as_dim, evaluate, product, substitute, symbol, symbols

MAX_RANK: Final = 16


class ShapeError(InvalidInput):
    """Shapes that an operator cannot combine."""


class TypeMismatch(InvalidInput):
    """Element types that an operator cannot combine."""


@dataclass(frozen=True)
class DType:
    """An element type: `kind` is one of bool, int, uint, float, string; `onnx` its number there."""

    name: str
    kind: str
    bits: int
    """Bits of one element; 0 for strings, whose elements have no common size."""
    onnx: int
    host: Any
    """The numpy scalar type that holds one element on the host."""

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype; types below a byte and 8-bit floats come from ml_dtypes."""
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
    DType("int2",       "int",    2, 26, ml_dtypes.int2),
    DType("int4",       "int",    4, 22, ml_dtypes.int4),
    DType("int8",       "int",    8,  3, np.int8),
    DType("int16",      "int",   16,  5, np.int16),
    DType("int32",      "int",   32,  6, np.int32),
    DType("int64",      "int",   64,  7, np.int64),
    DType("uint2",      "uint",   2, 25, ml_dtypes.uint2),
    DType("uint4",      "uint",   4, 21, ml_dtypes.uint4),
    DType("uint8",      "uint",   8,  2, np.uint8),
    DType("uint16",     "uint",  16,  4, np.uint16),
    DType("uint32",     "uint",  32, 12, np.uint32),
    DType("uint64",     "uint",  64, 13, np.uint64),
    DType("float4e2m1", "float",  4, 23, ml_dtypes.float4_e2m1fn),
    DType("float8e4m3fn", "float", 8, 17, ml_dtypes.float8_e4m3fn),
    DType("float8e4m3fnuz", "float", 8, 18, ml_dtypes.float8_e4m3fnuz),
    DType("float8e5m2", "float",  8, 19, ml_dtypes.float8_e5m2),
    DType("float8e5m2fnuz", "float", 8, 20, ml_dtypes.float8_e5m2fnuz),
    DType("float8e8m0", "float",  8, 24, ml_dtypes.float8_e8m0fnu),
    DType("bfloat16",   "float", 16, 16, ml_dtypes.bfloat16),
    DType("float16",    "float", 16, 10, np.float16),
    DType("float32",    "float", 32,  1, np.float32),
    DType("float64",    "float", 64, 11, np.float64),
    DType("string",     "string", 0,  8, np.object_),
)
# fmt: on
DTYPES: Final[Mapping[str, DType]] = {row.name: row for row in _ROWS}
# Numbers of TensorProto.DataType. Its complex types (14 and 15) have no row.
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
bfloat16 = DTYPES["bfloat16"]
float32 = DTYPES["float32"]
float64 = DTYPES["float64"]
string = DTYPES["string"]

_SEQUENCE: Final = DType("sequence", "sequence", 0, 0, np.object_)
_OPTIONAL: Final = DType("optional", "optional", 0, 0, np.object_)
OWN: Final = symbol("_")
"""In the type of a sequence's elements: a size that may differ from element to element."""


def as_dtype(x: DType | DTypeLike | str) -> DType:
    """Read an element type from a DType, its name, or anything that numpy accepts as a dtype."""
    if isinstance(x, DType):
        return x
    # Names come first: some of ours, such as float8e4m3fn and string, are none of numpy's.
    if isinstance(x, str) and x in DTYPES:
        return DTYPES[x]
    try:
        dtype = np.dtype(x)
        # numpy gives arrays of str a dtype per length, such as <U5; elements of ours are Python
        # objects.
        return string if dtype.kind == "U" else _BY_NUMPY[dtype]
    except (TypeError, KeyError):
        out = "; a complex tensor is a real one with a last axis of 2" * ("complex" in repr(x))
        raise InvalidInput(f"no element type {x!r}; known: {', '.join(DTYPES)}{out}") from None


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

    @property
    def carries_gradient(self) -> bool:
        """Whether a value of this type holds floats, through which gradients flow."""
        return self.dtype.is_float

    def with_sizes(self, sizes: Mapping[str, Dim]) -> TensorType:
        """Return the type with symbols replaced."""
        return TensorType(self.dtype, tuple(substitute(d, sizes) for d in self.shape))

    def concrete(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape as ints, for the given sizes of symbols."""
        return tuple(evaluate(d, sizes) for d in self.shape)

    def with_shape(self, shape: Iterable[Dim]) -> TensorType:
        """Return the type with another shape."""
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: DType) -> TensorType:
        """Return the type with another element type."""
        return TensorType(dtype, self.shape)


def TensorSpec(
    shape: Iterable[int | str | Dim], dtype: DType | DTypeLike | str = float32
) -> TensorType:
    """Return a tensor type from sizes and symbol names: `TensorSpec(("N", 1, 28, 28))`."""
    dims = tuple(as_dim(d) for d in shape)
    if len(dims) > MAX_RANK:
        raise InvalidInput(f"a tensor has at most {MAX_RANK} axes, got {len(dims)}")
    return TensorType(as_dtype(dtype), dims)


@dataclass(frozen=True, init=False, repr=False)
class SequenceType(TensorType):
    """Any number of tensors in order; `str` gives e.g. `seq(float32[_,3])`.

    `element` is their type, in which a size `_` may differ from tensor to tensor, or only an
    element type if their shapes are unknown. `empty`: it has no tensor yet, so any shape fits.
    """

    element: TensorType | DType
    empty: bool

    def __init__(self, element: TensorType | DType, *, empty: bool = False) -> None:
        if not isinstance(element, DType):
            if not is_plain(element):
                raise InvalidInput(f"a sequence holds tensors, not {element}")
            # Also for expressions such as 2*_: each element has its own size, so no two need agree.
            shape = (OWN if "_" in symbols(d) else d for d in element.shape)
            element = element.dtype if empty else element.with_shape(shape)
        _fill(self, dtype=_SEQUENCE, shape=(), element=element, empty=empty)

    def __str__(self) -> str:
        return f"seq({self.element}{' none' if self.empty else ''})"

    __repr__ = __str__

    @property
    def element_dtype(self) -> DType:
        """The element type of the tensors."""
        return self.element if isinstance(self.element, DType) else self.element.dtype

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols in the elements' shape, `_` excepted."""
        inner = self.element
        return frozenset() if isinstance(inner, DType) else inner.symbols - {"_"}

    @property
    def carries_gradient(self) -> bool:
        """See `TensorType`."""
        return self.element_dtype.is_float

    def with_sizes(self, sizes: Mapping[str, Dim]) -> SequenceType:
        """See `TensorType`."""
        if isinstance(self.element, DType):
            return self
        # `_` stands for a size per element, so no size of the graph may replace it.
        kept = {name: size for name, size in sizes.items() if name != "_"}
        return SequenceType(self.element.with_sizes(kept))


@dataclass(frozen=True, init=False, repr=False)
class OptionalType(TensorType):
    """A tensor or sequence of type `element`, or nothing; `str` gives `optional(float32[2])`."""

    element: TensorType

    def __init__(self, element: TensorType) -> None:
        if isinstance(element, OptionalType):
            raise InvalidInput(f"an optional holds a tensor or a sequence, not {element}")
        _fill(self, dtype=_OPTIONAL, shape=(), element=element)

    def __str__(self) -> str:
        return f"optional({self.element})"

    __repr__ = __str__

    @property
    def symbols(self) -> frozenset[str]:
        """Symbols in the type that it may hold."""
        return self.element.symbols

    @property
    def carries_gradient(self) -> bool:
        """See `TensorType`."""
        return self.element.carries_gradient

    def with_sizes(self, sizes: Mapping[str, Dim]) -> OptionalType:
        """See `TensorType`."""
        return OptionalType(self.element.with_sizes(sizes))


def _fill(type_: TensorType, **fields: object) -> None:
    for name, value in fields.items():
        # Frozen dataclasses refuse plain assignment, also in an `__init__` of their own.
        object.__setattr__(type_, name, value)


def is_plain(type_: TensorType) -> bool:
    """Return whether values of the type are tensors, not sequences or optionals."""
    return type(type_) is TensorType


def joined(a: TensorType, b: TensorType) -> TensorType | None:
    """Return the narrowest type that values of both types have; None if there is none.

    Two tensor types join only if they are equal; two sequences of one element type always do.
    """
    if a == b:
        return a
    if isinstance(a, OptionalType) and isinstance(b, OptionalType):
        inner = joined(a.element, b.element)
        return None if inner is None else OptionalType(inner)
    if not isinstance(a, SequenceType) or not isinstance(b, SequenceType):
        return None
    if a.element_dtype != b.element_dtype:
        return None
    if a.empty or b.empty:
        return b if a.empty else a
    return SequenceType(joined_elements(a.element, b.element))


def joined_elements(a: TensorType | DType, b: TensorType | DType) -> TensorType | DType:
    """Return what `a` and `b`, two types of elements with the same dtype, have in common."""
    if isinstance(a, DType) or isinstance(b, DType):
        return a if isinstance(a, DType) else a.dtype
    if a.rank != b.rank:
        return a.dtype
    pairs = zip(a.shape, b.shape, strict=True)
    return a.with_shape(x if x == y else OWN for x, y in pairs)


def fits(actual: TensorType, wanted: TensorType) -> bool:
    """Return whether each value of type `actual` also has type `wanted`."""
    return joined(actual, wanted) == wanted


def type_of(array: np.ndarray[Any, Any]) -> TensorType:
    """Return the type of a host array."""
    dtype = as_dtype(array.dtype)
    # numpy's object arrays hold anything, including what a file cannot store.
    if dtype == string and not all(isinstance(x, str) for x in array.reshape(-1)):
        raise InvalidInput("an array of Python objects is a tensor only if each object is a str")
    return TensorType(dtype, array.shape)
