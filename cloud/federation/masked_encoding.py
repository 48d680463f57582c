"""How the devices of a masked round encode their updates, and the norm bounds of the next round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triplane.cloud.federation.masked_spec import first_norm, follows_updates, least_and_honest
from triplane.cloud.federation.private_runs import privacy_of
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.limits import Change, Norms, floats_of, norms_of
from triplane.unified_ir.federated.core.run import RunState
from triplane.unified_ir.federated.masking import wire
from triplane.unified_ir.federated.masking.adaptive import bit_share, next_bound
from triplane.unified_ir.federated.masking.encoding import (
    LEVEL_BITS,
    EncodedSection,
    UpdateEncoding,
    range_for,
)
from triplane.unified_ir.federated.masking.noise import noises_for
from triplane.unified_ir.federated.masking.scores import ScoreEncoding
from triplane.unified_ir.federated.privacy.distributed import DistributedNoise

if TYPE_CHECKING:
    from triplane.cloud.federation.masked_cohort import CohortMean


@dataclass(frozen=True, slots=True)
class RoundEncoding:
    """The encoding of a round. noise, bit_noise: of each device, in its update and bit, or None."""

    message: pb.MaskingEncoding
    parsed: UpdateEncoding | ScoreEncoding
    noise: DistributedNoise | None = None
    bit_noise: DistributedNoise | None = None

    @property
    def own_std(self) -> float:
        """Deviation of each device's noise, in steps; 0 without."""
        return 0.0 if self.noise is None else float(self.noise.variance**0.5)

    @property
    def own_bit_std(self) -> float:
        """Deviation of the noise in each device's clipping bit; 0 without."""
        return 0.0 if self.bit_noise is None else float(self.bit_noise.variance**0.5)

    def digest(self, sampling: pb.Sampling) -> bytes:
        """Return what the terms of the round name it by. sampling: of the run's devices."""
        noise, bit = (0 if x is None else x.variance for x in (self.noise, self.bit_noise))
        return wire.encoding_digest(self.message, sampling, variance=noise, bit_variance=bit)

    @property
    def norms(self) -> tuple[float, ...]:
        """The largest norm of each section; a model that learns has parameters."""
        both = self.message.norm, self.message.buffer_norm
        return both[: len(self.parsed.sections)]


def round_encoding(
    spec: pb.Spec,
    *,
    parameters: int,
    buffers: int,
    cap: int,
    seed: int,
    norms: Norms | None = None,
) -> RoundEncoding:
    """Return the encoding of updates with so many entries. InvalidInput: the noise does not fit.

    norms: of parameters and buffers, by default those of the first round.
    """
    norm, buffer_norm = norms or (first_norm(spec),) * 2
    privacy, counts = privacy_of(spec), least_and_honest(spec)
    message = pb.MaskingEncoding(
        norm=norm, buffer_norm=buffer_norm, bits=LEVEL_BITS, cap=cap, seed=seed,
        bit_share=bit_share(privacy) if follows_updates(spec) else 0.0,
    )  # fmt: skip
    if privacy is None or counts is None:
        return RoundEncoding(message, wire.encoding_of(message, parameters, buffers))
    section = EncodedSection(parameters, range_for(norm, parameters), LEVEL_BITS)
    noise, bit = noises_for(section, norm, privacy, spec.cohort.devices, counts[1])
    parsed = wire.encoding_of(
        message, parameters, buffers, variance=noise.variance,
        bit_variance=0 if bit is None else bit.variance, least=spec.masking.least,
    )  # fmt: skip
    return RoundEncoding(message, parsed, noise, bit)


def norms_at(state: RunState) -> Norms:
    """Return the norm bounds of parameters and buffers, where they follow the updates."""
    return state.norm, state.buffer_clip or state.plan.clip


def next_norms(
    spec: pb.Spec,
    before: RunState,
    means: Sequence[CohortMean],
    shared: Change,
    buffers: Collection[str],
) -> Norms:
    """Return the norm bounds of parameters and buffers in the next round; 0 where they are fixed.

    means: of the cohort, or of its groups. shared: the state of this round, by tensor.
    """
    contributors = sum(mean.devices for mean in means)
    bits = [sum(bits) for bits in zip(*(mean.bits for mean in means), strict=True)]
    if not bits:
        return 0.0, 0.0
    privacy, first = privacy_of(spec), first_norm(spec)
    bounds, sizes = norms_at(before), norms_of(floats_of(shared), buffers)
    followed = [
        next_bound(
            bound, bit, contributors, devices=spec.cohort.devices, privacy=privacy,
            most=max(first, size),
        )
        for bound, bit, size in zip(bounds, bits, sizes, strict=False)
    ]  # fmt: skip
    return followed[0], (*followed, 0.0)[1]
