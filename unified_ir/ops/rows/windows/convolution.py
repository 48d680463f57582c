"""Convolution, its transpose and its weight gradient: each is a derivative of the other two.

With x: (N, C, *S), w: (O, C/groups, *K), g: (N, O, *T):
Conv(x, w) is bilinear; ConvTranspose(g, w) is its adjoint in x, ConvGradWeight(x, g) in w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.suggestions import check_choice
from triplane.unified_ir.ir.dims import Dim, Expr
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.batching import merged
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import IntegerForm, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.movement.structure import pad_row, slice_axis
from triplane.unified_ir.ops.rows.windows import xla_convolutions
from triplane.unified_ir.ops.rows.windows.conv_gradients import (
    conv_grad_input,
    conv_grad_weight,
    crop,
)
from triplane.unified_ir.ops.rows.windows.window import (
    SAME,
    Sizes,
    Window,
    at_tap,
    is_static,
    open_same_pads,
    out_sizes,
    shared_out,
    sizes_of,
    static,
    window_attrs,
    without_neutral,
)
from triplane.unified_ir.ops.samples import normal, sample
from triplane.unified_ir.ops.tensor import Tensor, dims_of

Types = tuple[TensorType, ...]


def _kernel_of(attrs: Mapping[str, Any], w: TensorType) -> tuple[int, ...]:
    """Return the kernel's size, checked against the attribute `kernel_shape`."""
    kernel = static(w.shape[2:], "a kernel's size")
    if attrs.get("kernel_shape") not in (None, kernel):
        raise ShapeError(f"kernel_shape={attrs['kernel_shape']} contradicts the weight {w}")
    return kernel


def _conv(call: OpCall) -> Types:
    x, w, group = call.type(0), call.type(1), call.attrs["group"]
    if x.rank != w.rank or x.rank < 3:
        raise ShapeError(f"Conv takes x: (N, C, ...) and w: (O, C/groups, ...), got {x} and {w}")
    if x.shape[1] != w.shape[1] * group:
        raise ShapeError(
            f"Conv needs x channels == w.shape[1] * groups, got {x} and {w} with groups={group}"
        )
    if group < 1 or (isinstance(w.shape[0], int) and w.shape[0] % group):
        raise ShapeError(f"Conv needs groups that divide the output channels, got {w}, {group=}")
    if call.has(2) and call.type(2).shape != w.shape[:1]:
        raise ShapeError(f"Conv needs one bias per output channel of {w}, got {call.type(2)}")
    if is_static(w.shape[2:]):
        spatial = out_sizes(call.attrs, _kernel_of(call.attrs, w), x.shape[2:])
    else:
        spatial = _positions_of_open_kernel(x, w, call.attrs)
    return (x.with_shape((x.shape[0], w.shape[0], *spatial)),)


def _positions_of_open_kernel(x: TensorType, w: TensorType, attrs: Mapping[str, Any]) -> list[Dim]:
    """Return the positions of a kernel of open size.

    A weight's gradient takes a cotangent as its kernel, which may have such a size.
    """
    # A window of 1 over size - (k - 1) d has as many positions as a window of k over size.
    unit = Window((1,) * (w.rank - 2), attrs)
    if (attrs.get("auto_pad") or "NOTSET") != "NOTSET" or attrs.get("kernel_shape"):
        raise ShapeError(f"a kernel of open size needs explicit pads, got {w} and {attrs}")
    return [
        unit.out_size(i, size - (k - 1) * unit.dilations[i])
        for i, (size, k) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True))
    ]


def _conv_vjp(
    g: Tensor, y: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None, **attrs: Any
) -> tuple[Tensor | None, ...]:
    kernel = _kernel_of(attrs, w.type)
    amounts = open_same_pads(attrs, kernel, x.shape[2:])
    if amounts is not None:
        return _conv_vjp_padded(g, x, w, b, amounts, {**attrs, "auto_pad": None, "pads": None})
    window = Window.over(x.shape[2:], kernel, attrs)
    d_x = conv_grad_input(g, w, x.shape[2:], window, attrs["group"])
    d_w = conv_grad_weight(x, g, kernel_shape=window.kernel, group=attrs["group"], **window.attrs())
    return (d_x, d_w) if b is None else (d_x, d_w, _grad_bias(g))


