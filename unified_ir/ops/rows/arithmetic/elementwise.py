"""Rows that compute each element on its own, with numpy broadcasting."""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any, Final

import numpy as np

from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import (
    TensorType,
    TypeMismatch,
    bool_,
    float32,
    float64,
    int32,
    int64,
)
from triplane.unified_ir.ops.batching import elementwise, first_elementwise
from triplane.unified_ir.ops.emission import EmissionContext, Emit, emit_broadcast
from triplane.unified_ir.ops.infer import broadcast
from triplane.unified_ir.ops.lowering import XlaContext, folded
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, IntegerForm, Op, OpCall, OpKind, Vjp
from triplane.unified_ir.ops.rows.movement.structure import same, sum_to, where
from triplane.unified_ir.ops.samples import apart, between, bools, fixed, ints, normal, sample
from triplane.unified_ir.ops.tensor import Tensor

Types = tuple[TensorType, ...]
_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)


def broadcast_same(call: OpCall) -> Types:
    """Infer the broadcast shape, with the element type of the first operand."""
    shapes = [call.type(i).shape for i in range(len(call.types))]
    return (call.type(0).with_shape(broadcast(call.row, *shapes)),)


def broadcast_bool(call: OpCall) -> Types:
    """Infer the broadcast shape, with element type bool."""
    return (broadcast_same(call)[0].with_dtype(bool_),)


def _needs_bool(call: OpCall) -> Types:
    for i in range(len(call.types)):
        if call.type(i).dtype != bool_:
            raise TypeMismatch(f"{call.row} takes bool operands, got {call.type(i)}")
    return broadcast_bool(call)


BROADCASTING: Final = frozenset({broadcast_same, broadcast_bool, _needs_bool})
"""Inference rules of rows whose operands broadcast against each other."""


_row = partial(Op, kind=OpKind.ELEMENTWISE)


def step(y: Tensor) -> Tensor:
    """Return 1 where y is not zero, else 0, typed like y; the fastest form on onnxruntime."""
    # A comparison and a selection would be two passes and an extra constant.
    return y.cast("bool").cast(y.dtype)


def _arithmetic(name: str, f: Any, vjp: Any, *, emit: Emit = emit_broadcast, **columns: Any) -> Op:
    samples = (
        sample(normal(2, 3), between(0.5, 2, 3)),
        sample(normal(3), between(0.5, 2, 2, 1)),
    )
    return _row(
        name=name,
        infer=broadcast_same,
        reference=f,
        vjp=vjp,
        weights=(0, 1),
        emit=emit,
        samples=samples,
        **columns,
    )


def _unary(name: str, f: Any, vjp: Vjp | None, *samples: Any, **columns: Any) -> Op:
    return _row(
        name=name,
        infer=same,
        reference=f,
        vjp=vjp,
        batch=elementwise,
        samples=samples or (sample(normal(2, 3)),),
        **columns,
    )


def _compare(name: str, f: Any) -> Op:
    samples = (sample(ints(0, 3, 2, 3), ints(0, 3, 3)), sample(apart(2, 3), apart(2, 3), smooth=()))
    return Op(
        name=name,
        kind=OpKind.COMPARISON,
        infer=broadcast_bool,
        reference=f,
        total=True,
        emit=emit_broadcast,
        samples=samples,
    )


def _logical(name: str, f: Any, *, total: bool = True) -> Op:
    samples = (sample(bools(2, 3), bools(3)),)
    return _row(
        name=name,
        batch=elementwise,
        infer=_needs_bool,
        reference=f,
        total=total,
        samples=samples,
    )


def _pow_vjp(g: Tensor, y: Tensor, x: Tensor, p: Tensor) -> Any:
    """Differentiate x^p; the exponent may have its own element type, and its cotangent has it too.

    p x^(p-1) is 0 for p = 0, also at x = 0, where the second factor is not finite.
    """
    base = where(x > 0.0, x, 1.0)
    exponent = p.cast(x.dtype)
    # The exponent 1 instead of -1 where p = 0: the factor p is 0 there, and 0 times infinity is
    # NaN.
    lower = where(exponent == 0.0, 1.0, exponent - 1.0)
    d_p = None
    if p.dtype.is_float:
        # d(x^p)/dp = x^p log x for x > 0; elsewhere the power is defined only for isolated p.
        d_p = sum_to(g * where(x > 0.0, y * log(base), 0.0), p).cast(p.dtype)
    return sum_to(g * exponent * power(x, lower), x), d_p


