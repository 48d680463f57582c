"""Steps that change samples at random, so that a network becomes robust against such changes.

What happens to a sample depends on the stream's seed, the epoch, the step's place in the pipeline
and the sample's row, and not on the block that the sample comes in. Use them for training only.
In `Noise` and `Jitter`, a byte x counts as x / 255, so that the same fields fit images before and
after `Scale`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triplane.unified_ir.data.columns import MAX_RANK, Array, Column, Field
from triplane.unified_ir.data.randomness import RowDraws
from triplane.unified_ir.data.transforms import checks
from triplane.unified_ir.data.transforms.single import Augmentation, values_of
from triplane.unified_ir.files.pixels import TOP

MAX_SHIFT: Final = 4096
"""Pixels by which an image is moved or padded."""
MAX_CHANGE: Final = 1e30
"""Noise and brightness that float32 holds with a factor of 255 and a rare draw."""
_CACHED: Final = 1 << 17


@dataclass(frozen=True)
class Flip(Augmentation):
    """Mirror each sample along `axis` with that probability.

    axis: of a sample, counted from the end: -1 is left and right of an image (C, H, W), -2 top and
    bottom.
    """

    axis: int = -1
    probability: float = 0.5

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.whole(self, "axis", self.axis, low=-MAX_RANK, high=-1)
        checks.number(self, "probability", self.probability, low=0, high=1)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.fixed(self, self.column, field)
        if -self.axis > len(field.shape):
            raise checks.invalid(self, f"column {self.column!r} has no axis {self.axis}: {field}")
        return field

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        chosen = np.flatnonzero(draws.uniform(1)[:, 0] < self.probability)
        y = x.copy()
        y[chosen] = np.flip(x[chosen], self.axis)
        return y


@dataclass(frozen=True)
class Shift(Augmentation):
    """Move each sample by up to `most` in each direction; `fill` what is uncovered.

    An image (C, H, W) moves down or up and right or left, a series (C, T) along its last axis; each
    distance in -most..most is equally likely.
    """

    most: int
    fill: float = 0

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.whole(self, "most", self.most, low=0, high=MAX_SHIFT)
        checks.number(self, "fill", self.fill)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.fixed(self, self.column, field, 2, 3)
        checks.representable(self, "fill", self.fill, field)
        _check_frame(self, field, self.most)
        return field

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        corners = draws.integers(x.ndim - 2, 2 * self.most + 1)
        return _windows(_framed(x, self.most, self.fill), corners, x.shape[2:])


@dataclass(frozen=True)
class RandomCrop(Augmentation):
    """Cut a window of size (height, width) out of each image (C, H, W), at a random place.

    padding: pixels of `fill` that are put around the image first. Every place is equally likely.
    """

    size: tuple[int, int]
    padding: int = 0
    fill: float = 0

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.size(self, self.size, most=checks.MAX_SAMPLE_BYTES)
        checks.whole(self, "padding", self.padding, low=0, high=MAX_SHIFT)
        checks.number(self, "fill", self.fill)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.fixed(self, self.column, field, 3)
        checks.representable(self, "fill", self.fill, field)
        _check_frame(self, field, self.padding)
        _check_window(self, field, self.size, self.padding)
        return Field(field.dtype, (field.shape[0], *self.size))

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        framed = _framed(values_of(column), self.padding, self.fill)
        places = np.array([n - s + 1 for n, s in zip(framed.shape[2:], self.size, strict=True)])
        corners = (draws.uniform(2) * places).astype(np.int64)
        return _windows(framed, corners, self.size)


@dataclass(frozen=True)
class Rotate(Augmentation):
    """Turn each image (C, H, W) around its centre by up to `degrees` in either direction.

    Every angle is equally likely. Pixels are interpolated linearly between four, in float32, and
    bytes are rounded; `fill` stands outside the image. Works on uint8 and float32.
    """

    degrees: float
    fill: float = 0

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.number(self, "degrees", self.degrees, low=0, high=180)
        checks.number(self, "fill", self.fill)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.fixed(self, self.column, field, 3)
        _bytes_or_float(self, field)
        checks.representable(self, "fill", self.fill, field)
        _check_frame(self, field, 1)
        return field

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        angles = np.deg2rad(self.degrees) * (2 * draws.uniform(1)[:, 0] - 1)
        return _in_parts(x, lambda part: _turned(x[part], angles[part], self.fill))


@dataclass(frozen=True)
class Erase(Augmentation):
    """Fill a rectangle at a random place of each image (C, H, W) with that probability.

    The rectangle has a random height in 1..size[0] and width in 1..size[1], and lies inside the
    image (random erasing, Zhong et al. 2017).
    """

    size: tuple[int, int]
    fill: float = 0
    probability: float = 0.5

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.size(self, self.size, most=checks.MAX_SAMPLE_BYTES)
        checks.number(self, "fill", self.fill)
        checks.number(self, "probability", self.probability, low=0, high=1)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        checks.fixed(self, self.column, field, 3)
        checks.representable(self, "fill", self.fill, field)
        _check_window(self, field, self.size, 0)
        return field

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        u = draws.uniform(5)
        sides = np.array(x.shape[2:])
        lengths = 1 + (u[:, 0:2] * self.size).astype(np.int64)
        starts = (u[:, 2:4] * (sides - lengths + 1)).astype(np.int64)
        y = x.copy()
        for k in np.flatnonzero(u[:, 4] < self.probability).tolist():
            (top, left), (height, width) = starts[k].tolist(), lengths[k].tolist()
            y[k, :, top : top + height, left : left + width] = self.fill
        return y


@dataclass(frozen=True)
class Noise(Augmentation):
    """Add normal noise of standard deviation `scale` to each value, clipped to low..high.

    Works on float32 and on bytes, which count as x / 255 and are rounded. A bound of None does not
    clip, except that bytes stay in 0..255.
    """

    scale: float
    low: float | None = 0
    high: float | None = 1

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.number(self, "scale", self.scale, low=0, high=MAX_CHANGE)
        _check_range(self, self.low, self.high)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        return _bytes_or_float(self, field)

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        return _in_parts(
            x, lambda part: self._noisy(x[part], replace(draws, rows=draws.rows[part]))
        )

    def _noisy(self, x: Array, draws: RowDraws) -> Array:
        y = _normal(draws, math.prod(x.shape[1:])).reshape(x.shape)
        y *= np.float32(self.scale * _unit(x))
        y += x
        return _clipped(y, x, self.low, self.high)


@dataclass(frozen=True)
class Jitter(Augmentation):
    """Compute mean + c (x - mean) + b with random contrast c and brightness b for each sample.

    c is uniform in 1 - contrast..1 + contrast, b in -brightness..brightness, mean is that of the
    sample; the result is clipped to low..high, as in `Noise`. Works on float32 and on bytes, which
    count as x / 255 and are rounded.
    """

    brightness: float = 0
    contrast: float = 0
    low: float | None = 0
    high: float | None = 1

    def check(self) -> None:
        """See `ColumnStep`."""
        checks.number(self, "brightness", self.brightness, low=0, high=MAX_CHANGE)
        checks.number(self, "contrast", self.contrast, low=0, high=1)
        _check_range(self, self.low, self.high)

    def after(self, field: Field) -> Field:
        """See `ColumnStep`."""
        return _bytes_or_float(self, field)

    def compute(self, column: Column, draws: RowDraws) -> Column:
        """See `ColumnStep`."""
        x = values_of(column)
        u = 2 * draws.uniform(2) - 1
        gain = 1 + self.contrast * u[:, 1]
        offset = self.brightness * _unit(x) * u[:, 0] + (1 - gain) * _means(x)
        along = (-1, *[1] * (x.ndim - 1))
        y = x * gain.astype(np.float32).reshape(along)
        y += offset.astype(np.float32).reshape(along)
        return _clipped(y, x, self.low, self.high)


def _framed(x: Array, edge: int, fill: float) -> Array:
    """Return x with a frame of `fill` around all axes but those of samples and channels."""
    if not edge:
        return x
    inside = tuple(slice(edge, edge + n) for n in x.shape[2:])
    framed = np.full((*x.shape[:2], *[n + 2 * edge for n in x.shape[2:]]), fill, x.dtype)
    framed[:, :, *inside] = x
    return framed


def _windows(x: Array, corners: NDArray[np.int64], size: tuple[int, ...]) -> Array:
    """Return the window of each sample at its corner. x: (N, C, ...); corners: (N, axes)."""
    x = np.ascontiguousarray(x)
    places = tuple(n - s + 1 for n, s in zip(x.shape[2:], size, strict=True))
    # `sliding_window_view`, which takes as long as the copies of a small block.
    windows: Array = np.ndarray(
        (len(x), *places, x.shape[1], *size),
        x.dtype,
        x,
        strides=(x.strides[0], *x.strides[2:], *x.strides[1:]),
    )
    # One index for each sample selects a whole window: few indices, and long copies.
    picked: Array = windows[np.arange(len(x)), *corners.T]
    return picked


def _in_parts(x: Array, function: Callable[[slice], Array]) -> Array:
    """Return the results for parts of the block, of the shape and type of x."""
    y = np.empty_like(x)
    # So that temporaries stay small: for 128 images 3x32x32 of bytes, noise is three times as fast
    # as for the whole block at once.
    rows = max(1, _CACHED // max(1, math.prod(x.shape[1:])))
    for k in range(0, len(x), rows):
        y[k : k + rows] = function(slice(k, k + rows))
    return y


def _turned(x: Array, angles: NDArray[np.float64], fill: float) -> Array:
    """Return each image turned by its angle. x: (N, C, H, W); angles: (N,)."""
    n, channels, height, width = x.shape
    cos, sin = (f(angles).astype(np.float32)[:, None, None] for f in (np.cos, np.sin))
    down = np.arange(height, dtype=np.float32)[:, None] - np.float32((height - 1) / 2)
    right = np.arange(width, dtype=np.float32) - np.float32((width - 1) / 2)
    # Where a pixel comes from, (N, H, W), in the image with a frame of one pixel around it.
    rows = (cos * down - sin * right + np.float32((height + 1) / 2)).clip(0, height + 1)
    columns = (sin * down + cos * right + np.float32((width + 1) / 2)).clip(0, width + 1)
    top, left = (np.minimum(np.floor(v), m) for v, m in ((rows, height), (columns, width)))
    lower, later = (rows - top)[:, None], (columns - left)[:, None]
    place = (top.astype(np.intp) * (width + 2) + left.astype(np.intp))[:, None]
    framed = _framed(x, 1, fill)
    images = np.arange(n * channels).reshape(n, channels, 1, 1) * ((height + 2) * (width + 2))
    place, pixels = place + images, framed.ravel()
    upper = pixels[place] * (1 - later) + pixels[place + 1] * later
    place += width + 2
    below = pixels[place] * (1 - later) + pixels[place + 1] * later
    y: Array = upper * (1 - lower) + below * lower
    return np.rint(y).astype(np.uint8) if x.dtype == np.uint8 else y


def _normal(draws: RowDraws, count: int) -> NDArray[np.float32]:
    """Return (N, count) normal numbers in float32, by Box and Muller, two from each word."""
    words = draws.words((count + 1) // 2)
    radius = (words >> np.uint64(32)).astype(np.float32)
    radius += np.float32(0.5)
    radius *= np.float32(2.0**-32)
    np.log(radius, out=radius)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    angle = (words & np.uint64(0xFFFFFFFF)).astype(np.float32)
    angle *= np.float32(2 * math.pi * 2.0**-32)
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return both[:, :count]


def _means(x: Array) -> NDArray[np.float64]:
    """Return the mean of each sample, (N,)."""
    flat = np.ascontiguousarray(x).reshape(len(x), math.prod(x.shape[1:]))
    # Bytes are summed as integers: floating-point sums through a buffer depend on the block.
    total = flat.sum(axis=1, dtype=np.uint64 if x.dtype == np.uint8 else None)
    means: NDArray[np.float64] = total.astype(np.float64) / max(1, flat.shape[1])
    return means


def _unit(x: Array) -> int:
    """Return what 1.0 is in the values of x."""
    return TOP if x.dtype == np.uint8 else 1


def _clipped(y: Array, x: Array, low: float | None, high: float | None) -> Array:
    """Return y clipped to low..high and rounded, in the type of x; y is overwritten."""
    if x.dtype == np.uint8:
        low, high = (min(max(v, 0.0), 1.0) for v in (low or 0.0, 1.0 if high is None else high))
    if low is not None or high is not None:
        unit = _unit(x)
        np.clip(y, *(None if v is None else np.float32(v * unit) for v in (low, high)), out=y)
    return np.rint(y, out=y).astype(np.uint8) if x.dtype == np.uint8 else y


def _check_range(step: Augmentation, low: float | None, high: float | None) -> None:
    bounds = [v for v in (low, high) if v is not None]
    for value in bounds:
        checks.number(step, "low and high", value)
    if bounds != sorted(bounds):
        raise checks.invalid(step, f"low must not exceed high, got {low} and {high}")


def _bytes_or_float(step: Augmentation, field: Field) -> Field:
    checks.fixed(step, step.column, field)
    if field.dtype not in {"uint8", "float32"}:
        raise checks.invalid(
            step, f"column {step.column!r} must hold uint8 or float32, got {field}; use Cast"
        )
    return field


def _check_frame(step: Augmentation, field: Field, edge: int) -> None:
    sides = [(n or 0) + 2 * edge for n in field.shape[1:]]
    checks.limited(step, step.column, Field(field.dtype, (field.shape[0], *sides)))


def _check_window(step: Augmentation, field: Field, size: tuple[int, int], padding: int) -> None:
    sides = [(n or 0) + 2 * padding for n in field.shape[1:]]
    if any(n < s for n, s in zip(sides, size, strict=True)):
        padded = f" with {padding} around it" if padding else ""
        raise checks.invalid(
            step,
            f"size {size} must fit into column {step.column!r}, which is {field}{padded}; "
            "choose a smaller size, or use Resize before",
        )
