"""Reductions over axes, which are an operand, and positions of extremes.

Ties of an extreme share its cotangent equally, as in PyTorch's amax. If `noop_with_empty_axes` is
set and no axes are named, each element is reduced by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import TensorType, bool_, int64, uint8
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.infer import onnx_attrs
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import MEANING_OPSET, Op, OpCall, OpKind, Types
from triplane.unified_ir.ops.rows.arithmetic.elementwise import abs_, exp, log, sign, sqrt
from triplane.unified_ir.ops.rows.arithmetic.matrix import same_along_axis
from triplane.unified_ir.ops.rows.arithmetic.products import product_of_others
from triplane.unified_ir.ops.rows.movement.structure import (
    axes_of,
    broadcast_to,
    known_ints,
    size_of,
    stop_gradient,
    where,
)
from triplane.unified_ir.ops.samples import apart, between, bools, fixed, ints, normal, sample
from triplane.unified_ir.ops.settings import length, settled
from triplane.unified_ir.ops.tensor import Tensor


def reduced_axes(rank: int, axes: Any, noop: int) -> tuple[int, ...]:
    """Return the axes that a reduction removes; `axes` is None where the operand is absent."""
    if axes is None or not len(axes):
        return () if noop else tuple(range(rank))
    return axes_of(rank, axes)


def _reduced(call: OpCall) -> Types:
    x, noop = call.type(0), call.attrs["noop_with_empty_axes"]
    axes = reduced_axes(x.rank, call.ints(1) if call.has(1) else None, noop)
    if call.attrs["keepdims"]:
        return (x.with_shape(1 if i in axes else d for i, d in enumerate(x.shape)),)
    return (x.with_shape(d for i, d in enumerate(x.shape) if i not in axes),)


def _reduced_open(call: OpCall) -> list[None]:
    """Return one unknown size per axis: computed axes do not say which sizes remain."""
    kept = 0 if call.attrs["keepdims"] else length(call, 1)
    return [None] * (call.type(0).rank - kept)


_settled = settled(_reduced, _reduced_open, 1)


def _row(name: str, **columns: Any) -> Op:
    return Op(name=name, kind=OpKind.REDUCTION, batch=batching.axes_shifted, **_settled, **columns)


def _kernel(f: Any) -> Any:
    """Turn a numpy reduction into a kernel whose axes are an operand."""

    def kernel(x: Any, axes: Any = None, *, keepdims: int, noop_with_empty_axes: int) -> Any:
        wanted = reduced_axes(x.ndim, axes, noop_with_empty_axes)
        return f(x, axis=wanted, keepdims=bool(keepdims))

    return kernel


def _xla(f: Any) -> Any:
    """Turn `f(context, x, axis, keepdims)` into a rule whose axes are an operand."""

    def rule(
        k: XlaContext, x: Any, axes: Any = None, *, keepdims: int, noop_with_empty_axes: int
    ) -> Any:
        known = None if axes is None else k.known(axes, "its axes")
        wanted = reduced_axes(x.ndim, known, noop_with_empty_axes)
        return f(k, x, axis=wanted, keepdims=bool(keepdims))

    return rule


def _axes(x: Tensor, axes: Tensor | None, noop: int) -> tuple[int, ...]:
    if axes is not None and axes.build.known(axes) is None:
        raise InvalidInput(
            "the gradient of a reduction needs axes that are known when the graph is built; pass a "
            "constant"
        )
    return reduced_axes(x.rank, None if axes is None else known_ints(axes), noop)


def _kept(t: Tensor, x: Tensor, reduced: tuple[int, ...]) -> Tensor:
    """Reshape a reduction of `x` so that the reduced axes have size 1."""
    return t.reshape([1 if i in reduced else d for i, d in enumerate(x.shape)])


def _vjp(rule: Any) -> Any:
    """Build a vjp from `rule(g, y, x, axes)`, whose result broadcasts to the shape of x."""

    def vjp(
        g: Tensor, y: Tensor, x: Tensor, axes: Tensor | None = None,
        *, keepdims: int, noop_with_empty_axes: int,
    ) -> Any:  # fmt: skip
        reduced = _axes(x, axes, noop_with_empty_axes)
        return (broadcast_to(rule(g, y, x, reduced), x.shape), None)

    return vjp


def _slope(f: Any) -> Any:
    """Build a vjp from `f(g, y, x)`, where g and y have the reduced axes as size 1."""
    return _vjp(lambda g, y, x, axes: f(_kept(g, x, axes), _kept(y, x, axes), x))


_uses = (
    sample(normal(2, 3, 4), fixed([0, 2])),
    sample(normal(2, 3), fixed([-1]), keepdims=0),
    sample(normal(2, 3)),
    sample(normal(2, 3), fixed([], "int64"), keepdims=0),
    sample(normal(2, 3), fixed([], "int64"), noop_with_empty_axes=1),
)

reduce_sum_row = _row(
    "ReduceSum",
    total=True,
    reference=_kernel(np.sum),
    xla=_xla(lambda k, x, **how: k.np.sum(x, **how)),
    vjp=_slope(lambda g, y, x: g),
    samples=_uses,
)


def _emit_axes_as_attribute(context: EmissionContext, node: Node) -> None:
    """Emit axes as an attribute, as reductions other than the sum have it before opset 18."""
    names = context.inputs(node)
    held = context.held(names[1]) if len(names) > 1 else None
    if held is None and len(names) > 1 and names[1]:
        raise InvalidInput(
            f"{node.op.name} takes only constant axes before opset 18, and these are computed; "
            "emit for opset 18 or newer"
        )
    axes = [] if held is None else [int(a) for a in held]
    if not axes and node.attrs.get("noop_with_empty_axes"):
        context.add("Identity", names[:1], context.output_names(node))
        return
    attrs: dict[str, Any] = {"keepdims": node.attrs.get("keepdims", 1)}
    _on_bytes(context, node, names[:1], attrs | ({"axes": axes} if axes else {}))


def _emit_bools_as_bytes(context: EmissionContext, node: Node) -> None:
    """Emit bools as bytes, which every opset and onnxruntime's kernels for no elements take."""
    _on_bytes(context, node, context.inputs(node), onnx_attrs(node.attrs))


