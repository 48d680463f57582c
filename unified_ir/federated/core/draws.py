"""Random choices of a run, the same on every machine and with every version of each library.

A stream is SHAKE-128 (FIPS 202) over the purpose of the choice and the number of the call, read as
64-bit little-endian words. numpy's generators are not used, because their distributions may change
between versions and importing them costs a device 5 MB; SHAKE is as fast as their raw words.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Draws:
    """A stream of words for one purpose; equal arguments and calls give equal words.

    who: a device's name, or a lease. The first n words of a longer call are those of a shorter one.
    """

    def __init__(self, seed: int, round_: int, who: str, purpose: str) -> None:
        self._text = f"triplane draws 1\n{seed}\n{round_}\n{who}\n{purpose}\n"
        self._calls = 0

    def words(self, n: int) -> npt.NDArray[np.uint64]:
        """Return the next n words."""
        stream = hashlib.shake_128(f"{self._text}{self._calls}".encode())
        self._calls += 1
        return np.frombuffer(stream.digest(8 * n), "<u8").astype(np.uint64, copy=False)

    def permutation(self, n: int) -> npt.NDArray[np.intp]:
        """Return the numbers 0 to n - 1 in a random order."""
        # Sorting by random words; with 64 bits, ties and their bias are negligible.
        return np.argsort(self.words(n), kind="stable")

    def uniform(self, n: int) -> npt.NDArray[np.float64]:
        """Return n numbers in [0, 1), multiples of 2^-53."""
        return (self.words(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def key(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return an array of random bits, for the state of a graph's own generator."""
        return (self.words(math.prod(shape)) >> np.uint64(32)).astype(dtype).reshape(shape)
