"""Conversion of runs to messages: runs for people, tasks and settlements for devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

from triplane.cloud.federation.journal import RunRecord
from triplane.cloud.federation.masked_spec import cohort_masking
from triplane.cloud.federation.private_runs import noise_terms, why_fewer_rounds
from triplane.cloud.federation.run_projection import RunProjection, Spread
from triplane.cloud.federation.spec import fewest_updates
from triplane.proto import federation_pb2 as pb
from triplane.proto.messages import message_from
from triplane.unified_ir.federated.core.lease_changes import open_lease, open_leases
from triplane.unified_ir.federated.core.masked_round import is_in_step, step_ends_s
from triplane.unified_ir.federated.core.metric import ACCURACY
from triplane.unified_ir.federated.core.run import (
    RULES_WITH_WATCHES,
    Ended,
    Outcome,
    Phase,
    RunMember,
    RunState,
    Settled,
)
from triplane.unified_ir.federated.core.selection import MAX_NAMED

MAX_ROUNDS: Final = 1000
"""Largest number of rounds of one run in an answer; older ones are left out."""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The blobs that a task names, with their sizes. message: the message to a device's own app.

    inline: the state's bytes, if they are sent with the task. inline_bytes: largest update, in
    bytes, that the device may send within its contribution. masking: the step of a masked round.
    own_std: deviation of the noise that the device adds to its masked integers, 0 for none;
    own_bit_std: of that in its clipping bit.
    """

    plan: pb.Blob
    state: pb.Blob
    message: pb.Blob | None = None
    inline: bytes = b""
    inline_bytes: int = 0
    masking: pb.MaskingStep | None = None
    own_std: float = 0.0
    own_bit_std: float = 0.0


def run_message(
    record: RunRecord,
    projection: RunProjection | None,
    *,
    rounds: bool,
    down: int = 0,
    waits: str = "",
    waiting: Mapping[str, str] = MappingProxyType({}),
    roster: int = 0,
) -> pb.Run:
    """Return a run as people see it.

    down: bytes that devices downloaded in the current round. waits: why nothing can be written at
    the moment, or empty. waiting: the reason why a device cannot work at the moment, by device.
    roster: the version of the signed roster of devices, 0 for none.
    """
    later = dict.fromkeys(
        ("round", "members", "rounds", "refusals", "revision", "metric", "epsilon_spent")
    )
    phase = pb.Run.Phase.Value((record.before or "preparing").upper())
    masking = cohort_masking(record.spec)
    message = message_from(pb.Run, record, phase=phase, roster=roster, masking=masking, **later)
    if projection is not None:
        _add_state(message, projection, rounds=rounds, down=down)
        if (budget := projection.state.budget) is not None:
            message.epsilon_spent = budget.spent
            message.reason = message.reason or why_fewer_rounds(record.spec, projection.state)
    message.reason = waits or message.reason
    for member in message.members:
        member.waits = waiting.get(member.device, "")
    return message


def _add_state(message: pb.Run, projection: RunProjection, *, rounds: bool, down: int) -> None:
    state = projection.state
    message.phase = pb.Run.Phase.Value(state.phase.name)
    message.reason = state.reason or _step_text(state)
    message.round = state.round.number if state.round else state.turn[0]
    message.revision = projection.revision
    if projection.metric != ACCURACY.name:  # which earlier releases do not name
        message.metric = projection.metric
    message.members.extend(_member(m, state) for _, m in sorted(state.members.items()))
    for kind, count in sorted(state.refusals.items()):
        newest = projection.refused.get(kind, "")
        message.refusals.reasons.add(kind=kind, count=count, newest=newest)
    if rounds:
        messages = [_ended(projection, ended) for ended in state.history]
        messages += _at_hand(state, down)
        message.rounds.extend(messages[-MAX_ROUNDS:])


def _step_text(state: RunState) -> str:
    """Describe where the run is in a masked round; empty if it is in none."""
    round_ = state.round
    if round_ is None or round_.masked is None or state.phase is not Phase.COLLECTING:
        return ""
    masked = round_.masked
    taking_part = [x for x in open_leases(state) if is_in_step(x, masked)]
    waiting = [x.device for x in taking_part if x.due]
    if masked.exchanging or not waiting:
        return f"the answers of {len(taking_part)} devices to the step {masked.step} are taken"
    named = ", ".join(waiting[:MAX_NAMED]) + (", ..." if len(waiting) > MAX_NAMED else "")
    since, most_s = masked.opened_s, step_ends_s(state, masked) - masked.opened_s
    return (
        f"since {datetime.fromtimestamp(since, UTC):%H:%M:%S} UTC, and for at most {most_s:.0f} s, "
        f"the step {masked.step} waits for {len(waiting)} of {len(taking_part)} devices: {named}"
    )


