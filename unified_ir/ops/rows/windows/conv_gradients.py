"""Gradients of a convolution: of its input, and of its weight in whichever form is fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, floor_div
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.matrix import gemm
from triplane.unified_ir.ops.rows.movement.slicing import slice_row
from triplane.unified_ir.ops.rows.movement.structure import concat, pad_row, slice_axis, stack
from triplane.unified_ir.ops.rows.windows import xla_convolutions
from triplane.unified_ir.ops.rows.windows.window import (
    Window,
    at_tap,
    is_static,
    static,
    tap_slices,
)
from triplane.unified_ir.ops.samples import normal, sample
from triplane.unified_ir.ops.tensor import Tensor, emit

Types = tuple[TensorType, ...]


def conv_grad_input(
    g: Tensor, w: Tensor, spatial: Sequence[Dim], window: Window, group: int
) -> Tensor:
    """Apply the adjoint of Conv in x: a ConvTranspose whose output has the given spatial size.

    If a size is open and the stride leaves its remainder open too, the output is computed at its
    largest possible size, and cut.
    """
    n = len(window.kernel)
    ends, extra, cut = [0] * n, [0] * n, []
    for i, size in enumerate(spatial):
        # How far the last window reaches beyond the plane: that is cut by pads. If it ends before
        # (a remainder of the stride that no window read), output_padding adds the missing zeros.
        beyond = window.reach(i, g.shape[2 + i]) - window.pads[i] - size
        if isinstance(beyond, int):
            ends[i], extra[i] = max(beyond, 0), max(-beyond, 0)
        else:
            # The remainder of the stride s is unknown but below s, so s - 1 more positions suffice.
            extra[i] = window.strides[i] - 1
            cut.append(i)
    attrs = {**window.attrs(), "pads": (*window.pads[:n], *ends), "output_padding": tuple(extra)}
    d_x = emit("ConvTranspose", g, w, group=group, **attrs)
    for i in cut:
        d_x = slice_axis(d_x, 2 + i, 0, spatial[i])
    return d_x


def crop(x: Tensor, wanted: Sequence[Dim]) -> Tensor:
    """Cut `x` to these sizes; an output padding of a stride or more adds positions beyond them."""
    for axis, (have, want) in enumerate(zip(x.shape, wanted, strict=True)):
        if have != want:
            x = slice_axis(x, axis, 0, want)
    return x


def _conv_grad_weight(call: OpCall) -> Types:
    x, g, attrs = call.type(0), call.type(1), call.attrs
    channels = static(x.shape[1:2], "channels")[0]
    if attrs["group"] < 1 or channels % attrs["group"]:
        raise ShapeError(f"{attrs['group']} groups do not divide {channels} channels")
    if x.rank != g.rank or x.shape[0] != g.shape[0]:
        raise ShapeError(f"ConvGradWeight takes x and g of one batch, got {x} and {g}")
    if attrs["form"] and attrs["form"] not in WEIGHT_FORMS:
        raise InvalidInput(f"form must be one of {', '.join(WEIGHT_FORMS)}, got {attrs['form']!r}")
    window = Window(attrs["kernel_shape"], attrs)
    n = len(window.kernel)
    for i, (size, positions) in enumerate(zip(x.shape[2:], g.shape[2:], strict=True)):
        beyond = window.reach(i, positions) - (size + window.pads[i] + window.pads[n + i])
        if isinstance(beyond, int) and beyond > 0:
            raise ShapeError(f"ConvGradWeight has more positions in {g} than windows in {x}")
    shape = (g.shape[1], channels // attrs["group"], *window.kernel)
    return (x.with_shape(shape),)


def _conv_grad_weight_kernel(
    x: Any, g: Any, *, kernel_shape: Any, group: int, form: str, **attrs: Any
) -> Any:
    window = Window(kernel_shape, attrs)
    padded = window.padded(x)
    grouped = padded.reshape(x.shape[0], group, -1, *padded.shape[2:])
    cotangents = g.reshape(g.shape[0], group, -1, *g.shape[2:])
    w = np.zeros((group, cotangents.shape[2], grouped.shape[2], *kernel_shape), x.dtype)
    spatial = "xyz"[: len(kernel_shape)]
    for tap in np.ndindex(*kernel_shape):
        view = at_tap(grouped, window, tap, g.shape[2:])
        # dw[o, c, k] = sum over n and positions p of g[n, o, p] x[n, c, s p + d k - pad].
        w[(Ellipsis, *tap)] = np.einsum(f"ngc{spatial},ngo{spatial}->goc", view, cotangents)
    return w.reshape(g.shape[1], -1, *kernel_shape)


def _conv_grad_weight_vjp(
    u: Tensor, y: Tensor, x: Tensor, g: Tensor,
    *, kernel_shape: Any, group: int, form: str, **attrs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    window = Window(kernel_shape, attrs)
    # y is bilinear in x and g, so each cotangent is again a convolution of the other operand with
    # u.
    d_x = conv_grad_input(g, u, x.shape[2:], window, group)
    return d_x, emit("Conv", x, u, group=group, **window.attrs())


@dataclass(frozen=True, slots=True)
class WeightForm:
    """One way to compute the gradient of a weight, and which cases it serves."""

    serves: Callable[[TensorType, TensorType, Window, int], bool]
    make: Callable[[Tensor, Tensor, Window, int], Tensor]


def _by_columns_serves(x: TensorType, g: TensorType, window: Window, group: int) -> bool:
    return is_static(x.shape[1:]) and is_static(g.shape[1:])


def _by_taps_serves(x: TensorType, g: TensorType, window: Window, group: int) -> bool:
    return _by_columns_serves(x, g, window, group) and x.shape[1] == g.shape[1] == group


def _interleaved_serves(x: TensorType, g: TensorType, window: Window, group: int) -> bool:
    return group == 1 and window.dilations[-1] == 1 and isinstance(x.shape[1], int)


def _by_columns(x: Tensor, g: Tensor, window: Window, group: int) -> Tensor:
    """Multiply slices of the padded input, as rows of one matrix, by g; one matrix per group."""
    k = len(window.kernel)
    planes = _swapped(_padded(x, window))
    out = static(g.shape[2:], "an output plane")
    taps = [
        _plane(planes, tap_slices(window, tap, out)) for tap in np.ndindex(*window.kernel)
    ]  # (C, N, *T) each
    if group == 1:
        return _product_of_columns(taps, g, window)
    n, per_group = x.shape[0], floor_div(x.shape[1], group)
    rows = concat([t.reshape((group, per_group, -1)) for t in taps], axis=1)
    cotangents = g.reshape((n, group, -1, *out)).transpose(1, 0, *range(3, 3 + k), 2)
    products = rows @ cotangents.reshape((group, rows.shape[2], -1))
    products = products.reshape((group, *window.kernel, -1, products.shape[2]))
    back = products.transpose(0, 2 + k, 1 + k, *range(1, 1 + k))
    return back.reshape((g.shape[1], per_group, *window.kernel))


def _product_of_columns(taps: Sequence[Tensor], g: Tensor, window: Window) -> Tensor:
    k, channels = len(window.kernel), taps[0].shape[0]
    rows = [t.reshape((channels, -1)) for t in taps]
    if len(rows) == 1:  # both operands are moved by whole planes, the result not at all
        outputs = _swapped(g).reshape((g.shape[1], -1))
        return gemm(outputs, rows[0], transB=1).reshape((g.shape[1], channels, *window.kernel))
    matrix = concat(rows)
    cotangents = g.transpose(0, *range(2, 2 + k), 1).reshape((-1, g.shape[1]))
    products = (matrix @ cotangents).reshape((*window.kernel, channels, g.shape[1]))
    return products.transpose(1 + k, k, *range(k))


def _by_taps(x: Tensor, g: Tensor, window: Window, group: int) -> Tensor:
    """Sum products per kernel position; for one input and output channel per group."""
    wide, out = _padded(x, window), static(g.shape[2:], "an output plane")
    axes = [0, *range(2, x.rank)]
    taps = [
        (_plane(wide, tap_slices(window, tap, out)) * g).sum(axes)
        for tap in np.ndindex(*window.kernel)
    ]
    return stack(taps, 1).reshape((g.shape[1], 1, *window.kernel))


def _by_rows(x: Tensor, g: Tensor, window: Window, group: int) -> Tensor:
    """Do as `_by_taps` with images and channels innermost, so that slices are few long copies."""
    n, out = len(window.kernel), static(g.shape[2:], "an output plane")
    wide, g_rows = inner_planes(x), inner_planes(g)
    if any(window.pads):
        wide = pad_row(wide, np.array([*window.pads[:n], 0, *window.pads[n:], 0]))
    taps = [
        (sliced(wide, tap_slices(window, tap, out)) * g_rows).reshape((-1, group)).sum([0])
        for tap in np.ndindex(*window.kernel)
    ]
    return stack(taps, 1).reshape((group, 1, *window.kernel))


def inner_planes(x: Tensor) -> Tensor:
    """Move (N, C, *S) -> (*S, N C), by one transposition of a matrix."""
    spatial = static(x.shape[2:], "a plane")
    rows = x.reshape((-1, int(np.prod(spatial))))
    return rows.transpose(1, 0).reshape((*spatial, -1))


def sliced(x: Tensor, taken: Sequence[slice], first: int = 0) -> Tensor:
    """Slice consecutive axes of `x`, from axis `first` on."""
    bounds = [(s.start, s.stop, axis, s.step) for axis, s in enumerate(taken, first)]
    if all((start, stop, step) == (0, x.shape[axis], 1) for start, stop, axis, step in bounds):
        return x
    return slice_row(x, *map(np.array, zip(*bounds, strict=True)))


def _interleaved(x: Tensor, g: Tensor, window: Window, group: int) -> Tensor:
    """Compute one Conv of x as (1, N, ..., W*C) by the kernel g: it reads runs of k*C floats."""
    n, c, *spatial = x.shape
    k = len(spatial)
    image = x.transpose(0, *range(2, 2 + k), 1).reshape((1, n, *spatial[:-1], spatial[-1] * c))
    # A step of one along the width is a step of C in the interleaved last axis.
    wide = [1] * (k - 1) + [c]
    attrs = {
        # The roles change: kernel positions are now output positions, so strides and dilations
        # swap.
        "strides": window.dilations,
        "dilations": [s * f for s, f in zip(window.strides, wide, strict=True)],
        "pads": [p * f for p, f in zip(window.pads, wide * 2, strict=True)],
    }
    sizes = [t * f for t, f in zip(window.kernel, wide, strict=True)]
    out = emit("Conv", image, _swapped(g), **attrs)
    out = crop(out, (1, g.shape[1], *sizes))
    return out.reshape((g.shape[1], *window.kernel, c)).transpose(0, 1 + k, *range(1, 1 + k))


def _padded(x: Tensor, window: Window) -> Tensor:
    n = len(window.kernel)
    if not any(window.pads):
        return x
    return pad_row(x, np.array([0, 0, *window.pads[:n], 0, 0, *window.pads[n:]]))


def _plane(x: Tensor, taken: Sequence[slice]) -> Tensor:
    """Slice the last axes of `x`."""
    return sliced(x, taken, x.rank - len(taken))


def _swapped(x: Tensor) -> Tensor:
    """Exchange batch and channels: (N, C, *S) -> (C, N, *S)."""
    return x.transpose(1, 0, *range(2, x.rank))


def _transposed(x: Tensor, g: Tensor, window: Window, group: int) -> Tensor:
    """Compute a Conv with batch and channel exchanged; strides and dilations exchange roles too."""
    n, channels, *spatial = x.shape
    per_group = floor_div(channels, group)
    k = len(spatial)
    if group > 1:
        split = x.reshape((n, group, per_group, *spatial))
        image = split.transpose(2, 1, 0, *range(3, 3 + k)).reshape((per_group, -1, *spatial))
    else:
        image = _swapped(x)
    attrs = {"strides": window.dilations, "dilations": window.strides, "pads": window.pads}
    out = emit("Conv", image, _swapped(g), group=group, **attrs)
    return _swapped(crop(out, (per_group, g.shape[1], *window.kernel)))


WEIGHT_FORMS: Final[Mapping[str, WeightForm]] = {
    "columns": WeightForm(_by_columns_serves, _by_columns),
    "interleaved": WeightForm(_interleaved_serves, _interleaved),
    "rows": WeightForm(_by_taps_serves, _by_rows),
    "taps": WeightForm(_by_taps_serves, _by_taps),
    "transposed": WeightForm(lambda x, g, window, group: True, _transposed),
}
"""The ways to compute ConvGradWeight; a node's attribute `form` names one, else `_fastest`."""


