"""Convolution, its transpose and its weight gradient: each is a derivative of the other two.

With x: (N, C, *S), w: (O, C/groups, *K), g: (N, O, *T):
Conv(x, w) is bilinear; ConvTranspose(g, w) is its adjoint in x, ConvGradWeight(x, g) in w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, ceil_div, floor_div
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, Call, Op
from triplane.unified_ir.ops.samples import normal, sample
from triplane.unified_ir.ops.structure import concat, pad, slice_axis, slice_row
from triplane.unified_ir.ops.tensor import Tensor

Types = tuple[TensorType, ...]


class Window:
    """Strides, dilations and explicit pads of a sliding window over `axes` spatial axes."""

    def __init__(self, kernel: Sequence[int], attrs: Mapping[str, Any]) -> None:
        n = len(kernel)
        self.kernel = tuple(kernel)
        self.strides = tuple(attrs.get("strides") or (1,) * n)
        self.dilations = tuple(attrs.get("dilations") or (1,) * n)
        self.pads = tuple(attrs.get("pads") or (0,) * (2 * n))
        if not len(self.strides) == len(self.dilations) == len(self.pads) // 2 == n:
            raise ShapeError(
                f"a window over {n} axes needs {n} strides and dilations and {2 * n} pads, got "
                f"{self.strides}, {self.dilations}, {self.pads}"
            )
        if (
            min(*self.strides, *self.dilations, *self.kernel, 1) < 1
            or min(self.pads, default=0) < 0
        ):
            raise ShapeError(
                f"window sizes, strides and dilations are positive, pads not negative, got {attrs}"
            )

    def span(self, i: int) -> int:
        """Extent of the dilated kernel along axis `i`."""
        return int((self.kernel[i] - 1) * self.dilations[i] + 1)

    def out_size(self, i: int, size: Dim, *, ceil_mode: bool = False) -> Dim:
        """Number of window positions along axis `i` of the given size."""
        n = len(self.kernel)
        free = size + self.pads[i] + self.pads[n + i] - self.span(i)
        if isinstance(free, int) and free < 0:
            raise ShapeError(
                f"a window of {self.span(i)} does not fit in size {size} with pads "
                f"{self.pads[i]}+{self.pads[n + i]}"
            )
        if not ceil_mode:
            return floor_div(free, self.strides[i]) + 1
        out = ceil_div(free, self.strides[i]) + 1
        starts_past_end = (
            isinstance(out, int)
            and isinstance(size, int)
            and (out - 1) * self.strides[i] >= size + self.pads[i]
        )
        return out - 1 if starts_past_end else out

    def out_ints(self, sizes: Sequence[int], *, ceil_mode: bool = False) -> list[int]:
        """Window positions along each axis of static sizes."""
        return list(
            static([self.out_size(i, s, ceil_mode=ceil_mode) for i, s in enumerate(sizes)], "sizes")
        )

    def attrs(self) -> dict[str, Any]:
        """As node attributes."""
        return {"strides": self.strides, "dilations": self.dilations, "pads": self.pads}


def with_explicit_pads(
    attrs: Mapping[str, Any], kernel: Sequence[int], spatial: Sequence[Dim]
) -> dict[str, Any]:
    """Attributes with `auto_pad` turned into `pads` (SAME_* needs static sizes or stride 1)."""
    mode = attrs.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        return dict(attrs) if mode == "NOTSET" else {**attrs, "pads": None}
    window = Window(kernel, {**attrs, "pads": None})
    totals = [_same_total(window, i, size) for i, size in enumerate(spatial)]
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    pads = small + large if mode == "SAME_UPPER" else large + small
    return {**attrs, "pads": tuple(pads)}


def _same_total(window: Window, i: int, size: Dim) -> int:
    if window.strides[i] == 1:
        return window.span(i) - 1
    if isinstance(size, Expr):
        raise ShapeError(f"SAME padding with stride over the symbolic size {size} is not static")
    out = -(-size // window.strides[i])
    return max(0, int((out - 1) * window.strides[i] + window.span(i) - size))


def static(dims: Sequence[Dim], what: str) -> tuple[int, ...]:
    """Dimensions that must be known when the graph is built."""
    if any(isinstance(d, Expr) for d in dims):
        raise ShapeError(f"{what} must be static, got ({', '.join(map(str, dims))})")
    return tuple(int(d) for d in dims)  # type: ignore[arg-type]


def conv_window(attrs: Mapping[str, Any], x: TensorType, w: TensorType) -> Window:
    """The window of a convolution, checked against the attribute `kernel_shape`."""
    kernel = static(w.shape[2:], "a kernel's size")
    if attrs.get("kernel_shape") not in (None, kernel):
        raise ShapeError(f"kernel_shape={attrs['kernel_shape']} contradicts the weight {w}")
    return Window(kernel, with_explicit_pads(attrs, kernel, x.shape[2:]))


def _conv(call: Call) -> Types:
    x, w, group = call.type(0), call.type(1), call.attrs["group"]
    if x.rank != w.rank or x.rank < 3:
        raise ShapeError(f"Conv takes x: (N, C, ...) and w: (O, C/groups, ...), got {x} and {w}")
    if x.shape[1] != w.shape[1] * group:
        raise ShapeError(
            f"Conv needs x channels == w.shape[1] * groups, got {x} and {w} with groups={group}"
        )
    if isinstance(w.shape[0], int) and w.shape[0] % group:
        raise ShapeError(f"Conv needs groups that divide the output channels, got {w}, {group=}")
    if call.has(2) and call.type(2).shape != w.shape[:1]:
        raise ShapeError(f"Conv needs one bias per output channel of {w}, got {call.type(2)}")
    window = conv_window(call.attrs, x, w)
    spatial = [window.out_size(i, d) for i, d in enumerate(x.shape[2:])]
    return (x.with_shape((x.shape[0], w.shape[0], *spatial)),)


def _conv_vjp(
    g: Tensor, y: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None, **attrs: Any
) -> tuple[Tensor | None, ...]:
    window = conv_window(attrs, x.type, w.type)
    d_x = conv_grad_input(g, w, x.shape[2:], window, attrs["group"])
    d_w = conv_grad_weight(x, g, kernel_shape=window.kernel, group=attrs["group"], **window.attrs())
    if b is None:
        return d_x, d_w
    return d_x, d_w, g.sum([*range(2, g.rank)]).sum([0])


def conv_grad_input(
    g: Tensor, w: Tensor, spatial: Sequence[Dim], window: Window, group: int
) -> Tensor:
    """The adjoint of Conv in x: a ConvTranspose whose output has the given spatial size."""
    n = len(window.kernel)
    extra = []
    for i, size in enumerate(spatial):
        reach = (g.shape[2 + i] - 1) * window.strides[i] + window.span(i)
        missing = size + window.pads[i] + window.pads[n + i] - reach
        if isinstance(missing, Expr):
            raise ShapeError(
                f"the gradient of a convolution with stride {window.strides[i]} needs a static "
                f"size, got {size}; fix the height and width in the TensorSpec"
            )
        extra.append(int(missing))
    return conv_transpose_row(g, w, group=group, output_padding=tuple(extra), **window.attrs())


def _conv_kernel(x: Any, w: Any, b: Any = None, **attrs: Any) -> Any:
    """One einsum per kernel tap over strided views of the padded input."""
    kernel = w.shape[2:]
    attrs = with_explicit_pads(attrs, kernel, x.shape[2:])
    window, group = Window(kernel, attrs), attrs["group"]
    n = len(kernel)
    out = window.out_ints(x.shape[2:])
    padded = np.pad(x, [(0, 0), (0, 0), *zip(window.pads[:n], window.pads[n:], strict=True)])
    grouped = padded.reshape(x.shape[0], group, -1, *padded.shape[2:])
    weights = w.reshape(group, -1, *w.shape[1:])
    y = np.zeros((x.shape[0], group, weights.shape[1], *out), x.dtype)
    for tap in np.ndindex(*kernel):
        view = at_tap(grouped, window, tap, out)
        y += np.einsum("ngc...,goc->ngo...", view, weights[(Ellipsis, *tap)])
    y = y.reshape(x.shape[0], w.shape[0], *out)
    return y if b is None else y + b.reshape(-1, *[1] * n)


def at_tap(x: Any, window: Window, tap: Sequence[int], out: Sequence[int]) -> Any:
    """The view of the padded input (..., *S) that kernel position `tap` multiplies."""
    return x[(Ellipsis, *_tap_slices(window, tap, out))]


def _tap_slices(window: Window, tap: Sequence[int], out: Sequence[int]) -> list[slice]:
    """Where kernel position `tap` reads the padded input, for each output position."""
    starts = [t * d for t, d in zip(tap, window.dilations, strict=True)]
    return [
        slice(start, start + (o - 1) * s + 1, s)
        for start, o, s in zip(starts, out, window.strides, strict=True)
    ]


conv_row = Op(
    name="Conv",
    infer=_conv,
    reference=_conv_kernel,
    vjp=_conv_vjp,
    samples=(
        sample(normal(2, 3, 6, 5), normal(4, 3, 3, 3), normal(4), pads=(1, 1, 1, 1)),
        sample(normal(2, 3, 7, 6), normal(4, 3, 3, 2), strides=(2, 2), pads=(1, 0, 0, 1)),
        sample(normal(2, 1, 5, 5), normal(2, 1, 3, 3)),
        sample(normal(2, 4, 5, 5), normal(6, 2, 3, 3), group=2),
        sample(normal(1, 2, 7, 7), normal(2, 2, 3, 3), dilations=(2, 2)),
        sample(normal(2, 3, 4, 4), normal(5, 3, 1, 1)),
        sample(normal(2, 2, 8), normal(3, 2, 3), strides=(2,)),
    ),
)


def _conv_transpose(call: Call) -> Types:
    x, w, attrs = call.type(0), call.type(1), call.attrs
    if attrs["output_shape"] or attrs["auto_pad"] != "NOTSET":
        raise InvalidInput("ConvTranspose takes explicit pads and output_padding here")
    if x.rank != w.rank or x.shape[1] != w.shape[0]:
        raise ShapeError(f"ConvTranspose takes x: (N, C, ...), w: (C, O/groups, ...), got {x}, {w}")
    window = Window(static(w.shape[2:], "a kernel's size"), attrs)
    n = len(window.kernel)
    extra = attrs["output_padding"] or (0,) * n
    spatial = [
        (d - 1) * window.strides[i] + window.span(i) + extra[i]
        - window.pads[i] - window.pads[n + i]
        for i, d in enumerate(x.shape[2:])
    ]  # fmt: skip
    if any(isinstance(d, int) and d < 1 for d in spatial):
        raise ShapeError(f"ConvTranspose of {x} leaves {spatial} after pads {window.pads}")
    return (x.with_shape((x.shape[0], w.shape[1] * attrs["group"], *spatial)),)


def _conv_transpose_kernel(x: Any, w: Any, b: Any = None, **attrs: Any) -> Any:
    """Adds each input position, times the kernel, onto the padded output; then crops the pads."""
    window, group = Window(w.shape[2:], attrs), attrs["group"]
    n = len(window.kernel)
    extra = attrs.get("output_padding") or (0,) * n
    full = [
        (s - 1) * window.strides[i] + window.span(i) + extra[i] for i, s in enumerate(x.shape[2:])
    ]
    grouped = x.reshape(x.shape[0], group, -1, *x.shape[2:])
    weights = w.reshape(group, -1, *w.shape[1:])
    y = np.zeros((x.shape[0], group, w.shape[1], *full), x.dtype)
    for tap in np.ndindex(*window.kernel):
        view = at_tap(y, window, tap, x.shape[2:])
        view += np.einsum("ngc...,gco->ngo...", grouped, weights[(Ellipsis, *tap)])
    y = y.reshape(x.shape[0], -1, *full)
    crop: list[Any] = [Ellipsis]
    crop += [slice(window.pads[i], full[i] - window.pads[n + i]) for i in range(n)]
    y = y[tuple(crop)]
    return y if b is None else y + b.reshape(-1, *[1] * n)


def _conv_transpose_vjp(
    g: Tensor, y: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None, **attrs: Any
) -> tuple[Tensor | None, ...]:
    window = Window(static(w.shape[2:], "a kernel's size"), attrs)
    group = attrs["group"]
    d_x = conv_row(g, w, group=group, **window.attrs())
    d_x = _crop(d_x, x.shape)
    d_w = conv_grad_weight(g, x, kernel_shape=window.kernel, group=group, **window.attrs())
    if b is None:
        return d_x, d_w
    return d_x, d_w, g.sum([*range(2, g.rank)]).sum([0])


def _crop(x: Tensor, wanted: Sequence[Dim]) -> Tensor:
    """Drops what output padding of a stride or more let the window see beyond the input."""
    for axis, (have, want) in enumerate(zip(x.shape, wanted, strict=True)):
        if have != want:
            x = slice_axis(x, axis, 0, want)
    return x


conv_transpose_row = Op(
    name="ConvTranspose",
    infer=_conv_transpose,
    reference=_conv_transpose_kernel,
    vjp=_conv_transpose_vjp,
    samples=(
        sample(normal(2, 4, 3, 3), normal(4, 3, 3, 3), pads=(1, 1, 1, 1)),
        sample(normal(2, 4, 3, 3), normal(4, 2, 3, 3), strides=(2, 2), output_padding=(1, 1)),
        sample(normal(2, 4, 3, 3), normal(4, 2, 2, 2), normal(4), group=2, strides=(2, 2)),
    ),
)


def _conv_grad_weight(call: Call) -> Types:
    x, g, attrs = call.type(0), call.type(1), call.attrs
    channels = static(x.shape[1:2], "channels")[0]
    if channels % attrs["group"]:
        raise ShapeError(f"{attrs['group']} groups do not divide {channels} channels")
    if x.rank != g.rank or x.shape[0] != g.shape[0]:
        raise ShapeError(f"ConvGradWeight takes x and g of one batch, got {x} and {g}")
    shape = (g.shape[1], channels // attrs["group"], *attrs["kernel_shape"])
    return (x.with_shape(shape),)


def _conv_grad_weight_kernel(x: Any, g: Any, *, kernel_shape: Any, group: int, **attrs: Any) -> Any:
    window = Window(kernel_shape, attrs)
    n = len(kernel_shape)
    padded = np.pad(x, [(0, 0), (0, 0), *zip(window.pads[:n], window.pads[n:], strict=True)])
    grouped = padded.reshape(x.shape[0], group, -1, *padded.shape[2:])
    cotangents = g.reshape(g.shape[0], group, -1, *g.shape[2:])
    w = np.zeros((group, cotangents.shape[2], grouped.shape[2], *kernel_shape), x.dtype)
    spatial = "xyz"[:n]
    for tap in np.ndindex(*kernel_shape):
        view = at_tap(grouped, window, tap, g.shape[2:])
        rule = f"ngc{spatial},ngo{spatial}->goc"
        w[(Ellipsis, *tap)] = np.einsum(rule, view, cotangents)
    return w.reshape(g.shape[1], -1, *kernel_shape)


def _conv_grad_weight_vjp(
    u: Tensor, y: Tensor, x: Tensor, g: Tensor, *, kernel_shape: Any, group: int, **attrs: Any
) -> tuple[Tensor, Tensor]:
    window = Window(kernel_shape, attrs)
    d_x = conv_grad_input(g, u, x.shape[2:], window, group)
    return d_x, conv_row(x, u, group=group, **window.attrs())


def _conv_grad_weight_body(
    x: Tensor, g: Tensor, *, kernel_shape: Any, group: int, **attrs: Any
) -> Tensor:
    """The fastest form on onnxruntime's CPU kernels for the case at hand."""
    window = Window(kernel_shape, attrs)
    planar = len(kernel_shape) == 2 and group == 1
    fixed = all(isinstance(d, int) for d in (*x.shape[1:], *g.shape[1:]))
    if planar and fixed and (x.shape[1] == 1 or window.kernel == (1, 1)):
        return _grad_weight_by_columns(x, g, window)
    if planar and fixed and window.dilations == (1, 1):
        return _grad_weight_interleaved(x, g, window)
    return _grad_weight_transposed(x, g, window, group)