def _div_reference(a: Any, b: Any) -> Any:
    """Divide; integers truncate towards zero, and the smallest integer over -1 is itself."""
    if a.dtype.kind not in "iu":
        return a / b
    _refuse_zero(b)
    # The smallest integer over -1 overflows and wraps to itself.
    with np.errstate(over="ignore"):
        down = a // b
        # // rounds down: one too low where the quotient is negative and not exact.
        return down + ((down < 0) & (down * b != a))


def _mod_reference(a: Any, b: Any, fmod: int) -> Any:
    if a.dtype.kind in "iu":
        _refuse_zero(b)
    return np.fmod(a, b) if fmod else np.mod(a, b)


def _mod_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor, *, fmod: int) -> Any:
    """mod(a, b) = a - b n, where the integer n is constant almost everywhere."""
    return sum_to(g, a), sum_to(-(g * round_((a - y) / b)), b)


def _pow_reference(x: Any, p: Any) -> Any:
    """Raise to a power; those of integers are exact, and fractions truncate."""
    # numpy refuses negative powers of integers; in float64, the fraction is cut off when the result
    # is cast back.
    if x.dtype.kind in "iu" and (p.dtype.kind not in "iu" or np.any(p < 0)):
        return np.power(x.astype(np.float64), p)
    return np.power(x, p.astype(x.dtype) if x.dtype.kind in "iu" else p)


def _refuse_zero(divisor: Any) -> None:
    """Refuse division by zero as onnxruntime does: integers have no infinity."""
    if not np.all(divisor):
        raise ValueError("integer division by zero; divide by `where(b == 0, 1, b)` instead of b")


def _div_xla(k: XlaContext, a: Any, b: Any) -> Any:
    if not k.np.issubdtype(a.dtype, np.integer):
        return k.np.divide(a, b)
    k.require(b != 0, "integer division by zero")
    # XLA truncates towards zero, and the smallest integer over -1 is itself, as here.
    return k.lax.div(*k.np.broadcast_arrays(a, b))


def _mod_xla(k: XlaContext, a: Any, b: Any, *, fmod: int) -> Any:
    if k.np.issubdtype(a.dtype, np.integer):
        k.require(b != 0, "integer division by zero")
    return k.np.fmod(a, b) if fmod else k.np.mod(a, b)


def _pow_xla(k: XlaContext, x: Any, p: Any) -> Any:
    """Raise to a power; those of integers truncate, as in `_pow_reference`."""
    if not k.np.issubdtype(x.dtype, np.integer):
        return k.np.power(x, p)
    if k.np.issubdtype(p.dtype, np.integer):
        exact = k.np.power(x, k.np.maximum(p, 0))
        return k.np.where(p < 0, k.np.power(x.astype(np.float64), p).astype(x.dtype), exact)
    return k.np.power(x.astype(np.float64), p)


def _flat(g: Tensor, y: Tensor, x: Tensor) -> tuple[None]:
    """Return the gradient of a piecewise constant function: none."""
    return (None,)


def _emit_clip(context: EmissionContext, node: Node) -> None:
    """Emit an absent bound as infinity: onnxruntime would use the largest finite number."""
    dtype, names = node.outputs[0].type.dtype, [*context.inputs(node), "", ""][:3]
    if not dtype.is_float or not any(names[1:]):
        context.plain(node)
        return
    ends = [np.array(end, dtype.numpy) for end in (-np.inf, np.inf)]
    bounds = [n or context.constant(end) for n, end in zip(names[1:], ends, strict=True)]
    context.add("Clip", [names[0], *bounds], context.output_names(node))


def _emit_div(context: EmissionContext, node: Node) -> None:
    """Emit a / -1 of integers as -a.

    The smallest integer has no opposite. On processors that trap at this division (x86-64),
    onnxruntime 1.31 kills the process, so the numbers of one caller would end a server.
    """
    a, b = context.inputs(node)
    if not _may_trap(context, node, b):
        context.plain_broadcast(node)
        return
    opposite, safe = _minus_one_apart(context, node, b)
    quotient = context.emit("Div", a, safe)
    context.add("Where", [opposite, context.emit("Neg", a), quotient], context.output_names(node))


def _emit_mod(context: EmissionContext, node: Node) -> None:
    """Emit a mod -1 of integers as a mod 1, which is also 0 and does not trap (`_emit_div`)."""
    a, b = context.inputs(node)
    if node.outputs[0].type.dtype.is_float and not node.attrs.get("fmod", 0):
        _float_mod(context, node, a, b)
        return
    if node.attrs.get("fmod", 0) or not _may_trap(context, node, b):
        context.plain_broadcast(node)
        return
    _, safe = _minus_one_apart(context, node, b)
    context.add("Mod", [a, safe], context.output_names(node))


