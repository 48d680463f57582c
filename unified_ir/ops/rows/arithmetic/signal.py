"""Signals: windows, the discrete Fourier transform, short-time spectra, mel filters.

With theta(k, n) = 2 pi k n / N: DFT(x)_k = sum_n x_n exp(-i theta(k, n)), its inverse
x_n = 1/N sum_k y_k exp(i theta(k, n)). The last axis holds one real number or the two parts of a
complex one. Both transforms are linear and each is the adjoint of the other up to 1/N, so each is
the gradient of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, floor_div
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.lowering import XlaContext, in_numpy
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import Op, OpCall, OpKind, Types, dtype_attr
from triplane.unified_ir.ops.rows.arithmetic.elementwise import cos, mod, sin
from triplane.unified_ir.ops.rows.movement.indexing import arange
from triplane.unified_ir.ops.rows.movement.structure import (
    axes_of,
    concat,
    known_ints,
    pad,
    slice_axis,
    where,
)
from triplane.unified_ir.ops.samples import fixed, normal, sample
from triplane.unified_ir.ops.tensor import Tensor, dims_of, emit

_AXIS: Final = -2
"""The last axis of the signal, before that of the complex parts."""


def _known(call: OpCall, i: int) -> tuple[Dim, ...] | None:
    """Return the contents of operand `i`, one number or several, or None if they are unknown."""
    return call.dims(i) if i < len(call.known) and call.known[i] is not None else None


def _window_types(call: OpCall) -> Types:
    if call.type(0).shape != ():
        raise ShapeError(f"{call.row} takes one length, got {call.type(0)}")
    known = _known(call, 0)
    size = call.opened() if known is None else known[0]
    if isinstance(size, int) and size < 1:
        raise ShapeError(f"{call.row} needs a length above 0, got {size}")
    return (TensorType(dtype_attr(call.attrs["output_datatype"]), (size,)),)


def _window_row(name: str, weights: Sequence[float]) -> Op:
    """w_n = sum_j weights_j cos(2 pi j n / N), N the length where periodic, else one less."""

    def kernel(size: Any, *, output_datatype: int, periodic: int) -> Any:
        n = np.arange(int(size))
        turns = 2 * np.pi * n / max(int(size) - (not periodic), 1)
        weights_at_n = sum(w * np.cos(j * turns) for j, w in enumerate(weights))
        return np.asarray(weights_at_n).astype(dtype_attr(output_datatype).numpy)

    return Op(
        name=name,
        kind=OpKind.SOURCE,
        data_dependent_dims=lambda call: int(_known(call, 0) is None),
        infer=_window_types,
        reference=kernel,
        xla=in_numpy(kernel, "its length"),
        samples=(
            sample(fixed(8)),
            sample(fixed(7), periodic=0),
            sample(fixed(5), output_datatype=11),
            sample(lambda rng: np.array(6)),
        ),
    )


hann_window = _window_row("HannWindow", (0.5, -0.5))
hamming_window = _window_row("HammingWindow", (25 / 46, -21 / 46))
blackman_window = _window_row("BlackmanWindow", (0.42, -0.5, 0.08))


def _axis(call: OpCall) -> int | None:
    """Return the transformed axis, counted from the front; None if only the data decide it."""
    x = call.type(0)
    known = _known(call, 2) if call.has(2) else (_AXIS,)
    if known is None or not isinstance(known[0], int):
        return None
    (axis,) = axes_of(x.rank, [known[0]])
    if axis == x.rank - 1 or x.shape[-1] not in (1, 2):
        raise ShapeError(
            f"{call.row} of {x} along axis {axis}: the last axis holds a real number (size 1) or "
            "a complex one (size 2), and the transform runs along another axis"
        )
    return axis


def _length(call: OpCall, axis: int) -> Dim:
    """Return the number of samples; the inverse of a one-sided spectrum gives an even number."""
    x = call.type(0)
    if call.has(1):
        known = _known(call, 1)
        if known is None:
            raise InvalidInput(f"{call.row} needs its length when the graph is built")
        return known[0]
    one_sided_inverse = call.attrs["inverse"] and call.attrs["onesided"]
    return 2 * (x.shape[axis] - 1) if one_sided_inverse else x.shape[axis]


def _dft_opens(call: OpCall) -> int:
    """Count the open sizes: all, if only the data decide the axis whose size changes."""
    return call.type(0).rank - 1 if _axis(call) is None and _changes_size(call) else 0


def _changes_size(call: OpCall) -> bool:
    return bool(call.has(1) or call.attrs["onesided"])


def _dft_types(call: OpCall) -> Types:
    x, axis = call.type(0), _axis(call)
    inverse, onesided = call.attrs["inverse"], call.attrs["onesided"]
    if axis is None:
        sizes = x.shape[:-1]
        if _changes_size(call):
            sizes = tuple(call.opened(i) for i in range(x.rank - 1))
        return (x.with_shape((*sizes, 1 if onesided and inverse else 2)),)
    n = _length(call, axis)
    if isinstance(n, int) and n < 1:
        raise ShapeError(f"{call.row} takes 1 sample or more, got {n} of {x}")
    if onesided and x.shape[-1] != (2 if inverse else 1):
        wanted = "inverse takes a complex spectrum" if inverse else "takes a real signal"
        raise ShapeError(f"one-sided {call.row} {wanted}, got {x}")
    size = floor_div(n, 2) + 1 if onesided and not inverse else n
    shape = list(x.shape)
    shape[axis], shape[-1] = size, 1 if onesided and inverse else 2
    return (x.with_shape(shape),)


def _dft_kernel(
    x: Any, length: Any = None, axis: Any = None, *, inverse: int, onesided: int, using: Any = np
) -> Any:
    """Transform by the functions of `using`: `numpy` or `jax.numpy`."""
    at = (_AXIS if axis is None else int(axis)) % x.ndim
    z = x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0)
    n = None if length is None else int(length)
    fft = using.fft
    if onesided and inverse:
        return fft.irfft(z, n, at)[..., None].astype(x.dtype)
    transform = fft.ifft if inverse else fft.rfft if onesided else fft.fft
    y = transform(z.real if onesided else z, n, at)
    return using.stack([y.real, y.imag], -1).astype(x.dtype)


def _without_ignored(k: XlaContext, x: Any, length: Any, axis: Any) -> Any:
    """Set to 0 what the inverse of a one-sided spectrum ignores, and a GPU's library may not.

    These are the imaginary parts of the frequency 0 and, for an even number of samples, the last.
    """
    at = (_AXIS if axis is None else int(axis)) % x.ndim
    bins = x.shape[at]
    n = 2 * (bins - 1) if length is None else int(length)
    ignored = (2 * np.arange(bins) % n == 0)[:, None] & [False, True]
    return k.np.where(
        ignored.reshape(*(bins if i == at else 1 for i in range(x.ndim - 1)), 2), 0, x
    )


def _dft_xla(k: XlaContext, x: Any, length: Any = None, axis: Any = None, **attrs: int) -> Any:
    n = None if length is None else k.known(length, "its length")
    at = None if axis is None else k.known(axis, "its axis")
    # XLA transforms float32 and float64 only.
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    if attrs["inverse"] and attrs["onesided"]:
        wide = _without_ignored(k, wide, n, at)
    return _dft_kernel(wide, n, at, **attrs, using=k.np)


def _fitted(x: Tensor, axis: int, n: Dim) -> Tensor:
    """Cut `x` to `n` samples along `axis`, or append zeros."""
    size = x.shape[axis]
    if size == n:
        return x
    if isinstance(size, Expr) or isinstance(n, Expr):
        raise InvalidInput(
            f"a transform takes {n} samples, got {size}; cut or pad the signal first"
        )
    if size > n:
        return slice_axis(x, axis, 0, n)
    return pad(x, [0] * (x.rank + axis) + [n - size] + [0] * (x.rank - 1 - axis))


def _waves(rows: Dim, columns: Dim, n: Dim, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of theta(row, column) in the element type of `x`.

    The product is first reduced modulo n in integers: in floats a long signal would lose digits.
    """
    if isinstance(rows, int) and isinstance(columns, int) and isinstance(n, int):
        theta = 2 * np.pi * (np.outer(np.arange(rows), np.arange(columns)) % n) / n
        constant = recorder().as_operand
        return constant(np.cos(theta), x.dtype), constant(np.sin(theta), x.dtype)
    size = dims_of([n]).reshape(())
    turns = mod(arange(rows).reshape((-1, 1)) * arange(columns), size)
    angle = turns.cast(x.dtype) * (2 * np.pi / size.cast(x.dtype))
    return cos(angle), sin(angle)


