"""The randomness of layers: one seeded generator for initial values, and keys for the graph.

A program starts as if it had called `seed(0)`, so running it twice gives the same weights. Two
models built in one program differ. Every layer also accepts a generator of its own.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.nn.state import RandomKey, State

_MAX_SEED: Final = 2**64


def _fresh(number: int) -> np.random.Generator:
    # An explicit key rather than a seed, which numpy would first pass through its SeedSequence.
    return np.random.Generator(np.random.Philox(key=np.array([number, 0], np.uint64)))


# A list of one generator, so that `seed` can replace it for every thread.
_shared: Final[list[np.random.Generator]] = [_fresh(0)]


def seed(number: int) -> None:
    """Seed the initial values of all layers built from now on, in every thread."""
    if not 0 <= number < _MAX_SEED:
        raise InvalidInput(f"a seed must be in 0..2^64-1, got {number}")
    _shared[0] = _fresh(number)


def generator(rng: np.random.Generator | None = None) -> np.random.Generator:
    """Return `rng`, or the generator that `seed` set."""
    return _shared[0] if rng is None else rng


def new_key(rng: np.random.Generator | None = None) -> RandomKey:
    """Return a random key from one raw word."""
    word = np.asarray(generator(rng).bit_generator.random_raw(1), np.uint64)
    return RandomKey(word.view(np.uint32).copy())


class Dropout(Cell):
    """In training, zeroes each element with probability `p_drop` and scales the rest up.

    y = x keep / (1 - p_drop) (Srivastava et al. 2014). The mask is a function of the cell's key,
    which advances at each use: equal on every engine, exact after a resume. In evaluation y = x.
    """

    key: State

    def __init__(self, p_drop: float = 0.5, *, rng: np.random.Generator | None = None) -> None:
        super().__init__()
        if not 0.0 <= p_drop < 1.0:
            raise InvalidInput(f"p_drop must be in [0, 1), got {p_drop}")
        self.p_drop = p_drop
        self.key = new_key(rng)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        if not self.training or self.p_drop == 0.0:
            return x
        y = ops.dropout(x, self.key, self.p_drop)
        self.key = ops.next_key(self.key)
        return y
