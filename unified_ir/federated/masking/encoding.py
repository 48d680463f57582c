"""Updates as integers whose masked sum gives the weighted mean.

For each section of an update x (float32, a device's examples w, at most `cap` of them count):

    y = x min(w, cap) / cap;  z = H D y, cut into blocks;  z clipped to [-range, range]
    q = floor((z + range) / step + u),  u uniform in [0, 1),  step = 2 range / (2^bits - 1)

H D is a randomized Hadamard rotation: D has public random signs, H is orthonormal, so a few large
entries are spread over a block and one range fits all. E[q] is exact where nothing is clipped, so
the sum over devices is unbiased. Each entry of z is off by less than one step, and a section of N
padded entries of m devices by less than m step sqrt(N) in the Euclidean norm, step sqrt(m N) / 2
expected. The weight is one more integer. Where norms follow the updates, so is a bit for each
section: 2 if it is short, 0 if not, and 1 for a device that sends zeros in its place. u comes from
the operating system, never from the plan: whoever knows u could read more of z than q says.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.masking.fields import MaskedField, Vector

LEVEL_BITS: Final = 8
BIT_BITS: Final = 2
"""Bits of a device's clipping bit, which is 0, 1 or 2."""
LARGEST_BLOCK: Final = 1 << 14
SMALLEST_BLOCK: Final = 1 << 8
MAX_PADDING: Final = 1 / 32
MAX_CAP: Final = 1 << 32
MAX_LEVEL_BITS: Final = 24
"""Above these bits float32 has no more digits."""
MAX_ENTRY: Final = 1e30
"""Sums of a block of larger entries could pass the range of float32."""
_CHUNK: Final = 1 << 16
_FLOAT32: Final = np.finfo(np.float32)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncodedSection:
    """A part of an update with its own range, such as the parameters, or the buffers.

    range: largest absolute value after the rotation; see `range_for`. bits: of an integer.
    noise_bits: further bits of the sum, so that noise may be added to the integers.
    """

    entries: int
    range: float
    bits: int = LEVEL_BITS
    noise_bits: int = 0

    def __post_init__(self) -> None:
        if not (_FLOAT32.tiny <= self.range < _FLOAT32.max) or self.entries < 1:
            raise InvalidInput(
                f"a section has entries and a range that float32 has, got {self.entries} entries "
                f"and range {self.range}"
            )
        if not (1 <= self.bits <= MAX_LEVEL_BITS and 0 <= self.noise_bits <= MAX_LEVEL_BITS):
            raise InvalidInput(
                f"a section has 1 to {MAX_LEVEL_BITS} bits and at most {MAX_LEVEL_BITS} noise "
                f"bits, got {self.bits} and {self.noise_bits}"
            )

    @property
    def step(self) -> float:
        """Difference of two neighbouring levels."""
        return 2 * self.range / ((1 << self.bits) - 1)

    @property
    def block(self) -> int:
        """Entries that are rotated together, a power of two."""
        block = LARGEST_BLOCK
        while block > SMALLEST_BLOCK and -self.entries % block > MAX_PADDING * self.entries:
            block //= 2
        return block

    @property
    def padded(self) -> int:
        """Entries including the padding of the last block."""
        return -(-self.entries // self.block) * self.block

    @property
    def field(self) -> MaskedField:
        """The integers of one device."""
        return MaskedField(self.padded, self.bits, self.noise_bits)

    def error_bound(self, devices: int) -> float:
        """Return what the Euclidean error of the sum over `devices` stays below, unless clipped.

        Rounding is independent and unbiased, so three times its largest deviation, half a step, is
        passed with a probability below exp(-600) over 256 entries (Laurent and Massart 2000).
        """
        return min(devices, 1.5 * math.sqrt(devices)) * self.step * math.sqrt(self.padded)


def range_for(norm: float, entries: int, *, deviations: float = 4.0) -> float:
    """Return the range for vectors of a Euclidean norm of at most `norm`.

    Rotated entries have about a normal distribution with deviation norm / sqrt(entries); beyond 4
    deviations lie 6 entries of 100,000.
    """
    return deviations * norm / float(np.sqrt(entries))


@dataclass(frozen=True)
class UpdateEncoding:
    """The encoding of one round. cap: examples that count at most. seed: public, of the rotation.

    has_bits: whether a device also says for each section whether it was short; bit_noise_bits: see
    `MaskedField`. Choose the cap near the examples that devices have, because the error of the mean
    grows with cap / examples. InvalidInput for a cap outside 1 to 2^32.
    """

    sections: tuple[EncodedSection, ...]
    cap: int
    seed: int
    has_bits: bool = False
    bit_noise_bits: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.cap <= MAX_CAP:
            raise InvalidInput(f"the cap on examples is 1 to {MAX_CAP}, got {self.cap}")

    @property
    def fields(self) -> tuple[MaskedField, ...]:
        """The masked fields of the sections, then that of the weight, then that of the bits."""
        weight = MaskedField(1, self.cap.bit_length())
        fields = (*(section.field for section in self.sections), weight)
        if not self.has_bits:
            return fields
        return (*fields, MaskedField(len(self.sections), BIT_BITS, self.bit_noise_bits))

    def encode(
        self, update: Sequence[npt.NDArray[Any]], examples: int, is_short: Sequence[bool] = ()
    ) -> tuple[Vector, ...]:
        """Return the integers of one device's update, for each of `fields`.

        update: a vector for each section. is_short: its bit for each section, if there are bits.
        InvalidInput unless all of it is finite and examples >= 1.
        """
        if examples < 1 or len(update) != len(self.sections):
            raise InvalidInput(
                f"an update has {len(self.sections)} sections and at least 1 example, got "
                f"{len(update)} and {examples}"
            )
        weight = min(examples, self.cap)
        pairs = enumerate(zip(self.sections, update, strict=True))
        vectors = [self._levels(i, section, x, weight) for i, (section, x) in pairs]
        vectors.append(np.array([weight], np.uint64))
        if self.has_bits:
            vectors.append(np.array([2 * bit for bit in is_short], np.uint8))
        return tuple(vectors)

    def decode(
        self, sums: Sequence[Vector], devices: int, *, cohort: int
    ) -> tuple[tuple[Floats, ...], int]:
        """Return (weighted mean of the updates, sum of the weights) of the sum over `devices`.

        cohort: devices that the round began with, which decide the modulus.
        InvalidInput if no such sum is possible, for example because a device lied about its weight.
        """
        if devices > cohort:
            raise InvalidInput(f"a sum of {devices} devices cannot come from a cohort of {cohort}")
        *vectors, weights = sums[: len(self.sections) + 1]
        weight = int(weights[0])
        if not devices <= weight <= devices * self.cap:
            raise InvalidInput(
                f"the weights of {devices} devices add up to {devices} to {devices * self.cap}, "
                f"got {weight}"
            )
        pairs = enumerate(zip(self.sections, vectors, strict=True))
        means = [
            self._mean(i, section, _centred(i, section, total, devices, cohort), self.cap / weight)
            for i, (section, total) in pairs
        ]
        return tuple(means), weight

    def sums_of_bits(self, sums: Sequence[Vector], devices: int, *, cohort: int) -> tuple[int, ...]:
        """Return for each section the sum over `devices` of +1, where it is short, and -1.

        Empty without bits; with noise in it where devices add some. InvalidInput: no such sum is
        possible.
        """
        if not self.has_bits:
            return ()
        field = self.fields[-1]
        shape, dtype = sums[-1].shape, sums[-1].dtype
        if shape != (field.entries,) or dtype != np.uint64:
            raise InvalidInput(f"the sum of {field.entries} bits is uint64, got {dtype}{shape}")
        levels = _nearest(sums[-1], field.width(cohort), 2 * devices)
        bits = tuple(int(level) - devices for level in levels)
        # Noise may lead out of the range; whoever adds it takes care of the modulus.
        if not field.noise_bits and any(abs(x) > devices or (x - devices) % 2 for x in bits):
            raise InvalidInput(
                f"the bits of {devices} devices, +1 or -1 each, cannot add up to {bits}, so a "
                "device lied"
            )
        return bits

    def _levels(self, at: int, section: EncodedSection, x: npt.NDArray[Any], weight: int) -> Vector:
        _check_entries(at, section, x)
        z = np.zeros(section.padded, np.float32)
        np.multiply(x, np.float32(weight / self.cap), out=z[: section.entries])
        self._rotate(at, section, z)
        levels = np.empty(section.padded, np.uint32)
        for start in range(0, len(z), _CHUNK):
            part = z[start : start + _CHUNK].astype(np.float64)
            np.clip(part, -section.range, section.range, out=part)
            noise = np.frombuffer(os.urandom(4 * len(part)), np.uint32) * 2.0**-32
            # Rounding of (z + range) / step must not give a level more than there are.
            level = np.minimum(
                np.floor((part + section.range) / section.step + noise), (1 << section.bits) - 1
            )
            levels[start : start + _CHUNK] = level
        return levels

    def _mean(
        self, at: int, section: EncodedSection, centred: npt.NDArray[np.float64], scale: float
    ) -> Floats:
        z: Floats = (centred * (section.step * scale)).astype(np.float32)
        self._rotate_back(at, section, z)
        return z[: section.entries]

    # Entry i is in block i mod (padded / block): a layer's entries are spread over all blocks, so
    # no block has much more than its part of the norm.

    def _rotate(self, at: int, section: EncodedSection, z: Floats) -> None:
        z *= self._signs[at]
        _hadamard(z.reshape(section.block, -1))

    def _rotate_back(self, at: int, section: EncodedSection, z: Floats) -> None:
        _hadamard(z.reshape(section.block, -1))
        z *= self._signs[at]

    @cached_property
    def _signs(self) -> tuple[npt.NDArray[np.int8], ...]:
        """The public signs of each section, from one stream of random bits."""
        draws = Draws(self.seed, 0, "", "masking rotation")
        return tuple(_random_signs(draws, section.padded) for section in self.sections)


def _centred(
    at: int, section: EncodedSection, total: Vector, devices: int, cohort: int
) -> npt.NDArray[np.float64]:
    """Return the sums of levels less their middle, which is the sum of zeros."""
    if total.shape != (section.padded,) or total.dtype != np.uint64:
        raise InvalidInput(
            f"the sum of section {at} is uint64[{section.padded}], got {total.dtype}{total.shape}"
        )
    largest = devices * ((1 << section.bits) - 1)
    levels = _nearest(total, section.field.width(cohort), largest)
    return levels.astype(np.float64) - largest / 2


def _nearest(total: Vector, width: int, largest: int) -> npt.NDArray[np.int64]:
    """Return the numbers modulo 2^width that are nearest to the middle of 0 and `largest`.

    Noise may make a sum negative, or larger than what is possible without it.
    """
    half = 1 << (width - 1)
    below = (largest + 1) // 2 - half
    return (total.astype(np.int64) - below) % (2 * half) + below


def _check_entries(at: int, section: EncodedSection, x: npt.NDArray[Any]) -> None:
    if x.shape != (section.entries,) or x.dtype != np.float32:
        raise InvalidInput(
            f"section {at} of an update is float32({section.entries},), got {x.dtype}{x.shape}"
        )
    # Not a number compares as false.
    if not max(float(x.max()), -float(x.min())) <= MAX_ENTRY:
        raise InvalidInput(
            f"entries of an update are finite and at most {MAX_ENTRY:g}, section {at} has "
            f"{float(x.min()):g} to {float(x.max()):g}; clip the update before it is masked"
        )


def _random_signs(draws: Draws, n: int) -> npt.NDArray[np.int8]:
    words = draws.words(-(-n // 64)).astype("<u8", copy=False)
    bits = np.unpackbits(words.view(np.uint8), count=n, bitorder="little")
    return 1 - 2 * bits.astype(np.int8)


def _hadamard(x: Floats) -> None:
    """Multiply x: (block, n) in place by the orthonormal Hadamard matrix, along the first axis."""
    block, n = x.shape
    half = block // 2
    difference = np.empty((half, n), x.dtype)
    span = 1
    while span < block:
        pairs = x.reshape(block // (2 * span), 2, span, n)
        low, high = pairs[:, 0], pairs[:, 1]
        rest = difference.reshape(low.shape)
        np.subtract(low, high, out=rest)
        low += high
        high[...] = rest
        span *= 2
    x *= np.float32(1 / np.sqrt(block))
