"""`Tensor`: a handle on a value of the graph under construction; operators on it add nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr
from triplane.unified_ir.ir.graph import Array, Value
from triplane.unified_ir.ir.types import DType, TensorType, as_dtype, bool_
from triplane.unified_ir.ops.recorder import Recorder, recorder
from triplane.unified_ir.ops.source import user_location


class Tensor:
    """A value of the graph under construction; operators on it add nodes."""

    __slots__ = ("build", "value")
    __array_ufunc__ = None
    """numpy operators defer to this class, so `array + tensor` records a node."""

    def __init__(self, build: Recorder, value: Value) -> None:
        self.build = build
        self.value = value

    @property
    def type(self) -> TensorType:
        """Element type and shape."""
        return self.value.type

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Sizes; symbolic ones are expressions such as `N`."""
        return self.value.type.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.value.type.dtype

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.value.type.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise InvalidInput(
            f"numpy was given {self}, which is an operand of a graph; use the function of that "
            "name in triplane.unified_ir.ops, or its own methods"
        )

    def numpy(self) -> Array:
        """The array, in eager mode."""
        if self.build.arrays is None:
            raise InvalidInput(
                f"{self} is symbolic: a recorded graph has no values yet (at {user_location()}); "
                "run the function, or use mode('eager') to see arrays while it is recorded"
            )
        return self.build.arrays[self.value]

    def __float__(self) -> float:
        return float(self._number("float()"))

    def __int__(self) -> int:
        return int(self._number("int()"))

    def __index__(self) -> int:
        if self.dtype.is_float:
            raise TypeError(f"{self} is no whole number")
        return int(self._number("an index, range() or a size"))

    def __round__(self, digits: int = 0) -> float:
        return round(float(self._number("round()")), digits)

    def __format__(self, how: str) -> str:
        return format(self.numpy(), how) if how else repr(self)

    def __contains__(self, _: object) -> bool:
        raise InvalidInput(
            f"`in` asks {self} for a truth value at {user_location()}; use (x == value).sum() > 0"
        )

    def _number(self, what: str) -> Array:
        """The one value, for Python to work with."""
        if self.build.arrays is None:
            raise InvalidInput(
                f"{what} needs a number at {user_location()}, but {self} has none while the graph "
                "is recorded; stay with tensors (ops.cast, ops.round_, loops over range of a "
                "tensor under @graph), or use mode('eager')"
            )
        return self.build.arrays[self.value].reshape(())

    def __setitem__(self, _: object, __: object) -> None:
        raise InvalidInput(
            f"{self} is a value and never changes; ops.where and ops.scatter_nd give a changed one"
        )

    def __repr__(self) -> str:
        name = self.value.name or "value"
        if self.build.arrays is not None and self.value in self.build.arrays:
            return f"Tensor({name}: {self.type} = {self.build.arrays[self.value]!r})"
        return f"Tensor({name}: {self.type})"

    def __bool__(self) -> bool:
        if self.build.arrays is not None:
            return bool(self.build.arrays[self.value])
        raise InvalidInput(
            f"{self!r} has no truth value while the graph is recorded (at {user_location()}); "
            "decorate the function with "
            "@graph (or write it in a Cell's construct) so that `if` and `while` become graph "
            "operators, or use ops.cond, ops.while_loop or ops.where"
        )

    def __len__(self) -> int:
        if not self.shape or not isinstance(self.shape[0], int):
            raise InvalidInput(f"len() needs a fixed first axis, got {self.type}")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __hash__(self) -> int:
        return id(self)

    # fmt: off
    def __add__(self, other: Any) -> Tensor: return emit("Add", self, other)
    def __radd__(self, other: Any) -> Tensor: return emit("Add", other, self)
    def __sub__(self, other: Any) -> Tensor: return emit("Sub", self, other)
    def __rsub__(self, other: Any) -> Tensor: return emit("Sub", other, self)
    def __mul__(self, other: Any) -> Tensor: return emit("Mul", self, other)
    def __rmul__(self, other: Any) -> Tensor: return emit("Mul", other, self)
    def __truediv__(self, other: Any) -> Tensor: return _divide(self, other)
    def __rtruediv__(self, other: Any) -> Tensor: return _divide(other, self)
    def __floordiv__(self, other: Any) -> Tensor: return _floor_divide(self, other)
    def __rfloordiv__(self, other: Any) -> Tensor: return _floor_divide(other, self)
    def __pow__(self, other: Any) -> Tensor: return emit("Pow", self, other)
    def __rpow__(self, other: Any) -> Tensor: return emit("Pow", other, self)
    def __matmul__(self, other: Any) -> Tensor: return emit("MatMul", self, other)
    def __rmatmul__(self, other: Any) -> Tensor: return emit("MatMul", other, self)
    def __neg__(self) -> Tensor: return emit("Neg", self)
    def __lt__(self, other: Any) -> Tensor: return emit("Less", self, other)
    def __le__(self, other: Any) -> Tensor: return emit("LessOrEqual", self, other)
    def __gt__(self, other: Any) -> Tensor: return emit("Greater", self, other)
    def __ge__(self, other: Any) -> Tensor: return emit("GreaterOrEqual", self, other)
    def __eq__(self, other: object) -> Tensor: return emit("Equal", self, other)  # type: ignore[override]
    def __ne__(self, other: object) -> Tensor: return emit("Not", emit("Equal", self, other))  # type: ignore[override]
    def __and__(self, other: Any) -> Tensor: return emit("And", self, other)
    def __or__(self, other: Any) -> Tensor: return emit("Or", self, other)
    def __invert__(self) -> Tensor: return emit("Not", self)
    # fmt: on

    def __getitem__(self, index: Any) -> Tensor:
        return getitem(self, index)

    def cast(self, dtype: DType | str) -> Tensor:
        """The same numbers in another element type."""
        wanted = as_dtype(dtype)
        return self if wanted == self.dtype else emit("Cast", self, to=wanted.onnx)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape; one size may be -1."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return self if tuple(sizes) == self.shape else emit("Reshape", self, dims_of(sizes))

    def transpose(self, *perm: int) -> Tensor:
        """Axes in the given order (reversed by default)."""
        return emit("Transpose", self, perm=perm or None)

    def sum(self, axes: Sequence[int] | None = None, *, keepdims: bool = False) -> Tensor:
        """Sum over `axes` (all by default)."""
        return reduce("ReduceSum", self, axes, keepdims=keepdims)

    def mean(self, axes: Sequence[int] | None = None, *, keepdims: bool = False) -> Tensor:
        """Mean over `axes` (all by default)."""
        return reduce("ReduceMean", self, axes, keepdims=keepdims)

    def max(self, axes: Sequence[int] | None = None, *, keepdims: bool = False) -> Tensor:
        """Maximum over `axes` (all by default)."""
        return reduce("ReduceMax", self, axes, keepdims=keepdims)