def _grad_bias(g: Tensor) -> Tensor:
    """Sum twice, which onnxruntime computes faster than one sum over such axes."""
    return g.sum([*range(2, g.rank)]).sum([0])


def _conv_vjp_padded(
    g: Tensor, x: Tensor, w: Tensor, b: Tensor | None, amounts: Sequence[Dim], attrs: Any
) -> tuple[Tensor | None, ...]:
    """Write padding that depends on open sizes out before, and cut it off the gradient."""
    n = x.rank - 2
    before, after = amounts[:n], amounts[n:]
    wide = pad_row(x, dims_of([0, 0, *before, 0, 0, *after]))
    d_wide, *rest = _conv_vjp(g, g, wide, w, b, **attrs)
    assert d_wide is not None
    return (without_padding(d_wide, before, x.shape[2:]), *rest)


def without_padding(x: Tensor, before: Sequence[Dim], spatial: Sequence[Dim]) -> Tensor:
    """Cut the padding off the spatial axes: (N, C, *S padded) -> (N, C, *S)."""
    for i, size in enumerate(spatial):
        x = slice_axis(x, 2 + i, before[i], before[i] + size)
    return x


def _conv_kernel(x: Any, w: Any, b: Any = None, **attrs: Any) -> Any:
    """Compute one einsum per kernel tap over strided views of the padded input."""
    kernel, group = w.shape[2:], attrs["group"]
    window = Window.over(x.shape[2:], kernel, attrs)
    out = window.out_ints(x.shape[2:])
    padded = window.padded(x)
    grouped = padded.reshape(x.shape[0], group, -1, *padded.shape[2:])
    weights = w.reshape(group, -1, *w.shape[1:])
    y = np.zeros((x.shape[0], group, weights.shape[1], *out), x.dtype)
    for tap in np.ndindex(*kernel):
        view = at_tap(grouped, window, tap, out)
        y += np.einsum("ngc...,goc->ngo...", view, weights[(Ellipsis, *tap)])
    y = y.reshape(x.shape[0], w.shape[0], *out)
    return y if b is None else y + b.reshape(-1, *[1] * len(kernel))


conv_row = Op(
    name="Conv",
    kind=OpKind.CONTRACTION,
    weights=(1, 2),
    integer_form=IntegerForm.PRODUCT,
    batch=merged,
    infer=_conv,
    reference=_conv_kernel,
    xla=xla_convolutions.conv,
    vjp=_conv_vjp,
    samples=(
        sample(normal(2, 3, 6, 5), normal(4, 3, 3, 3), normal(4), pads=(1, 1, 1, 1)),
        sample(normal(2, 3, 7, 6), normal(4, 3, 3, 2), strides=(2, 2), pads=(1, 0, 0, 1)),
        sample(normal(2, 1, 5, 5), normal(2, 1, 3, 3)),
        sample(normal(2, 4, 5, 5), normal(6, 2, 3, 3), group=2),
        sample(normal(1, 2, 7, 7), normal(2, 2, 3, 3), dilations=(2, 2)),
        sample(normal(2, 3, 4, 4), normal(5, 3, 1, 1)),
        sample(normal(2, 2, 8), normal(3, 2, 3), strides=(2,)),
        sample(normal(1, 2, 4, 5, 3), normal(3, 2, 2, 3, 2), strides=(1, 2, 1), pads=(1, 0, 1) * 2),
        sample(normal(2, 2, 5, 6), normal(3, 2, 3, 2), auto_pad="SAME_UPPER", strides=(2, 2)),
        sample(normal(2, 2, 5, 6), normal(3, 2, 2, 2), auto_pad="SAME_LOWER", strides=(1, 3)),
        sample(normal(2, 2, 5, 7), normal(3, 2, 1, 2), auto_pad="SAME_UPPER", strides=(3, 4)),
        sample(normal(2, 2, 5), normal(3, 2, 3), auto_pad="VALID", kernel_shape=(3,)),
    ),
)


