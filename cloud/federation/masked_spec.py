"""What a masked run demands of its `Spec`, and the defaults of `MaskedRounds`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.messages import message_from
from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.core.limits import (
    ADAPTIVE,
    OFF,
    check_no_start,
    first_bound,
    is_adaptive,
)
from triplane.unified_ir.federated.core.masked_step import PHASE_S

if TYPE_CHECKING:
    from triplane.unified_ir.federated.masking.parameters import MaskingParameters

MAX_MASKED_COHORT: Final = 1000
"""Largest number of devices in a masked round: the list of their keys is one message of 0.3 MB, and
the shares of one device are a row of the database of at most 0.1 MB."""
MAX_PHASE_S: Final = 86_400.0
LEAST_NORM: Final = 1e-6
MOST_NORM: Final = 1e6


@dataclass(frozen=True, slots=True)
class FewestLeft:
    """What a round with groups needs when some of them are left out: groups, and their devices."""

    groups: int = 1
    devices: int = 1


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
    groups = masking.groups or 1
    masking.groups = groups if groups > 1 else 0
    size = devices // groups
    if masking.groups and size < max(MIN_COHORT, masking.least):
        raise InvalidInput(
            f"{groups} groups of {devices} devices have {size} devices, and the sum of fewer than "
            f"{max(MIN_COHORT, masking.least)} may not be unmasked: each group is a cohort of its "
            "own. Ask more devices (--devices), or form fewer groups (--groups)"
        )
    # More than half must sign the list of survivors anyway.
    masking.least = masking.least or max(MIN_COHORT, min(quorum // groups, size // 2 + 1))
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
    _fill_parameters(masking, devices, quorum)
    if is_asked:
        _check_losses(masking, devices)


def fewest_devices(masking: pb.MaskedRounds) -> int:
    """Return the fewest devices that a masked round can begin with: the least of each group."""
    return int(masking.least * (masking.groups or 1))


def cohort_masking(spec: pb.Spec) -> pb.CohortMasking | None:
    """Return what the masking of a full cohort holds; None for a run without it."""
    if not spec.HasField("masking"):
        return None
    return message_from(pb.CohortMasking, _parameters(spec.masking, spec.cohort.devices)[0])


def masking_text(spec: pb.Spec) -> str:
    """Describe the masking of a run whose defaults are filled in, for a full cohort."""
    masking, noise = spec.masking, spec.noise
    text = _parameters(masking, spec.cohort.devices)[0].text()
    if masking.groups:
        text += (
            f"\na hash of all keys forms {masking.groups} groups, and {spec.robustness.aggregator} "
            "combines their means; a group that fails is left out"
        )
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

    Of a full cohort: a smaller one has no more colluders. Where one with groups has, devices refuse
    the round, as the noise is not what it costs.
    """
    if not spec.HasField("masking"):
        return None
    from triplane.unified_ir.federated.masking import groups

    return groups.least_and_honest(_parameters(spec.masking, spec.cohort.devices))


def follows_updates(spec: pb.Spec) -> bool:
    """Return whether the norm bound of a masked run follows the updates, by their bits."""
    return spec.HasField("masking") and is_adaptive(spec.robustness.norm_bound)


def first_norm(spec: pb.Spec) -> float:
    """Return the norm bound of the first round of a masked run whose defaults are filled in."""
    from triplane.unified_ir.federated.masking.adaptive import START

    if spec.HasField("noise"):
        return spec.noise.clip
    return first_bound(spec.robustness.norm_bound, START)


def _parameters(masking: pb.MaskedRounds, cohort: int) -> tuple[MaskingParameters, ...]:
    """Return the parameters for each size of the groups of a cohort, the smallest first."""
    from triplane.unified_ir.federated.masking.groups import group_parameters

    return group_parameters(
        cohort,
        masking.groups or 1,
        least=masking.least,
        lost_share=masking.lost_share,
        colluding_share=masking.colluding_share,
        failure=masking.failure,
    )


def _fill_parameters(masking: pb.MaskedRounds, devices: int, quorum: int) -> None:
    """Check that a cohort of each size that a round of the run may have can be masked."""
    masking.failure = masking.failure or defaults.MASK_FAILURE
    chosen = _parameters(masking, devices)
    if masking.groups:
        # What the colluders of a small group demand, so that a round begins with enough for it.
        masking.least = max(x.least for x in chosen)
    fewest = max(quorum, fewest_devices(masking))
    # Not only the smallest one: colluders and losses are whole numbers, so others may be worse off.
    for cohort in range(fewest, devices):
        try:
            _parameters(masking, cohort)
        except InvalidInput as error:
            raise InvalidInput(
                f"a round may have only {cohort} of {devices} devices, by its quorum and least "
                f"cohort: {error}"
            ) from error


def _check_losses(masking: pb.MaskedRounds, devices: int) -> None:
    """Refuse a share of lost devices that the least cohort does not leave."""
    for holds in _parameters(masking, devices):
        lost = int(masking.lost_share * holds.devices)
        if holds.lost < lost:
            raise InvalidInput(
                f"a {'group' if masking.groups else 'round'} of {holds.devices} devices of which "
                f"{lost} are lost (lost share {masking.lost_share:g}) has fewer than the "
                f"{holds.least} whose sum may be unmasked; ask more devices, or state a smaller "
                "share of lost devices or a smaller least cohort"
            )


def fill_norm_bound(spec: pb.Spec) -> None:
    """Fill in where a bound begins that follows masked updates; everything else is filled in.

    InvalidInput: a masked run has no bound, or one out of range; only a masked one has a start.
    """
    text = spec.robustness.norm_bound
    if not spec.HasField("masking"):
        check_no_start(text)
        return
    from triplane.unified_ir.federated.masking.adaptive import START

    bound = 0.0 if text == OFF else first_bound(text, START)
    if not LEAST_NORM <= bound <= MOST_NORM:
        raise InvalidInput(
            f"a masked run needs a norm bound from {LEAST_NORM:g} to {MOST_NORM:g}, because its "
            f"updates are integers in a range; got {text[:40]!r}. Set --norm-bound to a number, or "
            "leave it out, and it follows the updates"
        )
    if text == ADAPTIVE and not spec.HasField("noise"):
        spec.robustness.norm_bound = f"{ADAPTIVE}:{START:g}"
