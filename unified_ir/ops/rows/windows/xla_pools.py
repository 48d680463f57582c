"""Pools in XLA, as one pass over what each kernel position sees of the plane.

On one core that takes half the time of XLA's windowed reduction, and a fifth of that of the
gradient which JAX derives from it. Large windows use the windowed reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np

from triplane.unified_ir.ops.lowering import XlaContext, taken
from triplane.unified_ir.ops.rows.windows.window import Padded

MAX_TAPS: Final = 64
"""Kernel positions that are written out one by one at most; compiling them takes long."""


def window_maxima(k: XlaContext, x: Any, padded: Padded) -> Any:
    """Return the maximum of each window."""
    low = np.array(-np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min, x.dtype)
    if _has_few_taps(padded):
        return reduce(k.np.maximum, _views(k, x, padded, low))
    tiles = _tiles(x, padded)
    if tiles is not None:
        return tiles.max(_tile_axes(padded))
    return _reduced(k, padded, x, low, k.lax.max)


def window_sums(k: XlaContext, x: Any, padded: Padded) -> Any:
    """Return the sum of each window."""
    # Half precision would round after each kernel position.
    if _has_few_taps(padded) and x.dtype.itemsize >= 4:
        return sum(_views(k, x, padded, 0))
    tiles = _tiles(x, padded)
    if tiles is not None:
        return tiles.sum(_tile_axes(padded))
    return _reduced(k, padded, x, np.zeros((), x.dtype), k.lax.add)


def max_pool(
    k: XlaContext, x: Any, *, kernel_shape: Any, ceil_mode: int, storage_order: int, **attrs: Any
) -> Any:
    """Lower MaxPool, with positions only if the node has them as an output."""
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    y = window_maxima(k, x, padded)
    if len(k.node.outputs) == 1:
        return y
    where = _first_places(k, x, y, padded)
    if storage_order:
        digits = k.np.unravel_index(where, x.shape[2:])
        strides = np.cumprod([1, *x.shape[2:-1]])
        where = sum(d * s for d, s in zip(digits, strides, strict=True))
    return y, _over_planes(k, where, x.shape)


def max_unpool_first(
    k: XlaContext, g: Any, x: Any, y: Any, *, kernel_shape: Any, ceil_mode: int, form: str,
    **attrs: Any,
) -> Any:  # fmt: skip
    """Lower MaxUnpoolFirst."""
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    tiles = _tiles(x, padded)
    if tiles is not None:
        return _unpooled_tiles(k, g, x, _won(k, tiles, y, padded), padded)
    if _has_few_taps(padded) and np.prod(padded.window.strides) <= MAX_TAPS:
        return _unpooled_taps(k, g, x, _first_taps(k, x, y, padded), padded)
    index = _over_planes(k, _first_places(k, x, y, padded), x.shape).ravel()
    return k.np.zeros(x.size, g.dtype).at[index].add(g.ravel()).reshape(x.shape)


def max_select_first(
    k: XlaContext, t: Any, x: Any, y: Any, *, kernel_shape: Any, ceil_mode: int, form: str,
    **attrs: Any,
) -> Any:  # fmt: skip
    """Lower MaxSelectFirst."""
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    zero = np.zeros((), t.dtype)
    if _has_few_taps(padded):
        first = _first_taps(k, x, y, padded)
        seen = enumerate(_views(k, t, padded, 0))
        return sum(k.np.where(first == number, view, zero) for number, view in seen)
    tiles = _tiles(x, padded)
    if tiles is not None:
        won = _won(k, tiles, y, padded)
        return k.np.where(won, _tiles(t, padded), zero).sum(_tile_axes(padded))
    return taken(k, t.ravel(), (_over_planes(k, _first_places(k, x, y, padded), x.shape),))


def _has_few_taps(padded: Padded) -> bool:
    return int(np.prod(padded.window.kernel)) <= MAX_TAPS


def _views(k: XlaContext, x: Any, padded: Padded, value: Any) -> list[Any]:
    """Return what each kernel position sees at all window positions; padding is `value`."""
    wide = k.np.pad(x, [(0, 0), (0, 0), *padded.spread], constant_values=value)
    return list(padded.views(wide))


def _reduced(k: XlaContext, padded: Padded, x: Any, start: Any, f: Callable[..., Any]) -> Any:
    """Reduce each window of the spatial axes; x: an array (N, C, *S), or a tuple of them."""
    window = padded.window
    return k.lax.reduce_window(
        x,
        start,
        f,
        (1, 1, *window.kernel),
        (1, 1, *window.strides),
        [(0, 0), (0, 0), *padded.spread],
        window_dilation=(1, 1, *window.dilations),
    )


def _first_taps(k: XlaContext, x: Any, y: Any, padded: Padded) -> Any:
    """Return the number of the kernel position that sees the maximum first; 0 if it is a NaN."""
    # Padding that is no number equals no maximum, not even that of a window of -inf.
    other = np.nan if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
    first = k.np.zeros(y.shape, np.int32)
    for number, view in reversed(list(enumerate(_views(k, x, padded, other)))):
        first = k.np.where(view == y, np.int32(number), first)
    return first


def _unpooled_taps(k: XlaContext, g: Any, x: Any, first: Any, padded: Padded) -> Any:
    """Add, for each kernel position, the elements of g that it won, at their places.

    Positions with equal remainders by the stride are one dense plane, to which only the kernel
    positions with that remainder add.
    """
    window, zero = padded.window, np.zeros((), g.dtype)
    strides, spread = window.strides, padded.spread
    sizes = [d + before + after for d, (before, after) in zip(x.shape[2:], spread, strict=True)]
    counts = [-(-d // s) for d, s in zip(sizes, strides, strict=True)]
    reach = [(window.span(i) - 1) // s for i, s in enumerate(strides)]
    # Slices of arrays padded once take a third of the time of padding what each position adds.
    room = [(r, count - o) for r, count, o in zip(reach, counts, padded.out, strict=True)]
    room = [(0, 0), (0, 0), *room]
    wide_g, wide_first = k.np.pad(g, room), k.np.pad(first, room, constant_values=-1)
    empty = k.np.zeros((*x.shape[:2], *counts), g.dtype)
    planes = dict.fromkeys(np.ndindex(*strides), empty)
    for number, tap in enumerate(np.ndindex(*window.kernel)):
        offsets = [t * d for t, d in zip(tap, window.dilations, strict=True)]
        at = tuple(o % s for o, s in zip(offsets, strides, strict=True))
        starts = [r - o // s for r, o, s in zip(reach, offsets, strides, strict=True)]
        seen = (Ellipsis, *(slice(a, a + n) for a, n in zip(starts, counts, strict=True)))
        planes[at] += k.np.where(wide_first[seen] == number, wide_g[seen], zero)
    apart = k.np.stack(list(planes.values()), -1).reshape(*empty.shape, *strides)
    pairs = [axis for i in range(padded.n) for axis in (2 + i, 2 + padded.n + i)]
    whole = [count * s for count, s in zip(counts, strides, strict=True)]
    plane = apart.transpose(0, 1, *pairs).reshape(*x.shape[:2], *whole)
    inside = [slice(before, before + d) for d, (before, _) in zip(x.shape[2:], spread, strict=True)]
    return plane[(slice(None), slice(None), *inside)]


def _first_places(k: XlaContext, x: Any, y: Any, padded: Padded) -> Any:
    """Return where each window's maximum first is, as an int64 position in its plane."""
    if not _has_few_taps(padded):
        return _first_by_reduction(k, x, padded)
    window = padded.window
    digits = k.np.unravel_index(_first_taps(k, x, y, padded), window.kernel)
    where: Any = 0
    for i, (digit, size) in enumerate(zip(digits, x.shape[2:], strict=True)):
        starts = np.arange(padded.out[i]) * window.strides[i] - window.pads[i]
        along = starts.reshape([-1 if a == i else 1 for a in range(padded.n)])
        where = where * size + along + digit * window.dilations[i]
    # A window of padding and NaN alone has no first maximum; its position is one of the plane's.
    return where.clip(0, int(np.prod(x.shape[2:])) - 1)


