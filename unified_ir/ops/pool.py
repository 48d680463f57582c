"""Pooling. The gradient of a maximum goes to the first maximum of each window, as in PyTorch.

Equality with the maximum alone would hand the gradient to every tie, and ties are the rule on
images with a constant background; windows therefore carry a key that makes the winner unique.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import ShapeError, TensorType, int64
from triplane.unified_ir.ops.convolution import (
    Window,
    at_tap,
    conv_transpose_row,
    static,
    with_explicit_pads,
)
from triplane.unified_ir.ops.indexing import gather, scatter_elements
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, Call, Op
from triplane.unified_ir.ops.samples import apart, normal, sample
from triplane.unified_ir.ops.structure import ones, pad, slice_row, zeros
from triplane.unified_ir.ops.tensor import Tensor

Types = tuple[TensorType, ...]


def pool_window(attrs: Mapping[str, Any], x: TensorType) -> Window:
    """The window of a pooling node with its pads made explicit."""
    kernel = attrs["kernel_shape"]
    if x.rank != len(kernel) + 2:
        raise ShapeError(f"a pool over {len(kernel)} axes takes x: (N, C, ...), got {x}")
    window = Window(kernel, with_explicit_pads(attrs, kernel, x.shape[2:]))
    if any(pad >= k for pad, k in zip(window.pads, window.kernel * 2, strict=True)):
        raise ShapeError(f"a pool's pads are below its window {kernel}, got {window.pads}")
    return window


def _pooled_type(x: TensorType, attrs: Mapping[str, Any]) -> TensorType:
    window = pool_window(attrs, x)
    ceil_mode = bool(attrs["ceil_mode"])
    spatial = [window.out_size(i, d, ceil_mode=ceil_mode) for i, d in enumerate(x.shape[2:])]
    return x.with_shape((*x.shape[:2], *spatial))


def _pool(call: Call) -> Types:
    y = _pooled_type(call.type(0), call.attrs)
    return (y, y.with_dtype(int64))[: call.outputs]


def _check_winners(call: Call, *, like_x: TensorType, like_y: TensorType) -> TensorType:
    """The type of operand x, after holding the operands to x and to its pooled shape."""
    x = call.type(1)
    pooled = _pooled_type(x, call.attrs)
    if like_x.shape != x.shape or like_y.shape != pooled.shape or call.type(2) != pooled:
        found = [str(call.type(i)) for i in range(3)]
        raise ShapeError(f"{call.row} takes x as {x} and its pool as {pooled}, got {found}")
    return x


def _max_unpool(call: Call) -> Types:
    return (_check_winners(call, like_x=call.type(1), like_y=call.type(0)),)


def _max_select(call: Call) -> Types:
    _check_winners(call, like_x=call.type(0), like_y=call.type(2))
    return (call.type(2),)


class _Padded:
    """A host array under a sliding window, for the reference kernels."""

    def __init__(self, x: Any, kernel: Any, ceil_mode: int, attrs: Mapping[str, Any]) -> None:
        self.window = Window(kernel, with_explicit_pads(attrs, kernel, x.shape[2:]))
        self.out = self.window.out_ints(x.shape[2:], ceil_mode=bool(ceil_mode))
        self.n = len(kernel)
        self.before = self.window.pads[: self.n]
        self.after = [
            max(0, (o - 1) * w.strides[i] + w.span(i) - x.shape[2 + i] - w.pads[i])
            for w in (self.window,)
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


def _max_pool_kernel(x: Any, *, kernel_shape: Any, ceil_mode: int, **attrs: Any) -> Any:
    """Maximum and its first flat position over (N, C, *S), window by window."""
    padded = _Padded(x, kernel_shape, ceil_mode, attrs)
    low = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    values = padded.pad(x, low)
    positions = padded.pad(np.arange(x.size).reshape(x.shape), -1)
    best = np.full((*x.shape[:2], *padded.out), low, x.dtype)
    where = np.full(best.shape, -1)
    for tap in padded.taps():
        value, here = padded.at(values, tap), padded.at(positions, tap)
        better = (value > best) | ((where < 0) & (here >= 0))
        best, where = np.where(better, value, best), np.where(better, here, where)
    return best, where


def _max_pool_vjp(g: Any, y: Any, x: Tensor, **attrs: Any) -> tuple[Tensor | None]:
    if isinstance(g, tuple):
        g, y = g[0], y[0]
    if g is None:
        return (None,)
    return (max_unpool(g, x, y, **_window_attrs(attrs)),)


def _window_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    if attrs.get("storage_order"):
        raise InvalidInput("MaxPool with storage_order=1 has no gradient")
    return {k: attrs[k] for k in _WINDOW if attrs.get(k) not in (None, "NOTSET")}


_WINDOW = {
    "kernel_shape": AttrSpec("INTS", required=True),
    "strides": AttrSpec("INTS"),
    "pads": AttrSpec("INTS"),
    "dilations": AttrSpec("INTS"),
    "ceil_mode": AttrSpec("INT", 0),
    "auto_pad": AttrSpec("STRING", "NOTSET"),
}

max_pool_row = Op(
    name="MaxPool",
    infer=_pool,
    reference=_max_pool_kernel,
    vjp=_max_pool_vjp,
    samples=(
        sample(apart(2, 3, 4, 6), kernel_shape=(2, 2), strides=(2, 2)),
        sample(apart(2, 3, 5, 5), kernel_shape=(2, 2), strides=(2, 2)),
        sample(apart(1, 2, 6, 6), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        sample(apart(1, 2, 5, 5), kernel_shape=(2, 2)),
        sample(
            lambda rng: np.round(rng.standard_normal((2, 2, 4, 4))), outputs=2, smooth=(),
            kernel_shape=(2, 2), strides=(2, 2),
        ),
        sample(apart(2, 2, 7), kernel_shape=(3,), strides=(3,)),
    ),
)  # fmt: skip


MAX_KEYED_WIDTH: Final = 512
"""Wider, the 0/1 matrix of the key trick, quadratic in the width, is not worth its bytes."""


def _disjoint(window: Window, x: Tensor, attrs: Mapping[str, Any]) -> bool:
    """Whether the windows tile a static plane without overlap, so that the key trick applies."""
    return (
        window.kernel == window.strides
        and len(window.kernel) == 2
        and not any(window.pads)
        and not attrs["ceil_mode"]
        and set(window.dilations) == {1}
        and all(isinstance(d, int) and d <= MAX_KEYED_WIDTH for d in x.shape[2:])
    )


def _upsample(m: Tensor, window: Window) -> Tensor:
    """m: (N, C, h, w) -> (N, C, h*kh, w*kw), each element repeated: one product with a 0/1 matrix.

    The matrix holds kh copies of the column repetition, so rows double in the same pass.
    """
    kh, kw = window.kernel
    n, c, h, w = m.shape
    assert isinstance(w, int)
    repeat = np.tile(np.repeat(np.eye(w), kw, axis=1), (1, kh)).astype(m.dtype.numpy)
    rows = m.reshape((-1, w)) @ m.build.admit(repeat)
    return rows.reshape((n, c, h * kh, w * kw))


def _cropped(x: Tensor, h: int, w: int) -> Tensor:
    if x.shape[2:] == (h, w):
        return x
    return slice_row(x, *(np.array(v) for v in ([0, 0], [h, w], [2, 3])))


def _winner(x: Tensor, y: Tensor, window: Window) -> Tensor:
    """1 at the first maximum of each window, else 0; x cropped to whole windows.

    Every maximum must be finite: one infinite maximum spoils the winners of its whole row of
    windows, since 0 * inf in the product that repeats it is NaN.
    """
    kh, kw = window.kernel
    _, _, h, w = x.shape
    assert isinstance(h, int)
    assert isinstance(w, int)
    order = np.arange(kh * kw, 0, -1).reshape(kh, kw)
    keys = np.tile(order, (h // kh, w // kw)).astype(x.dtype.numpy)
    keyed = (x == _upsample(y, window)).cast(x.dtype) * keys
    best = max_pool_row(keyed, kernel_shape=window.kernel, strides=window.strides)
    return (keyed == _upsample(best, window)).cast(x.dtype)


def _max_unpool_body(g: Tensor, x: Tensor, y: Tensor, **attrs: Any) -> Tensor:
    window = pool_window(attrs, x.type)
    if not _disjoint(window, x, attrs):
        index = _positions(x, attrs).reshape((-1,))
        flat = zeros([x.type.size], g.dtype)
        return scatter_elements(flat, index, g.reshape((-1,)), reduction="add").reshape(x.shape)
    h, w = (int(d) * k for d, k in zip(y.shape[2:], window.kernel, strict=True))  # type: ignore[arg-type]
    placed = _upsample(g, window) * _winner(_cropped(x, h, w), y, window)
    missing = [int(d) - k for d, k in zip(x.shape[2:], (h, w), strict=True)]  # type: ignore[arg-type]
    return pad(placed, (0, 0, 0, 0, 0, 0, *missing)) if any(missing) else placed


def _max_select_body(t: Tensor, x: Tensor, y: Tensor, **attrs: Any) -> Tensor:
    window = pool_window(attrs, x.type)
    if not _disjoint(window, x, attrs):
        return gather(t.reshape((-1,)), _positions(x, attrs), axis=0)
    h, w = (int(d) * k for d, k in zip(y.shape[2:], window.kernel, strict=True))  # type: ignore[arg-type]
    chosen = _cropped(t, h, w) * _winner(_cropped(x, h, w), y, window)
    mean = average_pool_row(chosen, kernel_shape=window.kernel, strides=window.strides)
    return mean * float(math.prod(window.kernel))


def _positions(x: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    _, index = max_pool_row.all_outputs(x, outputs=2, **_window_attrs(attrs))
    return index


_overlapping: Final[Mapping[str, Any]] = {
    "kernel_shape": (3, 3),
    "strides": (2, 2),
    "pads": (1, 1, 1, 1),
}


def _pooled(f: Any, **attrs: Any) -> Any:
    """A maker of the pooled array that belongs to the sample's x (operand 1, same seed)."""

    def make(rng: np.random.Generator) -> Any:
        return _max_pool_kernel(f(np.random.default_rng(7)), ceil_mode=0, **attrs)[0]

    return make