def _float_mod(context: EmissionContext, node: Node, a: str, b: str) -> None:
    """Add b to the remainder that onnxruntime gives where its sign is not that of b."""
    # fmod=1 gives the sign of the dividend, ONNX's fmod=0 that of the divisor; onnxruntime has only
    # the former for floats.
    zero = context.constant(np.array(0, node.outputs[0].type.dtype.numpy))
    rest = context.emit("Mod", a, b, fmod=1)
    crossed = context.emit("Less", context.emit("Mul", rest, b), zero)
    moved = context.emit("Add", rest, b)
    context.add("Where", [crossed, moved, rest], context.output_names(node))


_POWERS: Final = frozenset({int32, int64, float32, float64})


def _emit_pow(context: EmissionContext, node: Node) -> None:
    """Cast an exponent to int64 if onnxruntime has no kernel for its type."""
    exponent = node.inputs[1]
    assert exponent is not None
    if exponent.type.dtype in _POWERS or exponent.type.dtype.is_float:
        context.plain_broadcast(node)
        return
    x, p = context.inputs(node)
    p = context.emit("Cast", p, to=int64.onnx)
    context.add("Pow", [x, p], context.output_names(node))


def _may_trap(context: EmissionContext, node: Node, divisor: str) -> bool:
    """Return whether a 32- or 64-bit divisor can be -1; the kernel widens narrower ones."""
    dtype = node.outputs[0].type.dtype.numpy
    if dtype not in {np.dtype(np.int32), np.dtype(np.int64)}:
        return False
    known = context.held(divisor)
    return known is None or bool((known == -1).any())


def _minus_one_apart(context: EmissionContext, node: Node, divisor: str) -> tuple[str, str]:
    """Return the names of (where the divisor is -1, the divisor with 1 there)."""
    dtype = node.outputs[0].type.dtype.numpy
    is_minus_one = context.emit("Equal", divisor, context.constant(np.array(-1, dtype)))
    one = context.constant(np.array(1, dtype))
    return is_minus_one, context.emit("Where", is_minus_one, one, divisor)


_SHORT: Final = frozenset({"int8", "int16", "uint8", "uint16"})


def _emit_extreme(context: EmissionContext, node: Node) -> None:
    """Compare integers below 32 bits as int32: onnxruntime has no kernels for them."""
    dtype = node.outputs[0].type.dtype
    if dtype.name not in _SHORT:
        context.plain_broadcast(node)
        return
    wide = [context.emit("Cast", name, to=int32.onnx) for name in context.inputs(node)]
    extreme = context.emit(node.op.name, *wide)
    context.add("Cast", [extreme], context.output_names(node), to=dtype.onnx)


# fmt: off
add = _arithmetic("Add", np.add, lambda g, y, a, b: (sum_to(g, a), sum_to(g, b)),
                  total=True, integer_form=IntegerForm.MIX)
sub = _arithmetic("Sub", np.subtract, lambda g, y, a, b: (sum_to(g, a), sum_to(-g, b)), total=True)
mul = _arithmetic("Mul", np.multiply, lambda g, y, a, b: (sum_to(g * b, a), sum_to(g * a, b)),
                  total=True, integer_form=IntegerForm.MIX)
div = _arithmetic("Div", _div_reference,
                  lambda g, y, a, b: (sum_to(g / b, a), sum_to(-(g * y) / b, b)), emit=_emit_div,
                  xla=_div_xla)

neg = _unary("Neg", np.negative, lambda g, y, x: (-g,), total=True)
abs_ = _unary("Abs", np.abs, lambda g, y, x: (g * sign(x),), sample(apart(2, 3)), total=True)
exp = _unary("Exp", np.exp, lambda g, y, x: (g * y,))
log = _unary("Log", np.log, lambda g, y, x: (g / x,), sample(between(0.5, 3, 2, 3)))
sqrt = _unary("Sqrt", np.sqrt, lambda g, y, x: (g * 0.5 / y,), sample(between(0.5, 3, 2, 3)))
reciprocal = _unary("Reciprocal", np.reciprocal, lambda g, y, x: (-(g * y * y),),
                    sample(between(0.5, 3, 2, 3)))