def _grad_weight_interleaved(x: Tensor, g: Tensor, window: Window) -> Tensor:
    """One Conv whose image is x as (1, N, H, W*C) and whose kernel is g: runs of k*C floats."""
    c, (kh, kw), (sh, sw) = x.shape[1], window.kernel, window.strides
    assert isinstance(c, int)
    n, _, h, w = x.shape
    image = x.transpose(0, 2, 3, 1).reshape((1, n, h, w * c))
    top, left, bottom, right = window.pads
    out = conv_row(
        image,
        g.transpose(1, 0, 2, 3),
        dilations=(sh, sw * c),
        pads=(top, left * c, bottom, right * c),
    )
    out = _crop(out, (1, g.shape[1], kh, kw * c))
    return out.reshape((g.shape[1], kh, kw, c)).transpose(0, 3, 1, 2)


def _grad_weight_by_columns(x: Tensor, g: Tensor, window: Window) -> Tensor:
    """Slices of the padded input as rows of one matrix product; for one channel or a 1x1 kernel."""
    top, left, bottom, right = window.pads
    if any(window.pads):
        x = pad(x, (0, 0, top, left, 0, 0, bottom, right))
    planes = x.transpose(1, 0, 2, 3)
    taps = []
    for tap in np.ndindex(*window.kernel):
        rows, columns = _tap_slices(window, tap, static(g.shape[2:], "an output plane"))
        taps.append(_plane(planes, rows, columns).reshape((x.shape[1], -1)))
    matrix = concat(taps) if len(taps) > 1 else taps[0]
    cotangents = g.transpose(0, 2, 3, 1).reshape((-1, g.shape[1]))
    out = matrix @ cotangents
    return out.reshape((*window.kernel, x.shape[1], g.shape[1])).transpose(3, 2, 0, 1)


