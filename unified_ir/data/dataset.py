"""Labelled images in memory, and the order in which training sees them.

The order depends only on (seed, epoch), so a run that resumes at an epoch continues as if it had
never stopped. It is computed from raw Philox words, whose stream numpy never changes, and not by
`Generator.permutation`, whose stream it may change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files.images import check_sizes
from triplane.unified_ir.files.pixels import TOP, as_input
from triplane.unified_ir.files.samples import MAX_CLASSES, check_finite

_WORD: Final = 2**64


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Images and their classes.

    x: (N, C, H, W) float32, in 0..1 if the source has whole numbers; y: (N,) int64, indices into
    `labels`. Both are read-only views. Anything else raises InvalidInput.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        _check(self.x, self.y, self.labels)
        for name in ("x", "y"):
            # A view, so that the caller's own array stays writeable.
            view = getattr(self, name).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    def __len__(self) -> int:
        return len(self.y)

    def take(self, n: int) -> Dataset:
        """Return the first `n` images."""
        if not 0 < n <= len(self):
            raise InvalidInput(f"take needs 1..{len(self)} images, got {n}")
        return Dataset(self.x[:n], self.y[:n], self.labels)

    def select(self, indices: NDArray[np.integer[Any]]) -> Dataset:
        """Return the images at `indices`, in that order."""
        return Dataset(self.x[indices], self.y[indices], self.labels)

    def split(self, fraction: float = 0.2, *, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Return (rest, held out); each class contributes its share of ceil(fraction * N) images.

        The choice depends only on the labels and `seed`; both parts keep the original order.
        """
        if not 0.0 < fraction < 1.0:
            raise InvalidInput(f"split needs a fraction between 0 and 1, got {fraction}")
        held_out = np.zeros(len(self), dtype=bool)
        for label, count in _shares(self.y, fraction).items():
            members = np.flatnonzero(self.y == label)
            held_out[members[_order(len(members), seed, label)[:count]]] = True
        if held_out.all():
            raise InvalidInput(f"holding out {fraction} of {len(self)} images leaves none")
        return self.select(np.flatnonzero(~held_out)), self.select(np.flatnonzero(held_out))

    def batches(
        self, size: int, *, seed: int, epoch: int = 0, drop_last: bool = False
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Yield (x, y) of `size` images, every image once, in an order set by (seed, epoch).

        If `size` does not divide N, the last batch is smaller, or left out with `drop_last`.
        """
        if size < 1:
            raise InvalidInput(f"a batch must hold at least 1 image, got size={size}")
        order = _order(len(self), seed, epoch)
        end = len(self) - len(self) % size if drop_last else len(self)
        for start in range(0, end, size):
            chosen = order[start : start + size]
            yield self.x[chosen], self.y[chosen]


def from_arrays(
    x: NDArray[Any], y: NDArray[Any], *, labels: tuple[str, ...] = (), top: int = TOP
) -> Dataset:
    """Return a Dataset of arrays as files have them.

    x: (N, H, W) or (N, C, H, W); unsigned bytes are divided by `top`, floats stay as they are.
    y: (N,) whole numbers. Without `labels`, class k is called str(k).
    """
    if x.ndim == 3:
        x = x[:, None]
    if x.dtype == np.uint8:
        scaled = as_input(x, np.dtype(np.float32), top=top)
    elif x.dtype.kind == "f":
        with np.errstate(over="ignore"):  # becomes infinite, which Dataset refuses
            scaled = x.astype(np.float32, order="C")
    else:
        raise InvalidInput(f"pixels must be uint8 or floating point, got {x.dtype}")
    if y.dtype.kind not in "ui":
        raise InvalidInput(f"labels must be whole numbers, got {y.dtype}{_fraction(y)}")
    _check_labels(y)
    return Dataset(scaled, y.astype(np.int64), labels or tuple(map(str, range(int(y.max()) + 1))))


def _check(x: NDArray[Any], y: NDArray[Any], labels: tuple[str, ...]) -> None:
    if x.ndim != 4 or x.dtype != np.float32:
        raise InvalidInput(f"x must be (N, C, H, W) float32, got {x.shape} {x.dtype}")
    if y.ndim != 1 or y.dtype != np.int64 or len(y) != len(x):
        raise InvalidInput(f"y must be ({len(x)},) int64, one per image, got {y.shape} {y.dtype}")
    check_sizes(x.shape)
    _check_labels(y)
    if int(y.max()) >= len(labels):
        raise InvalidInput(f"class {int(y.max())} has no name; there are {len(labels)} labels")
    check_finite(x, "x", what="pixels")


def _check_labels(y: NDArray[Any]) -> None:
    if y.size == 0:
        raise InvalidInput("a dataset must have at least one image, got none")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= MAX_CLASSES:
        at = int(np.argmax((y < 0) | (y >= MAX_CLASSES)))
        raise InvalidInput(
            f"classes must be in 0..{MAX_CLASSES - 1}, got {low}..{high}; "
            f"the first out of range is {int(y[at])}, sample {at}"
        )


def _fraction(y: NDArray[Any]) -> str:
    """Return which floating-point label is not an integer, or how to convert if all are."""
    if y.dtype.kind != "f" or y.ndim != 1 or not y.size:
        return ""
    wrong = ~np.isfinite(y) | (y != np.floor(y))
    if not wrong.any():
        return "; convert them: y.astype(np.int64)"
    at = int(np.argmax(wrong))
    return f"; the first that is not one is {y[at]}, sample {at}"


def _shares(y: NDArray[np.int64], fraction: float) -> dict[int, int]:
    """Return how many images of each class to hold out, by largest remainders."""
    classes, counts = np.unique(y, return_counts=True)
    # 0.07 * 100 is 7.000000000000001, whose ceiling would be 8.
    wanted = math.ceil(round(fraction * len(y), 9))
    exact = counts * (wanted / len(y))
    shares = np.floor(exact).astype(int)
    missing = wanted - int(shares.sum())
    # The largest remainders first; equal ones in the order of the classes.
    shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    return {int(k): int(v) for k, v in zip(classes, shares, strict=True)}


def _order(n: int, seed: int, stream: int) -> NDArray[np.intp]:
    """Return a permutation of 0..n-1 that depends on (seed, stream) alone."""
    if not (0 <= seed < _WORD and 0 <= stream < _WORD):
        raise InvalidInput(f"seed and epoch must be in 0..2^64-1, got {seed} and {stream}")
    key = np.array([seed, stream], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(n), kind="stable")
