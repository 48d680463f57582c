"""Convolutions by XLA's own operator, and by sums and products where its CPU kernels are slow.

Measured on one core (jaxlib 0.10.2) against XLA's convolution: depthwise by taps takes 1/15 to 1/60
of the time, the gradient of the weight of a grouped convolution 1/60, that of a 1x1 kernel 1/4, and
a kernel of 5x5 over one channel 1/4. On other devices XLA's convolution calls the vendor's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.rows.windows.window import Window, at_tap

MAX_TAPS: Final = 64
"""Kernel positions that are written out one by one at most; compiling them takes long."""

MAX_CACHED: Final = 1 << 20
"""Elements that a processor's caches hold."""


def conv(k: XlaContext, x: Any, w: Any, b: Any = None, *, group: int, **attrs: Any) -> Any:
    """Lower Conv."""
    window = Window.over(x.shape[2:], w.shape[2:], attrs)

    def whole(x: Any, w: Any) -> Any:
        return _convolved(
            k,
            x,
            w,
            window.strides,
            _pairs(window),
            rhs_dilation=window.dilations,
            feature_group_count=group,
        )

    faster = None
    if group == x.shape[1] and (group > 1 or w.shape[0] == 1) and _has_few_taps(window, x):
        faster = lambda x, w: _by_taps(k, x, w, window)
    elif _is_product(window, group):
        faster = lambda x, w: k.np.einsum("nc...,oc->no...", _strided(x, window), _matrix(w))
    elif x.shape[1] == 1 and 1 < prod(window.kernel) <= MAX_TAPS:
        faster = lambda x, w: _by_columns(k, x, w, window)
    return with_bias(_on_cpu(k, faster, whole, x, w), b)


def with_bias(y: Any, b: Any) -> Any:
    """Add one bias per channel of y: (N, C, *S), if there is one."""
    return y if b is None else y + b.reshape(-1, *[1] * (y.ndim - 2))


def conv_transpose(  # noqa: PLR0917 - the operands of the row, and its window
    k: XlaContext, x: Any, w: Any, b: Any, window: Window, extra: Sequence[int], group: int
) -> Any:
    """Lower ConvTranspose: a Conv of the input spread by its strides with the kernel reversed."""
    n = len(window.kernel)
    spans = [window.span(i) for i in range(n)]
    pads = [
        (span - 1 - window.pads[i], span - 1 - window.pads[n + i] + extra[i])
        for i, span in enumerate(spans)
    ]

    def whole(x: Any, w: Any) -> Any:
        order = "IO"
        if group > 1:  # (C, O/groups) -> (O, C/groups)
            grouped = w.reshape(group, -1, *w.shape[1:]).swapaxes(1, 2)
            w, order = grouped.reshape(-1, w.shape[0] // group, *window.kernel), "OI"
        return _convolved(
            k,
            x,
            k.lax.rev(w, tuple(range(2, 2 + n))),
            (1,) * n,
            pads,
            order=("NC", order, "NC"),
            lhs_dilation=window.strides,
            rhs_dilation=window.dilations,
            feature_group_count=group,
        )

    def spread(x: Any) -> Any:
        gaps = [(*p, s - 1) for p, s in zip(pads, window.strides, strict=True)]
        return k.lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *gaps])

    faster = None
    if group == x.shape[1] and w.shape[1] == 1 and _has_few_taps(window, x):
        dense = Window(window.kernel, {"dilations": window.dilations})
        faster = lambda x, w: _by_taps(k, spread(x), k.lax.rev(w, tuple(range(2, 2 + n))), dense)
    elif _is_product(window, group):
        faster = lambda x, w: spread(k.np.einsum("nc...,co->no...", x, _matrix(w)))
    return with_bias(_on_cpu(k, faster, whole, x, w), b)


def conv_grad_weight(
    k: XlaContext, x: Any, g: Any, *, kernel_shape: Any, group: int, form: str, **attrs: Any
) -> Any:
    """Lower ConvGradWeight: batch and channels exchange roles, and so do strides and dilations."""
    window = Window(kernel_shape, attrs)
    # What no window reads is cut off the end, so that the output has the kernel's size.
    pads = [
        (before, (size - 1) * dilation + (out - 1) * stride + 1 - have - before)
        for before, size, dilation, stride, have, out in zip(
            window.pads, window.kernel, window.dilations, window.strides, x.shape[2:], g.shape[2:],
            strict=False,
        )
    ]  # fmt: skip

    def whole(x: Any, g: Any, **layout: Any) -> Any:
        return _convolved(k, x, g, window.dilations, pads, rhs_dilation=window.strides, **layout)

    def by_batch_groups(x: Any, g: Any) -> Any:
        return whole(x, g, order=("CN", "IO", "CN"), batch_group_count=group)

    def by_feature_groups(x: Any, g: Any) -> Any:
        split = x.reshape(x.shape[0], group, -1, *x.shape[2:])
        planes = k.np.moveaxis(split, 2, 0).swapaxes(1, 2)
        planes = planes.reshape(planes.shape[0], -1, *x.shape[2:])
        return whole(planes, g, order=("NC", "IO", "CN"), feature_group_count=group)

    faster: Callable[..., Any] | None = None
    if group > 1 and x.shape[1] == group == g.shape[1] and _has_few_taps(window, x):
        # Beyond the caches, one pass per tap takes longer than XLA's convolution.
        small = x.size <= MAX_CACHED
        faster = (lambda x, g: _gradient_by_taps(k, x, g, window)) if small else None
    elif group > 1:
        faster = by_feature_groups
    elif _is_product(window, group):
        faster = lambda x, g: _contracted(k, _strided(x, window, g), g)
    return _on_cpu(k, faster, by_batch_groups, x, g)