def _plane(x: Tensor, rows: slice, columns: slice) -> Tensor:
    if (rows, columns) == (slice(0, x.shape[2], 1), slice(0, x.shape[3], 1)):
        return x
    bounds = ((rows.start, columns.start), (rows.stop, columns.stop), (2, 3))
    return slice_row(
        x, *(np.array(b, np.int64) for b in bounds), np.array((rows.step, columns.step), np.int64)
    )


def _grad_weight_transposed(x: Tensor, g: Tensor, window: Window, group: int) -> Tensor:
    """Conv with batch and channel exchanged; strides and dilations exchange roles too."""
    n, channels = x.shape[0], x.shape[1]
    spatial = x.shape[2:]
    per_group = floor_div(channels, group)
    k = len(spatial)
    if group > 1:
        split = x.reshape((n, group, per_group, *spatial))
        image = split.transpose(2, 1, 0, *range(3, 3 + k)).reshape((per_group, -1, *spatial))
    else:
        image = x.transpose(1, 0, *range(2, 2 + k))
    out = conv_row(
        image,
        g.transpose(1, 0, *range(2, 2 + k)),
        group=group,
        strides=window.dilations,
        dilations=window.strides,
        pads=window.pads,
    )
    out = _crop(out, (per_group, g.shape[1], *window.kernel))
    return out.transpose(1, 0, *range(2, 2 + k))