def transposed_window(
    attrs: Mapping[str, Any], kernel: Sequence[int], spatial: Sequence[Dim]
) -> tuple[Window, tuple[int, ...]]:
    """Return the window whose Conv this transposes, with explicit pads, and the output padding.

    `output_shape` and SAME_* fix the output's size, and the pads follow from it; sizes that no pad
    can reach are reached by output padding.
    """
    mode = attrs.get("auto_pad") or "NOTSET"
    plain = Window(kernel, {**attrs, "pads": attrs.get("pads") if mode == "NOTSET" else None})
    extra = list(attrs.get("output_padding") or (0,) * len(kernel))
    if len(extra) != len(kernel) or min(extra, default=0) < 0:
        raise ShapeError(f"ConvTranspose over {len(kernel)} axes takes output_padding={extra}")
    wanted = attrs.get("output_shape")
    if not wanted and mode not in SAME:
        return plain, tuple(extra)
    if wanted and len(wanted) != len(kernel):
        raise ShapeError(f"ConvTranspose needs {len(kernel)} sizes in output_shape, got {wanted}")
    totals = []
    for i, size in enumerate(spatial):
        out = wanted[i] if wanted else size * plain.strides[i]
        # ONNX: total_padding = stride (size - 1) + output_padding + span - output_shape.
        total = plain.reach(i, size) + extra[i] - out
        if isinstance(total, Expr):
            raise ShapeError(f"ConvTranspose with output_shape needs static sizes, got {size}")
        extra[i] += max(-total, 0)
        totals.append(max(total, 0))
    return Window(kernel, {**attrs, "pads": shared_out(totals, mode)}), tuple(extra)


def _conv_transpose(call: OpCall) -> Types:
    x, w, attrs = call.type(0), call.type(1), call.attrs
    group = attrs["group"]
    if x.rank != w.rank or x.rank < 3 or x.shape[1] != w.shape[0]:
        raise ShapeError(f"ConvTranspose takes x: (N, C, ...), w: (C, O/groups, ...), got {x}, {w}")
    if group < 1 or (isinstance(w.shape[0], int) and w.shape[0] % group):
        raise ShapeError(f"ConvTranspose needs groups that divide its channels, got {w}, {group=}")
    window, extra = transposed_window(attrs, _kernel_of(attrs, w), x.shape[2:])
    n = len(window.kernel)
    spatial = [
        window.reach(i, d) + extra[i] - window.pads[i] - window.pads[n + i]
        for i, d in enumerate(x.shape[2:])
    ]
    if any(isinstance(d, int) and d < 1 for d in spatial):
        raise ShapeError(f"ConvTranspose of {x} leaves {spatial} after pads {window.pads}")
    channels = w.shape[1] * group
    if call.has(2) and call.type(2).shape != (channels,):
        raise ShapeError(f"ConvTranspose of {w} needs {channels} biases, got {call.type(2)}")
    return (x.with_shape((x.shape[0], channels, *spatial)),)


def _conv_transpose_kernel(x: Any, w: Any, b: Any = None, **attrs: Any) -> Any:
    """Add each input position, times the kernel, onto the padded output; then crop the pads."""
    window, extra = transposed_window(attrs, w.shape[2:], x.shape[2:])
    group, n = attrs["group"], len(window.kernel)
    full = [
        static([window.reach(i, s)], "a plane")[0] + extra[i] for i, s in enumerate(x.shape[2:])
    ]
    grouped = x.reshape(x.shape[0], group, -1, *x.shape[2:])
    weights = w.reshape(group, -1, *w.shape[1:])
    y = np.zeros((x.shape[0], group, w.shape[1], *full), x.dtype)
    for tap in np.ndindex(*window.kernel):
        view = at_tap(y, window, tap, x.shape[2:])
        view += np.einsum("ngc...,gco->ngo...", grouped, weights[(Ellipsis, *tap)])
    inside: list[Any] = [slice(window.pads[i], full[i] - window.pads[n + i]) for i in range(n)]
    y = y.reshape(x.shape[0], -1, *full)[(Ellipsis, *inside)]
    return y if b is None else y + b.reshape(-1, *[1] * n)


def _conv_transpose_xla(
    k: XlaContext, x: Any, w: Any, b: Any = None, *, group: int, **attrs: Any
) -> Any:
    window, extra = transposed_window(attrs, w.shape[2:], x.shape[2:])
    return xla_convolutions.conv_transpose(k, x, w, b, window, extra, group)