def _divide(a: Any, b: Any) -> Tensor:
    """As Python's `/`: whole numbers give fractions, float32 ones; ONNX's Div would truncate."""
    if _is_whole(a) and _is_whole(b):
        a, b = (as_tensor(x).cast("float32") for x in (a, b))
    return emit("Div", a, b)


def _floor_divide(a: Any, b: Any) -> Tensor:
    """As Python's `//`: rounded down, also where ONNX's Div of whole numbers rounds to zero."""
    quotient = emit("Div", a, b)
    if quotient.dtype.is_float:
        return emit("Floor", quotient)
    inexact = as_tensor(a) != quotient * b
    below = (as_tensor(a) < 0) != (as_tensor(b) < 0)
    rounded: Tensor = quotient - (inexact & below).cast(quotient.dtype)
    return rounded


def _is_whole(x: Any) -> bool:
    if hasattr(x, "dtype"):
        return not as_dtype(x.dtype).is_float
    return isinstance(x, (int, Expr))


TensorLike = Tensor | Array | float | int | bool


def emit(name: str, *inputs: Any, **attrs: Any) -> Tensor:
    """Adds a node by ONNX operator name, looked up in the table of the graph being recorded."""
    target = recorder()
    return target.apply(target.table["", name], inputs, attrs)[0]