def _first_by_reduction(k: XlaContext, x: Any, padded: Padded) -> Any:
    size = int(np.prod(x.shape[2:]))
    places = k.np.broadcast_to(np.arange(size).reshape(x.shape[2:]), x.shape)
    low = np.array(-np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min, x.dtype)

    def better(a: Any, b: Any) -> Any:
        (x_a, at_a), (x_b, at_b) = a, b
        # Padding is at `size`, so it loses to elements that equal it.
        takes_a = (x_a > x_b) | ((x_a == x_b) & (at_a <= at_b)) | k.np.isnan(x_a)
        return k.np.where(takes_a, x_a, x_b), k.np.where(takes_a, at_a, at_b)

    return _reduced(k, padded, (x, places), (low, np.int64(size)), better)[1]


def _over_planes(k: XlaContext, where: Any, shape: Sequence[int]) -> Any:
    """Turn positions in planes of (N, C, *S) into positions in the whole array."""
    first = np.arange(shape[0] * shape[1]) * int(np.prod(shape[2:]))
    return k.np.asarray(first.reshape(*shape[:2], *[1] * (len(shape) - 2))) + where


def _tiles(x: Any, padded: Padded) -> Any | None:
    """Return windows that tile the plane as axes: (N, C, T, k, T, k, ...); None if they do not."""
    window = padded.window
    plain = window.kernel == window.strides and set(window.dilations) <= {1}
    if not plain or any(before or after for before, after in padded.spread):
        return None
    inside = [slice(0, out * k) for out, k in zip(padded.out, window.kernel, strict=True)]
    split = [d for pair in zip(padded.out, window.kernel, strict=True) for d in pair]
    return x[(slice(None), slice(None), *inside)].reshape(*x.shape[:2], *split)


def _tile_axes(padded: Padded) -> tuple[int, ...]:
    return tuple(range(3, 3 + 2 * padded.n, 2))


def _won(k: XlaContext, tiles: Any, y: Any, padded: Padded) -> Any:
    """Return which element of each tile is its first maximum, shaped like `tiles`."""
    axes, kernel = _tile_axes(padded), padded.window.kernel
    number = np.arange(int(np.prod(kernel)), dtype=np.int32)
    number = number.reshape([d for size in kernel for d in (1, size)])
    equal = tiles == k.np.expand_dims(y, axes)
    first = k.np.where(equal, number, np.int32(number.size)).min(axes, keepdims=True)
    return number == first


def _unpooled_tiles(k: XlaContext, g: Any, x: Any, won: Any, padded: Padded) -> Any:
    placed = k.np.where(won, k.np.expand_dims(g, _tile_axes(padded)), np.zeros((), g.dtype))
    covered = [out * size for out, size in zip(padded.out, padded.window.kernel, strict=True)]
    missing = [(0, have - some) for have, some in zip(x.shape[2:], covered, strict=True)]
    return k.np.pad(placed.reshape(*x.shape[:2], *covered), [(0, 0), (0, 0), *missing])