def _on_bytes(
    context: EmissionContext, node: Node, names: list[str], attrs: Mapping[str, Any]
) -> None:
    """Emit the operator, on uint8 in place of bool."""
    if node.outputs[0].type.dtype != bool_:
        context.add(node.op.name, names, context.output_names(node), **attrs)
        return
    counted = context.emit("Cast", names[0], to=uint8.onnx)
    reduced = context.emit(node.op.name, counted, *names[1:], **attrs)
    context.add("Cast", [reduced], context.output_names(node), to=bool_.onnx)


reduce_mean_row = _row(
    "ReduceMean",
    reference=_kernel(np.mean),
    xla=_xla(lambda k, x, **how: k.np.mean(x, **how)),
    vjp=_vjp(
        lambda g, y, x, axes: _kept(g / size_of([x.shape[a] for a in axes], g.dtype), x, axes)
    ),
    lower_below={18: _emit_axes_as_attribute},
    samples=_uses,
)


def _extreme_vjp(
    g: Tensor, y: Tensor, x: Tensor, axes: Tensor | None = None,
    *, keepdims: int, noop_with_empty_axes: int,
) -> Any:  # fmt: skip
    reduced = _axes(x, axes, noop_with_empty_axes)
    # Ties share the cotangent: it is divided by the number of elements equal to the extreme.
    hit = (x == _kept(y, x, reduced)).cast(g.dtype)
    count = reduce_sum_row(hit, axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes)
    return (_kept(g, x, reduced) * hit / count, None)