tanh = _unary("Tanh", np.tanh, lambda g, y, x: (g * (1.0 - y * y),))
# 1 / (1 + e^-x) = exp(-log(1 + e^-x)): logaddexp overflows for no x.
sigmoid = _unary("Sigmoid", lambda x: np.exp(-np.logaddexp(0, -x)),
                 lambda g, y, x: (g * y * (1.0 - y),), integer_form=IntegerForm.MIX,
                 xla=lambda k, x: k.lax.logistic(x))
softplus = _unary("Softplus", lambda x: np.logaddexp(x, 0), lambda g, y, x: (g * sigmoid(x),),
                  xla=lambda k, x: k.np.logaddexp(x, 0))
# The mask comes from the result, so the operand need not be kept for the backward pass.
relu = _unary("Relu", lambda x: np.maximum(x, 0), lambda g, y, x: (g * step(y),),
              sample(apart(2, 3)), integer_form=IntegerForm.CLAMP,
              xla=lambda k, x: k.np.maximum(x, 0))
sin = _unary("Sin", np.sin, lambda g, y, x: (g * cos(x),))
cos: Op = _unary("Cos", np.cos, lambda g, y, x: (-(g * sin(x)),))
tan = _unary("Tan", np.tan, lambda g, y, x: (g * (1.0 + y * y),))
asin = _unary("Asin", np.arcsin, lambda g, y, x: (g / sqrt(1.0 - x * x),),
              sample(between(-0.9, 0.9, 2, 3)))
acos = _unary("Acos", np.arccos, lambda g, y, x: (-(g / sqrt(1.0 - x * x)),),
              sample(between(-0.9, 0.9, 2, 3)))
atan = _unary("Atan", np.arctan, lambda g, y, x: (g / (1.0 + x * x),))
sinh = _unary("Sinh", np.sinh, lambda g, y, x: (g * cosh(x),))
cosh: Op = _unary("Cosh", np.cosh, lambda g, y, x: (g * sinh(x),))
asinh = _unary("Asinh", np.arcsinh, lambda g, y, x: (g / sqrt(x * x + 1.0),))
acosh = _unary("Acosh", np.arccosh, lambda g, y, x: (g / sqrt(x * x - 1.0),),
               sample(between(1.5, 3, 2, 3)))
atanh = _unary("Atanh", np.arctanh, lambda g, y, x: (g / (1.0 - x * x),),
               sample(between(-0.9, 0.9, 2, 3)))
# numpy has no erf.
erf = _unary("Erf", lambda x: np.vectorize(math.erf, otypes=[x.dtype])(x),
             lambda g, y, x: (g * _TWO_OVER_ROOT_PI * exp(-(x * x)),),
             xla=lambda k, x: k.lax.erf(x))
sign: Op = _unary("Sign", np.sign, _flat, sample(apart(2, 3)))
floor = _unary("Floor", np.floor, _flat, sample(apart(2, 3)))
ceil = _unary("Ceil", np.ceil, _flat, sample(apart(2, 3)))
round_ = _unary("Round", np.round, _flat, sample(apart(2, 3)),
                sample(fixed([0.5, 1.5, -2.5, 1.2]), smooth=()))
logical_not = _unary("Not", np.logical_not, None, sample(bools(2, 3)), total=True)
is_nan = Op(name="IsNaN", kind=OpKind.ELEMENTWISE, batch=elementwise,
            infer=lambda call: (call.type(0).with_dtype(bool_),),
            reference=np.isnan, samples=(sample(fixed([1.0, float("nan")])),))
is_inf = Op(name="IsInf", kind=OpKind.ELEMENTWISE, batch=elementwise,
            infer=lambda call: (call.type(0).with_dtype(bool_),),
            reference=lambda x, *, detect_negative, detect_positive: (
                np.isposinf(x) & bool(detect_positive) | np.isneginf(x) & bool(detect_negative)
            ), xla=lambda k, x, *, detect_negative, detect_positive: (
                k.np.isposinf(x) & bool(detect_positive) | k.np.isneginf(x) & bool(detect_negative)
            ), samples=(
                sample(fixed([1.0, np.inf, -np.inf, np.nan])),
                sample(fixed([1.0, np.inf, -np.inf]), detect_negative=0),
                sample(fixed([1.0, np.inf, -np.inf]), detect_positive=0)))
