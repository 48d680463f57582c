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
_GOLDEN: Final = 0x9E3779B97F4A7C15
_ROUNDS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT: Final = 31
# The same as numpy's numbers; to make them takes as long as to use them.
_WORD_GOLDEN, _WORD_LAST_SHIFT = np.uint64(_GOLDEN), np.uint64(_LAST_SHIFT)
_WORD_ROUNDS: Final = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in _ROUNDS)


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
        # Python's integers, because seed and epoch may be numpy's, which overflow.
        seed, epoch = int(self.seed), int(self.epoch)
        key = _mixed(_mixed(_mixed(seed) ^ epoch) ^ self.step)
        start = self.rows.astype(np.uint64)
        start ^= np.uint64(key)
        start += _WORD_GOLDEN
        _finish(start)
        counter = np.arange(1, count + 1, dtype=np.uint64)
        # SplitMix64 (Steele, Lea, Flood 2014), its state started at a hash of the row's place.
        words: NDArray[np.uint64] = start[:, None] + counter * _WORD_GOLDEN
        _finish(words)
        return words

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
    return _mixed(place ^ (part + 1))


def _unit(x: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return words as numbers in [0, 1), by their highest 53 bits."""
    unit = (x >> np.uint64(11)).astype(np.float64)
    unit *= 2.0**-53
    return unit


def _mixed(x: int) -> int:
    """Return the word that follows the state x in SplitMix64."""
    x = (x + _GOLDEN) % WORD
    for shift, factor in _ROUNDS:
        x = (x ^ (x >> shift)) * factor % WORD
    return x ^ (x >> _LAST_SHIFT)


def _finish(x: NDArray[np.uint64]) -> None:
    """Do the same to an array, without the first sum, in place."""
    shifted = np.empty_like(x)
    for shift, factor in _WORD_ROUNDS:
        x ^= np.right_shift(x, shift, out=shifted)
        x *= factor
    x ^= np.right_shift(x, _WORD_LAST_SHIFT, out=shifted)
