"""Windows of a plane as columns and back, and convolutions that sample at offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triplane.unified_ir.ir.dims import Dim, Expr, product
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.movement.indexing import arange
from triplane.unified_ir.ops.rows.movement.structure import broadcast_to, size_of, slice_axis
from triplane.unified_ir.ops.rows.windows import sampling
from triplane.unified_ir.ops.rows.windows.conv_gradients import conv_grad_input
from triplane.unified_ir.ops.rows.windows.convolution import conv_row
from triplane.unified_ir.ops.rows.windows.window import (
    Sizes,
    Window,
    at_tap,
    sizes_of,
    static,
    window_attrs,
)
from triplane.unified_ir.ops.samples import between, fixed, normal, sample
from triplane.unified_ir.ops.settings import length, settled
from triplane.unified_ir.ops.tensor import Tensor, dims_of


def _patches(channels: int, kernel: Sequence[int], dtype: Any) -> Any:
    """Return the weight of a grouped convolution that lists each channel's window as channels."""
    taps = int(np.prod(kernel))
    one = np.eye(taps, dtype=dtype).reshape(taps, 1, *kernel)
    return np.tile(one, (channels, 1, *[1] * len(kernel)))


def _col2im_operands(
    x: TensorType, image: Any, block: Any, attrs: Mapping[str, Any]
) -> tuple[list[Dim], int, Window, list[Dim]]:
    """Return image sizes, channels, window and positions; refuse columns that do not fit them."""
    kernel = [int(k) for k in block]
    sizes = [d if isinstance(d, Expr) else int(d) for d in image]
    window = Window(kernel, attrs)
    out = [window.out_size(i, d) for i, d in enumerate(sizes)]
    taps = int(np.prod(kernel))
    columns = static(x.shape[1:2], "the columns of Col2Im")[0] if x.rank == 3 else 0
    if len(sizes) != len(kernel) or not columns or columns % taps or x.shape[2] != product(out):
        raise ShapeError(
            f"Col2Im takes (N, C * {taps}, {product(out)}) for blocks {kernel} of an image "
            f"{sizes}, got {x}"
        )
    return sizes, columns // taps, window, out


def _col2im_types(call: OpCall) -> tuple[TensorType]:
    x = call.type(0)
    sizes, channels, _, _ = _col2im_operands(x, call.dims(1), call.ints(2), call.attrs)
    return (x.with_shape((x.shape[0], channels, *sizes)),)


def _col2im(x: Tensor, image: Tensor, block: Tensor, **attrs: Any) -> Tensor:
    known = [sampling.contents("Col2Im", operand) for operand in (image, block)]
    sizes, channels, window, out = _col2im_operands(x.type, known[0], known[1], attrs)
    planes = x.reshape((*x.shape[:2], *out))
    weight = x.build.as_operand(_patches(channels, window.kernel, x.dtype.numpy))
    # Col2Im adds each column back to where im2col read it: the adjoint of that convolution.
    return conv_grad_input(planes, weight, sizes, window, channels)


def _col2im_vjp(g: Tensor, y: Tensor, x: Tensor, _: Tensor, block: Tensor, **attrs: Any) -> Any:
    kernel: Any = sampling.contents("Col2Im", block)
    window = Window([int(k) for k in kernel], attrs)
    return (_unfolded(g, window).reshape(x.shape), None, None)


def _unfolded(x: Tensor, window: Window) -> Tensor:
    channels = static(x.shape[1:2], "channels")[0]
    weight = _patches(channels, window.kernel, x.dtype.numpy)
    return conv_row(x, weight, group=channels, **window.attrs())


def _col2im_kernel(x: Any, image: Any, block: Any, **attrs: Any) -> Any:
    """Add each tap's columns where its window position lies; then crop the pads."""
    window = Window([int(k) for k in block], attrs)
    out = window.out_ints([int(d) for d in image])
    n, taps = len(window.kernel), int(np.prod(window.kernel))
    columns = x.reshape(x.shape[0], -1, taps, *out)
    full = [int(d) + window.pads[i] + window.pads[n + i] for i, d in enumerate(image)]
    y: Any = np.zeros((*columns.shape[:2], *full), x.dtype)
    for k, tap in enumerate(np.ndindex(*window.kernel)):
        view = at_tap(y, window, tap, out)
        view += columns[:, :, k]
    plane: Any = [slice(window.pads[i], window.pads[i] + int(d)) for i, d in enumerate(image)]
    return y[(Ellipsis, *plane)]


col2im = Op(
    name="Col2Im",
    kind=OpKind.WINDOW,
    **settled(
        _col2im_types,
        lambda call: (call.type(0).shape[0], *[None] * (1 + length(call, 1))),
        1,
        2,
    ),
    reference=_col2im_kernel,
    vjp=_col2im_vjp,
    body=_col2im,
    samples=(
        sample(normal(2, 12, 6), fixed([3, 4]), fixed([2, 2])),
        sample(normal(1, 6, 6), fixed([5, 5]), fixed([2, 3]), strides=(2, 2), pads=(0, 1, 1, 0)),
        sample(normal(2, 4, 4), fixed([5]), fixed([2]), dilations=(1,)),
        sample(normal(1, 4, 9), fixed([5, 5]), fixed([2, 2]), dilations=(2, 2)),
    ),
)