def _conv_transpose_vjp(
    g: Tensor, y: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None, **attrs: Any
) -> tuple[Tensor | None, ...]:
    window, _ = transposed_window(attrs, _kernel_of(attrs, w.type), x.shape[2:])
    group = attrs["group"]
    # The adjoint of the adjoint: a plain Conv of the cotangent.
    d_x = crop(conv_row(g, w, group=group, **window.attrs()), x.shape)
    d_w = conv_grad_weight(g, x, kernel_shape=window.kernel, group=group, **window.attrs())
    return (d_x, d_w) if b is None else (d_x, d_w, _grad_bias(g))


def _emit_conv_transpose(context: EmissionContext, node: Node) -> None:
    """Emit explicit pads, because runtimes place those of SAME and output_shape differently."""
    x, w = node.inputs[0], node.inputs[1]
    assert x is not None
    assert w is not None
    if node.attrs.get("auto_pad", "NOTSET") == "NOTSET" and not node.attrs.get("output_shape"):
        context.plain(node)
        return
    kernel = static(w.type.shape[2:], "a kernel's size")
    window, extra = transposed_window(node.attrs, kernel, x.type.shape[2:])
    context.plain(node, auto_pad=None, output_shape=None, output_padding=extra, pads=window.pads)


conv_transpose_row = Op(
    name="ConvTranspose",
    kind=OpKind.CONTRACTION,
    weights=(1, 2),
    emit=_emit_conv_transpose,
    batch=merged,
    infer=_conv_transpose,
    reference=_conv_transpose_kernel,
    xla=_conv_transpose_xla,
    vjp=_conv_transpose_vjp,
    samples=(
        sample(normal(2, 4, 3, 3), normal(4, 3, 3, 3), pads=(1, 1, 1, 1)),
        sample(normal(2, 4, 3, 3), normal(4, 2, 3, 3), strides=(2, 2), output_padding=(1, 1)),
        sample(normal(2, 4, 3, 3), normal(4, 2, 2, 2), normal(4), group=2, strides=(2, 2)),
        sample(normal(2, 2, 4), normal(2, 3, 3), strides=(3,), dilations=(2,), pads=(1, 2)),
        sample(normal(1, 2, 2, 3, 2), normal(2, 2, 2, 3, 2), strides=(2, 1, 2), pads=(0, 1, 0) * 2),
        sample(normal(1, 2, 3, 4), normal(2, 2, 3, 2), strides=(2, 3), auto_pad="SAME_UPPER"),
        sample(normal(1, 2, 3, 4), normal(2, 2, 4, 3), strides=(2, 2), auto_pad="SAME_LOWER"),
        sample(normal(1, 2, 3, 3), normal(2, 2, 3, 3), strides=(3, 2), output_shape=(10, 6)),
        sample(normal(1, 2, 3, 3), normal(2, 2, 3, 3), strides=(2, 2), auto_pad="VALID"),
    ),
)


PADDINGS: Final = {"same": "SAME_UPPER", "valid": "VALID"}
"""Name of a padding -> ONNX's name."""


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """x: (N, C, *S), weight: (O, C/groups, *K), bias: (O,) -> (N, O, *T).

    `padding` is an amount for every side, one per axis, or "same" / "valid". With "same" an axis
    has ceil(size / stride) outputs, and an odd element of padding comes after the axis.
    """
    mode = None
    attrs = window_attrs(x.rank, stride, 0 if isinstance(padding, str) else padding, dilation)
    if isinstance(padding, str):
        check_choice("padding that is no number", padding, PADDINGS)
        mode = PADDINGS[padding]
        kernel = static(weight.shape[2:], "a kernel's size")
        if is_static(x.shape[2:]) or set(attrs["strides"]) == {1}:
            window = Window.over(x.shape[2:], kernel, {**attrs, "auto_pad": mode})
            mode, attrs["pads"] = None, window.pads
    return conv_row(x, weight, bias, group=groups, auto_pad=mode, **without_neutral(attrs))


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """x: (N, C, *S), weight: (C, O/groups, *K), bias: (O,) -> (N, O, *T), the adjoint of `conv`.

    T = (S - 1) stride - 2 padding + dilation (K - 1) + 1 + output_padding along each axis.
    """
    attrs = window_attrs(x.rank, stride, padding, dilation)
    attrs["output_padding"] = sizes_of(output_padding, x.rank, "an output_padding")
    return conv_transpose_row(x, weight, bias, group=groups, **without_neutral(attrs))