equal = _compare("Equal", np.equal)
less = _compare("Less", np.less)
less_equal = _compare("LessOrEqual", np.less_equal)
greater = _compare("Greater", np.greater)
greater_equal = _compare("GreaterOrEqual", np.greater_equal)
logical_and = _logical("And", np.logical_and)
logical_or = _logical("Or", np.logical_or)
# `total` would change the graphs of networks saved so far.
logical_xor = _logical("Xor", np.logical_xor, total=False)
# fmt: on


mod = _row(
    name="Mod",
    emit=_emit_mod,
    infer=broadcast_same,
    reference=_mod_reference,
    vjp=_mod_vjp,
    xla=_mod_xla,
    samples=(
        sample(ints(-9, 9, 5), fixed(4)),
        sample(fixed([[5.3, -5.3, 0.7]]), fixed([[2.0], [-1.5]]), fmod=1),
    ),
)
power = _row(
    name="Pow",
    emit=_emit_pow,
    infer=broadcast_same,
    reference=_pow_reference,
    vjp=_pow_vjp,
    xla=_pow_xla,
    samples=(
        sample(between(0.5, 2, 2, 3), fixed(3.0)),
        sample(between(0.5, 2, 2, 3), normal(3)),
        sample(normal(2, 3), fixed(2.0), smooth=(0,)),
        sample(normal(2, 3), fixed([2, 3, 0])),
        sample(ints(-4, 4, 5, dtype="int32"), fixed(3.0), smooth=()),
    ),
)


def _extreme_vjp(g: Tensor, y: Tensor, *xs: Tensor) -> list[Tensor]:
    """Share the cotangent equally among ties, as PyTorch's maximum does."""
    hits = [(x == y).cast(g.dtype) for x in xs]
    share = g / sum(hits[1:], hits[0])
    return [sum_to(share * hit, x) for hit, x in zip(hits, xs, strict=True)]


def _fold(f: Any) -> Any:
    return lambda *xs: reduce(f, xs)


maximum = Op(
    name="Max", kind=OpKind.ELEMENTWISE, emit=_emit_extreme,
    infer=broadcast_same, reference=_fold(np.maximum), vjp=_extreme_vjp,
    xla=folded("maximum"),
    samples=(
        sample(apart(2, 3), between(0.02, 0.08, 3)),
        sample(ints(-5, 5, 2, 3, dtype="int16"), ints(-5, 5, 3, dtype="int16")),
    ),
)  # fmt: skip
minimum = Op(
    name="Min", kind=OpKind.ELEMENTWISE, emit=_emit_extreme,
    infer=broadcast_same, reference=_fold(np.minimum), vjp=_extreme_vjp,
    xla=folded("minimum"),
    samples=(sample(apart(2, 3), between(0.02, 0.08, 3)),),
)  # fmt: skip


def _total_vjp(g: Tensor, y: Tensor, *xs: Tensor) -> list[Tensor]:
    return [sum_to(g, x) for x in xs]


total = Op(
    name="Sum", kind=OpKind.ELEMENTWISE,
    infer=broadcast_same, reference=_fold(np.add), vjp=_total_vjp,
    xla=folded("add"),
    samples=(sample(normal(2, 3), normal(3), normal(2, 1)), sample(normal(3))),
)  # fmt: skip
average = Op(
    name="Mean", kind=OpKind.ELEMENTWISE, infer=broadcast_same,
    reference=lambda *xs: _fold(np.add)(*xs) / len(xs),
    xla=lambda k, *xs: folded("add")(k, *xs) / len(xs),
    vjp=lambda g, y, *xs: _total_vjp(g * (1 / len(xs)), y, *xs),
    samples=(sample(normal(2, 3), normal(3), normal(2, 1)), sample(normal(3))),
)  # fmt: skip