def _member(member: RunMember, state: RunState) -> pb.Member:
    lease = open_lease(state, member.device)
    return message_from(
        pb.Member,
        member,
        score=message_from(pb.Score, member.score) if member.score else None,
        reason=member.settled.reason if member.settled else "",
        why=[pb.Dropped(reason=reason, count=n) for reason, n in member.why.items()],
        waits=None,
        base=lease.base.version if lease and lease.base else None,
    )


def _ended(projection: RunProjection, ended: Ended) -> pb.Round:
    spreads = projection.spreads.get(str(ended.number)) if ended.evaluates else None
    return message_from(
        pb.Round,
        ended,
        loss=ended.loss if math.isfinite(ended.loss) else 0.0,
        before=_spread(spreads.before) if spreads else None,
        after=_spread(spreads.after) if spreads else None,
    )


def _spread(spread: Spread) -> pb.Spread:
    if math.isfinite(spread.worst):
        return message_from(pb.Spread, spread, masked=False)
    return pb.Spread(mean=spread.mean, masked=True)


def _at_hand(state: RunState, down: int) -> list[pb.Round]:
    at_hand = state.round
    if at_hand is None or state.phase is not Phase.COLLECTING:
        return []
    tally = Counter(lease.outcome for lease in at_hand.leases)
    return [
        pb.Round(
            number=at_hand.number,
            evaluates=at_hand.evaluates,
            opened_s=at_hand.opened_s,
            asked=len(at_hand.leases),
            counted=tally[Outcome.COUNTED],
            refused=tally[Outcome.REFUSED] + tally[Outcome.DECLINED],
            lost=tally[Outcome.LOST],
            bytes_down=down,
            bytes_up=sum(x.update.size for x in at_hand.leases if x.update),
            left_out=at_hand.left_out,
        )
    ]


def task_message(
    record: RunRecord, state: RunState, device: str, files: TaskFiles, now_s: float
) -> pb.Task:
    """Return the device's task in this run. The caller has checked that it has an open lease."""
    lease, at_hand = open_lease(state, device), state.round
    assert lease is not None
    assert at_hand is not None
    spec, masked = record.spec, at_hand.masked
    ends_s = at_hand.opened_s + state.plan.deadline_s
    if masked is not None:
        ends_s = step_ends_s(state, masked)
    task = pb.Task(
        run=record.id,
        round=at_hand.number,
        lease=bytes.fromhex(lease.id),
        plan=files.plan,
        state=files.state,
        sampling=spec.sampling,
        seed=spec.seed,
        # Seconds left, not a time: the device's clock may be wrong.
        deadline_s=max(0.0, ends_s - now_s),
        inline_state=files.inline,
        inline_bytes=files.inline_bytes,
        cohort=fewest_updates(spec),
        returns=state.watch.returns,
        masking=files.masking,
        base=lease.base.version if lease.base else None,
    )
    if state.rules >= RULES_WITH_WATCHES:
        task.included = bytes.fromhex(state.members[device].included_lease)
    if files.message is not None:
        task.flower.CopyFrom(files.message)
    elif at_hand.evaluates:
        task.evaluate.CopyFrom(pb.Evaluate(steps=spec.hyperparameters.inner_steps))
    else:
        task.learn.CopyFrom(pb.Learn(compression=spec.compression, keep=spec.keep))
        terms = noise_terms(spec, state, files.own_std, files.own_bit_std)
        if terms is not None:
            task.noise.CopyFrom(terms)
        is_clear = not (spec.HasField("flower") or spec.HasField("masking"))
        task.takes_vector = is_clear and not spec.compression
    return task


def settlements(run: str, member: RunMember) -> list[pb.Settlement]:
    """Return the settlements of the newest contribution that counted, and of the newest of all.

    The device may know neither: its stream may have ended before the settlement of the one that
    counted was sent, and it may have lost a lease since.
    """
    newest, counted = member.settled, member.counted_lease
    settled = [Settled(lease=counted, counted=True)] if counted else []
    if newest is not None and newest.lease != counted:  # else it was sent again, and came too late
        settled.append(newest)
    return [message_from(pb.Settlement, x, run=run, lease=bytes.fromhex(x.lease)) for x in settled]
