"""Pools by XLA's own operators: rules of the column `xla`.

Windows that tile the plane are axes of a reshaped array, which is several times as fast on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from triplane.unified_ir.ops.lowering import XlaContext, taken
from triplane.unified_ir.ops.rows.windows.window import Padded


def _reduced(k: XlaContext, padded: Padded, x: Any, start: Any, f: Callable[..., Any]) -> Any:
    """Reduce each window of the spatial axes; x: arrays (N, C, *S), alike, or one of them."""
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


def tiles(x: Any, padded: Padded) -> Any | None:
    """Return windows that tile the plane as axes: (N, C, T, k, T, k, ...); None if they do not."""
    window = padded.window
    plain = window.kernel == window.strides and set(window.dilations) <= {1}
    if not plain or any(after or before for before, after in padded.spread):
        return None
    inside = [slice(0, out * k) for out, k in zip(padded.out, window.kernel, strict=True)]
    split = [d for pair in zip(padded.out, window.kernel, strict=True) for d in pair]
    return x[(slice(None), slice(None), *inside)].reshape(*x.shape[:2], *split)


def _tile_axes(padded: Padded) -> tuple[int, ...]:
    return tuple(range(3, 3 + 2 * padded.n, 2))


def _lowest(dtype: Any) -> Any:
    return np.array(-np.inf if dtype.kind not in "iu" else np.iinfo(dtype).min, dtype)


def window_maxima(k: XlaContext, x: Any, padded: Padded) -> Any:
    """Return the maximum of each window."""
    split = tiles(x, padded)
    if split is not None:
        return split.max(_tile_axes(padded))
    return _reduced(k, padded, x, _lowest(x.dtype), k.lax.max)


def window_sums(k: XlaContext, x: Any, padded: Padded) -> Any:
    """Return the sum of each window."""
    split = tiles(x, padded)
    if split is not None:
        return split.sum(_tile_axes(padded))
    return _reduced(k, padded, x, np.zeros((), x.dtype), k.lax.add)


def max_pool(
    k: XlaContext, x: Any, *, kernel_shape: Any, ceil_mode: int, storage_order: int, **attrs: Any
) -> Any:
    """Lower MaxPool, with positions only if the node has them as an output."""
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    if len(k.node.outputs) == 1:
        return window_maxima(k, x, padded)
    y, where = _first_maxima(k, x, padded)
    if storage_order:
        digits = k.np.unravel_index(where, x.shape[2:])
        strides = np.cumprod([1, *x.shape[2:-1]])
        where = sum(d * s for d, s in zip(digits, strides, strict=True))
    return y, _over_planes(k, where, x.shape)


def _first_maxima(k: XlaContext, x: Any, padded: Padded) -> tuple[Any, Any]:
    """Return each window's maximum and where it first is, as a position in its plane."""
    size = int(np.prod(x.shape[2:]))
    places = k.np.broadcast_to(k.np.arange(size).reshape(x.shape[2:]), x.shape)

    def better(a: Any, b: Any) -> Any:
        (x_a, at_a), (x_b, at_b) = a, b
        # A maximum that is not a number is one as well; padding, at `size`, loses to its equals.
        odd_a, odd_b = k.np.isnan(x_a), k.np.isnan(x_b)
        level = (x_a == x_b) | (odd_a & odd_b)
        takes_a = (x_a > x_b) | (odd_a & ~odd_b) | (level & (at_a <= at_b))
        return k.np.where(takes_a, x_a, x_b), k.np.where(takes_a, at_a, at_b)

    return _reduced(k, padded, (x, places), (_lowest(x.dtype), np.int64(size)), better)  # type: ignore[no-any-return]


def _over_planes(k: XlaContext, where: Any, shape: Sequence[int]) -> Any:
    """Turn positions in planes of (N, C, *S) into positions in the whole array."""
    first = k.np.arange(shape[0] * shape[1]) * int(np.prod(shape[2:]))
    return first.reshape(*shape[:2], *[1] * (len(shape) - 2)) + where


def _winners(k: XlaContext, x: Any, y: Any, padded: Padded) -> tuple[Any, Any] | None:
    """Return, for windows that tile the plane, which element of each is its first maximum.

    Tiles of bool, and the axes of a window; None if the windows overlap.
    """
    split = tiles(x, padded)
    if split is None:
        return None
    axes = _tile_axes(padded)
    kernel = padded.window.kernel
    number = np.arange(int(np.prod(kernel)), dtype=np.int32).reshape(kernel)
    number = np.expand_dims(number, (0, *range(1, 2 * padded.n, 2)))[None]
    number = number.reshape([d for size in kernel for d in (1, size)])
    equal = split == k.np.expand_dims(y, axes)
    first = k.np.where(equal, number, number.size).min(axes, keepdims=True)
    return number == first, axes


def max_unpool_first(
    k: XlaContext, g: Any, x: Any, y: Any, *, kernel_shape: Any, ceil_mode: int, form: str,
    **attrs: Any,
) -> Any:  # fmt: skip
    """Lower MaxUnpoolFirst."""
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    winners = _winners(k, x, y, padded)
    if winners is not None:
        won, axes = winners
        spread = k.np.where(won, k.np.expand_dims(g, axes), np.zeros((), g.dtype))
        covered = [o * s for o, s in zip(padded.out, padded.window.kernel, strict=True)]
        plane = spread.reshape(*x.shape[:2], *covered)
        missing = [(0, have - some) for have, some in zip(x.shape[2:], covered, strict=True)]
        return k.np.pad(plane, [(0, 0), (0, 0), *missing])
    _, where = _first_maxima(k, x, padded)
    index = _over_planes(k, where, x.shape).ravel()
    return k.np.zeros(x.size, g.dtype).at[index].add(g.ravel()).reshape(x.shape)


def max_select_first(
    k: XlaContext, t: Any, x: Any, y: Any, *, kernel_shape: Any, ceil_mode: int, form: str,
    **attrs: Any,
) -> Any:  # fmt: skip
    """Lower MaxSelectFirst."""
    padded = Padded(x, kernel_shape, ceil_mode, attrs)
    winners = _winners(k, x, y, padded)
    if winners is not None:
        won, axes = winners
        return k.np.where(won, tiles(t, padded), np.zeros((), t.dtype)).sum(axes)
    _, where = _first_maxima(k, x, padded)
    return taken(k, t.ravel(), (_over_planes(k, where, x.shape),))
