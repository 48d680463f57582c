"""Sliding windows: where a kernel of convolution or pooling reads its input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, ceil_div, floor_div
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.tensor import Tensor, whole_numbers

SAME: Final = ("SAME_UPPER", "SAME_LOWER")

Sizes = int | Sequence[int]
"""One size for every spatial axis, or one per axis."""


class Window:
    """Strides, dilations and explicit pads of a sliding window over `axes` spatial axes."""

    def __init__(self, kernel: Sequence[int], attrs: Mapping[str, Any]) -> None:
        n = len(kernel)
        self.kernel = tuple(kernel)
        self.strides = tuple(attrs.get("strides") or (1,) * n)
        self.dilations = tuple(attrs.get("dilations") or (1,) * n)
        self.pads = tuple(attrs.get("pads") or (0,) * (2 * n))
        if not len(self.strides) == len(self.dilations) == len(self.pads) / 2 == n:
            raise ShapeError(
                f"a window over {n} axes needs {n} strides and dilations and {2 * n} pads, got "
                f"{self.strides}, {self.dilations}, {self.pads}"
            )
        if (
            min(*self.strides, *self.dilations, *self.kernel, 1) < 1
            or min(self.pads, default=0) < 0
        ):
            raise ShapeError(
                "window sizes, strides and dilations must be positive and pads must not be "
                f"negative, got {attrs}"
            )

    @classmethod
    def without_pads(cls, kernel: Sequence[int], attrs: Mapping[str, Any]) -> Window:
        """Return the window without pads, which the caller writes out before it."""
        return cls(kernel, {**attrs, "pads": None})

    @classmethod
    def over(
        cls, spatial: Sequence[Dim], kernel: Sequence[int], attrs: Mapping[str, Any]
    ) -> Window:
        """Return the window over axes of these sizes, with `auto_pad` as explicit pads.

        SAME padding needs static sizes or a stride of 1.
        """
        mode = attrs.get("auto_pad") or "NOTSET"
        if mode not in ("NOTSET", "VALID", *SAME):
            raise InvalidInput(f"auto_pad must be NOTSET, VALID, {' or '.join(SAME)}, got {mode!r}")
        if mode == "NOTSET":
            return cls(kernel, attrs)
        window = cls.without_pads(kernel, attrs)
        if mode in SAME:
            totals = [window.same_total(i, size) for i, size in enumerate(spatial)]
            window.pads = shared_out(totals, mode)
        return window

    def span(self, i: int) -> int:
        """Return the extent of the dilated kernel along axis `i`."""
        return int((self.kernel[i] - 1) * self.dilations[i] + 1)

    def same_total(self, i: int, size: Dim) -> int:
        """Return how much padding SAME means along axis `i`, before and after together."""
        if self.strides[i] == 1:
            return self.span(i) - 1
        if isinstance(size, Expr):
            raise ShapeError(
                f"SAME padding with a stride over the symbolic size {size} is not static"
            )
        # ONNX: out = ceil(size / stride), and just enough padding that the last window fits.
        out = -(-size // self.strides[i])
        return max(0, int((out - 1) * self.strides[i] + self.span(i) - size))

    def out_size(self, i: int, size: Dim, *, ceil_mode: bool = False) -> Dim:
        """Return the number of window positions along axis `i` of the given size.

        With `ceil_mode` the last window may reach beyond the padded input, but starts within the
        input or the pads before it.
        """
        n = len(self.kernel)
        free = size + self.pads[i] + self.pads[n + i] - self.span(i)
        if isinstance(free, int) and free < 0:
            raise ShapeError(
                f"a window of {self.span(i)} does not fit in size {size} with pads "
                f"{self.pads[i]}+{self.pads[n + i]}"
            )
        if not ceil_mode:
            return floor_div(free, self.strides[i]) + 1
        if self.pads[n + i] + self.strides[i] > self.span(i):  # else none starts too far
            return ceil_div(size + self.pads[i], self.strides[i])
        return ceil_div(free, self.strides[i]) + 1

    def out_ints(self, sizes: Sequence[int], *, ceil_mode: bool = False) -> list[int]:
        """Return the window positions along each axis of static sizes."""
        out = [self.out_size(i, s, ceil_mode=ceil_mode) for i, s in enumerate(sizes)]
        return list(static(out, "sizes"))

    def reach(self, i: int, positions: Dim) -> Dim:
        """Return how far the last of `positions` windows reads along the padded axis `i`."""
        return (positions - 1) * int(self.strides[i]) + self.span(i)

    def padded(self, x: Any) -> Any:
        """Return a host array (N, C, *S) with its spatial axes padded by zeros."""
        n = len(self.kernel)
        return np.pad(x, [(0, 0), (0, 0), *zip(self.pads[:n], self.pads[n:], strict=True)])

    def attrs(self) -> dict[str, Any]:
        """Return strides, dilations and pads as node attributes."""
        return {"strides": self.strides, "dilations": self.dilations, "pads": self.pads}


def shared_out(totals: Sequence[Any], mode: str) -> tuple[Any, ...]:
    """Share total paddings out before and after; SAME_UPPER puts an odd element after."""
    small = [floor_div(t, 2) for t in totals]
    large = [t - s for t, s in zip(totals, small, strict=True)]
    return tuple(small + large if mode == "SAME_UPPER" else large + small)


def open_same_pads(
    attrs: Mapping[str, Any], kernel: Sequence[int], spatial: Sequence[Dim]
) -> tuple[Dim, ...] | None:
    """Return the symbolic amounts of SAME padding, before and after; None if they are static.

    With a stride beyond the window the amount has no normal form and is refused.
    """
    mode = attrs.get("auto_pad") or "NOTSET"
    strides = attrs.get("strides") or (1,) * len(kernel)
    if mode not in SAME or all(
        isinstance(d, int) or s == 1 for d, s in zip(spatial, strides, strict=True)
    ):
        return None
    window = Window.without_pads(kernel, attrs)
    totals: list[Dim] = []
    for i, size in enumerate(spatial):
        if isinstance(size, int) or strides[i] == 1:
            totals.append(window.same_total(i, size))
        # max(0, ...) of a symbolic amount is no polynomial; it is not needed if windows overlap or
        # touch.
        elif window.span(i) < strides[i]:
            raise ShapeError(
                f"the gradient of SAME padding of the symbolic size {size} needs a stride within "
                f"the window's {window.span(i)}, got {strides[i]}; fix the size"
            )
        else:
            totals.append(window.reach(i, ceil_div(size, strides[i])) - size)
    return shared_out(totals, mode)


def out_sizes(
    attrs: Mapping[str, Any],
    kernel: Sequence[int],
    spatial: Sequence[Dim],
    *,
    ceil_mode: bool = False,
) -> list[Dim]:
    """Return the window positions along each axis, symbolic sizes included."""
    if (attrs.get("auto_pad") or "NOTSET") in SAME:
        window = Window.without_pads(kernel, attrs)
        return [ceil_div(d, s) for d, s in zip(spatial, window.strides, strict=True)]
    window = Window.over(spatial, kernel, attrs)
    return [window.out_size(i, d, ceil_mode=ceil_mode) for i, d in enumerate(spatial)]


def pooled_type(x: TensorType, attrs: Mapping[str, Any]) -> TensorType:
    """Return the type of a pool of x: (N, C, *S); refuse windows of padding alone."""
    kernel = attrs["kernel_shape"]
    if x.rank != len(kernel) + 2:
        raise ShapeError(f"a pool over {len(kernel)} axes takes x: (N, C, ...), got {x}")
    window = Window(kernel, attrs)
    if any(pad >= k for pad, k in zip(window.pads, window.kernel * 2, strict=True)):
        raise ShapeError(
            f"the pads of a pool must be smaller than its window {kernel}, got {window.pads}"
        )
    spatial = out_sizes(attrs, kernel, x.shape[2:], ceil_mode=bool(attrs.get("ceil_mode")))
    return x.with_shape((*x.shape[:2], *spatial))


def refuse_padding_alone(x: TensorType, attrs: Mapping[str, Any]) -> None:
    """Refuse windows that may see only padding: taps further apart than an axis is long."""
    kernel, spatial = attrs["kernel_shape"], x.shape[2:]
    if not is_static(spatial):
        return
    window = Window.over(spatial, kernel, attrs)
    for size, dilation, before in zip(spatial, window.dilations, window.pads, strict=False):
        if before and isinstance(size, int) and size < dilation:
            raise ShapeError(
                f"a pool with a dilation of {dilation} and padding over an axis of {size} has "
                "windows of padding alone; use a dilation of at most the axis"
            )


def emit_pool(context: EmissionContext, node: Node) -> None:
    """Emit windows that `ceil_mode` adds over a static plane as padding at the end.

    A window that would start beyond the data is no window, but below opset 22 onnxruntime counts
    it while it infers shapes, though not while it runs. The pads of SAME are written out if a
    stride goes beyond the window: onnxruntime computes negative pads there.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    sizes = x.type.shape[2:]
    if not is_static(sizes):
        context.plain(node)
        return
    kernel: Any = node.attrs["kernel_shape"]
    window = Window.over(sizes, kernel, node.attrs)
    if not node.attrs.get("ceil_mode"):
        jumps = any(s > window.span(i) for i, s in enumerate(window.strides))
        same = {"auto_pad": None, "pads": window.pads if any(window.pads) else None}
        context.plain(node, **(same if jumps else {}))
        return
    n = len(window.kernel)
    ends = tuple(
        max(window.pads[n + i], int(window.reach(i, out) - window.pads[i] - size))
        for i, (out, size) in enumerate(zip(y.type.shape[2:], sizes, strict=True))
    )
    if ends != window.pads[n:] and (
        node.attrs.get("count_include_pad")
        or any(end >= k for end, k in zip(ends, window.kernel, strict=True))
    ):  # pads that count, or that a kernel refuses: both only where a window was added
        context.plain(node)
        return
    context.plain(node, ceil_mode=0, auto_pad="NOTSET", pads=window.pads[:n] + ends)