def _fixed(f: Any) -> Any:
    return lambda _: f(np.random.default_rng(7))


_tiled: Final[Mapping[str, Any]] = {"kernel_shape": (2, 2), "strides": (2, 2)}
_x, _x_odd, _x_over = apart(2, 3, 4, 6), apart(2, 3, 5, 5), apart(1, 2, 6, 6)

max_unpool = Op(
    name="MaxUnpoolFirst",
    domain=DOMAIN,
    operands=("T", "T", "T"),
    attrs=_WINDOW,
    infer=_max_unpool,
    vjp=lambda u, out, g, x, y, **a: (max_select(u, x, y, **_window_attrs(a)), None, None),
    body=_max_unpool_body,
    samples=(
        sample(normal(2, 3, 2, 3), _fixed(_x), _pooled(_x, **_tiled), smooth=(0,), **_tiled),
        sample(
            normal(2, 3, 2, 2), _fixed(_x_odd), _pooled(_x_odd, **_tiled), smooth=(0,), **_tiled
        ),
        sample(
            normal(1, 2, 3, 3), _fixed(_x_over), _pooled(_x_over, **_overlapping),
            smooth=(0,), **_overlapping,
        ),
    ),
)  # fmt: skip
"""g: like y -> like x: each element of g at the first maximum of its window of x, the rest 0."""

