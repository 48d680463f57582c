"""Random numbers that depend on the place of a sample alone: seed, epoch, step and row.

Each row has its own numbers, whoever computes them and in whichever block, so the stream does not
depend on the number of workers, and a resumed run sees the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data.columns import Rows

WORD: Final = 2**64
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def permutation(n: int, seed: int, stream: int) -> NDArray[np.int64]:
    """Return a permutation of 0..n-1 that depends on (seed, stream) alone.

    Computed from raw Philox words, whose stream numpy never changes, and not by
    `Generator.permutation`, whose stream it may change. Equal words keep the order of the rows.
    """
    return np.argsort(words(n, seed, stream), kind="stable").astype(np.int64, copy=False)


def words(n: int, seed: int, stream: int) -> NDArray[np.uint64]:
    """Return n random words that depend on (seed, stream) alone."""
    if not (0 <= seed < WORD and 0 <= stream < WORD):
        raise InvalidInput(f"seed and epoch must be in 0..2^64-1, got {seed} and {stream}")
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(n)


@dataclass(frozen=True, eq=False)
class RowDraws:
    """The random numbers of a block of rows at one step of a pipeline.

    seed, epoch: those of the stream. step: the place of the step in the pipeline, so that two steps
    draw different numbers. rows: (N,) int64, the position of each row in the step's input.
    """

    seed: int
    epoch: int
    step: int
    rows: Rows

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return (N, count) random words, the same in every version of Triplane."""
        key = _mixed(_mixed(_mixed(np.uint64(self.seed)) ^ np.uint64(self.epoch))
                     ^ np.uint64(self.step))  # fmt: skip
        start = _mixed(key ^ self.rows.astype(np.uint64))
        counter = np.arange(1, count + 1, dtype=np.uint64)
        # SplitMix64 (Steele, Lea, Flood 2014), its state started at a hash of the row's place.
        return _finished(start[:, None] + counter * _GOLDEN)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return (N, count) numbers in [0, 1)."""
        return _unit(self.words(count))

    def normal(self, count: int) -> NDArray[np.float64]:
        """Return (N, count) numbers of the standard normal distribution (Box and Muller 1958)."""
        half = (count + 1) // 2
        u = self.uniform(2 * half)
        radius = np.sqrt(-2.0 * np.log1p(-u[:, :half]))
        angle = 2.0 * math.pi * u[:, half:]
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        return both[:, :count]

    def integers(self, count: int, below: int) -> NDArray[np.int64]:
        """Return (N, count) whole numbers in 0..below-1."""
        return (self.uniform(count) * below).astype(np.int64)

    def generator(self, k: int) -> np.random.Generator:
        """Return numpy's generator for row k of the block, for functions of the user's."""
        one = RowDraws(self.seed, self.epoch, self.step, self.rows[k : k + 1])
        return np.random.Generator(np.random.Philox(key=one.words(2)[0]))


def place_of_part(place: int, part: int) -> int:
    """Return the place of a pipeline that is part number `part` of the one at `place`."""
    return int(_mixed(np.uint64(place) ^ np.uint64(part + 1)))


def _unit(x: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return words as numbers in [0, 1), by their highest 53 bits."""
    unit: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return unit


def _mixed(x: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return _finished(np.asarray(x + _GOLDEN))


def _finished(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
        return x ^ (x >> np.uint64(31))
