"""A round with central noise: clip every change, sum exactly, add the noise, divide.

    d = (sum_k round(clip(change_k)) + noise) / devices

`devices` is the number that completes a round, also in a round with fewer updates: a missing device
counts as zeros. So neither the sum's sensitivity nor the divisor depends on who took part, and what
is released says nothing about their number. All devices weigh the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.limits import check_fits
from triplane.unified_ir.federated.privacy import secret
from triplane.unified_ir.federated.privacy.clipping import clip as clip_change
from triplane.unified_ir.federated.privacy.clipping import l2_norm
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy

BIT_GRID: Final = 2.0**-8
"""Grid of the noise in the sum of clipping bits, which are integers and so are on it exactly. From
the least deviation (a round of one device) to the largest it is in the range of the sampler."""
UNCLIPPED: Final = 1 - 2.0**-12
"""A device does not send its clipping bit: a clipped change has the norm to this share or more."""

Shapes = Mapping[str, tuple[int, ...]]
Open = Callable[[], Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class RoundNoise:
    """The noise of one round. steps: of the sum, in steps of the grid. bits: of clipping bits."""

    steps: secret.Integers
    bits: float = 0.0


@dataclass(frozen=True, slots=True)
class Release:
    """What a round publishes. mean: by tensor, float64. clip: norm of the next round.

    clipped: updates that were clipped, by the device or here; for people, it is not published.
    """

    mean: dict[str, Array]
    clip: float
    clipped: int


def shapes_of(state: Mapping[str, Array], frozen: Collection[str] = ()) -> Shapes:
    """Return the shapes of the tensors that a change moves.

    frozen: those that learning leaves as they are. Honest changes are zero there, so a sum without
    them loses nothing, and noise would only spoil them.
    """
    moved = {n: x for n, x in state.items() if n not in frozen}
    return {n: x.shape for n, x in moved.items() if np.issubdtype(x.dtype, np.floating)}


def entries_of(shapes: Shapes) -> int:
    """Return the number of entries of a change."""
    return sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())


def check_release(
    privacy: DifferentialPrivacy, state: Mapping[str, Array], frozen: Collection[str], devices: int
) -> None:
    """Raise InvalidInput if rounds of this state cannot get the noise; see `shapes_of`."""
    entries = entries_of(shapes_of(state, frozen))
    if not entries:
        raise InvalidInput(
            "learning moves no tensor of this model, so there is no sum that could get noise; "
            "leave the noise out, or freeze fewer parameters"
        )
    privacy.central(privacy.clip, entries, devices)


def draw(
    privacy: DifferentialPrivacy,
    clip: float,
    entries: int,
    devices: int,
    past: Sequence[secret.Integers],
) -> RoundNoise:
    """Draw the noise of a round, once; see `CentralNoise.draw` for `past` and the contract."""
    norm = privacy.adaptive(clip, devices)
    bits = 0.0
    if norm is not None:
        (drawn,) = secret.rounded_gaussian(1, 2 * norm.bit_noise / BIT_GRID)
        bits = float(drawn) * BIT_GRID
    return RoundNoise(privacy.central(clip, entries, devices).draw(past), bits)


def release(
    shapes: Shapes,
    updates: Iterable[Open],
    *,
    privacy: DifferentialPrivacy,
    clip: float,
    devices: int,
    noise: RoundNoise,
) -> Release:
    """Return what the round publishes; the order of updates does not matter.

    devices: number that completes a round, at least that of the updates. InvalidInput: an update
    does not fit, cannot be clipped, or there are too many.
    """
    entries = entries_of(shapes)
    central = privacy.central(clip, entries, devices)
    total, count, clipped = np.zeros(entries), 0, 0
    for opened in updates:
        count += 1
        change = {name: np.array(x) for name, x in opened().items() if name in shapes}
        check_fits(shapes, change)
        clip_change(change, clip)
        clipped += l2_norm(change) >= UNCLIPPED * clip
        total += central.round(np.concatenate([change[n].reshape(-1) for n in sorted(shapes)]))
    if count > devices:
        raise InvalidInput(
            f"a round with noise sums at most {devices} updates, by which it divides; got {count}"
        )
    mean = central.add(total, noise.steps) / devices
    norm = privacy.adaptive(clip, devices)
    bits = (count - clipped) - clipped  # +1 for each that was not clipped, and -1
    after = clip if norm is None else norm.next(bits + noise.bits, devices).norm
    return Release(_split(mean, shapes), after, clipped)


def _split(flat: Array, shapes: Shapes) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    at = 0
    for name in sorted(shapes):
        size = entries_of({name: shapes[name]})
        tensors[name] = flat[at : at + size].reshape(shapes[name])
        at += size
    return tensors
