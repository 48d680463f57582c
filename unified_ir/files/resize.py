"""Resize images as ONNX's Resize does: linear, half-pixel coordinates, with antialiasing.

    y_i = sum_j w_ij x_j / sum_j w_ij,  w_ij = max(0, 1 - |j + 1/2 - c_i| / s)
    c_i = (i + 1/2) n_in / n_out,       s = max(1, n_in / n_out)

per axis, over all whole j, where x_j is the nearest pixel if j is outside the image. A smaller
result averages all pixels that it covers; a larger one interpolates between two.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput

MAX_RESIZED_SIDE: Final = 8192  # pixels of the result


def resized(images: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Return images (N, C, H, W), uint8 or float32, as (N, C, *size) of the same type.

    Bytes are computed in float32, then rounded, halves to even. The result for an image does not
    depend on the others. Raises InvalidInput for another type, rank or size.
    """
    known = str(images.dtype) in {"uint8", "float32"}
    if not known or images.ndim != 4 or 0 in images.shape[1:]:
        raise InvalidInput(
            f"resize needs images (N, C, H, W) as uint8 or float32, got {images.dtype}"
            f"{images.shape}"
        )
    if not all(1 <= n <= MAX_RESIZED_SIDE for n in size):
        raise InvalidInput(f"resize needs a size (H, W) of 1..{MAX_RESIZED_SIDE} each, got {size}")
    if images.shape[2:] == tuple(size):
        return images
    # Rows first: they are contiguous, and fewer of them are left for the slower pass over columns.
    smooth = _along(_along(images, 2, size[0]), 3, size[1])
    if images.dtype == np.uint8:
        return np.clip(np.rint(smooth), 0, 255).astype(np.uint8)
    return smooth


def _along(x: NDArray[Any], axis: int, n_out: int) -> NDArray[np.float32]:
    """Return (..., n_out, ...) float32 along one axis of x: (N, C, H, W)."""
    if x.shape[axis] == n_out:
        return x.astype(np.float32, copy=False)
    indices, weights = _taps(x.shape[axis], n_out)
    along = (-1, 1) if axis == 2 else (-1,)
    # A sum over taps and no matrix product, whose order of additions depends on the batch.
    total: NDArray[np.float32] = x.take(indices[0], axis=axis) * weights[0].reshape(along)
    for index, weight in zip(indices[1:], weights[1:], strict=True):
        total += x.take(index, axis=axis) * weight.reshape(along)
    return total


def _taps(n_in: int, n_out: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return which pixels each result sums, and their weights; both are (taps, n_out)."""
    ratio = n_in / n_out
    reach = max(1.0, ratio)
    centre = (np.arange(n_out) + 0.5) * ratio
    first = np.floor(centre - reach).astype(np.int64)
    indices = first + np.arange(int(np.ceil(2 * reach)) + 1)[:, None]
    weights = np.maximum(0.0, 1.0 - np.abs(indices + 0.5 - centre) / reach)
    weights /= weights.sum(axis=0)
    used = weights.any(axis=1)
    return indices.clip(0, n_in - 1)[used], weights[used].astype(np.float32)