def weight_forms(x: TensorType, g: TensorType, attrs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the forms that serve a ConvGradWeight of these operands, the default first."""
    window, group = Window(attrs["kernel_shape"], attrs), attrs.get("group") or 1
    serving = [name for name, form in WEIGHT_FORMS.items() if form.serves(x, g, window, group)]
    first = _fastest(x, g, window, group, serving)
    return (first, *(name for name in serving if name != first))


LARGE_PLANE: Final = 256
"""From this many positions on, slices of whole planes are long copies as they are."""


def _fastest(
    x: TensorType, g: TensorType, window: Window, group: int, serving: Sequence[str]
) -> str:
    """Return the fastest on onnxruntime's CPU kernels; a tuner that measures sets `form`."""
    dense = set(window.strides) == {1}
    order: tuple[str, ...] = ("interleaved", "transposed")
    if x.shape[1] == 1 or set(window.kernel) == {1}:
        order = ("columns", "interleaved", "transposed")
    elif group > 1:
        order = ("columns", "transposed") if dense else ("transposed",)
        if "rows" in serving:
            large = int(np.prod(static(g.shape[2:], "a plane"))) >= LARGE_PLANE
            order = ("taps",) if dense and large else ("rows",)
    return next(name for name in order if name in serving)


def _conv_grad_weight_body(
    x: Tensor, g: Tensor, *, kernel_shape: Any, group: int, form: str, **attrs: Any
) -> Tensor:
    window = Window(kernel_shape, attrs)
    serving = weight_forms(x.type, g.type, {"kernel_shape": kernel_shape, "group": group, **attrs})
    if form and form not in serving:
        raise InvalidInput(f"this ConvGradWeight has the forms {', '.join(serving)}, got {form!r}")
    return WEIGHT_FORMS[form or serving[0]].make(x, g, window, group)


conv_grad_weight = Op(
    name="ConvGradWeight", kind=OpKind.CONTRACTION,
    computes="the gradient of y = Conv(x, w) with respect to w, from x and the cotangent g of y",
    domain=DOMAIN,
    operands=("T", "T"),
    attrs={
        "kernel_shape": AttrSpec("INTS", required=True),
        "strides": AttrSpec("INTS"),
        "pads": AttrSpec("INTS"),
        "dilations": AttrSpec("INTS"),
        "group": AttrSpec("INT", 1),
        "form": AttrSpec("STRING", ""),
    },
    infer=_conv_grad_weight,
    reference=_conv_grad_weight_kernel,
    xla=xla_convolutions.conv_grad_weight,
    vjp=_conv_grad_weight_vjp,
    body=_conv_grad_weight_body,
    samples=(
        sample(normal(2, 3, 6, 5), normal(2, 4, 4, 3), kernel_shape=(3, 3)),
        sample(
            normal(2, 3, 6, 6), normal(2, 4, 3, 3),
            kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 0, 0),
        ),
        sample(normal(2, 1, 6, 5), normal(2, 4, 6, 5), kernel_shape=(3, 3), pads=(1, 1, 1, 1)),
        sample(normal(2, 3, 5, 5), normal(2, 4, 3, 3), kernel_shape=(1, 1), strides=(2, 2)),
        sample(normal(2, 4, 5, 5), normal(2, 6, 3, 3), kernel_shape=(3, 3), group=2),
        sample(normal(1, 2, 7, 7), normal(1, 2, 3, 3), kernel_shape=(3, 3), dilations=(2, 2)),
        sample(normal(2, 2, 8), normal(2, 3, 3), kernel_shape=(3,), strides=(2,)),
        sample(normal(2, 3, 5, 4), normal(2, 3, 5, 4), kernel_shape=(3, 3), group=3,
               pads=(1, 1, 1, 1)),
        sample(normal(1, 2, 4, 3, 5), normal(1, 3, 2, 3, 3), kernel_shape=(2, 1, 3),
               strides=(2, 1, 2), pads=(0, 0, 1) * 2),
        *(sample(normal(2, 3, 5, 6), normal(2, 3, 3, 4), kernel_shape=(3, 3), group=3, form=form)
          for form in ("transposed", "columns", "taps", "rows")),
        sample(normal(2, 3, 5, 6), normal(2, 3, 3, 3), kernel_shape=(3, 3), group=3, form="rows",
               strides=(2, 2), pads=(1, 1, 1, 0)),
        *(sample(normal(2, 2, 7, 6), normal(2, 3, 2, 6), kernel_shape=(3, 3), strides=(2, 1),
                 dilations=(2, 1), pads=(1, 1, 0, 1), form=form)
          for form in ("transposed", "columns", "interleaved")),
    ),
)  # fmt: skip
