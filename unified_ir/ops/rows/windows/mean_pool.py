"""Pooling by sums: means and p-norms of windows. A sum of windows is a convolution with ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.batching import merged
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import IntegerForm, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import abs_, power, sign
from triplane.unified_ir.ops.rows.movement.resizing import along
from triplane.unified_ir.ops.rows.movement.structure import ones, pad_row, where
from triplane.unified_ir.ops.rows.windows.conv_gradients import conv_grad_input
from triplane.unified_ir.ops.rows.windows.convolution import conv_row, without_padding
from triplane.unified_ir.ops.rows.windows.window import (
    Padded,
    Sizes,
    Window,
    emit_pool,
    is_static,
    open_same_pads,
    pool_attrs,
    pooled_type,
    refuse_padding_alone,
)
from triplane.unified_ir.ops.rows.windows.xla_pools import window_sums
from triplane.unified_ir.ops.samples import apart, between, normal, sample
from triplane.unified_ir.ops.tensor import Tensor, dims_of


def _average_types(call: OpCall) -> tuple[TensorType]:
    if not call.attrs["count_include_pad"]:
        refuse_padding_alone(call.type(0), call.attrs)
    return (pooled_type(call.type(0), call.attrs),)


def _lp_types(call: OpCall) -> tuple[TensorType]:
    """Infer the types of LpPool, and of GlobalLpPool, which has no `kernel_shape`."""
    x = call.type(0)
    if call.attrs["p"] < 1:
        raise InvalidInput(f"{call.row} needs a power p of at least 1, got {call.attrs['p']}")
    if "kernel_shape" in call.attrs:
        return (pooled_type(x, call.attrs),)
    if x.rank < 3:
        raise ShapeError(f"{call.row} takes x: (N, C, ...), got {x}")
    return (x.with_shape((*x.shape[:2], *(1 for _ in x.shape[2:]))),)


def _rooms(x: Tensor, attrs: Mapping[str, Any]) -> tuple[Sequence[Dim], Sequence[Dim], Window]:
    """Return padding before and after, up to where the last window ends, and the bare window."""
    kernel, spatial = attrs["kernel_shape"], x.shape[2:]
    bare = Window.without_pads(kernel, attrs)
    n = len(kernel)
    amounts = open_same_pads(attrs, kernel, spatial)
    if amounts is not None:
        return amounts[:n], amounts[n:], bare
    window = Window.over(spatial, kernel, attrs)
    if not attrs.get("ceil_mode"):
        return window.pads[:n], window.pads[n:], bare
    after: list[Dim] = []
    for i, size in enumerate(spatial):
        out = window.out_size(i, size, ceil_mode=True)
        room = window.reach(i, out) - size - window.pads[i]
        if not isinstance(room, int) and window.span(i) < window.strides[i]:
            raise ShapeError(
                f"a pool with ceil_mode over the symbolic size {size} needs a window of at least "
                f"its stride {window.strides[i]}, got {window.span(i)}; fix the size"
            )
        after.append(max(room, 0) if isinstance(room, int) else room)
    return window.pads[:n], after, bare


def _sums(x: Tensor, attrs: Mapping[str, Any], value: float = 0.0) -> Tensor:
    """Sum each window, padding counted as `value`; x: (N, C, *S) -> (N, C, *T)."""
    before, after, bare = _rooms(x, attrs)
    # Channels become samples of one channel, since a dense kernel of ones would add them up.
    flat = x.reshape((-1, 1, *x.shape[2:]))
    pads = [*before, *after]
    kernel = ones((1, 1, *bare.kernel), x.dtype)
    if is_static(pads) and not value:
        y = conv_row(flat, kernel, **{**bare.attrs(), "pads": pads})
    else:
        amounts = dims_of([0, 0, *before, 0, 0, *after])
        y = conv_row(pad_row(flat, amounts, value or None), kernel, **bare.attrs())
    return y.reshape((*x.shape[:2], *y.shape[2:]))


def _spread(g: Tensor, x: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    """Apply the transpose of `_sums`: add each element of g to every position of its window."""
    kernel, spatial = attrs["kernel_shape"], list(x.shape[2:])
    n = len(kernel)
    flat = g.reshape((-1, 1, *g.shape[2:]))
    taps = ones((1, 1, *kernel), g.dtype)
    amounts = open_same_pads(attrs, kernel, spatial)
    if amounts is None:
        window = Window.over(spatial, kernel, attrs)
        return conv_grad_input(flat, taps, spatial, window, 1).reshape(x.shape)
    bare = Window.without_pads(kernel, attrs)
    wide = [a + d + b for a, d, b in zip(amounts[:n], spatial, amounts[n:], strict=True)]
    spread = conv_grad_input(flat, taps, wide, bare, 1)
    return without_padding(spread, amounts[:n], spatial).reshape(x.shape)


def _host_counts(padded: Padded, spatial: Sequence[int], include: int) -> Any:
    """Count the elements of each window: those inside, or declared padding too."""
    inside = padded.pad(np.ones(tuple(spatial)), 0)
    if include:
        declared = zip(padded.window.pads[padded.n :], padded.after, strict=True)
        # Positions that only ceil_mode adds never count, even with count_include_pad.
        stop = [size - max(0, room - own) for size, (own, room) in
                zip(inside.shape, declared, strict=True)]  # fmt: skip
        inside[tuple(slice(0, end) for end in stop)] = 1
    return sum(padded.views(inside))


def _average_kernel(
    x: Any, *, kernel_shape: Any, ceil_mode: int, count_include_pad: int, **attrs: Any
) -> Any:
    """Divide the sum over each window by how many of its elements count."""
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    counts = _host_counts(padded, x.shape[2:], count_include_pad)
    return sum(padded.views(padded.pad(x, 0))) / counts.astype(x.dtype)


def _average_xla(
    k: XlaContext, x: Any, *, kernel_shape: Any, ceil_mode: int, count_include_pad: int,
    **attrs: Any,
) -> Any:  # fmt: skip
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    counts = _host_counts(padded, x.shape[2:], count_include_pad)
    return window_sums(k, x, padded) / counts.astype(x.dtype)


def _counts(x: Tensor, attrs: Mapping[str, Any]) -> Any:
    """Count elements of each window: a number, an array, or a tensor for open sizes."""
    kernel, spatial, include = attrs["kernel_shape"], x.shape[2:], attrs["count_include_pad"]
    ceil_mode, pads = attrs["ceil_mode"], any(attrs.get("pads") or ())
    if is_static(spatial):
        shape = [int(d) for d in spatial]  # type: ignore[arg-type]
        padded = Padded(np.empty((1, 1, *shape)), kernel, ceil_mode, attrs)
        counts = _host_counts(padded, shape, include)
        return float(counts.flat[0]) if np.ptp(counts) == 0 else counts.astype(x.dtype.numpy)
    if include and ceil_mode and pads:
        raise ShapeError(
            f"the mean over the symbolic plane of {x.type} with ceil_mode and counted pads has no "
            "gradient; fix the height and width in the TensorSpec"
        )
    same = open_same_pads(attrs, kernel, spatial) is not None
    if not ceil_mode and (include or not (pads or same)):
        return float(math.prod(kernel))
    return _sums(ones((1, 1, *spatial), x.dtype), attrs)


def _undilated(node: Node) -> bool:
    return set(node.attrs.get("dilations", (1,))) == {1}  # type: ignore[arg-type]


average_pool_row = Op(
    name="AveragePool", kind=OpKind.WINDOW, integer_form=IntegerForm.MIX, emit=emit_pool,
    batch=merged,
    infer=_average_types,
    reference=_average_kernel,
    xla=_average_xla,
    vjp=lambda g, y, x, **attrs: (_spread(g / _counts(x, attrs), x, attrs),),
    body=lambda x, **attrs: _sums(x, attrs) / _counts(x, attrs),
    native=lambda node, opset: opset >= 19 or _undilated(node),
    samples=(
        sample(normal(2, 3, 4, 6), kernel_shape=(2, 2), strides=(2, 2)),
        sample(normal(1, 2, 6, 5), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        sample(normal(1, 2, 6, 5), kernel_shape=(3, 3), pads=(1, 1, 1, 1), count_include_pad=1),
        sample(normal(1, 2, 7, 6), kernel_shape=(3, 2), dilations=(2, 3), pads=(1, 0, 0, 1)),
        sample(normal(1, 2, 6, 7), kernel_shape=(3, 2), strides=(2, 2), ceil_mode=1),
        sample(normal(1, 2, 5, 6), kernel_shape=(2, 3), strides=(2, 2), auto_pad="SAME_UPPER"),
        sample(normal(1, 2, 5, 6), kernel_shape=(2, 2), strides=(1, 3), auto_pad="SAME_LOWER",
               count_include_pad=1),
        sample(normal(1, 2, 7), kernel_shape=(3,), strides=(2,)),
        sample(normal(1, 2, 4, 4, 5), kernel_shape=(2, 2, 3), strides=(2, 1, 2)),
    ),
)  # fmt: skip

global_average_pool = Op(
    name="GlobalAveragePool",
    kind=OpKind.WINDOW,
    integer_form=IntegerForm.MIX,
    batch=merged,
    body=lambda x: x.mean([*range(2, x.rank)], keepdims=True),
    samples=(sample(normal(2, 3, 4, 5)),),
)


def _root(total: Any, p: int) -> Any:
    return total if p == 1 else total ** (1.0 / p)


def norm_slope(g: Tensor, y: Tensor, p: int) -> Tensor:
    """Return g y^(1 - p), and 0 where the norm y is 0 and has no derivative."""
    if p == 1:
        return g
    zero = y == 0.0
    return where(zero, 0.0, g / power(where(zero, 1.0, y), float(p - 1)))


def norm_share(x: Tensor, p: int) -> Tensor:
    """Return sign(x) |x|^(p - 1): how each element moves the sum of p-th powers, divided by p."""
    return x if p == 2 else sign(x) if p == 1 else sign(x) * power(abs_(x), float(p - 1))


def powers(x: Tensor, p: int) -> Tensor:
    """|x|^p."""
    return abs_(x) if p == 1 else x * x if p == 2 else power(abs_(x), float(p))


def _lp_kernel(x: Any, *, kernel_shape: Any, p: int, ceil_mode: int, **attrs: Any) -> Any:
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    return _root(sum(padded.views(padded.pad(np.abs(x) ** p, 0))), p)


def _lp_xla(
    k: XlaContext, x: Any, *, kernel_shape: Any, p: int, ceil_mode: int, **attrs: Any
) -> Any:
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    return _root(window_sums(k, abs(x) ** p, padded), p)


def _lp_native(node: Node, opset: int) -> bool:
    return opset >= 18 or (_undilated(node) and not node.attrs.get("ceil_mode"))


lp_pool_row = Op(
    name="LpPool", kind=OpKind.WINDOW,
    batch=merged,
    infer=_lp_types,
    reference=_lp_kernel,
    xla=_lp_xla,
    # y = (sum |x|^p)^(1/p): dy/dx_i = y^(1 - p) sign(x_i) |x_i|^(p - 1).
    vjp=lambda g, y, x, p, **attrs: (
        _spread(norm_slope(g, y, p), x, attrs) * norm_share(x, p),
    ),
    body=lambda x, *, p, **attrs: _root(_sums(powers(x, p), attrs), p),
    native=_lp_native,
    samples=(
        sample(normal(2, 3, 4, 6), kernel_shape=(2, 2), strides=(2, 2)),
        sample(between(0.5, 2, 1, 2, 6, 5), kernel_shape=(3, 2), strides=(2, 1), p=3,
               pads=(1, 0, 1, 1)),
        sample(apart(1, 2, 5, 4), kernel_shape=(2, 2), dilations=(2, 1), p=1),
        sample(normal(1, 2, 6, 5), kernel_shape=(3, 2), strides=(2, 2), ceil_mode=1),
        sample(normal(1, 2, 6), kernel_shape=(3,), strides=(2,), auto_pad="SAME_LOWER"),
    ),
)  # fmt: skip


def _global_lp_body(x: Tensor, *, p: int) -> Tensor:
    total = powers(x, p).sum([*range(2, x.rank)], keepdims=True)
    return total if p == 1 else power(total, 1.0 / p)


global_lp_pool = Op(
    name="GlobalLpPool",
    kind=OpKind.WINDOW,
    batch=merged,
    infer=_lp_types,
    reference=lambda x, p: _root(
        (np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True), p
    ),
    vjp=lambda g, y, x, p: (norm_slope(g, y, p) * norm_share(x, p),),
    body=_global_lp_body,
    native=lambda node, opset: opset < 22,
    samples=(sample(normal(2, 3, 4, 5)), sample(apart(2, 3, 4), p=1), sample(normal(1, 2, 3), p=3)),
)
"""onnxruntime has a kernel up to opset 21 only."""


def avg_pool(
    x: Tensor,
    kernel: Sizes,
    *,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = False,
) -> Tensor:
    """x: (N, C, *S) -> (N, C, *T): mean of each window over the elements inside `x`.

    With `count_include_pad` the padding counts too, as zeros.
    """
    attrs = pool_attrs(x, kernel, stride, padding)
    modes = {"ceil_mode": int(ceil_mode), "count_include_pad": int(count_include_pad)}
    return average_pool_row(x, **modes, **attrs)


def lp_pool(
    x: Tensor, p: int, kernel: Sizes, *, stride: Sizes | None = None, ceil_mode: bool = False
) -> Tensor:
    """x: (N, C, *S) -> (N, C, *T): (sum |x|^p)^(1/p) of each window; the gradient at 0 is 0."""
    return lp_pool_row(x, p=p, ceil_mode=int(ceil_mode), **pool_attrs(x, kernel, stride, 0))


def adaptive_avg_pool(x: Tensor, size: int | Sequence[int | None]) -> Tensor:
    """x: (N, C, *S) -> (N, C, *size): output o is the mean of floor(oS/T) .. ceil((o+1)S/T).

    None keeps an axis. An axis of symbolic size can only be kept or pooled to 1.
    """
    wanted = [size] * (x.rank - 2) if isinstance(size, int) else list(size)
    if len(wanted) != x.rank - 2:
        raise ShapeError(f"adaptive_avg_pool of {x.type} takes {x.rank - 2} sizes, got {size}")
    y = x
    for axis, out in enumerate(wanted, 2):
        have = x.shape[axis]
        if out is None or out == have:
            continue
        if out == 1:
            y = y.mean([axis], keepdims=True)
        elif isinstance(have, int) and out >= 1:
            y = along(y, y.build.as_operand(_shares(have, out).astype(x.dtype.numpy)), axis)
        else:
            raise ShapeError(f"adaptive_avg_pool of {x.type} to {out} along axis {axis}")
    return y


def _shares(size: int, out: int) -> Any:
    """Return (out, size): the share that each position has in each mean."""
    starts = np.arange(out) * size // out
    ends = -(-(np.arange(1, out + 1) * size) // out)
    position = np.arange(size)
    inside = (position >= starts[:, None]) & (position < ends[:, None])
    return inside / inside.sum(1, keepdims=True)
