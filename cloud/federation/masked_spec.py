"""What a masked run demands of its `Spec`, the defaults of `MaskedRounds`, and its encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.messages import message_from
from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.core.masked_step import PHASE_S

if TYPE_CHECKING:
    from triplane.unified_ir.federated.masking.encoding import UpdateEncoding
    from triplane.unified_ir.federated.masking.parameters import MaskingParameters
    from triplane.unified_ir.federated.privacy.distributed import DistributedNoise

MAX_MASKED_COHORT: Final = 1000
"""Largest number of devices in a masked round: the list of their keys is one message of 0.3 MB, and
the shares of one device are a row of the database of at most 0.1 MB."""
MAX_PHASE_S: Final = 86_400.0
LEAST_NORM: Final = 1e-6
MOST_NORM: Final = 1e6


def fill_masking(spec: pb.Spec, *, quorum: int) -> None:
    """Fill in the defaults of masking, if the run has it. InvalidInput: it cannot be masked.

    quorum: fewest devices of a round. Everything else is filled in before.
    """
    if not spec.HasField("masking"):
        return
    from triplane.unified_ir.federated.masking.parameters import MIN_COHORT

    masking, devices = spec.masking, spec.cohort.devices
    if not MIN_COHORT <= devices <= MAX_MASKED_COHORT:
        raise InvalidInput(
            f"a masked round has {MIN_COHORT} to {MAX_MASKED_COHORT} devices, and devices is "
            f"{devices}; set --devices"
        )
    # More than half must sign the list of survivors anyway.
    masking.least = masking.least or max(MIN_COHORT, min(quorum, devices // 2 + 1))
    is_asked = masking.HasField("lost_share")
    if not is_asked:
        masking.lost_share = defaults.LOST_SHARE
    if not masking.HasField("colluding_share"):
        masking.colluding_share = defaults.COLLUDING_SHARE
    masking.phase_s = masking.phase_s or PHASE_S
    if not 0 < masking.phase_s <= MAX_PHASE_S:
        raise InvalidInput(
            f"phase_s is above 0 and at most {MAX_PHASE_S:g} s, got {masking.phase_s:g}"
        )
    _fill_parameters(masking, devices, max(quorum, masking.least))
    if is_asked:
        _check_losses(masking, devices)


def cohort_masking(spec: pb.Spec) -> pb.CohortMasking | None:
    """Return what the masking of a full cohort holds; None for a run without it."""
    if not spec.HasField("masking"):
        return None
    return message_from(pb.CohortMasking, _parameters(spec.masking, spec.cohort.devices))


def masking_text(spec: pb.Spec) -> str:
    """Describe the masking of a run whose defaults are filled in, for a full cohort."""
    text, noise = _parameters(spec.masking, spec.cohort.devices).text(), spec.noise
    text += (
        f"\neach step after learning takes at most {spec.masking.phase_s:g} s (--phase-s), that of "
        f"shares longer if the round's deadline of {spec.cohort.deadline_s:g} s leaves more"
    )
    if not spec.HasField("noise"):
        return text
    _, honest = least_and_honest(spec) or (0, 0)
    return (
        f"{text}\ndevices add the noise themselves, enough while {honest} devices of a sum are "
        f"honest: epsilon {noise.epsilon:g} at delta {noise.delta:g} holds for one device against "
        "whoever sees the models, and against the cloud"
    )


def least_and_honest(spec: pb.Spec) -> tuple[int, int] | None:
    """Return the fewest devices in a sum and how many of them are honest; None without masking.

    Of a full cohort: a smaller one has no more colluders.
    """
    if not spec.HasField("masking"):
        return None
    chosen = _parameters(spec.masking, spec.cohort.devices)
    return chosen.least, chosen.least - chosen.colluding


@dataclass(frozen=True, slots=True)
class RoundEncoding:
    """How the devices of a round encode their updates. noise: of each device, or None."""

    message: pb.MaskingEncoding
    parsed: UpdateEncoding
    noise: DistributedNoise | None

    @property
    def own_std(self) -> float:
        """Deviation of each device's noise, in steps; 0 without."""
        return 0.0 if self.noise is None else float(self.noise.variance**0.5)


def round_encoding(
    spec: pb.Spec, *, parameters: int, buffers: int, cap: int, seed: int
) -> RoundEncoding:
    """Return the encoding of updates with so many entries. InvalidInput: the noise does not fit."""
    from triplane.unified_ir.federated.masking import wire
    from triplane.unified_ir.federated.masking.encoding import LEVEL_BITS
    from triplane.unified_ir.federated.masking.noise import noise_for

    norm = float(spec.robustness.norm_bound)
    message = pb.MaskingEncoding(
        norm=norm, buffer_norm=norm, bits=LEVEL_BITS, cap=cap, seed=seed
    )  # fmt: skip
    parsed, counts = wire.encoding_of(message, parameters, buffers), least_and_honest(spec)
    if not spec.HasField("noise") or counts is None:
        return RoundEncoding(message, parsed, None)
    noise = noise_for(parsed.sections[0], norm, spec.noise.multiplier, counts[1])
    parsed = wire.encoding_of(
        message, parameters, buffers, variance=noise.variance, least=spec.masking.least
    )
    return RoundEncoding(message, parsed, noise)


def _parameters(masking: pb.MaskedRounds, cohort: int) -> MaskingParameters:
    from triplane.unified_ir.federated.masking.parameters import choose_parameters

    return choose_parameters(
        cohort,
        least=masking.least,
        lost_share=masking.lost_share,
        colluding_share=masking.colluding_share,
        failure=masking.failure,
    )


def _fill_parameters(masking: pb.MaskedRounds, devices: int, fewest: int) -> None:
    """Check that the smallest and the largest cohort of a run can be masked."""
    masking.failure = masking.failure or defaults.MASK_FAILURE
    _parameters(masking, devices)
    if fewest < devices:
        try:
            _parameters(masking, fewest)
        except InvalidInput as error:
            raise InvalidInput(
                f"a round may have only {fewest} of {devices} devices, by its quorum and least "
                f"cohort: {error}"
            ) from error


def _check_losses(masking: pb.MaskedRounds, devices: int) -> None:
    """Refuse a share of lost devices that the least cohort does not leave."""
    lost, holds = int(masking.lost_share * devices), _parameters(masking, devices)
    if holds.lost < lost:
        raise InvalidInput(
            f"a round of {devices} devices of which {lost} are lost (lost share "
            f"{masking.lost_share:g}) has fewer than the {holds.least} whose sum may be unmasked; "
            "ask more devices, or state a smaller share of lost devices or a smaller least cohort"
        )


def check_norm_bound(spec: pb.Spec) -> None:
    """Raise InvalidInput unless a masked run has a number that bounds the norm of updates."""
    if not spec.HasField("masking"):
        return
    text = spec.robustness.norm_bound
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not LEAST_NORM <= bound <= MOST_NORM:
        raise InvalidInput(
            f"a masked run needs a norm bound from {LEAST_NORM:g} to {MOST_NORM:g}, got "
            f"{text[:40]!r}: the cloud sees no single update, so it cannot follow their "
            "norms. Set --norm-bound to a number; triplane federate simulate --norm-bound says how "
            "many updates a bound scales on data like that of the devices"
        )