def _convolved(
    k: XlaContext, x: Any, w: Any, strides: Sequence[int], pads: Sequence[tuple[int, int]], *,
    order: tuple[str, str, str] = ("NC", "OI", "NC"), **options: Any,
) -> Any:  # fmt: skip
    """Call XLA's convolution; order: what the first two axes of x, w and the output are.

    On a CPU XLA is fast with channels last only. It rearranges a convolution of the program itself,
    but none inside a loop, where it takes fifteen times as long. A GPU's layouts are left to XLA.
    """
    n = len(strides)
    spatial = "".join(map(str, range(n)))

    def plain(x: Any, w: Any) -> Any:
        numbers = tuple(name + spatial for name in order)
        return k.lax.conv_general_dilated(x, w, strides, pads, dimension_numbers=numbers, **options)

    def channels_last(x: Any, w: Any) -> Any:
        inside = range(2, n + 2)
        y = k.lax.conv_general_dilated(
            k.np.transpose(x, (order[0].index("N"), *inside, order[0].index("C"))),
            k.np.transpose(w, (*inside, order[1].index("I"), order[1].index("O"))),
            strides,
            pads,
            dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
            **options,
        )
        outer = (0, n + 1) if order[2] == "NC" else (n + 1, 0)
        return k.np.transpose(y, (*outer, *range(1, n + 1)))

    return _on_cpu(k, channels_last, plain, x, w)


def _on_cpu(k: XlaContext, faster: Callable[..., Any] | None, other: Any, *operands: Any) -> Any:
    """Compute `faster`, if there is one, where the program runs on a CPU, else `other`."""
    if faster is None:
        return other(*operands)
    return k.lax.platform_dependent(*operands, cpu=faster, default=other)


def _pairs(window: Window) -> list[tuple[int, int]]:
    n = len(window.kernel)
    return list(zip(window.pads[:n], window.pads[n:], strict=True))


def _has_few_taps(window: Window, x: Any) -> bool:
    """Return whether to write out the taps; half precision would round after each of them."""
    return prod(window.kernel) <= MAX_TAPS and x.dtype.itemsize >= 4


def _by_taps(k: XlaContext, x: Any, w: Any, window: Window) -> Any:
    """Sum one product per kernel position, all in one pass; w: (O, 1, *K), O/C outputs each."""
    wide = k.np.pad(x, [(0, 0), (0, 0), *_pairs(window)])[:, :, None]
    weights = w.reshape(x.shape[1], -1, *window.kernel)
    out = window.out_ints(x.shape[2:])
    shape = (*weights.shape[:2], *[1] * len(out))
    total = sum(
        at_tap(wide, window, tap, out) * weights[(Ellipsis, *tap)].reshape(shape)
        for tap in np.ndindex(*window.kernel)
    )
    return total.reshape(x.shape[0], -1, *out)


def _gradient_by_taps(k: XlaContext, x: Any, g: Any, window: Window) -> Any:
    """Sum one product per kernel position; x and g have one channel per group.

    A loop, because each position is a pass of its own, and one pass compiles faster than many.
    """
    n, out = len(window.kernel), g.shape[2:]
    wide = k.np.pad(x, [(0, 0), (0, 0), *_pairs(window)])
    taps = np.indices(window.kernel).reshape(n, -1).T * np.array(window.dilations)
    read = [(o - 1) * s + 1 for o, s in zip(out, window.strides, strict=True)]

    def at(tap: Any) -> Any:
        seen = k.lax.dynamic_slice(wide, (0, 0, *tap), (*x.shape[:2], *read))
        strided = seen[(Ellipsis, *(slice(None, None, s) for s in window.strides))]
        return (strided * g).sum((0, *range(2, x.ndim)))

    return k.lax.map(at, k.np.asarray(taps)).T.reshape(-1, 1, *window.kernel)


def _by_columns(k: XlaContext, x: Any, w: Any, window: Window) -> Any:
    """Multiply the windows of the only channel, as columns, by the weight as a matrix."""
    wide = k.np.pad(x, [(0, 0), (0, 0), *_pairs(window)])
    out = window.out_ints(x.shape[2:])
    taps = [at_tap(wide[:, 0], window, tap, out) for tap in np.ndindex(*window.kernel)]
    return k.np.einsum("kn...,ok->no...", k.np.stack(taps), w.reshape(w.shape[0], -1))


def _is_product(window: Window, group: int) -> bool:
    return group == 1 and set(window.kernel) == {1} and not any(window.pads)


def _strided(x: Any, window: Window, like: Any = None) -> Any:
    """Return what windows of one element read: at all positions, or at those of `like`."""
    out = window.out_ints(x.shape[2:]) if like is None else like.shape[2:]
    return at_tap(x, window, (0,) * len(window.kernel), out)


def _matrix(w: Any) -> Any:
    return w.reshape(w.shape[:2])


def _contracted(k: XlaContext, x: Any, g: Any) -> Any:
    """Return the gradient of a 1x1 kernel: (O, C, 1, ...)."""
    summed = (0, *range(2, x.ndim))
    y = k.lax.dot_general(g, x, ((summed, summed), ((), ())))
    return y.reshape(*y.shape, *[1] * (x.ndim - 2))