def _deform_types(call: OpCall) -> tuple[TensorType]:
    x, w, offset = call.type(0), call.type(1), call.type(2)
    attrs = call.attrs
    if x.rank != 4 or w.rank != 4:
        raise ShapeError(f"DeformConv takes x: (N, C, H, W), w: (O, C/groups, h, w), got {x}, {w}")
    window = Window(static(w.shape[2:], "a kernel's size"), attrs)
    out = [window.out_size(i, d) for i, d in enumerate(x.shape[2:])]
    groups, taps = attrs["offset_group"], int(np.prod(window.kernel))
    wanted = (x.shape[0], groups * taps * 2, *out)
    if x.shape[1] != w.shape[1] * attrs["group"] or offset.shape != wanted:
        raise ShapeError(f"DeformConv of {x} by {w} takes offsets {wanted}, got {offset}")
    if call.has(4) and call.type(4).shape != (x.shape[0], groups * taps, *out):
        raise ShapeError(f"DeformConv needs one mask value per offset, got {call.type(4)}")
    return (x.with_shape((x.shape[0], w.shape[0], *out)),)


def _deform_conv(
    x: Tensor, w: Tensor, offset: Tensor, b: Tensor | None = None, mask: Tensor | None = None,
    *, group: int, offset_group: int, **attrs: Any,
) -> Tensor:  # fmt: skip
    """Convolve with taps moved by `offset` (Dai 2017) and scaled by `mask` (Zhu 2019)."""
    window = Window(static(w.shape[2:], "a kernel's size"), attrs)
    n, c, *spatial = x.shape
    out, taps = offset.shape[2:], int(np.prod(window.kernel))
    channels = static([c], "channels")[0]
    grouped = x.reshape((-1, channels // offset_group, *spatial))
    places = product(list(out))
    # ONNX lists offsets as (group, tap, (y, x)); each group of channels is treated as a sample of
    # its own.
    moved = offset.reshape((-1, taps, 2, places))
    axes: list[Sequence[sampling.Tap]] = []
    for i, size in enumerate(spatial):
        extent = size_of([size], x.dtype)
        shift = slice_axis(moved, 2, i, i + 1).reshape((-1, taps, places))
        pairs = sampling.linear(shift + _regular(window, i, out, x))
        near = [(sampling.bounded(p, extent), w * sampling.inside(p, extent)) for p, w in pairs]
        axes.append(near)
    planes = grouped.shape[0]
    first = arange(planes).reshape((planes, 1, 1)) * sampling.whole(product(list(spatial)))
    read = sampling.weighted_rows(
        sampling.rows_of(grouped), first, spatial, axes
    )  # (N og, K, T, C/og)
    if mask is not None:
        read = read * mask.reshape((-1, taps, places, 1))
    columns = read.transpose(0, 3, 1, 2).reshape((n, group, channels // group * taps, places))
    weights = w.reshape((group, -1, channels // group * taps))
    y = (weights @ columns).reshape((n, w.shape[0], *out))
    return y if b is None else y + b.reshape((w.shape[0], 1, 1))


def _regular(window: Window, i: int, out: Sequence[Dim], like: Tensor) -> Tensor:
    """Return where each tap lies along axis `i` without its offset: (K, T)."""
    tap = np.indices(window.kernel)[i].reshape(-1, 1) * window.dilations[i] - window.pads[i]
    start = arange(out[i]).cast(like.dtype) * float(window.strides[i])
    wide = start.reshape([out[k] if k == i else 1 for k in range(len(out))])
    places = broadcast_to(wide, out).reshape((1, product(list(out))))
    return places + like.build.as_operand(tap.astype(like.dtype.numpy))


deform_conv = Op(
    name="DeformConv", kind=OpKind.WINDOW, weights=(1, 3),
    infer=_deform_types,
    body=_deform_conv,
    native=lambda node, opset: opset >= 19,
    samples=(
        sample(normal(2, 2, 4, 4), normal(3, 2, 2, 2), normal(2, 8, 3, 3)),
        sample(normal(1, 4, 5, 4), normal(2, 2, 3, 2), normal(1, 24, 3, 2), normal(2),
               between(0, 1, 1, 12, 3, 2), group=2, offset_group=2, strides=(2, 2),
               pads=(1, 0, 1, 0)),
        sample(normal(1, 2, 5, 5), normal(2, 2, 2, 2), normal(1, 8, 3, 3), dilations=(2, 2)),
    ),
)  # fmt: skip


def unfold(
    x: Tensor, kernel: Sizes, *, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1
) -> Tensor:
    """x: (N, C, *S) -> (N, C K, L): the K elements of each of L windows, channel by channel."""
    attrs = window_attrs(x.rank, stride, padding, dilation)
    y = _unfolded(x, Window(sizes_of(kernel, x.rank, "a window"), attrs))
    return y.reshape((*y.shape[:2], product(list(y.shape[2:]))))


def fold(
    x: Tensor,
    size: Sequence[Dim],
    kernel: Sizes,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
) -> Tensor:
    """x: (N, C K, L) -> (N, C, *size): windows added where they overlap; the adjoint of unfold."""
    rank = len(size) + 2
    block = np.array(sizes_of(kernel, rank, "a window"))
    return col2im(x, dims_of(list(size)), block, **window_attrs(rank, stride, padding, dilation))