max_select: Op = Op(
    name="MaxSelectFirst",
    domain=DOMAIN,
    operands=("T", "T", "T"),
    attrs=_WINDOW,
    infer=_max_select,
    vjp=lambda g, out, t, x, y, **a: (max_unpool(g, x, y, **_window_attrs(a)), None, None),
    body=_max_select_body,
    samples=(
        sample(normal(2, 3, 4, 6), _fixed(_x), _pooled(_x, **_tiled), smooth=(0,), **_tiled),
        sample(
            normal(1, 2, 6, 6), _fixed(_x_over), _pooled(_x_over, **_overlapping),
            smooth=(0,), **_overlapping,
        ),
    ),
)  # fmt: skip
"""t: like x -> like y: t at the first maximum of each window of x."""


def _average_kernel(
    x: Any, *, kernel_shape: Any, ceil_mode: int, count_include_pad: int, **attrs: Any
) -> Any:
    """Sum over each window divided by how many of its elements count."""
    padded = _Padded(x, kernel_shape, ceil_mode, attrs)
    values, inside = padded.pad(x, 0), padded.pad(np.ones(x.shape[2:]), 0)
    if count_include_pad:
        declared = zip(padded.window.pads[padded.n :], padded.after, strict=True)
        stop = [size - max(0, room - own) for size, (own, room) in
                zip(inside.shape, declared, strict=True)]  # fmt: skip
        inside[tuple(slice(0, end) for end in stop)] = 1
    total, count = np.zeros((*x.shape[:2], *padded.out), x.dtype), np.zeros(padded.out)
    for tap in padded.taps():
        total += padded.at(values, tap)
        count += padded.at(inside, tap)
    return total / count.astype(x.dtype)