def _dft(
    x: Tensor, length: Tensor | None = None, axis: Tensor | None = None,
    *, inverse: int, onesided: int,
) -> Tensor:  # fmt: skip
    """Transform by products with the matrices of cosines and sines."""
    at = (_AXIS if axis is None else known_ints(axis)[0]) % x.rank
    back_one_sided = bool(inverse and onesided)
    n = _samples(x, at, length, back_one_sided)
    used = floor_div(n, 2) + 1 if back_one_sided else n
    bins = floor_div(n, 2) + 1 if onesided and not inverse else n
    x = _fitted(x, at, used)
    parts = [x[..., k] for k in range(int(x.shape[-1]))]  # type: ignore[arg-type]
    parts = [_last(part, at) for part in parts]
    c, s = _waves(used, bins, n, x)
    if back_one_sided:
        weights = _mirror_weights(used, n, x)
        real = (parts[0] * weights) @ c - (parts[1] * weights) @ s
        return _stacked([real * _inverse_of(n, x)], at)
    sign = -1.0 if inverse else 1.0
    # (a + i b)(c -+ i s): the exponent is negative forward, positive backward.
    real, imaginary = parts[0] @ c, parts[0] @ s * -sign
    if len(parts) == 2:
        real, imaginary = real + parts[1] @ s * sign, imaginary + parts[1] @ c
    if inverse:
        scale = _inverse_of(n, x)
        real, imaginary = real * scale, imaginary * scale
    return _stacked([real, imaginary], at)


