"""`Tensor`: a handle to a value of the graph under construction; operators on it add nodes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar

import ml_dtypes
import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, floor_div, product
from triplane.unified_ir.ir.graph import Array, Value
from triplane.unified_ir.ir.types import DType, ShapeError, TensorType, as_dtype, bool_, float32
from triplane.unified_ir.ops import numpy_functions
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN
from triplane.unified_ir.ops.source import caller_place, missing_source
from triplane.unified_ir.ops.subscript import subscript

if TYPE_CHECKING:
    from triplane.unified_ir.ops.build import Build

Axes = int | Sequence[int] | None
"""One axis, several, or all."""

_LARGEST_HALF: Final = 65504.0
"""The largest float16."""
_INDEX: Final = "an index, range() or a size"

P = ParamSpec("P")
R = TypeVar("R")


class Tensor:
    """A value of the graph under construction; operators on it add nodes."""

    __slots__ = ("build", "value")

    def __init__(self, build: Build, value: Value) -> None:
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
            f"a numpy function was called with {self}, which belongs to a graph; use the function "
            "of that name in triplane.unified_ir.ops, or the tensor's own methods"
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Tensor:
        # `array + tensor` comes here, too: numpy asks before it would convert the tensor.
        name = numpy_functions.check_ufunc(ufunc, method, options)
        if name in numpy_functions.ROWS:
            return emit(numpy_functions.ROWS[name], *inputs)
        own, reflected = numpy_functions.METHODS[name]
        first, *rest = inputs
        tensor, others = (first, rest) if isinstance(first, Tensor) else (rest[0], [first])
        return getattr(tensor, own if tensor is first else reflected)(*others)  # type: ignore[no-any-return]

    def __array_function__(self, function: Any, _: Any, args: Any, __: Any) -> tuple[Dim, ...]:
        return args[0].shape if function is np.shape else numpy_functions.refuse(function)  # type: ignore[no-any-return]

    def numpy(self) -> Array:
        """Return the array, in eager mode."""
        if self.build.arrays is None:
            raise InvalidInput(
                f"{self} is symbolic: a recorded graph has no values yet (at {caller_place()}); "
                "run the function, or use mode('eager') to see arrays while it is recorded"
            )
        return self.build.arrays[self.value]

    def __float__(self) -> float:
        return float(self._number("float()"))

    def __int__(self) -> int:
        return int(self._number("int()"))

    def __index__(self) -> int:
        if self.dtype.is_float:
            raise TypeError(f"{self} is not a whole number")
        return int(self._number(_INDEX))

    def __round__(self, digits: int = 0) -> float:
        return round(float(self._number("round()")), digits)

    def __format__(self, how: str) -> str:
        return format(self.numpy(), how) if how else repr(self)

    def __contains__(self, _: object) -> bool:
        raise InvalidInput(
            f"`in` asks {self} for a truth value at {caller_place()}; use (x == value).sum() > 0"
        )

    def _number(self, what: str) -> Array:
        """Return the one element as a Python number needs it."""
        if self.build.arrays is None:
            # Only a loop over range() is a statement, which the missing source would explain.
            way_out = (missing_source() if what is _INDEX else "") or (
                "stay with tensors (ops.cast, ops.round_, loops over range of a tensor under "
                "@graph), or use mode('eager')"
            )
            raise InvalidInput(
                f"{what} needs a number at {caller_place()}, but {self} has none while the graph "
                f"is recorded; {way_out}"
            )
        return self.build.arrays[self.value].reshape(())

    def __setitem__(self, _: object, __: object) -> None:
        raise InvalidInput(f"{self} is a value and never changes; use ops.where or ops.scatter_nd")

    def __repr__(self) -> str:
        name = self.value.name or "value"
        if self.build.arrays is not None and self.value in self.build.arrays:
            return f"Tensor({name}: {self.type} = {self.build.arrays[self.value]!r})"
        return f"Tensor({name}: {self.type})"

    def __bool__(self) -> bool:
        if self.build.arrays is not None:
            return bool(self.build.arrays[self.value])
        way_out = missing_source() or (
            "decorate the function with @graph (or write it in a Cell's construct) so that `if` "
            "and `while` become graph operators, or use ops.cond, ops.while_loop or ops.where"
        )
        raise InvalidInput(
            f"{self!r} has no truth value while the graph is recorded (at {caller_place()}); "
            f"{way_out}"
        )

    def __len__(self) -> int:
        if not self.shape or not isinstance(self.shape[0], int):
            way_out = missing_source()
            raise InvalidInput(
                f"len() needs a fixed first axis, got {self.type}{way_out and f'; {way_out}'}"
            )
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
    def __mod__(self, other: Any) -> Tensor: return emit("Mod", self, other)
    def __rmod__(self, other: Any) -> Tensor: return emit("Mod", other, self)
    def __pow__(self, other: Any) -> Tensor: return _power(self, other)
    def __rpow__(self, other: Any) -> Tensor: return _power(other, self)
    def __abs__(self) -> Tensor: return emit("Abs", self)
    def __pos__(self) -> Tensor: return self
    def __matmul__(self, other: Any) -> Tensor: return emit("MatMul", self, other)
    def __rmatmul__(self, other: Any) -> Tensor: return emit("MatMul", other, self)
    def __neg__(self) -> Tensor: return emit("Neg", self)
    def __lt__(self, other: Any) -> Tensor: return emit("Less", self, other)
    def __le__(self, other: Any) -> Tensor: return emit("LessOrEqual", self, other)
    def __gt__(self, other: Any) -> Tensor: return emit("Greater", self, other)
    def __ge__(self, other: Any) -> Tensor: return emit("GreaterOrEqual", self, other)
    def __eq__(self, other: object) -> Tensor: return emit("Equal", self, other)  # type: ignore[override]
    def __ne__(self, other: object) -> Tensor: return emit("Not", emit("Equal", self, other))  # type: ignore[override]
    def __and__(self, other: Any) -> Tensor: return _bitwise("And", self, other)
    def __rand__(self, other: Any) -> Tensor: return _bitwise("And", other, self)
    def __or__(self, other: Any) -> Tensor: return _bitwise("Or", self, other)
    def __ror__(self, other: Any) -> Tensor: return _bitwise("Or", other, self)
    def __xor__(self, other: Any) -> Tensor: return _bitwise("Xor", self, other)
    def __rxor__(self, other: Any) -> Tensor: return _bitwise("Xor", other, self)
    def __invert__(self) -> Tensor: return _bitwise("Not", self)
    # fmt: on

    def __getitem__(self, index: Any) -> Tensor:
        return subscript(self, index)

    def cast(self, dtype: DType | str) -> Tensor:
        """Return the same numbers in another element type."""
        wanted = as_dtype(dtype)
        return self if wanted == self.dtype else emit("Cast", self, to=wanted.onnx)

    def reshape(self, *shape: Any) -> Tensor:
        """Return the same elements in another shape; one size may be -1, 0 is an empty axis."""
        sizes = _flat(shape)
        if tuple(sizes) == self.shape:
            return self
        settled = _settled([d if isinstance(d, Expr) else int(d) for d in sizes], self.type)
        # Reshape reads 0 as "the size that was there" unless allowzero is set, which ONNX forbids
        # together with -1.
        literal = -1 not in settled and _may_move_a_zero(settled, self.shape)
        return emit("Reshape", self, dims_of(settled), allowzero=int(literal))

    def transpose(self, *perm: Any) -> Tensor:
        """Return the axes in this order, by default in reverse."""
        order = _flat(perm)
        if any(not -self.rank <= int(p) < self.rank for p in order):
            raise InvalidInput(
                f"{self.type} has {self.rank} axes, transpose names {tuple(order)} "
                f"(at {caller_place()})"
            )
        return emit("Transpose", self, perm=[int(p) % self.rank for p in order] or None)

    @property
    def T(self) -> Tensor:
        """Axes in reverse order."""
        return self.transpose()

    ndim = rank

    @property
    def size(self) -> Dim:
        """Number of elements."""
        return self.type.size

    astype = cast
    view = reshape
    permute = transpose

    def swapaxes(self, a: int, b: int) -> Tensor:
        """Return the tensor with axes `a` and `b` exchanged."""
        if not all(-self.rank <= axis < self.rank for axis in (a, b)):
            raise InvalidInput(
                f"{self.type} has {self.rank} axes, swapaxes names {a} and {b} "
                f"(at {caller_place()})"
            )
        order = list(range(self.rank))
        order[a], order[b] = order[b], order[a]
        return self.transpose(*order)

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        """Merge the axes `start` to `end` into one."""
        first, last = (a + self.rank if a < 0 else a for a in (start, end))
        middle = product(self.shape[first : last + 1])
        return self.reshape((*self.shape[:first], middle, *self.shape[last + 1 :]))

    def squeeze(self, *axes: int) -> Tensor:
        """Remove these axes, which have size 1; by default all axes of size 1."""
        return emit("Squeeze", self, np.array(axes, np.int64) if axes else None)

    def unsqueeze(self, *axes: int) -> Tensor:
        """Insert axes of size 1 at these positions of the result."""
        return emit("Unsqueeze", self, np.array(axes, np.int64))

    def expand(self, *shape: Any) -> Tensor:
        """Broadcast to `shape`; -1 keeps an axis."""
        sizes = _flat(shape)
        lead = len(sizes) - self.rank
        kept = [
            self.shape[i - lead] if isinstance(d, int) and d == -1 and i >= lead else d
            for i, d in enumerate(sizes)
        ]
        return emit("Expand", self, dims_of(kept))

    def expand_as(self, other: Tensor) -> Tensor:
        """Broadcast to the shape of `other`."""
        return self.expand(other.shape)

    def masked_fill(self, mask: TensorLike, value: TensorLike) -> Tensor:
        """Return `value` where `mask` is true, and these elements elsewhere."""
        return emit("Where", mask, value, self)

    def clip(self, low: TensorLike | None = None, high: TensorLike | None = None) -> Tensor:
        """Limit elements to `low` and `high`."""
        return emit("Clip", self, low, high)

    def detach(self) -> Tensor:
        """Return the same values, through which no gradient passes."""
        target = recorder()
        return target.apply(target.table[DOMAIN, "StopGradient"], (self,), {})[0]

    def item(self) -> Any:
        """Return the one element as a Python number, in eager mode."""
        return self._number("item()").item()

    def sum(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Sum over `axis`: one, several, all by default."""
        return reduce("ReduceSum", self, axis, keepdims=keepdims)

    def mean(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Return the mean over `axis`: one, several, all by default; float32 for whole numbers."""
        return reduce("ReduceMean", _fractions(self), axis, keepdims=keepdims)

    def max(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Return the maximum over `axis`: one, several, all by default."""
        return reduce("ReduceMax", self, axis, keepdims=keepdims)

    def min(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Return the minimum over `axis`: one, several, all by default."""
        return reduce("ReduceMin", self, axis, keepdims=keepdims)

    def prod(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Return the product over `axis`: one, several, all by default."""
        return reduce("ReduceProd", self, axis, keepdims=keepdims)

    def any(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Return whether any element is not zero, over `axis`."""
        return reduce("ReduceMax", self.cast(bool_), axis, keepdims=keepdims)

    def all(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Return whether every element is not zero, over `axis`."""
        return reduce("ReduceMin", self.cast(bool_), axis, keepdims=keepdims)

    def var(self, axis: Axes = None, *, correction: int = 0, keepdims: bool = False) -> Tensor:
        """Return the mean squared distance from the mean; the count is reduced by `correction`.

        It is 0 by default, as in numpy; PyTorch's default is 1.
        """
        x = _fractions(self)
        away = x - x.mean(axis, keepdims=True)
        if not correction:
            return (away * away).mean(axis, keepdims=keepdims)
        some = [axis] if isinstance(axis, (int, np.integer)) else axis
        axes = range(self.rank) if some is None else some
        count = product([self.shape[a] for a in axes])
        # Added to a tensor because a size may be symbolic.
        divisor = as_tensor(np.array(0)) + count - correction
        return (away * away).sum(axis, keepdims=keepdims) / divisor.cast(x.dtype)

    def std(self, axis: Axes = None, *, correction: int = 0, keepdims: bool = False) -> Tensor:
        """Return the square root of `var`; for equal elements it is 0 with slope 0, as in PyTorch.

        It is computed at a scale at which no square overflows or underflows.
        """
        x = _fractions(self)
        # The mean of equal numbers may be off by a rounding, and a deviation of a rounding has a
        # slope of order 1. Their distances from the largest are exactly 0, and so is their mean.
        top, low = (
            reduce(f"Reduce{end}", x, axis, keepdims=True).detach() for end in ("Max", "Min")
        )
        highest, most, least = _range_of_squares(x.dtype)
        size = emit("Max", emit("Abs", top), emit("Abs", low))
        # A power of two, so that distances are as exact as they are without it.
        whole = emit("Where", size > highest / 4, x.build.as_operand(4.0, x.dtype), 1.0)
        spread = top / whole - low / whole
        large = emit("Where", spread > most, spread / most, 1.0)
        scale = emit("Where", (spread > 0.0) & (spread < least), spread / least, large)
        away = (x / whole - top / whole) / scale
        y = root(away.var(axis, correction=correction, keepdims=keepdims))
        return y * scale.reshape(y.shape) * whole.reshape(y.shape)

    def argmax(self, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
        """Return the int64 position of the first maximum along `axis`, by default in flat order."""
        return _position("ArgMax", self, axis, keepdims=keepdims)

    def argmin(self, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
        """Return the int64 position of the first minimum along `axis`, by default in flat order."""
        return _position("ArgMin", self, axis, keepdims=keepdims)

    def cumsum(self, axis: int) -> Tensor:
        """Return running sums along `axis`."""
        return emit("CumSum", self, axis)


def _position(name: str, x: Tensor, axis: int | None, *, keepdims: bool) -> Tensor:
    if axis is None:
        return emit(name, x.reshape((-1,)), axis=0, keepdims=0)
    return emit(name, x, axis=axis, keepdims=int(keepdims))


def _power(a: Any, b: Any) -> Tensor:
    """Compute Python's `**`: a whole number to the power of a fraction is floating-point.

    A negative whole power that is only known in a run truncates as in PyTorch: 2 ** -1 is 0.
    """
    if isinstance(b, int) and b < 0 and _is_whole(a):
        raise InvalidInput(f"a whole number to the power {b} is a fraction; cast it to float first")
    # ONNX's Pow returns the type of the base, so an integer base would truncate the result.
    if _is_whole(a) and not _is_whole(b):
        a = as_tensor(a).cast(as_dtype(b.dtype) if hasattr(b, "dtype") else "float32")
    return emit("Pow", a, b)


def root(x: Tensor) -> Tensor:
    """Return the square root, with slope 0 at 0."""
    # Two selections: the slope of sqrt at 0 is infinite, and infinity times the 0 of the outer
    # selection would be NaN.
    level = x == 0.0
    return emit("Where", level, 0.0, emit("Sqrt", emit("Where", level, 1.0, x)))


def _range_of_squares(dtype: DType) -> tuple[float, float, float]:
    """Return the largest number, and bounds within which sums of squares stay in range."""
    limits = ml_dtypes.finfo(dtype.numpy)  # type: ignore[no-untyped-call]
    # Sums of up to room^2 squares stay finite: 2^40 elements, in float16 only 16.
    highest, lowest = float(limits.max), float(limits.tiny)
    room = 2.0 ** (20 if highest > _LARGEST_HALF else 2)
    return highest, highest**0.5 / room, lowest**0.5 * room


def _bitwise(name: str, *operands: Any) -> Tensor:
    """Apply a logical operator to booleans, or its bitwise form to whole numbers."""
    whole = any(
        as_dtype(x.dtype) != bool_ if hasattr(x, "dtype") else not isinstance(x, bool)
        for x in operands
    )
    return emit(f"Bitwise{name}" if whole else name, *operands)


def _divide(a: Any, b: Any) -> Tensor:
    """Compute Python's `/`: whole numbers give float32; ONNX's Div would truncate."""
    if _is_whole(a) and _is_whole(b):
        a, b = (as_tensor(x).cast("float32") for x in (a, b))
    return emit("Div", a, b)


def _floor_divide(a: Any, b: Any) -> Tensor:
    """Compute Python's `//`, which rounds down; ONNX's Div of whole numbers rounds to zero.

    Of floats, the floor of the quotient can be one too large, since division rounds: 1 / 0.1 is 10
    in float32, but this 0.1 is above a tenth. So the exact remainder is taken away first.
    """
    quotient = emit("Div", a, b)
    a, b = (as_tensor(x, None if hasattr(x, "dtype") else quotient.dtype) for x in (a, b))
    is_float = quotient.dtype.is_float
    rest = emit("Mod", a, b, fmod=1) if is_float else a - quotient * b  # of the sign of a
    below = ((rest != 0) & ((rest < 0) != (b < 0))).cast(quotient.dtype)
    if not is_float:
        return emit("Sub", quotient, below)
    whole = emit("Round", (a - rest) / b - below)
    return emit("Where", b == 0, emit("Floor", quotient), whole)


def _fractions(x: Tensor) -> Tensor:
    """Cast whole numbers and booleans to float32: ONNX would truncate their mean."""
    return x.cast("float32") if _is_whole(x) else x


def _is_whole(x: Any) -> bool:
    if hasattr(x, "dtype"):
        return not as_dtype(x.dtype).is_float
    return isinstance(x, (int, Expr))


def _flat(args: tuple[Any, ...]) -> Any:
    """Return the sizes or axes of a call, given one by one or as one sequence."""
    return args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


class HasTensor(Protocol):
    """Anything that stands for a tensor, such as a parameter of a cell in its `construct`."""

    def __tensor__(self) -> Tensor:
        """Return the tensor in the graph being recorded."""
        ...


TensorLike = Tensor | Array | np.generic | float | int | bool | HasTensor


def emit(name: str, *inputs: Any, **attrs: Any) -> Tensor:
    """Add a node by ONNX operator name to the graph being recorded."""
    target = recorder()
    return target.apply(target.table["", name], inputs, attrs)[0]


def reduce(name: str, x: Tensor, axis: Axes, *, keepdims: bool) -> Tensor:
    """Add a reduction whose axes are an operand (every reduction since opset 18)."""
    operand = axes_operand(axis)
    # No axes: nothing is reduced. ONNX would read an empty list as all axes.
    if operand is not None and not operand.size:
        return x
    return emit(name, x, operand, keepdims=int(keepdims))


def axes_operand(axis: Axes) -> Array | None:
    """Return axes as an int64 vector, None for all; InvalidInput unless they are whole numbers."""
    return None if axis is None else np.array(whole_numbers(axis, "an axis"), np.int64)


def whole_numbers(value: Any, what: str) -> tuple[Any, ...]:
    """Return one or several whole numbers or sizes as a tuple; InvalidInput names `what`."""
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Tensor))
    try:
        return tuple(
            d if isinstance(d, Expr) else index(d) for d in (value if several else [value])
        )
    except TypeError:
        raise InvalidInput(
            f"{what} is one or several whole numbers, got {value!r} (at {caller_place()})"
        ) from None


def _settled(sizes: list[Dim], type_: TensorType) -> list[Dim]:
    """Replace -1 in the sizes of a reshape if ONNX's rule would not give the number it stands for.

    ONNX reads a 0 as "unchanged" unless `allowzero` is set, which excludes -1. In an empty tensor
    -1 stands for the number that it has for any other size of the empty axes.
    """
    if sizes.count(-1) != 1 or not _may_move_a_zero(sizes, type_.shape):
        return sizes
    rest = [d for d in sizes if d not in {0, -1}]
    # Without the empty axes both products are positive, and their quotient is the size -1 stands
    # for.
    whole, part = product([d for d in type_.shape if d != 0]), product(rest)
    one = floor_div(whole, part)
    if product([one, part]) != whole:
        if 0 not in sizes:
            return sizes  # the run compares the sizes
        one = -1
    if one == -1 or type_.shape.count(0) != sizes.count(0):
        shown = ", ".join(map(str, sizes))
        raise ShapeError(
            f"Reshape of {type_} to ({shown}): next to an empty axis (0), -1 could be any size; "
            f"write the size instead of -1, or x.shape[i] to keep one"
        )
    return [one if d == -1 else d for d in sizes]


def _may_move_a_zero(sizes: Sequence[Dim], shape: Sequence[Dim]) -> bool:
    """Return whether a size is or may be 0 at an axis that had another size before."""
    return any(
        d == 0 or (isinstance(d, Expr) and (i >= len(shape) or shape[i] != d))
        for i, d in enumerate(sizes)
    )


def dims_of(sizes: Sequence[Dim | int]) -> Tensor:
    """Return sizes as an int64 vector of the graph being recorded."""
    return recorder().dims([d if isinstance(d, Expr) else int(d) for d in sizes])


def as_tensor(x: TensorLike, dtype: DType | None = None) -> Tensor:
    """Return `x` as a tensor of the graph being recorded."""
    return recorder().as_operand(x, dtype)


def admitted(x: Any) -> Any:
    """Return a numpy array as a constant of the graph being recorded, anything else unchanged."""
    return as_tensor(np.asarray(x)) if isinstance(x, (np.ndarray, np.generic)) else x


def taken(x: Any, *, narrow: bool) -> Any:
    """Return an array as a constant, float64 as float32 where `narrow`; anything else unchanged."""
    wide = isinstance(x, (np.ndarray, np.generic)) and x.dtype == np.float64
    return admitted(x.astype(np.float32) if narrow and wide else x)


_OPERAND: Final = {"Tensor", "Tensor | None"}


def taking_arrays(builder: Callable[P, R]) -> Callable[P, R]:
    """Let arguments of `builder` that are declared as tensors be numpy arrays, too.

    A float64 array (numpy's default) becomes float32 if all floating-point tensors are float32.
    """
    # Modules of builders postpone evaluation of annotations, so these are strings.
    declared = inspect.signature(builder).parameters
    operands = {name for name, p in declared.items() if p.annotation in _OPERAND}
    if not operands:
        return builder
    order = [name in operands for name, p in declared.items() if p.kind != p.VAR_POSITIONAL]
    rest = any(p.kind == p.VAR_POSITIONAL and name in operands for name, p in declared.items())

    @functools.wraps(builder)
    def build(*args: P.args, **kwargs: P.kwargs) -> R:
        marks = (*order[: len(args)], *[rest] * (len(args) - len(order)))
        tensors = [x for x, mark in zip(args, marks, strict=True) if mark]
        tensors += [v for k, v in kwargs.items() if k in operands]
        floats = {x.dtype for x in tensors if isinstance(x, Tensor) and x.dtype.is_float}
        narrow = floats == {float32}
        admitted: Any = [
            taken(x, narrow=narrow) if mark else x for x, mark in zip(args, marks, strict=True)
        ]
        named: Any = {k: taken(v, narrow=narrow) if k in operands else v for k, v in kwargs.items()}
        return builder(*admitted, **named)

    return build