def _average_pool_vjp(g: Tensor, y: Tensor, x: Tensor, **attrs: Any) -> tuple[Tensor]:
    """Spreads g / count over each window: a transposed convolution with a kernel of ones."""
    window = pool_window(attrs, x.type)
    if attrs["ceil_mode"]:
        raise InvalidInput("AveragePool with ceil_mode=1 has no gradient; pad instead")
    n = len(window.kernel)
    spatial = static(x.shape[2:], "the plane of an AveragePool under differentiation")
    flat = (g / _window_counts(window, spatial, g, attrs)).reshape((-1, 1, *g.shape[2:]))
    extra = [
        spatial[i] + window.pads[i] + window.pads[n + i]
        - (int(d) - 1) * window.strides[i] - window.span(i)  # type: ignore[arg-type]
        for i, d in enumerate(g.shape[2:])
    ]  # fmt: skip
    kernel = ones((1, 1, *window.kernel), g.dtype)
    spread = conv_transpose_row(flat, kernel, output_padding=tuple(extra), **window.attrs())
    return (spread.reshape(x.shape),)


def _window_counts(
    window: Window, spatial: Sequence[int], g: Tensor, attrs: Mapping[str, Any]
) -> Any:
    if attrs["count_include_pad"] or not any(window.pads):
        return float(math.prod(window.kernel))
    counts = _average_kernel(
        np.ones((1, 1, *spatial)), kernel_shape=window.kernel, ceil_mode=0,
        count_include_pad=1, **window.attrs(),
    )  # fmt: skip
    return (counts * math.prod(window.kernel)).astype(g.dtype.numpy)


average_pool_row = Op(
    name="AveragePool",
    infer=_pool,
    reference=_average_kernel,
    vjp=_average_pool_vjp,
    samples=(
        sample(normal(2, 3, 4, 6), kernel_shape=(2, 2), strides=(2, 2)),
        sample(normal(1, 2, 6, 5), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        sample(normal(1, 2, 6, 5), kernel_shape=(3, 3), pads=(1, 1, 1, 1), count_include_pad=1),
    ),
)

global_average_pool = Op(
    name="GlobalAveragePool",
    body=lambda x: x.mean([*range(2, x.rank)], keepdims=True),
    samples=(sample(normal(2, 3, 4, 5)),),
)


def _sizes(kernel: int | Sequence[int], rank: int) -> tuple[int, ...]:
    return (kernel,) * (rank - 2) if isinstance(kernel, int) else tuple(kernel)


def _pool_attrs(
    x: Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
) -> dict[str, Any]:
    window = _sizes(kernel, x.rank)
    attrs: dict[str, Any] = {"kernel_shape": window}
    attrs["strides"] = window if stride is None else _sizes(stride, x.rank)
    pads = _sizes(padding, x.rank) * 2
    if any(pads):
        attrs["pads"] = pads
    return attrs


def max_pool(
    x: Tensor,
    kernel: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
) -> Tensor:
    """x: (N, C, *S) -> (N, C, *T): maximum of each window; the stride defaults to the window."""
    return max_pool_row(x, **_pool_attrs(x, kernel, stride, padding))


def avg_pool(
    x: Tensor,
    kernel: int | Sequence[int],
    *,
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
) -> Tensor:
    """x: (N, C, *S) -> (N, C, *T): mean of each window over what lies inside `x`."""
    return average_pool_row(x, **_pool_attrs(x, kernel, stride, padding))
