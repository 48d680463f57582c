"""Answers of devices to the steps of masked rounds, as events; what they hold is opened elsewhere.

The cloud checks what it can without the other answers: that the step is the present one and the
size is what the terms allow. An answer is stored as bytes in the commit that journals it; a masked
update above 64 KiB is a file that was uploaded before.
"""

from __future__ import annotations

import hashlib
from typing import Final

from triplane.cloud.federation.live import LiveRun, MakeEvent
from triplane.cloud.federation.masked_cohort import FIELD_OF
from triplane.cloud.federation.masked_cohorts import MaskedCohorts
from triplane.cloud.federation.update_store import (
    Refusal,
    UpdateStore,
    late_event,
    refusal_event,
)
from triplane.proto import federation_pb2 as pb
from triplane.proto.roster import Roster
from triplane.unified_ir.federated.core.files import INLINE_BYTES
from triplane.unified_ir.federated.core.lease_changes import open_lease
from triplane.unified_ir.federated.core.masked_round import (
    answer_of,
    has_taken,
    is_in_step,
    is_wanted,
)
from triplane.unified_ir.federated.core.masked_step import MaskedStep, StepAnswer
from triplane.unified_ir.federated.core.run import Event, Masked, RunState
from triplane.unified_ir.federated.masking.messages import SEALED_BYTES
from triplane.unified_ir.federated.masking.shamir import SHARE_BYTES
from triplane.unified_ir.federated.masking.wire import MAX_KEY_BYTES

ENTRY_BYTES: Final = 16
"""Most bytes of a map's entry beside its value: position, tags and lengths."""
POSITION_BYTES: Final = 5
"""Most bytes of the position of a device whose shares could not be opened."""
BASE_BYTES: Final = 256
"""Most bytes of an answer beside its shares, its masked update and its identity key."""
STEPS_BY_FIELD: Final = {field: step for step, field in FIELD_OF.items()}


def judge_answer(
    run: LiveRun,
    device: str,
    contribution: pb.Contribution,
    rounds: MaskedCohorts,
    updates: UpdateStore,
) -> tuple[MakeEvent, bytes]:
    """Return the event of an answer, and its bytes, which are stored in the commit of the event.

    Has no other effect.
    """
    lease, message = contribution.lease.hex(), contribution.masked
    held = open_lease(run.projection.state, device)
    if held is None or held.id != lease:
        return late_event(device, lease), b""
    try:
        data = message.SerializeToString(deterministic=True)
        answer = _answer(run, device, message, data, rounds, updates)
    except Refusal as refusal:
        return _unless_left(refusal_event(device, lease, refusal.kind, str(refusal)), device), b""
    return _event(device, lease, answer), data


def without_left(run: LiveRun, device: str, make: MakeEvent) -> MakeEvent:
    """Drop an event of a device that left a masked round in which its update still counts."""
    round_ = run.projection.state.round
    return make if round_ is None or round_.masked is None else _unless_left(make, device)


def _unless_left(make: MakeEvent, device: str) -> MakeEvent:
    def unless_left(state: RunState, at_s: float) -> Event | None:
        lease, round_ = open_lease(state, device), state.round
        if lease is not None and round_ is not None and round_.masked is not None:
            # Its lease ends with the round. Until then it could fill the journal.
            left = has_taken(lease, MaskedStep.INPUTS) and not is_in_step(lease, round_.masked)
            if left:
                return None
        return make(state, at_s)

    return unless_left


def _event(device: str, lease: str, answer: StepAnswer) -> MakeEvent:
    def make(state: RunState, at_s: float) -> Event | None:
        held, round_ = open_lease(state, device), state.round
        if held is None or held.id != lease:
            return late_event(device, lease)(state, at_s)
        if is_wanted(state, held, answer):
            return Masked(at_s=at_s, device=device, lease=lease, answer=answer)
        if answer in held.answers:
            return None  # it was sent again
        step = round_.masked.step if round_ and round_.masked else "none"
        reason = f"the round is at the step {step}, and this answers {answer.step}"
        if answer_of(held, answer.step) is not None:
            reason = f"a device answers the step {answer.step} once, and this differs from before"
        return _unless_left(refusal_event(device, lease, "masking", reason), device)(state, at_s)

    return make


def _answer(
    run: LiveRun,
    device: str,
    message: pb.MaskingAnswer,
    data: bytes,
    rounds: MaskedCohorts,
    updates: UpdateStore,
) -> StepAnswer:
    state = run.projection.state
    round_, field = state.round, message.WhichOneof("answer")
    if round_ is None or round_.masked is None or field is None:
        raise Refusal("kind", "an answer to a step of a masked round was not asked for")
    step = STEPS_BY_FIELD[field]
    most = _most_bytes(step, len(round_.leases))
    if step is MaskedStep.KEYS:
        _check_listed(rounds.roster(), message.keys.identity_key)
    size, file = len(data), ""
    if step is MaskedStep.INPUTS:
        expected = rounds.input_bytes(run.record, state, device)
        file = _check_input(message.input, expected, updates)
        size -= len(message.input.data)
    if size > most:
        raise Refusal("oversized", f"the step {step} is answered by at most {most} bytes")
    size = len(data) + (message.input.blob.size if file else 0)
    return StepAnswer(step=step, blob=hashlib.sha256(data).hexdigest(), size=size, file=file)


def _check_listed(roster: Roster | None, identity_key: bytes) -> None:
    """Refuse a device that every other would refuse, so that the round goes on without it.

    Devices decide this by the roster that they have verified; here it only saves the round.
    """
    if roster is not None and not roster.holds(identity_key):
        raise Refusal(
            "masking",
            f"the device is not in the {roster.summary}, so the others of a masked round refuse "
            "it; a signer adds it: triplane cloud roster add NAME --keys DIR",
        )


def _most_bytes(step: MaskedStep, cohort: int) -> int:
    """Return the largest answer, without the masked update."""
    of_each = {
        MaskedStep.SHARES: SEALED_BYTES + ENTRY_BYTES,
        MaskedStep.INPUTS: POSITION_BYTES,
        MaskedStep.REVEALS: SHARE_BYTES + ENTRY_BYTES,
    }.get(step, 0)
    return BASE_BYTES + cohort * of_each + (MAX_KEY_BYTES if step is MaskedStep.KEYS else 0)


def _check_input(message: pb.MaskedInput, expected: int, updates: UpdateStore) -> str:
    """Check the masked update of an answer; return the name of its file, or "" if it is inline."""
    size = message.blob.size if message.HasField("blob") else len(message.data)
    if size != expected:
        raise Refusal("masking", f"a masked update has {expected} bytes here, got {size}")
    if not message.HasField("blob"):
        if size > INLINE_BYTES:
            raise Refusal("oversized", f"an inline masked update has at most {INLINE_BYTES} bytes")
        return ""
    if message.data:
        raise Refusal("masking", "a masked update is inline or in a file, and this is both")
    updates.announced_file(message.blob.sha256, size)
    return message.blob.sha256.hex()