def _samples(x: Tensor, axis: int, length: Tensor | None, back_one_sided: bool) -> Dim:
    if length is not None:
        return known_ints(length)[0]
    return 2 * (x.shape[axis] - 1) if back_one_sided else x.shape[axis]


def _last(x: Tensor, axis: int) -> Tensor:
    """Move `axis` to the end."""
    order = [i for i in range(x.rank) if i != axis]
    return x if axis == x.rank - 1 else x.transpose(*order, axis)


def _stacked(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Stack parts along a new last axis, after moving their last axis to `axis`."""
    rank = parts[0].rank
    order = list(range(rank - 1))
    order.insert(axis, rank - 1)
    turned = [p if axis == rank - 1 else p.transpose(*order) for p in parts]
    columns = [emit("Unsqueeze", p, np.array([rank])) for p in turned]
    return columns[0] if len(columns) == 1 else concat(columns, axis=rank)


def _inverse_of(n: Dim, x: Tensor) -> Any:
    if isinstance(n, int):
        return 1.0 / n
    return 1.0 / dims_of([n]).reshape(()).cast(x.dtype)


def _mirror_weights(used: Dim, n: Dim, x: Tensor) -> Tensor:
    """Return how often each of the frequencies 0..n//2 occurs in the whole spectrum."""
    k = arange(used)
    mirrored = dims_of([n]).reshape(()) - k
    once = emit("Or", k < 1, mirrored <= k)
    # A real signal has y_{N-k} = conj(y_k), so each frequency counts twice, except 0 and, for even
    # N, N/2.
    return where(once, np.array(1, x.dtype.numpy), np.array(2, x.dtype.numpy))


def _dft_vjp(
    g: Tensor, y: Tensor, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None,
    *, inverse: int, onesided: int,
) -> Any:  # fmt: skip
    """Apply the adjoint: the other transform times N or 1/N, mirrored frequencies twice."""
    at = (_AXIS if axis is None else known_ints(axis)[0]) % x.rank
    back_one_sided = bool(inverse and onesided)
    n = _samples(x, at, length, back_one_sided)
    along = np.array(at)
    count = dims_of([n]).reshape(()).cast(x.dtype)
    if back_one_sided:
        slope = dft(g, None, along, onesided=1) * (1.0 / count)
        weights = _mirror_weights(floor_div(n, 2) + 1, n, x)
        slope = slope * weights.reshape((-1, *[1] * (x.rank - 1 - at)))
    elif inverse:
        slope = dft(g, None, along) * (1.0 / count)
    else:
        slope = dft(_whole(g, at, n), None, along, inverse=1) * count
    # A real signal has no imaginary part, and so no cotangent for one.
    if x.shape[-1] == 1 and slope.shape[-1] == 2:
        slope = slice_axis(slope, x.rank - 1, 0, 1)
    return _fitted(slope, at, x.shape[at]), None, None


def _whole(g: Tensor, axis: int, n: Dim) -> Tensor:
    """Append zeros to a one-sided spectrum, up to `n` samples."""
    size = g.shape[axis]
    if size == n:
        return g
    rest = [*g.shape[:axis], n - size, *g.shape[axis + 1 :]]
    return concat([g, emit("Expand", np.zeros((1,) * g.rank, g.dtype.numpy), dims_of(rest))], axis)


dft = Op(
    name="DFT",
    kind=OpKind.SIGNAL,
    data_dependent_dims=_dft_opens,
    infer=_dft_types,
    reference=_dft_kernel,
    body=_dft,
    xla=_dft_xla,
    vjp=_dft_vjp,
    native=lambda node, opset: opset >= 20,
    samples=(
        sample(normal(2, 6, 1)),
        sample(normal(2, 5, 3, 2), None, fixed(1)),
        sample(normal(3, 8, 1), None, fixed(1), onesided=1),
        sample(normal(2, 4, 2), inverse=1),
        sample(normal(2, 5, 2), None, fixed(-2), inverse=1, onesided=1),
        sample(normal(2, 6, 1), fixed(8), onesided=1),
        sample(normal(2, 6, 2), fixed(4)),
    ),
)
"""x: (..., n, ..., 1 or 2) -> (..., n or n//2+1, ..., 2) along `axis`, -2 by default."""


def _frame_sizes(call: OpCall) -> tuple[Dim | None, Dim | None]:
    """Return (step, samples of a frame), None where only the data decide."""
    steps = _known(call, 1)
    lengths = _known(call, 3) if call.has(3) else call.type(0).shape[1:2]
    length = None if lengths is None else lengths[0]
    if call.has(2):
        window: Any = call.type(2).shape[0]
        if call.has(3) and length not in {None, window}:
            raise ShapeError(f"{call.row} has frames of {length}, its window is {call.type(2)}")
        length = window
    step = None if steps is None else steps[0]
    for size in (step, length):
        if isinstance(size, int) and size < 1:
            raise ShapeError(f"{call.row} needs a step and a frame above 0, got {step}, {length}")
    return step, length


def _stft_opens(call: OpCall) -> int:
    step, length = _frame_sizes(call)
    return 2 if length is None else int(step is None)


def _stft_types(call: OpCall) -> Types:
    x = call.type(0)
    if x.rank != 3 or x.shape[2] not in (1, 2):
        raise ShapeError(f"{call.row} takes a signal (B, L, 1) or (B, L, 2), got {x}")
    step, length = _frame_sizes(call)
    onesided = call.attrs["onesided"]
    if onesided and x.shape[2] != 1:
        raise ShapeError(f"one-sided {call.row} takes a real signal, got {x}")
    if isinstance(x.shape[1], int) and isinstance(length, int) and x.shape[1] < length:
        raise ShapeError(f"{call.row} has frames of {length} samples, its signal is {x}")
    if length is None:
        return (x.with_shape((x.shape[0], call.opened(0), call.opened(1), 2)),)
    frames = call.opened(0) if step is None else floor_div(x.shape[1] - length, step) + 1
    bins = floor_div(length, 2) + 1 if onesided else length
    return (x.with_shape((x.shape[0], frames, bins, 2)),)


def _stft_kernel(
    x: Any, step: Any, window: Any = None, length: Any = None, *, onesided: int
) -> Any:
    size = x.shape[1] if length is None else int(length)
    size = size if window is None else len(window)
    starts = np.arange((x.shape[1] - size) // int(step) + 1) * int(step)
    framed = x[:, starts[:, None] + np.arange(size)]
    if window is not None:
        framed = framed * window[:, None]
    return _dft_kernel(framed, None, 2, inverse=0, onesided=onesided)


def _stft(
    x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None,
    *, onesided: int,
) -> Tensor:  # fmt: skip
    """Gather frames, multiply them by the window, and transform them."""
    every = known_ints(step)[0]
    size: Any = x.shape[1] if window is None else window.shape[0]
    if length is not None:
        size = known_ints(length)[0]
    starts = arange(floor_div(x.shape[1] - size, every) + 1) * every
    framed = emit("Gather", x, starts.reshape((-1, 1)) + arange(size), axis=1)
    if window is not None:
        framed = framed * window.reshape((-1, 1))
    return dft(framed, None, np.array(2), onesided=onesided)


def _stft_xla(
    k: XlaContext, x: Any, step: Any, window: Any = None, length: Any = None, *, onesided: int
) -> Any:
    size = x.shape[1] if length is None else int(k.known(length, "the length of a frame"))
    size = size if window is None else len(window)
    every = int(k.known(step, "its step"))
    count = (x.shape[1] - size) // every + 1
    starts = np.arange(count)[:, None] * every
    # Frames are copied whole, not sample by sample.
    numbers = k.lax.GatherDimensionNumbers((0, 2, 3), (), (1,))
    framed = k.lax.gather(x, starts, numbers, (x.shape[0], size, x.shape[2]))
    if window is not None:
        framed = framed * window[:, None]
    return _dft_xla(k, framed, None, np.array(2), inverse=0, onesided=onesided)


stft = Op(
    name="STFT",
    kind=OpKind.SIGNAL,
    settings=(2,),
    data_dependent_dims=_stft_opens,
    infer=_stft_types,
    reference=_stft_kernel,
    body=_stft,
    xla=_stft_xla,
    samples=(
        sample(normal(2, 16, 1), fixed(4), normal(8)),
        sample(normal(2, 11, 1), fixed(3), None, fixed(5)),
        sample(normal(2, 9, 2), fixed(2), normal(4), fixed(4), onesided=0),
    ),
)
"""signal: (B, L, 1 or 2) -> (B, frames, bins, 2), frames = (L - length) // step + 1."""


def _mel_types(call: OpCall) -> Types:
    bins, length = _known(call, 0), _known(call, 1)
    if any(isinstance(n, int) and n < 1 for n in (*(bins or ()), *(length or ()))):
        raise ShapeError(f"{call.row} takes 1 band or more, 1 sample or more, got {bins}, {length}")
    columns = call.opened(0) if bins is None else bins[0]
    rows = call.opened(int(bins is None)) if length is None else floor_div(length[0], 2) + 1
    return (TensorType(dtype_attr(call.attrs["output_datatype"]), (rows, columns)),)


def _mel_corners(count: int, length: int, rate: Any, edges: Any, using: Any) -> Any:
    """Return the bins of the corners of `count` triangles that are equally apart in mel."""
    mels = 2595 * using.log10(1 + edges / 700)
    # As ONNX's definition: count + 2 corners, but the last one stays below the upper edge.
    steps = np.arange(count + 2) * ((mels[1] - mels[0]) / (count + 2)) + mels[0]
    hertz = 700 * (10 ** (steps / 2595) - 1)
    return ((length + 1) * hertz // rate).astype(np.int64)


def _mel_fits(corners: Any, rows: int) -> Any:
    """Return, for each corner, whether its triangles lie within `rows` frequencies."""
    # The last corner is the end of a triangle, where it is 0 again.
    return (corners >= 0) & (corners < rows + (np.arange(len(corners)) == len(corners) - 1))


def _mel_bank(corners: Any, rows: int, using: Any) -> Any:
    """Return triangles from corner to corner: 0, 1 at the middle one, 0."""
    left, middle, right = corners[:-2], corners[1:-1], corners[2:]
    at = np.arange(rows)[:, None]
    rise = (at - left) / using.maximum(middle - left, 1)
    fall = (right - at) / using.maximum(right - middle, 1)
    rises, falls = (left <= at) & (at < middle), (middle < at) & (at < right)
    peaks = (at == middle) & ((left <= middle) | (middle < right))
    return using.where(rises, rise, using.where(falls, fall, using.where(peaks, 1.0, 0.0)))


def _mel(bins: Any, length: Any, rate: Any, low: Any, high: Any, *, output_datatype: int) -> Any:
    """Return triangles on the mel scale 2595 log10(1 + f / 700), corners at whole bins."""
    edges = np.array([low, high], np.float64).reshape(-1)
    rows = int(length) // 2 + 1
    corners = _mel_corners(int(bins), int(length), float(rate), edges, np)
    if not np.all(_mel_fits(corners, rows)):
        raise ValueError(f"bands up to {high} Hz at {rate} Hz lie outside the {rows} frequencies")
    return _mel_bank(corners, rows, np).astype(dtype_attr(output_datatype).numpy)


def _mel_xla(
    k: XlaContext, bins: Any, length: Any, rate: Any, low: Any, high: Any, *, output_datatype: int
) -> Any:
    count, n = int(k.known(bins, "its bands")), int(k.known(length, "its length"))
    rows = n // 2 + 1
    low, high, rate = (k.np.asarray(x).astype(np.float64).reshape(()) for x in (low, high, rate))
    corners = _mel_corners(count, n, rate, k.np.stack([low, high]), k.np)
    k.require(_mel_fits(corners, rows), "a band lies outside the frequencies")
    return _mel_bank(corners, rows, k.np)


mel_weight_matrix = Op(
    name="MelWeightMatrix", kind=OpKind.SOURCE, settings=(2, 3, 4),
    data_dependent_dims=lambda call: sum(_known(call, i) is None for i in (0, 1)),
    infer=_mel_types,
    reference=_mel,
    xla=_mel_xla,
    samples=(
        sample(fixed(8), fixed(16), fixed(8192), fixed(0.0, "float32"), fixed(4096.0, "float32")),
        sample(fixed(5), fixed(64), fixed(8000), fixed(20.0, "float32"), fixed(3800.0, "float32"),
               output_datatype=11),
    ),
)  # fmt: skip
"""Filters of `bins` mel bands for a transform of `length` samples: (length // 2 + 1, bins)."""