def _ends(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the lowest and the highest value of an element type."""
    # ONNX: a reduction over no elements gives the identity of the operation, minus infinity or the
    # lowest integer for a maximum.
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return (False, True) if dtype.kind == "b" else (-np.inf, np.inf)


def _extreme_row(name: str, f: Any, *, xla: Any, total: bool) -> Op:
    return _row(
        name,
        total=total,
        reference=_kernel(f),
        xla=_xla(xla),
        vjp=_extreme_vjp,
        lower_below={18: _emit_axes_as_attribute, MEANING_OPSET + 1: _emit_bools_as_bytes},
        samples=(
            sample(apart(2, 3, 4), fixed([0, 2])),
            sample(apart(2, 3), fixed([-1]), keepdims=0),
            sample(apart(2, 3), fixed([], "int64"), noop_with_empty_axes=1),
            sample(ints(-9, 9, 2, 3), fixed([1])),
            sample(bools(2, 3), fixed([1])),
        ),
    )


reduce_max_row = _extreme_row(
    "ReduceMax",
    lambda x, **how: np.max(x, initial=_ends(x.dtype)[0], **how),
    xla=lambda k, x, **how: k.np.max(x, initial=_ends(x.dtype)[0], **how),
    total=True,
)
# It fails on no input either, but `total` would change the graphs of networks saved so far.
reduce_min_row = _extreme_row(
    "ReduceMin",
    lambda x, **how: np.min(x, initial=_ends(x.dtype)[1], **how),
    xla=lambda k, x, **how: k.np.min(x, initial=_ends(x.dtype)[1], **how),
    total=False,
)
reduce_prod_row = _row(
    "ReduceProd",
    reference=_kernel(np.prod),
    xla=_xla(lambda k, x, **how: k.np.prod(x, **how)),
    vjp=_vjp(lambda g, y, x, axes: _kept(g, x, axes) * product_of_others(x, axes)),
    lower_below={18: _emit_axes_as_attribute},
    samples=(*_uses, sample(fixed([[0.0, 2.0, 3.0], [0.0, 0.0, 5.0]]), fixed([1]))),
)


def _composed(name: str, body: Any, slope: Any, *, positive: bool = False) -> Op:
    """Build the row of a sum between two elementwise functions."""
    make = (lambda *s: between(0.5, 2, *s)) if positive else apart
    return _row(
        name,
        body=body,
        vjp=_slope(slope),
        # onnxruntime returns the operand itself where no axis is reduced.
        native=lambda node, opset: not node.attrs.get("noop_with_empty_axes"),
        lower_below={18: _emit_axes_as_attribute},
        samples=(
            sample(make(2, 3, 4), fixed([0, 2])),
            sample(make(2, 3), fixed([-1]), keepdims=0),
            sample(make(2, 3)),
            sample(make(2, 3), fixed([], "int64"), noop_with_empty_axes=1),
        ),
    )


def _of_sum(f: Any) -> Any:
    """Build a body from `f(x, total)`, where `total` sums over the axes."""
    return lambda x, axes=None, **attrs: f(x, lambda t: reduce_sum_row(t, axes, **attrs))


def _unit(x: Tensor, norm: Tensor) -> Tensor:
    """x / norm, and 0 where the norm is 0: the subgradient that PyTorch takes."""
    return where(norm == 0.0, 0.0, x / where(norm == 0.0, 1.0, norm))


def _log_sum_exp(x: Tensor, axes: Tensor | None = None, **attrs: int) -> Tensor:
    """log(sum(exp(x - m))) + m for the maximum m, where m is finite."""
    # The maximum cancels in the value, so its gradient is 0 and need not be computed.
    top = stop_gradient(reduce_max_row(x, axes, **{**attrs, "keepdims": 1}))
    top = where((top == float("inf")) | (top == -float("inf")), 0.0, top)
    total = log(reduce_sum_row(exp(x - top), axes, **attrs))
    return total + top.reshape(total.shape)


reduce_l1_row = _composed(
    "ReduceL1", _of_sum(lambda x, total: total(abs_(x))), lambda g, y, x: g * sign(x)
)
reduce_l2_row = _composed(
    "ReduceL2", _of_sum(lambda x, total: sqrt(total(x * x))), lambda g, y, x: g * _unit(x, y)
)
reduce_sum_square_row = _composed(
    "ReduceSumSquare", _of_sum(lambda x, total: total(x * x)), lambda g, y, x: g * 2.0 * x
)
reduce_log_sum_row = _composed(
    "ReduceLogSum",
    _of_sum(lambda x, total: log(total(x))),
    # y = log(sum x), dy/dx = 1 / sum x = exp(-y).
    lambda g, y, x: g * exp(-y),
    positive=True,
)
reduce_log_sum_exp_row = _composed("ReduceLogSumExp", _log_sum_exp, lambda g, y, x: g * exp(x - y))


def _position_types(call: OpCall) -> Types:
    x = call.type(0)
    axis = axes_of(x.rank, [call.attrs["axis"]])[0]
    middle = (1,) if call.attrs["keepdims"] else ()
    return (TensorType(int64, (*x.shape[:axis], *middle, *x.shape[axis + 1 :])),)


def _position_row(name: str, f: Any) -> Op:
    def kernel(x: Any, *, axis: int, keepdims: int, select_last_index: int) -> Any:
        if select_last_index:
            size = x.shape[axis]
            return size - 1 - f(np.flip(x, axis), axis, keepdims=bool(keepdims))
        return f(x, axis, keepdims=bool(keepdims))

    def rule(k: XlaContext, x: Any, *, axis: int, keepdims: int, select_last_index: int) -> Any:
        extreme = k.np.max if name == "ArgMax" else k.np.min
        at = _extreme_position(k, x, extreme, axis % x.ndim, last=bool(select_last_index))
        return at if keepdims else k.np.squeeze(at, axis)

    return Op(
        name=name,
        kind=OpKind.REDUCTION,
        batch=batching.axis_shifted,
        infer=_position_types,
        reference=kernel,
        xla=rule,
        samples=(
            sample(apart(3, 4), axis=1, keepdims=0),
            sample(apart(3, 4)),
            sample(lambda rng: np.round(rng.standard_normal((3, 8))), axis=-1),
            sample(lambda rng: np.round(rng.standard_normal((3, 8))), axis=-1, select_last_index=1),
        ),
    )


argmax_row = _position_row("ArgMax", np.argmax)
argmin_row = _position_row("ArgMin", np.argmin)


def _extreme_position(k: XlaContext, x: Any, extreme: Any, axis: int, *, last: bool) -> Any:
    """Return the first (or last) position of a maximum or minimum along an axis, which stays.

    NaN counts as the extreme, as in numpy. Two plain reductions: XLA's reduction of pairs takes 20
    times as long on a CPU.
    """
    n = x.shape[axis]
    along = [n if i == axis else 1 for i in range(x.ndim)]
    places = np.arange(n, dtype=np.int32).reshape(along)
    hit = (x == extreme(x, axis, keepdims=True)) | (x != x)  # noqa: PLR0124 - NaN
    if last:
        return k.np.max(k.np.where(hit, places, -1), axis, keepdims=True)
    return k.np.min(k.np.where(hit, places, n), axis, keepdims=True)


def _hardmax_xla(k: XlaContext, x: Any, *, axis: int) -> Any:
    axis %= x.ndim
    along = [-1 if i == axis else 1 for i in range(x.ndim)]
    first = _extreme_position(k, x, k.np.max, axis, last=False)
    return first == np.arange(x.shape[axis]).reshape(along)


hardmax = Op(
    name="Hardmax",
    kind=OpKind.REDUCTION,
    batch=batching.axis_shifted,
    infer=same_along_axis,
    reference=lambda x, *, axis: np.moveaxis(
        np.expand_dims(np.argmax(x, axis), -1) == np.arange(x.shape[axis]), -1, axis
    ),
    xla=_hardmax_xla,
    vjp=lambda g, y, x, *, axis: (None,),
    samples=(sample(apart(3, 4)), sample(apart(2, 3, 4), axis=1)),
)
"""1 at the first maximum along an axis, 0 elsewhere."""


def argmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the position of the first maximum along `axis`, int64."""
    return argmax_row(x, axis=axis, keepdims=0)


def argmin(x: Tensor, axis: int = -1) -> Tensor:
    """Return the position of the first minimum along `axis`, int64."""
    return argmin_row(x, axis=axis, keepdims=0)
