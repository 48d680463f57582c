"""What a masked run demands of its `Spec`, and the defaults of `MaskedRounds`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.masked_step import PHASE_S
from triplane.unified_ir.federated.core.pipeline import pipeline_row

if TYPE_CHECKING:
    from triplane.unified_ir.federated.masking.parameters import MaskingParameters

MAX_MASKED_COHORT: Final = 1000
"""Largest number of devices in a masked round: the list of their keys is one message of 0.3 MB, and
the shares of one device are a row of the database of at most 0.1 MB."""
LOST_SHARE: Final = 0.1
COLLUDING_SHARE: Final = 0.1
MAX_PHASE_S: Final = 86_400.0
LEAST_NORM: Final = 1e-6
MOST_NORM: Final = 1e6
MEAN: Final = "mean"


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
        masking.lost_share = LOST_SHARE
    if not masking.HasField("colluding_share"):
        masking.colluding_share = COLLUDING_SHARE
    masking.phase_s = masking.phase_s or PHASE_S
    if not 0 < masking.phase_s <= MAX_PHASE_S:
        raise InvalidInput(
            f"phase_s is above 0 and at most {MAX_PHASE_S:g} s, got {masking.phase_s:g}"
        )
    _fill_parameters(masking, devices, max(quorum, masking.least))
    if is_asked:
        _check_losses(masking, devices)
    _check_composes(spec)
    _check_norm_bound(spec.robustness.norm_bound)


def masking_text(spec: pb.Spec) -> str:
    """Describe the masking of a run whose defaults are filled in, for a full cohort."""
    return _parameters(spec.masking, spec.cohort.devices).text()


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
    from triplane.unified_ir.federated.masking.messages import FAILURE

    masking.failure = masking.failure or FAILURE
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


def _check_composes(spec: pb.Spec) -> None:
    from triplane.unified_ir.federated.algorithms import algorithm

    mask = pipeline_row("mask")
    names = [spec.compression, *spec.robustness.aggregator.split("+")]
    if spec.HasField("flower"):
        names += ["flower-app"] if spec.flower.app else ["flower-strategy"]
    for name in names:
        if name in {"", MEAN}:
            continue
        row = pipeline_row(name)
        if (reason := row.refusal(mask, ()) or mask.refusal(row, ())) is not None:
            raise InvalidInput(f"{name!r} does not compose with masking: {reason}")
    if algorithm(spec.algorithm).by_share:
        raise InvalidInput(
            f"{spec.algorithm} does not compose with masking: its control variates would be "
            "clipped to the norm of an update, and 8 bits are too few for them; choose another "
            "algorithm"
        )


def _check_norm_bound(text: str) -> None:
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