def reduce(name: str, x: Tensor, axes: Sequence[int] | None, *, keepdims: bool) -> Tensor:
    """A reduction whose axes are an operand (every reduction since opset 18)."""
    if axes is not None and len(axes) == 0:
        return x
    operand = None if axes is None else np.array(axes, np.int64)
    return emit(name, x, operand, keepdims=int(keepdims))


def dims_of(sizes: Sequence[Dim | int]) -> Tensor:
    """Sizes as an int64 vector of the graph being recorded."""
    return recorder().dims([d if isinstance(d, Expr) else int(d) for d in sizes])


def as_tensor(x: TensorLike, dtype: DType | None = None) -> Tensor:
    """`x` as a tensor of the graph being recorded."""
    return recorder().admit(x, dtype)


def getitem(x: Tensor, index: Any) -> Tensor:
    """numpy basic indexing: ints, slices of ints and sizes, None, Ellipsis; or one int tensor.

    An int tensor gathers along the first axis. Anything else is refused by name.
    """
    if isinstance(index, (Tensor, np.ndarray)) and as_dtype(index.dtype) != bool_:
        return emit("Gather", x, index, axis=0)
    items = _expanded(x, index if isinstance(index, tuple) else (index,))
    bounds: list[tuple[Dim, Dim, int, int]] = []
    drop: list[int] = []
    new: list[int] = []
    axis = 0
    for item in items:
        if item is None:
            new.append(axis - len(drop) + len(new))
            continue
        start, end, step = _bounds(x, axis, item)
        if (start, end, step) != (0, _END, 1):
            bounds.append((start, end, axis, step))
        if isinstance(item, (int, np.integer)):
            drop.append(axis)
        axis += 1
    y = x
    if bounds:
        y = emit("Slice", y, *(dims_of(v) for v in zip(*bounds, strict=True)))
    if drop:
        y = emit("Squeeze", y, np.array(drop, np.int64))
    return emit("Unsqueeze", y, np.array(new, np.int64)) if new else y


_END = 2**62


def _expanded(x: Tensor, items: tuple[Any, ...]) -> list[Any]:
    used = sum(i is not None and i is not Ellipsis for i in items)
    if used > x.rank:
        raise InvalidInput(f"{x.type} has {x.rank} axes, the index names {used}")
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    rest = [i for i in items[at + 1 :] if i is not Ellipsis]
    return [*items[:at], *[slice(None)] * (x.rank - used), *rest]


def _bounds(x: Tensor, axis: int, item: Any) -> tuple[Dim, Dim, int]:
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        size = x.shape[axis]
        if isinstance(size, int) and not -size <= item < size:
            raise InvalidInput(f"index {item} is outside axis {axis} of {x.type}")
        return int(item), int(item) + 1 if item != -1 else _END, 1
    if isinstance(item, slice):
        step = 1 if item.step is None else int(item.step)
        start = (0 if step > 0 else _END) if item.start is None else _bound(item.start)
        end = (_END if step > 0 else -_END) if item.stop is None else _bound(item.stop)
        return start, end, step
    kind = f"{item.dtype} tensor" if hasattr(item, "dtype") else type(item).__name__
    raise InvalidInput(
        f"an index is ints, slices, None, Ellipsis or one int tensor, got a {kind}; "
        "use ops.gather, ops.where or ops.scatter_nd"
    )


def _bound(value: Any) -> Dim:
    if isinstance(value, (int, np.integer, Expr)):
        return value if isinstance(value, Expr) else int(value)
    raise InvalidInput(
        f"a slice's bound is an int or a size such as x.shape[0], got {value!r}; "
        "use ops.gather with ops.arange"
    )