def _clip_vjp(
    g: Tensor, y: Tensor, x: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> Any:
    """Pass the cotangent to x where low <= x <= high, and elsewhere to the bound that replaced x.

    Where low > high, the upper bound is the result everywhere, also where x equals it.
    """
    kept = x == y
    if low is not None and high is not None and not _are_ordered(low, high):
        kept = kept & (low <= high)
    d_x = g * kept.cast(g.dtype)
    beyond = None if high is None else (x > high if low is None else (x > high) | (low > high))
    d_high = None if beyond is None or high is None else sum_to(where(beyond, g, 0), high)
    if low is None:
        return d_x, None, d_high
    below = x < low if high is None else (x < low) & (low <= high)
    return d_x, sum_to(where(below, g, 0), low), d_high


def _are_ordered(low: Tensor, high: Tensor) -> bool:
    """Return whether both bounds are known and low <= high."""
    ends = [low.build.known(bound) for bound in (low, high)]
    numbers = [end for end in ends if isinstance(end, np.ndarray)]
    return len(numbers) == 2 and bool(np.all(numbers[0] <= numbers[1]))


clip = _row(
    name="Clip",
    settings=(1, 2),
    integer_form=IntegerForm.CLAMP,
    emit=_emit_clip,
    batch=first_elementwise,
    infer=same,
    reference=lambda x, low=None, high=None: np.clip(x, low, high),
    xla=lambda k, x, low=None, high=None: k.np.clip(x, low, high),
    vjp=_clip_vjp,
    samples=(
        sample(apart(2, 3), fixed(-0.35), fixed(0.35)),
        sample(apart(2, 3), None, fixed(0.05)),
        sample(apart(2, 3), fixed(0.25)),
    ),
)


def _same_float(call: OpCall) -> Any:
    if not call.type(0).dtype.is_float:
        raise TypeMismatch(f"{call.row} takes floats, got {call.type(0)}; cast it first")
    return same(call)


def _hard_tanh_vjp(g: Tensor, y: Tensor, x: Tensor, *, low: float, high: float) -> Any:
    """0 at the bounds, unlike `Clip`: PyTorch's hardtanh and clamp differ there."""
    return (where((y > as_like(low, y)) & (y < as_like(high, y)), g, 0.0),)


hard_tanh = _row(
    name="HardTanh",
    computes="min(max(x, low), high); its gradient at both bounds is 0",
    domain=DOMAIN,
    operands=("T",),
    attrs={"low": AttrSpec("FLOAT", -1.0), "high": AttrSpec("FLOAT", 1.0)},
    infer=_same_float,
    body=lambda x, *, low, high: clip(x, low, high),
    vjp=_hard_tanh_vjp,
    batch=elementwise,
    samples=(sample(apart(2, 3)), sample(apart(2, 3), low=0.0, high=0.25)),
)


def as_like(value: float, x: Tensor) -> Tensor:
    """Return a number as a scalar in the element type of `x`."""
    return x.build.as_operand(value, x.dtype)


leaky_relu = _unary(
    "LeakyRelu",
    lambda x, alpha: np.where(x > 0, x, alpha * x),
    lambda g, y, x, *, alpha: (g * where(x > 0.0, 1.0, as_like(alpha, g)),),
    sample(apart(2, 3), alpha=0.2),
    integer_form=IntegerForm.MIX,
    xla=lambda k, x, *, alpha: k.np.where(x > 0, x, alpha * x),
)


def _gelu(x: Tensor, *, approximate: str) -> Tensor:
    """x times the normal distribution function (Hendrycks and Gimpel 2016)."""
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + tanh(inner))
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


gelu = _row(
    name="Gelu",
    body=_gelu,
    samples=(sample(normal(2, 3)), sample(normal(2, 3), approximate="tanh")),
)


def _hard_sigmoid_vjp(g: Tensor, y: Tensor, x: Tensor, *, alpha: float, beta: float) -> Any:
    """alpha where alpha x + beta is strictly between 0 and 1, else 0, as in PyTorch."""
    if alpha == 0.0:
        return (None,)
    low, high = sorted((-beta / alpha, (1.0 - beta) / alpha))
    return (where((x > as_like(low, x)) & (x < as_like(high, x)), g * as_like(alpha, g), 0.0),)


def has_float_kernel(node: Node, opset: int) -> bool:
    """Exclude float64: onnxruntime 1.31 has no kernels of these rows for it."""
    return node.outputs[0].type.dtype != float64


hard_sigmoid = _row(
    name="HardSigmoid",
    integer_form=IntegerForm.IN_PARTS,
    batch=elementwise,
    body=lambda x, *, alpha, beta: clip(alpha * x + beta, 0.0, 1.0),
    native=has_float_kernel,
    vjp=_hard_sigmoid_vjp,
    samples=(sample(between(-2, 2, 2, 3), smooth=(0,)),),
)


hard_swish = _row(
    name="HardSwish",
    integer_form=IntegerForm.IN_PARTS,
    batch=elementwise,
    body=lambda x: x * clip(x * (1 / 6) + 0.5, 0.0, 1.0),
    native=has_float_kernel,
    # The slope is 0 up to -3 and 1 from 3, as in PyTorch.
    vjp=lambda g, y, x: (g * where(x <= -3.0, 0.0, where(x < 3.0, x * (1 / 3) + 0.5, 1.0)),),
    samples=(sample(between(-2, 2, 2, 3)),),
)
