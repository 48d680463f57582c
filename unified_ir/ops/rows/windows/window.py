"""Sliding windows: where a kernel of convolution or pooling reads its input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, ceil_div, floor_div
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.tensor import Tensor, whole_numbers

SAME: Final = ("SAME_UPPER", "SAME_LOWER")


def emit_pool(context: EmissionContext, node: Node) -> None:
    """Windows that `ceil_mode` adds over a static plane are written as padding at the end.

    A window that would start beyond the data is no window, but below opset 22 onnxruntime counts
    it while it infers shapes, though not while it runs. The pads of SAME are written out where a
    stride goes beyond the window: it takes them for negative.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    sizes = x.type.shape[2:]
    counts_pads = bool(node.attrs.get("count_include_pad"))
    if any(isinstance(size, Expr) for size in sizes):
        context.plain(node)
        return
    kernel: Any = node.attrs["kernel_shape"]
    window = Window(kernel, with_explicit_pads(node.attrs, kernel, sizes))
    if not node.attrs.get("ceil_mode"):
        jumps = any(s > window.span(i) for i, s in enumerate(window.strides))
        same = {"auto_pad": None, "pads": window.pads if any(window.pads) else None}
        context.plain(node, **(same if jumps else {}))
        return
    n = len(window.kernel)
    missing = [
        (int(out) - 1) * window.strides[i] + window.span(i) - window.pads[i] - int(size)  # type: ignore[arg-type]
        for i, (out, size) in enumerate(zip(y.type.shape[2:], sizes, strict=True))
    ]
    ends = tuple(max(a, b) for a, b in zip(window.pads[n:], missing, strict=True))
    if ends != window.pads[n:] and (
        counts_pads or any(end >= k for end, k in zip(ends, window.kernel, strict=True))
    ):  # pads that count, or that a kernel refuses: both only where a window was added
        context.plain(node)
        return
    context.plain(node, ceil_mode=0, auto_pad="NOTSET", pads=window.pads[:n] + ends)


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
                f"window sizes, strides and dilations are positive, pads not negative, got {attrs}"
            )

    def span(self, i: int) -> int:
        """Extent of the dilated kernel along axis `i`."""
        return int((self.kernel[i] - 1) * self.dilations[i] + 1)

    def out_size(self, i: int, size: Dim, *, ceil_mode: bool = False) -> Dim:
        """Number of window positions along axis `i` of the given size.

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
        """Window positions along each axis of static sizes."""
        return list(
            static([self.out_size(i, s, ceil_mode=ceil_mode) for i, s in enumerate(sizes)], "sizes")
        )

    def reach(self, i: int, positions: Dim) -> Dim:
        """How far the last of so many windows reads from the start of the padded axis `i`."""
        return (positions - 1) * int(self.strides[i]) + self.span(i)

    def attrs(self) -> dict[str, Any]:
        """As node attributes."""
        return {"strides": self.strides, "dilations": self.dilations, "pads": self.pads}


def with_explicit_pads(
    attrs: Mapping[str, Any], kernel: Sequence[int], spatial: Sequence[Dim]
) -> dict[str, Any]:
    """Attributes with `auto_pad` turned into `pads` (SAME_* needs static sizes or stride 1)."""
    mode = attrs.get("auto_pad") or "NOTSET"
    if mode not in ("NOTSET", "VALID", *SAME):
        raise InvalidInput(f"auto_pad is NOTSET, VALID, {' or '.join(SAME)}, got {mode!r}")
    if mode not in SAME:
        return dict(attrs) if mode == "NOTSET" else {**attrs, "pads": None}
    window = Window(kernel, {**attrs, "pads": None})
    totals = [_same_total(window, i, size) for i, size in enumerate(spatial)]
    return {**attrs, "pads": shared_out(totals, mode)}


def shared_out(totals: Sequence[Any], mode: str) -> tuple[Any, ...]:
    """Total paddings as amounts before and after; SAME_UPPER puts an odd one after."""
    small = [floor_div(t, 2) for t in totals]
    large = [t - s for t, s in zip(totals, small, strict=True)]
    return tuple(small + large if mode == "SAME_UPPER" else large + small)


def _same_total(window: Window, i: int, size: Dim) -> int:
    if window.strides[i] == 1:
        return window.span(i) - 1
    if isinstance(size, Expr):
        raise ShapeError(f"SAME padding with stride over the symbolic size {size} is not static")
    out = -(-size // window.strides[i])
    return max(0, int((out - 1) * window.strides[i] + window.span(i) - size))


def open_same_pads(
    attrs: Mapping[str, Any], kernel: Sequence[int], spatial: Sequence[Dim]
) -> tuple[Dim, ...] | None:
    """Symbolic amounts that SAME padding means, before and after; None where they are static.

    With a stride beyond the window the amount has no normal form and is refused.
    """
    mode = attrs.get("auto_pad") or "NOTSET"
    strides = attrs.get("strides") or (1,) * len(kernel)
    if mode not in SAME or all(
        isinstance(d, int) or s == 1 for d, s in zip(spatial, strides, strict=True)
    ):
        return None
    window = Window(kernel, {**attrs, "pads": None})
    totals: list[Dim] = []
    for i, size in enumerate(spatial):
        if isinstance(size, int) or strides[i] == 1:
            totals.append(_same_total(window, i, size))
        elif window.span(i) < strides[i]:
            raise ShapeError(
                f"SAME padding of the symbolic size {size} with a stride of {strides[i]} beyond "
                f"the window's {window.span(i)} is not differentiated; fix the size"
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
    """Window positions along each axis, symbolic sizes included."""
    if (attrs.get("auto_pad") or "NOTSET") in SAME:
        window = Window(kernel, {**attrs, "pads": None})
        return [ceil_div(d, s) for d, s in zip(spatial, window.strides, strict=True)]
    window = Window(kernel, with_explicit_pads(attrs, kernel, spatial))
    return [window.out_size(i, d, ceil_mode=ceil_mode) for i, d in enumerate(spatial)]


def pooled_type(x: TensorType, attrs: Mapping[str, Any]) -> TensorType:
    """The type of a pool of x: (N, C, *S); windows of padding alone are refused."""
    kernel = attrs["kernel_shape"]
    if x.rank != len(kernel) + 2:
        raise ShapeError(f"a pool over {len(kernel)} axes takes x: (N, C, ...), got {x}")
    window = Window(kernel, attrs)
    if any(pad >= k for pad, k in zip(window.pads, window.kernel * 2, strict=True)):
        raise ShapeError(f"a pool's pads are below its window {kernel}, got {window.pads}")
    spatial = out_sizes(attrs, kernel, x.shape[2:], ceil_mode=bool(attrs.get("ceil_mode")))
    return x.with_shape((*x.shape[:2], *spatial))


def refuse_padding_alone(x: TensorType, attrs: Mapping[str, Any]) -> None:
    """Refuses windows that may see nothing but padding: taps further apart than an axis is long."""
    kernel, spatial = attrs["kernel_shape"], x.shape[2:]
    if not is_static(spatial):
        return
    window = Window(kernel, with_explicit_pads(attrs, kernel, spatial))
    for size, dilation, before in zip(spatial, window.dilations, window.pads, strict=False):
        if before and isinstance(size, int) and size < dilation:
            raise ShapeError(
                f"a pool with a dilation of {dilation} and padding over an axis of {size} has "
                "windows of padding alone; take a dilation of at most the axis"
            )


def sizes_of(value: int | Sequence[int], rank: int, what: str) -> tuple[int, ...]:
    """One size per spatial axis of a tensor (N, C, *S); InvalidInput names `what` is none."""
    sizes = whole_numbers(value, what)
    return sizes if isinstance(value, Iterable) else sizes * (rank - 2)


def pool_attrs(
    x: Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    *,
    ceil_mode: bool,
) -> dict[str, Any]:
    """Attributes of a pool; the stride defaults to the window."""
    window = sizes_of(kernel, x.rank, "a window")
    attrs: dict[str, Any] = {"kernel_shape": window, "ceil_mode": int(ceil_mode)}
    attrs["strides"] = window if stride is None else sizes_of(stride, x.rank, "a stride")
    pads = sizes_of(padding, x.rank, "a padding") * 2
    return {**attrs, "pads": pads} if any(pads) else attrs


def static(dims: Sequence[Dim], what: str) -> tuple[int, ...]:
    """Dimensions that must be known when the graph is built."""
    if any(isinstance(d, Expr) for d in dims):
        raise ShapeError(f"{what} must be static, got ({', '.join(map(str, dims))})")
    return tuple(int(d) for d in dims)  # type: ignore[arg-type]


def is_static(dims: Sequence[Dim]) -> bool:
    """Whether every size is a number."""
    return all(isinstance(d, int) for d in dims)


def at_tap(x: Any, window: Window, tap: Sequence[int], out: Sequence[int]) -> Any:
    """The view of the padded input (..., *S) that kernel position `tap` multiplies."""
    return x[(Ellipsis, *tap_slices(window, tap, out))]


def tap_slices(window: Window, tap: Sequence[int], out: Sequence[int]) -> list[slice]:
    """Where kernel position `tap` reads the padded input, for each output position."""
    starts = [t * d for t, d in zip(tap, window.dilations, strict=True)]
    return [
        slice(start, start + (o - 1) * s + 1, s)
        for start, o, s in zip(starts, out, window.strides, strict=True)
    ]


class Padded:
    """A host array under a sliding window, for the reference kernels of pools."""

    def __init__(self, x: Any, kernel: Any, ceil_mode: int, attrs: Mapping[str, Any]) -> None:
        self.window = Window(kernel, with_explicit_pads(attrs, kernel, x.shape[2:]))
        self.out = self.window.out_ints(x.shape[2:], ceil_mode=bool(ceil_mode))
        self.n = len(kernel)
        self.before = self.window.pads[: self.n]
        self.after = [
            max(0, int(self.window.reach(i, o)) - x.shape[2 + i] - self.before[i])  # type: ignore[arg-type]
            for i, o in enumerate(self.out)
        ]

    def pad(self, x: Any, value: Any) -> Any:
        """The spatial axes of `x` padded as far as any window reaches."""
        lead = [(0, 0)] * (x.ndim - self.n)
        spread = [*lead, *zip(self.before, self.after, strict=True)]
        return np.pad(x, spread, constant_values=value)

    def taps(self) -> Iterator[tuple[int, ...]]:
        """Kernel positions in row-major order."""
        return iter(np.ndindex(*self.window.kernel))

    def at(self, x: Any, tap: tuple[int, ...]) -> Any:
        """What kernel position `tap` sees at each window position of the padded array."""
        return at_tap(x, self.window, tap, self.out)
