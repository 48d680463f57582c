"""What rules of a run do with leases and members: find, change and settle them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from triplane.unified_ir.federated.core.run import (
    UNWILLING,
    Answered,
    Arrived,
    Effects,
    Lease,
    Leases,
    Masked,
    Members,
    Outcome,
    Phase,
    Round,
    RunMember,
    RunState,
    Scored,
    Settled,
    Tell,
)

MAX_WHY: Final = 8
"""Number of distinct reasons kept for one device; further ones are counted together."""
MAX_WHY_CHARS: Final = 200
OTHER: Final = "other reasons"
MAX_REST: Final = 32
"""Largest number of rounds for which a device that misses deadlines, or sends what cannot count, is
not drawn. The number is 1 after the first time and doubles with each further one in a row."""
ANSWERED: Final = UNWILLING | {Outcome.COUNTED}

Step = tuple[RunState, Effects]


def open_lease(state: RunState, device: str) -> Lease | None:
    """Return the open lease of the device in the current round, if it has one."""
    lease = lease_of(state, device) if state.phase is Phase.COLLECTING else None
    return lease if lease is not None and lease.outcome is Outcome.OPEN else None


def lease_of(state: RunState, device: str) -> Lease | None:
    """Return the lease of a device in the current round, whatever its outcome."""
    return None if state.round is None else leases_of(state.round).of(device)


def members_of(state: RunState) -> Members:
    """Return the members with their indexes."""
    assert isinstance(state.members, Members)
    return state.members


def leases_of(round_: Round) -> Leases:
    """Return the leases with their indexes."""
    assert isinstance(round_.leases, Leases)
    return round_.leases


def with_member(state: RunState, member: RunMember) -> RunState:
    """Return the state with this member in place of the one of its name."""
    before = members_of(state)
    after = before.with_(member.device, member)
    return state if after is before else replace(state, members=after)


def held_lease(state: RunState, event: Any) -> Lease | None:
    """Return the open lease of the event's id, if it is this device's."""
    lease = open_lease(state, event.device)
    return lease if lease is not None and lease.id == event.lease else None


def put_lease(state: RunState, lease: Lease) -> RunState:
    """Return the state with this lease in place of its device's."""
    assert state.round is not None
    before = leases_of(state.round)
    if before.of(lease.device) == lease:
        return state
    return replace(state, round=replace(state.round, leases=before.with_(lease)))


def settle(state: RunState, lease: Lease, outcome: Outcome) -> Step:
    """End a lease with that outcome and send its device a new document."""
    counted, answered = outcome is Outcome.COUNTED, outcome in ANSWERED
    member = state.members[lease.device]
    member = replace(
        member,
        counted=member.counted + counted,
        dropped=member.dropped + (not counted),
        declined=member.declined + (outcome is Outcome.DECLINED),
        why=member.why if counted else _reason_counts(member.why, lease.reason),
        # Kept with the member, not the round, so that a device that reconnects later still gets its
        # answer.
        settled=Settled(lease=lease.id, counted=counted, reason=lease.reason),
        missed=0 if answered else member.missed,
        rests_until=0 if answered else member.rests_until,
        counted_lease=lease.id if counted else member.counted_lease,
    )
    if counted and state.plan.budget is not None and not state.plan.least:
        round_ = state.round
        if round_ is not None and not round_.evaluates:
            member = replace(member, used_round=round_.number)
    return with_member(put_lease(state, replace(lease, outcome=outcome)), member), (
        Tell(lease.device),
    )


def unwanted(state: RunState, event: Arrived | Answered | Scored | Masked) -> Step:
    """Answer a contribution to a closed lease, or a repeated one, and change nothing else."""
    member = state.members.get(event.device)
    if member is None:
        return state, ()
    if member.settled is None or member.settled.lease != event.lease:
        reason = "its round is over, or it was never asked"
        member = replace(
            member,
            settled=Settled(lease=event.lease, counted=False, reason=reason),
            dropped=member.dropped + 1,
            why=_reason_counts(member.why, reason),
        )
    return with_member(state, member), (Tell(event.device),)


def _reason_counts(why: Mapping[str, int], reason: str) -> Mapping[str, int]:
    cut = reason[:MAX_WHY_CHARS]
    # Reasons come from devices: without these limits one of them could fill the state of the run.
    key = cut if cut in why or len(why) < MAX_WHY else OTHER
    return {**why, key: why.get(key, 0) + 1}


def base_of(state: RunState, lease: Lease) -> str:
    """Return the blob of the shared state that a lease of the current round learns from."""
    return state.shared if lease.base is None else lease.base.state


def referenced_states(state: RunState) -> frozenset[str]:
    """Return the blobs of the states that a run still needs, SHA-256 in hexadecimal.

    They are the present one, the good one to which it may return, and those from which devices
    learn that have an open lease. The first one is of the run's plan, see `journal.references`.
    """
    bases = {base_of(state, lease) for lease in open_leases(state)}
    return frozenset({state.shared, state.good, *bases} - {""})


def open_leases(state: RunState) -> tuple[Lease, ...]:
    """Return the open leases, in the order of device names."""
    return leases_of(state.round).listed("open") if state.round else ()


def counted_leases(round_: Round) -> tuple[Lease, ...]:
    """Return the leases that counted, in the order of device names."""
    return leases_of(round_).listed("counted")


def resting(member: RunMember, number: int) -> RunMember:
    """Return the member after it gave nothing of use to the round of that number."""
    rest = min(2**member.missed, MAX_REST)
    missed = min(member.missed + 1, MAX_REST)  # a count beyond it would make no difference
    return replace(member, missed=missed, rests_until=number + 1 + rest)


def with_rest(before: RunState, after: RunState, device: str) -> RunState:
    """Return `after` with a rest for a device whose answer was refused.

    before: has the rounds in a row that it missed; a settlement counts a refusal as an answer.
    Without rests, devices that send what cannot count would keep rounds below the quorum.
    """
    member = replace(after.members[device], missed=before.members[device].missed)
    return with_member(after, resting(member, after.turn[0]))


def away_since(round_: Round, latest_s: float) -> list[Lease]:
    """Return the open leases of devices that left before then, in the order of their names."""
    leases = leases_of(round_)
    devices = itertools.takewhile(lambda key: key[0] <= latest_s, leases.indexed("away"))
    return [x for _, device in sorted(devices, key=lambda key: key[1]) if (x := leases.of(device))]
