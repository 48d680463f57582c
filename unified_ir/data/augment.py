"""Modified copies of images, so that a network becomes robust against small changes.

A change takes images (N, C, H, W) and a generator, and returns images: `flipped`, `shifted`,
`noisy`, or your own function. The same seed gives the same copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data.dataset import Dataset

Images = NDArray[np.float32]
Change = Callable[[Images, np.random.Generator], Images]


def augmented(dataset: Dataset, *changes: Change, copies: int = 1, seed: int = 0) -> Dataset:
    """Return the images, and `copies` of each with every change applied in turn.

    InvalidInput: no copies, or a change that returns another number or type of images.
    """
    if copies < 1:
        raise InvalidInput(f"augmented makes at least 1 copy, got {copies}")
    rng = np.random.default_rng(seed)
    parts = [dataset.x]
    for _ in range(copies):
        x = dataset.x
        for change in changes:
            changed = np.asarray(change(x, rng))
            if changed.shape != x.shape or changed.dtype != np.float32:
                raise InvalidInput(
                    f"{_name(change)} must return float32{list(x.shape)} like its argument, got "
                    f"{changed.dtype}{list(changed.shape)}"
                )
            x = changed
        parts.append(x)
    return Dataset(np.concatenate(parts), np.tile(dataset.y, copies + 1), dataset.labels)


def flipped(x: Images, rng: np.random.Generator) -> Images:
    """Mirror each image with probability 1/2."""
    chosen = rng.random(len(x)) < 0.5
    return np.where(chosen[:, None, None, None], x[..., ::-1], x)


def shifted(most: int, *, fill: float = 0.0) -> Change:
    """Move each image by up to `most` pixels in each direction; `fill` the uncovered pixels."""
    if most < 0:
        raise InvalidInput(f"shifted moves by 0 pixels or more, got {most}")
    return partial(_shifted, most=most, fill=fill)


def noisy(scale: float) -> Change:
    """Add normal noise of that standard deviation to each pixel, clipped to 0..1."""
    if scale < 0:
        raise InvalidInput(f"noisy needs a standard deviation of 0 or more, got {scale}")
    return partial(_noisy, scale=scale)


def _shifted(x: Images, rng: np.random.Generator, *, most: int, fill: float) -> Images:
    n, _, height, width = x.shape
    edge = ((0, 0), (0, 0), (most, most), (most, most))
    framed = np.pad(x, edge, constant_values=fill)
    down, right = rng.integers(0, 2 * most + 1, (2, n))
    rows = down[:, None] + np.arange(height)
    columns = right[:, None] + np.arange(width)
    # Indices broadcast to (N, H, W); the slice of channels comes last then: (N, H, W, C).
    shifted: Images = framed[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(shifted.transpose(0, 3, 1, 2))


def _noisy(x: Images, rng: np.random.Generator, *, scale: float) -> Images:
    return np.clip(x + rng.normal(0.0, scale, x.shape), 0.0, 1.0).astype(np.float32)


def _name(change: Any) -> str:
    return str(getattr(change, "__name__", None) or getattr(change.func, "__name__", change))
