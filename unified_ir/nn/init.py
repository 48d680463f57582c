"""Initial values of parameters, drawn from an explicit generator.

Numbers are computed from the generator's raw 64-bit words, whose streams numpy guarantees to keep,
and not by methods such as `Generator.normal`, whose streams it may change. So the same seed gives
the same weights with every version of numpy.

Fans of a weight of shape (O, I, *K): fan_in = I prod(K), fan_out = O prod(K).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Protocol

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array


class Initializer(Protocol):
    """Creates the initial float32 array of a parameter."""

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """Return an array of `shape` that depends on `rng` alone."""
        ...


def unit_uniform(shape: Sequence[int], rng: np.random.Generator) -> Array:
    """Return multiples of 2^-24 in [0, 1), one raw word each."""
    if isinstance(rng.bit_generator, np.random.MT19937):
        raise InvalidInput("initializers need 64-bit raw words; use Philox or PCG64, not MT19937")
    words = np.asarray(rng.bit_generator.random_raw(math.prod(shape)), np.uint64)
    # The top 24 bits, which a float32 holds exactly: no rounding, and never 1.
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).reshape(shape)


def unit_normal(shape: Sequence[int], rng: np.random.Generator) -> Array:
    """Return standard normal numbers (Box and Muller 1958), from float64 rounded once."""
    # In (0, 1], so that the logarithm is finite.
    u = 1.0 - unit_uniform(shape, rng).astype(np.float64)
    angle = 2.0 * np.pi * unit_uniform(shape, rng).astype(np.float64)
    return (np.sqrt(-2.0 * np.log(u)) * np.cos(angle)).astype(np.float32)


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """Return (fan_in, fan_out) of a weight; a vector or scalar has none."""
    if len(shape) < 2:
        raise InvalidInput(
            f"only a weight (O, I, ...) has fans, got shape {tuple(shape)}; use Uniform or "
            "ConstantInitializer"
        )
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


@dataclass(frozen=True)
class ConstantInitializer:
    """Every element is `value`."""

    value: float = 0.0

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        return np.full(shape, self.value, np.float32)


@dataclass(frozen=True)
class Uniform:
    """Uniform in [-reach, reach)."""

    reach: float

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        reach = np.float32(self.reach)
        return unit_uniform(shape, rng) * (np.float32(2) * reach) - reach


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0."""

    std: float = 1.0

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        return unit_normal(shape, rng) * np.float32(self.std)


@dataclass(frozen=True)
class KaimingUniform:
    """Uniform with variance gain^2 / fan_in (He et al. 2015; gain sqrt(2) is for ReLU)."""

    gain: float = math.sqrt(2.0)

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        return Uniform(self.gain * math.sqrt(3.0 / fans(shape)[0]))(shape, rng)


@dataclass(frozen=True)
class KaimingNormal:
    """Normal with variance gain^2 / fan_in (He et al. 2015)."""

    gain: float = math.sqrt(2.0)

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        return Normal(self.gain / math.sqrt(fans(shape)[0]))(shape, rng)


@dataclass(frozen=True)
class GlorotUniform:
    """Uniform with variance 2 gain^2 / (fan_in + fan_out) (Glorot and Bengio 2010)."""

    gain: float = 1.0

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        return Uniform(self.gain * math.sqrt(6.0 / sum(fans(shape))))(shape, rng)


@dataclass(frozen=True)
class GlorotNormal:
    """Normal with variance 2 gain^2 / (fan_in + fan_out) (Glorot and Bengio 2010)."""

    gain: float = 1.0

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        return Normal(self.gain * math.sqrt(2.0 / sum(fans(shape))))(shape, rng)


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal with mean 0, truncated at `within` standard deviations on either side.

    Drawn by the inverse of the distribution function, so each element takes one word.
    """

    std: float = 1.0
    within: float = 2.0

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        normal = NormalDist()
        low = normal.cdf(-self.within)
        u = unit_uniform(shape, rng).astype(np.float64) + 2.0**-25  # in (0, 1)
        chances = low + (1.0 - 2.0 * low) * u
        drawn = np.array([normal.inv_cdf(p) for p in chances.reshape(-1).tolist()], np.float64)
        return (drawn * self.std).astype(np.float32).reshape(shape)


@dataclass(frozen=True)
class Orthogonal:
    """Rows, or columns where there are fewer of them, orthonormal times `gain` (Saxe et al. 2013).

    A weight (O, I, *K) counts as a matrix (O, I prod(K)).
    """

    gain: float = 1.0

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        rows, columns = shape[0], fans(shape)[0]
        tall = unit_normal((max(rows, columns), min(rows, columns)), rng).astype(np.float64)
        # QR of a normal matrix is uniform over orthogonal matrices once the diagonal of R is
        # positive (Mezzadri 2007).
        q, r = np.linalg.qr(tall)
        q *= np.sign(np.diag(r))  # the signs of QR depend on the library
        return (self.gain * (q if rows >= columns else q.T)).astype(np.float32).reshape(shape)


@dataclass(frozen=True)
class Eye:
    """The identity matrix, or ones on the diagonal of a matrix that is not square."""

    def __call__(self, shape: Sequence[int], rng: np.random.Generator) -> Array:
        """See `Initializer`."""
        if len(shape) != 2:
            raise InvalidInput(f"Eye makes matrices, got shape {tuple(shape)}")
        return np.eye(*shape, dtype=np.float32)


STANDARD_NORMAL: Final = Normal()
# gain sqrt(3 / fan_in) = 1 / sqrt(fan_in); PyTorch writes it as kaiming_uniform_ with a = sqrt(5).
WEIGHT: Final = KaimingUniform(gain=math.sqrt(1 / 3))
"""The default of layers and of PyTorch: uniform within 1 / sqrt(fan_in)."""


def bias_of(weight: Sequence[int]) -> Uniform:
    """Return the default for the bias beside a weight: uniform within 1 / sqrt(fan_in)."""
    return Uniform(1.0 / math.sqrt(fans(weight)[0]))