conv_grad_weight = Op(
    name="ConvGradWeight",
    domain=DOMAIN,
    operands=("T", "T"),
    attrs={
        "kernel_shape": AttrSpec("INTS", required=True),
        "strides": AttrSpec("INTS"),
        "pads": AttrSpec("INTS"),
        "dilations": AttrSpec("INTS"),
        "group": AttrSpec("INT", 1),
    },
    infer=_conv_grad_weight,
    reference=_conv_grad_weight_kernel,
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
    ),
)  # fmt: skip


def _pair(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """x: (N, C, *S), weight: (O, C/groups, *K), bias: (O,) -> (N, O, *T).

    `padding` is an amount for every side, one per axis, or "same" / "valid"; "same" keeps
    ceil(size / stride), the odd element going after.
    """
    n = x.rank - 2
    attrs: dict[str, Any] = {"strides": _pair(stride, n), "dilations": _pair(dilation, n)}
    if isinstance(padding, str):
        modes = {"same": "SAME_UPPER", "valid": "VALID"}
        if padding not in modes:
            raise InvalidInput(f"padding is an int, ints, 'same' or 'valid', got {padding!r}")
        kernel = static(weight.shape[2:], "a kernel's size")
        attrs = with_explicit_pads({**attrs, "auto_pad": modes[padding]}, kernel, x.shape[2:])
        attrs.pop("auto_pad")
    else:
        attrs["pads"] = _pair(padding, n) * 2
    plain = {k: v for k, v in attrs.items() if v and any(i != _NEUTRAL[k] for i in v)}
    return conv_row(x, weight, bias, group=groups, **plain)


_NEUTRAL = {"strides": 1, "dilations": 1, "pads": 0}