def sizes_of(value: Sizes, rank: int, what: str) -> tuple[int, ...]:
    """Return one size per spatial axis of (N, C, *S); InvalidInput names `what` is not one."""
    sizes = whole_numbers(value, what)
    return sizes if isinstance(value, Iterable) else sizes * (rank - 2)


def window_attrs(
    rank: int, stride: Sizes, padding: Sizes, dilation: Sizes
) -> dict[str, tuple[int, ...]]:
    """Return attributes of a window over (N, C, *S) of `rank` axes, padded alike on both ends.

    InvalidInput names the argument that is no whole number.
    """
    return {
        "strides": sizes_of(stride, rank, "a stride"),
        "pads": sizes_of(padding, rank, "a padding") * 2,
        "dilations": sizes_of(dilation, rank, "a dilation"),
    }


_NEUTRAL: Final = {"strides": 1, "dilations": 1, "pads": 0, "output_padding": 0}


def without_neutral(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a window whose absence would not mean the same."""
    return {k: v for k, v in attrs.items() if any(i != _NEUTRAL[k] for i in v)}


def pool_attrs(
    x: Tensor, kernel: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes = 1
) -> dict[str, Any]:
    """Return attributes of a pool; the stride defaults to the window."""
    window = sizes_of(kernel, x.rank, "a window")
    attrs = window_attrs(x.rank, window if stride is None else stride, padding, dilation)
    return {**without_neutral(attrs), "kernel_shape": window, "strides": attrs["strides"]}


def static(dims: Sequence[Dim], what: str) -> tuple[int, ...]:
    """Return dimensions that must be known when the graph is built."""
    if any(isinstance(d, Expr) for d in dims):
        raise ShapeError(f"{what} must be static, got ({', '.join(map(str, dims))})")
    return tuple(int(d) for d in dims)  # type: ignore[arg-type]


def is_static(dims: Sequence[Dim]) -> bool:
    """Return whether every size is a number."""
    return all(isinstance(d, int) for d in dims)


def at_tap(x: Any, window: Window, tap: Sequence[int], out: Sequence[int]) -> Any:
    """Return the view of the padded input (..., *S) that kernel position `tap` multiplies."""
    return x[(Ellipsis, *tap_slices(window, tap, out))]


def tap_slices(window: Window, tap: Sequence[int], out: Sequence[int]) -> list[slice]:
    """Return where kernel position `tap` reads the padded input, for each output position."""
    starts = [t * d for t, d in zip(tap, window.dilations, strict=True)]
    return [
        slice(start, start + (o - 1) * s + 1, s)
        for start, o, s in zip(starts, out, window.strides, strict=True)
    ]


class Padded:
    """A host array under a sliding window, for the reference kernels of pools."""

    def __init__(self, x: Any, kernel: Any, ceil_mode: int, attrs: Mapping[str, Any]) -> None:
        self.window = Window.over(x.shape[2:], kernel, attrs)
        self.out = self.window.out_ints(x.shape[2:], ceil_mode=bool(ceil_mode))
        self.n = len(kernel)
        before = self.window.pads[: self.n]
        self.after = [
            max(0, int(self.window.reach(i, o)) - x.shape[2 + i] - before[i])  # type: ignore[arg-type]
            for i, o in enumerate(self.out)
        ]
        self.spread = list(zip(before, self.after, strict=True))

    def pad(self, x: Any, value: Any) -> Any:
        """Return `x` with spatial axes padded as far as any window reaches."""
        return np.pad(x, [(0, 0)] * (x.ndim - self.n) + self.spread, constant_values=value)

    def views(self, x: Any) -> Iterable[Any]:
        """Yield what each kernel position sees at all window positions of the padded array."""
        return (at_tap(x, self.window, tap, self.out) for tap in np.ndindex(*self.window.kernel))
