"""Names, types and shapes of a graph's inputs and outputs, and the check of what a caller feeds.

The check is the boundary: after it, a call can fail only because of the values inside the tensors.
It costs well under a microsecond per tensor, so serving and training run it on every call.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files.samples import transpose_hint

Array = npt.NDArray[Any]

NEXT: Final = ":next"
"""An output named `w:next` is the new value of the state tensor `w`.

ONNX forbids one name for an input and for a node's result (onnxruntime: "Duplicate definition of
name"), so the new value carries this suffix; no parameter path contains a colon.
"""

LISTED: Final = 12
"""Number of names that a message lists; the others are only counted."""
UNNAMED: Final = "?"
"""A dimension whose size the graph does not state; two of them may differ."""

# fmt: off
DTYPES: Final[Mapping[str, str]] = {
    # onnxruntime            ours
    "tensor(bool)":          "bool",
    "tensor(int8)":          "int8",
    "tensor(int16)":         "int16",
    "tensor(int32)":         "int32",
    "tensor(int64)":         "int64",
    "tensor(uint8)":         "uint8",
    "tensor(uint16)":        "uint16",
    "tensor(uint32)":        "uint32",
    "tensor(uint64)":        "uint64",
    "tensor(float16)":       "float16",
    "tensor(float)":         "float32",
    "tensor(double)":        "float64",
    "tensor(bfloat16)":      "bfloat16",
    "tensor(float8e4m3fn)":  "float8_e4m3fn",
    "tensor(float8e5m2)":    "float8_e5m2",
    "tensor(int4)":          "int4",
    "tensor(uint4)":         "uint4",
    "tensor(float8e4m3fnuz)": "float8_e4m3fnuz",
    "tensor(float8e5m2fnuz)": "float8_e5m2fnuz",
    "tensor(float8e8m0)":    "float8_e8m0",
    "tensor(float4e2m1)":    "float4_e2m1",
    "tensor(int2)":          "int2",
    "tensor(uint2)":         "uint2",
    "tensor(string)":        "string",
}
# fmt: on

INSIDE_ONLY: Final = frozenset({
    "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0",
    "float4_e2m1", "int4", "uint4", "int2", "uint2",
})  # fmt: skip
"""Dtypes that numpy lacks: tensors inside a graph may have them, its inputs and outputs may not."""

_NO_ARRAY: Final = np.dtype([("no array has this dtype", "V1")])
"""Stands for the dtypes above in a check. None would not do: numpy takes it for float64."""


FORMS: Final = {"optional(seq(": "optional sequence", "optional(": "optional", "seq(": "sequence"}
"""Prefixes of the element type in onnxruntime's names of sequence and optional types."""


def next_name(state: str) -> str:
    """Return the name of the output that carries the new value of the state tensor `state`."""
    return state + NEXT


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output: `shape` holds sizes, symbols such as "N", or `UNNAMED`."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    form: str = "tensor"
    """Or "sequence" (a list of arrays), "optional", "optional sequence" (one of these, or None)."""

    @property
    def is_static(self) -> bool:
        """Return whether it is a tensor all of whose dimensions are numbers."""
        return self.form == "tensor" and all(isinstance(dim, int) for dim in self.shape)

    def __str__(self) -> str:
        dims = ", ".join(str(dim) for dim in self.shape)
        if self.form != "tensor":
            return f"{self.name}: {self.form} of {self.dtype}"
        return f"{self.name}: {self.dtype}({dims})"


class Signature:
    """The inputs of a call, compiled once so that checking a call is cheap."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self.tensors = tuple(tensors)
        self.names = frozenset(tensor.name for tensor in self.tensors)
        self._rows = tuple(_compile(tensor) for tensor in self.tensors if tensor.form == "tensor")
        self._others = tuple(tensor for tensor in self.tensors if tensor.form != "tensor")

    def check(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return `feeds` as arrays; InvalidInput names the tensor, what was expected and seen.

        Names must match exactly, dtypes exactly, ranks and fixed sizes exactly, and one symbol
        means one size across all inputs.
        """
        if feeds.keys() != self.names:
            raise _names_differ(self.names, feeds)
        sizes: dict[str, int] = {}
        for name, dtype, rank, fixed, symbols in self._rows:
            x = feeds[name]
            if type(x) is not np.ndarray:
                # A new dict: the caller's own must not change.
                feeds = {**feeds, name: (x := np.asarray(x))}
            shape = x.shape
            if x.dtype != dtype or len(shape) != rank:
                raise self._refused(name, x)
            for axis, size in fixed:
                if shape[axis] != size:
                    raise self._refused(name, x)
            for axis, symbol in symbols:
                # The first input with a symbol fixes its size for all others.
                if sizes.setdefault(symbol, shape[axis]) != shape[axis]:
                    raise self._refused(name, x, f"; {symbol} is {sizes[symbol]} in another input")
        for info in self._others:
            _check_form(info, feeds[info.name])
        return feeds

    def _refused(self, name: str, x: Array, more: str = "") -> InvalidInput:
        want = next(tensor for tensor in self.tensors if tensor.name == name)
        if want.dtype in INSIDE_ONLY:
            more = f"; {want.dtype} does not pass through numpy, cast inside the graph"
        more = more or transpose_hint(x.shape, want.shape)
        return InvalidInput(f"input must be {want}, got {x.dtype}{x.shape}{more}")


Row = tuple[
    str, np.dtype[Any] | None, int, tuple[tuple[int, int], ...], tuple[tuple[int, str], ...]
]


def _compile(tensor: TensorInfo) -> Row:
    axes = list(enumerate(tensor.shape))
    fixed = tuple((axis, dim) for axis, dim in axes if isinstance(dim, int))
    symbols = tuple((axis, dim) for axis, dim in axes if isinstance(dim, str) and dim != UNNAMED)
    return tensor.name, _numpy_dtype(tensor.dtype), len(axes), fixed, symbols


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name in INSIDE_ONLY:
        return _NO_ARRAY
    return np.dtype(np.object_ if name == "string" else name)


def _check_form(info: TensorInfo, value: Any) -> None:
    """Raise InvalidInput unless `value` is a sequence or an optional of this kind."""
    if value is None and info.form.startswith("optional"):
        return
    items = value if info.form.endswith("sequence") else [value]
    dtype = _numpy_dtype(info.dtype)
    if not isinstance(items, list) or not all(
        isinstance(x, np.ndarray) and x.dtype == dtype for x in items
    ):
        raise InvalidInput(
            f"input must be {info}: a sequence is a list of arrays, an optional is None or its "
            f"value; got {str(value)[:80]}"
        )


def _names_differ(names: frozenset[str], feeds: Mapping[str, Array]) -> InvalidInput:
    return InvalidInput(
        f"inputs must be exactly {_listed(names)}; missing {_listed(names - feeds.keys())}, "
        f"unknown {_listed(feeds.keys() - names)}"
    )


def _listed(names: Iterable[str]) -> str:
    """Return the first names, and the number of the others."""
    first, more = sorted(names)[:LISTED], len(set(names)) - LISTED
    return f"{first} and {more} more" if more > 0 else str(first)
