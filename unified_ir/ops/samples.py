"""Sample operands of rows: functions of a random generator, so a seed fixes every sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.unified_ir.ir.graph import AttrValue
from triplane.unified_ir.ops.row import MakeArray, Sample


def normal(*shape: int) -> MakeArray:
    """Draw standard normal float64; the suites cast it to the element type under test."""
    return lambda rng: rng.standard_normal(shape)


def between(low: float, high: float, *shape: int) -> MakeArray:
    """Draw uniformly in [low, high)."""
    return lambda rng: rng.uniform(low, high, shape)


def apart(*shape: int) -> MakeArray:
    """Draw values at least 0.1 apart and away from 0, in random order: without ties or kinks."""
    n = int(np.prod(shape))
    values = (np.arange(n) - n // 2) * 0.2 + 0.1
    return lambda rng: rng.permutation(values).reshape(shape)


def ints(low: int, high: int, *shape: int, dtype: str = "int64") -> MakeArray:
    """Draw uniform integers in low..high-1."""
    return lambda rng: rng.integers(low, high, shape).astype(dtype)


def bools(*shape: int) -> MakeArray:
    """Draw random booleans."""
    return lambda rng: rng.random(shape) < 0.5


@dataclass(frozen=True)
class FixedArray:
    """Always the same array; the suites make it a constant of the graph if it holds integers."""

    value: Any
    dtype: str | None = None

    def __call__(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """Return the array."""
        return np.asarray(self.value, self.dtype)


@dataclass(frozen=True)
class LiteralArray(FixedArray):
    """Like `FixedArray`, and a constant of the graph for any element type."""


def computed(value: Any, dtype: str | None = None) -> MakeArray:
    """Return always the same array, which is known only when the graph runs."""
    return lambda rng: np.asarray(value, dtype)


fixed = FixedArray
literal = LiteralArray


def sample(
    *inputs: MakeArray | None,
    outputs: int = 1,
    smooth: tuple[int, ...] | None = None,
    **attrs: AttrValue,
) -> Sample:
    """Return a `Sample`, with attributes as keywords."""
    return Sample(inputs=inputs, attrs=attrs, outputs=outputs, smooth=smooth)
