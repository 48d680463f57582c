"""Random choices of a run, the same on every machine and for every version of numpy.

Only the raw words of Philox-4x64 are used (Salmon et al. 2011), keyed by the SHA-256 of what the
choice is for; numpy's distributions may change between its versions, its bit streams do not.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Draws:
    """A stream of words for one purpose; equal arguments give an equal stream.

    who: a device's name, or a lease.
    """

    def __init__(self, seed: int, round_: int, who: str, purpose: str) -> None:
        text = f"triplane draws 1\n{seed}\n{round_}\n{who}\n{purpose}"
        digest = hashlib.sha256(text.encode()).digest()
        self._words = np.random.Philox(key=np.frombuffer(digest[:16], "<u8").astype(np.uint64))

    def words(self, n: int) -> npt.NDArray[np.uint64]:
        """The next n words."""
        return np.asarray(self._words.random_raw(n), np.uint64)

    def permutation(self, n: int) -> npt.NDArray[np.intp]:
        """The numbers 0 to n - 1 in a random order."""
        return np.argsort(self.words(n), kind="stable")

    def uniform(self, n: int) -> npt.NDArray[np.float64]:
        """n numbers in [0, 1), multiples of 2^-53."""
        return (self.words(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def key(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """An array of random bits, for the state of a graph's own generator."""
        count = int(np.prod(shape, dtype=np.int64))
        return (self.words(count) >> np.uint64(32)).astype(dtype).reshape(shape)
