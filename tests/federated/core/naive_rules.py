"""The rules of a run as they are easiest to read: every question looks at every device.

The oracle of `core/rules.py`, which answers from indexes. It is what release 0.1 ran, so what it
makes of a journal is what the journal means.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from triplane.unified_ir.federated.core.lease_base import LeaseBase
from triplane.unified_ir.federated.core.run import (
    RULES_WITH_PAUSES,
    RULES_WITH_RESTS,
    RULES_WITH_WATCHES,
    Answered,
    Arrived,
    Asked,
    Declined,
    Effects,
    Ended,
    Event,
    Failed,
    Finish,
    Finished,
    Joined,
    Judged,
    Lease,
    Left,
    Outcome,
    Phase,
    Reduce,
    Reduced,
    Refused,
    Restarted,
    Resumed,
    Round,
    RunMember,
    RunState,
    Scored,
    Settled,
    Stopped,
    Tell,
    Tick,
)

LEASE_CHARS: Final = 32
MAX_GIVEN_UP: Final = 10
"""Rounds in a row without a quorum, after which the run stops and asks for a person."""
FIRST_PAUSE_S: Final = 0.5
"""After a round that was given up; doubles with each in a row."""
MAX_PAUSE_S: Final = 30.0
MAX_WHY: Final = 8
"""Reasons that are told apart of one device; further ones are counted together."""
MAX_WHY_CHARS: Final = 200
OTHER: Final = "other reasons"

UNWILLING: Final = frozenset({Outcome.DECLINED, Outcome.REFUSED})

Rule = Callable[[RunState, Any], tuple[RunState, Effects]]


def step(state: RunState, event: Event) -> tuple[RunState, Effects]:
    """The state after `event`, and what has to be done because of it."""
    rule = RULES.get((state.phase, type(event)))
    after, effects = rule(state, event) if rule else (state, ())
    if isinstance(event, Tick):
        after = replace(after, looked_s=event.at_s)
    return _advance(after, event.at_s, effects)


def due_s(state: RunState) -> float | None:
    """When a `Tick` could change something; None while only others can."""
    patience_s = state.plan.patience_s
    waits: list[float] = []
    if state.phase is Phase.GATHERING:
        waits = [state.since_s + patience_s]
        waits += [m.away_s + patience_s for m in state.members.values() if m.away_s is not None]
        waits = [state.not_before_s, *(max(at_s, state.not_before_s) for at_s in waits)]
    elif state.phase is Phase.COLLECTING and state.round is not None:
        waits = [state.round.opened_s + state.plan.deadline_s]
        waits += [x.away_s + patience_s for x in _open_leases(state) if x.away_s is not None]
    return min((at_s for at_s in waits if at_s > state.looked_s), default=None)


def open_lease(state: RunState, device: str) -> Lease | None:
    """What the device shall work on now."""
    if state.phase is not Phase.COLLECTING or state.round is None:
        return None
    for lease in state.round.leases:
        if lease.device == device and lease.outcome is Outcome.OPEN:
            return lease
    return None


def lease_id(
    run: str, number: int, *, evaluates: bool, attempt: int, device: str, epoch: str = ""
) -> str:
    """Names a lease: the same round, attempt, device and epoch give the same one.

    A cloud that was restored from a backup repeats rounds, from other states. With the epoch of its
    process in the name, no device takes such a lease for one that it has answered before.
    """
    text = f"{run}\n{number}\n{int(evaluates)}\n{attempt}\n{device}"
    text += f"\n{epoch}" if epoch else ""
    return hashlib.sha256(text.encode()).hexdigest()[:LEASE_CHARS]


# Rules, one per phase and event; an event without one changes nothing.


def _join(state: RunState, event: Joined) -> tuple[RunState, Effects]:
    known = state.members.get(event.device)
    fresh = known or RunMember(device=event.device, connected=True, examples=event.examples)
    member = replace(
        fresh, connected=True, away_s=None, examples=event.examples, held_out=event.held_out
    )
    return _away(_with(state, member), event.device, None), (Tell(event.device),)


def _leave(state: RunState, event: Left) -> tuple[RunState, Effects]:
    known = state.members.get(event.device)
    if known is None:
        return state, ()
    gone = replace(known, connected=False, away_s=event.at_s)
    return _away(_with(state, gone), event.device, event.at_s), ()


def _restart(state: RunState, event: Restarted) -> tuple[RunState, Effects]:
    """Nobody is there, and waiting begins anew."""
    gone = {
        name: replace(m, connected=False, away_s=event.at_s) for name, m in state.members.items()
    }
    state = replace(state, members=gone)
    if event.epoch != state.epoch:
        state = replace(state, epoch=event.epoch)
    for lease in _open_leases(state):
        state = _put(state, replace(lease, away_s=event.at_s))
    if state.phase is Phase.GATHERING:
        state = replace(state, since_s=event.at_s)
    return state, _due(state)


def _due(state: RunState) -> Effects:
    """What was to be done and may have been lost with the process."""
    if state.phase is Phase.REDUCING and state.round is not None:
        return (Reduce(state.round.number, _counted(state.round)),)
    return (Finish(),) if state.phase is Phase.FINISHING else ()


def _ask(state: RunState, event: Asked) -> tuple[RunState, Effects]:
    found = state.round
    assert found is not None
    if (event.number, event.evaluates, event.attempt) != (
        found.number, found.evaluates, found.attempt,
    ):  # fmt: skip
        return state, ()
    leases = tuple(x for x in found.leases if x.device in event.messages)
    asked = replace(state, round=replace(found, leases=leases))
    return asked, tuple(Tell(x.device) for x in leases if x.outcome is Outcome.OPEN)


def _arrive(state: RunState, event: Arrived) -> tuple[RunState, Effects]:
    if state.round and state.round.evaluates:
        return _unwanted(state, event.device, event.lease)
    return _answer(state, event)


def _answer(state: RunState, event: Arrived | Answered) -> tuple[RunState, Effects]:
    lease = _held(state, event)
    if lease is None:
        return _unwanted(state, event.device, event.lease)
    done = replace(lease, outcome=Outcome.COUNTED, update=event.update, away_s=None)
    return _settle(state, replace(done, bytes_down=event.bytes_down))


def _score(state: RunState, event: Scored) -> tuple[RunState, Effects]:
    lease = _held(state, event)
    if lease is None or not (state.round and state.round.evaluates):
        return _unwanted(state, event.device, event.lease)
    member = state.members[event.device]
    scored = _with(state, replace(member, score=event.score))
    done = replace(lease, outcome=Outcome.COUNTED, away_s=None, bytes_down=event.bytes_down)
    return _settle(scored, done)


def _refuse(state: RunState, event: Refused) -> tuple[RunState, Effects]:
    counts = {**state.refusals, event.kind: state.refusals.get(event.kind, 0) + 1}
    state = replace(state, refusals=counts)
    lease = _held(state, event)
    if lease is None:
        return state, ()
    done = replace(lease, outcome=Outcome.REFUSED, reason=event.reason)
    missed = state.members[event.device].missed
    state, effects = _settle(state, replace(done, bytes_down=event.bytes_down))
    if state.rules >= RULES_WITH_WATCHES:
        until = state.turn[0] + 1 + min(2**missed, 32)
        member = replace(state.members[event.device], missed=min(missed + 1, 32), rests_until=until)
        state = _with(state, member)
    return state, effects


def _decline(state: RunState, event: Declined) -> tuple[RunState, Effects]:
    lease = _held(state, event)
    if lease is None:
        return state, ()
    done = replace(lease, outcome=Outcome.DECLINED, reason=event.reason)
    return _settle(state, replace(done, bytes_down=event.bytes_down))


def _tick(state: RunState, event: Tick) -> tuple[RunState, Effects]:
    assert state.round is not None
    over = event.at_s >= state.round.opened_s + state.plan.deadline_s
    gone = event.at_s - state.plan.patience_s
    effects: Effects = ()
    for lease in state.round.leases:
        away = lease.away_s is not None and lease.away_s <= gone
        if lease.outcome is Outcome.OPEN and (over or away):
            why = "its stream was away too long" if away else "the round's deadline passed"
            state, more = _settle(state, replace(lease, outcome=Outcome.LOST, reason=why))
            effects += more
            if not away and state.rules >= RULES_WITH_RESTS:
                member = state.members[lease.device]
                until = state.turn[0] + 1 + min(2**member.missed, 32)
                missed = min(member.missed + 1, 32)
                state = _with(state, replace(member, missed=missed, rests_until=until))
    return state, effects


def _reduce(state: RunState, event: Reduced) -> tuple[RunState, Effects]:
    if event.number != state.turn[0]:
        return state, ()
    number, every = event.number, state.plan.evaluate_every
    judged = number == state.plan.rounds or (every > 0 and number % every == 0)
    turn = (number, True) if judged else (number + 1, False)
    members = dict(state.members)
    for lease in state.round.leases if state.round else ():
        if lease.outcome is Outcome.COUNTED and state.rules >= RULES_WITH_WATCHES:
            members[lease.device] = replace(members[lease.device], included_lease=lease.id)
    after = replace(state, shared=event.shared, attempt=0, members=members)
    return _gather(after, turn, event.at_s), ()


def _finish(state: RunState, event: Finished) -> tuple[RunState, Effects]:
    return replace(state, phase=Phase.DONE, reason="", since_s=event.at_s), ()


def _stop(state: RunState, event: Stopped) -> tuple[RunState, Effects]:
    told = tuple(Tell(lease.device) for lease in _open_leases(state))
    kept = state.round if state.phase is Phase.REDUCING else None
    after = replace(
        state, phase=Phase.STOPPED, reason=event.reason, since_s=event.at_s, round=kept,
        attempt=state.attempt + 1,
    )  # fmt: skip
    return after, told


def _resume(state: RunState, event: Resumed) -> tuple[RunState, Effects]:
    """What was to be reduced when the run stopped is reduced now."""
    if state.round is not None:
        again = replace(state, phase=Phase.REDUCING, reason="", since_s=event.at_s)
        return again, _due(again)
    return replace(_gather(state, state.turn, event.at_s), reason=""), ()


def _fail(state: RunState, event: Failed) -> tuple[RunState, Effects]:
    told = tuple(Tell(lease.device) for lease in _open_leases(state))
    after = replace(state, phase=Phase.FAILED, reason=event.reason, since_s=event.at_s, round=None)
    return after, told


def _late(state: RunState, event: Arrived | Answered | Scored) -> tuple[RunState, Effects]:
    return _unwanted(state, event.device, event.lease)


# fmt: off
_LIVE: Final = (Phase.GATHERING, Phase.COLLECTING, Phase.REDUCING, Phase.FINISHING, Phase.STOPPED)
RULES: Final[Mapping[tuple[Phase, type], Rule]] = {
    **{(phase, Joined):       _join   for phase in _LIVE},
    **{(phase, Left):         _leave  for phase in _LIVE},
    **{(phase, Restarted):    _restart for phase in _LIVE},
    **{(phase, Refused):      _refuse for phase in _LIVE},
    **{(phase, Failed):       _fail   for phase in _LIVE},
    **{(phase, Stopped):      _stop   for phase in _LIVE if phase is not Phase.STOPPED},
    **{(phase, Arrived):      _late   for phase in _LIVE},
    **{(phase, Answered):     _late   for phase in _LIVE},
    **{(phase, Scored):       _late   for phase in _LIVE},
    (Phase.COLLECTING, Asked):    _ask,
    (Phase.COLLECTING, Arrived):  _arrive,
    (Phase.COLLECTING, Answered): _answer,
    (Phase.COLLECTING, Scored):   _score,
    (Phase.COLLECTING, Declined): _decline,
    (Phase.COLLECTING, Tick):     _tick,
    (Phase.REDUCING, Reduced):    _reduce,
    (Phase.FINISHING, Finished):  _finish,
    (Phase.STOPPED, Resumed):     _resume,
}
# fmt: on


# What follows from any event.


def _advance(state: RunState, now_s: float, effects: Effects) -> tuple[RunState, Effects]:
    """Close the round if it is complete, open the next if enough devices are there."""
    if state.phase is Phase.COLLECTING and state.round is not None:
        state, more = _close(state, state.round, now_s)
        effects += more
    if state.phase is Phase.GATHERING:
        state, more = _open(state, now_s)
        effects += more
    return state, effects


def _open(state: RunState, now_s: float) -> tuple[RunState, Effects]:
    number, evaluates = state.turn
    if number > state.plan.rounds:
        return replace(state, phase=Phase.FINISHING, reason="", since_s=now_s), (Finish(),)
    if now_s < state.not_before_s:
        return replace(state, reason=_pauses_after(state)), ()
    able = [m for m in state.members.values() if m.connected and _able(m, evaluates=evaluates)]
    waited = now_s >= state.since_s + state.plan.patience_s
    least = 1 if evaluates else state.plan.quorum
    connected = able
    rested = [m for m in able if m.rests_until <= number]
    able = rested if len(rested) >= least else able
    left_out = len(connected) - len(able)
    usual = least if evaluates else state.plan.asked - _given_up(state, now_s) - left_out
    wanted = least if waited else max(least, usual)
    here = waited or _all_here(state, now_s)
    if len(able) < wanted or not here:
        if evaluates and here:
            return _open(_gather(state, (number + 1, False), now_s), now_s)
        return replace(state, reason=_waits_for(connected, state, evaluates=evaluates)), ()
    chosen = sorted(m.device for m in able) if evaluates else _chosen(state, able)
    leases = tuple(
        Lease(
            id=lease_id(
                state.run,
                number,
                evaluates=evaluates,
                attempt=state.attempt,
                device=device,
                epoch=state.epoch,
            ),
            device=device,
            base=_base(state),
        )
        for device in chosen
    )
    opened = Round(
        number=number, evaluates=evaluates, attempt=state.attempt, opened_s=now_s, leases=leases,
        population=len([m for m in state.members.values() if m.examples > 0]),
    )  # fmt: skip
    state = replace(state, phase=Phase.COLLECTING, reason="", since_s=now_s, round=opened)
    return state, tuple(Tell(device) for device in chosen)


def _base(state: RunState) -> LeaseBase:
    """Each learning round that was not given up has published one state."""
    reduced = [x for x in state.history if not x.evaluates and not x.given_up]
    return LeaseBase(version=len(reduced), state=state.shared)


def _all_here(state: RunState, now_s: float) -> bool:
    """Whether nobody is away who may be back within patience."""
    return all(m.connected or _is_gone(state, m, now_s) for m in state.members.values())


def _given_up(state: RunState, now_s: float) -> int:
    """Members away for longer than patience: no round waits for them."""
    return sum(_is_gone(state, m, now_s) for m in state.members.values())


def _is_gone(state: RunState, member: RunMember, now_s: float) -> bool:
    return member.away_s is not None and member.away_s + state.plan.patience_s <= now_s


def _close(state: RunState, found: Round, now_s: float) -> tuple[RunState, Effects]:
    counted = _counted(found)
    missing = [x for x in found.leases if x.outcome is Outcome.OPEN]
    enough = not found.evaluates and len(counted) >= state.plan.devices
    if missing and not enough:
        return state, ()
    told: Effects = ()
    for lease in missing:
        late = replace(lease, outcome=Outcome.LATE, reason="enough others were faster")
        state, more = _settle(state, late)
        told += more
    assert state.round is not None
    short = not found.evaluates and len(counted) < state.plan.quorum
    why = f"{len(counted)} updates of {state.plan.quorum} needed" if short else ""
    found = state.round
    ended = _ended(found, now_s, why)
    state = replace(state, history=(*state.history, ended))
    if short:
        return _give_up(state, why, now_s), told
    wanted = state.plan.needs_scores and state.rules >= RULES_WITH_PAUSES
    if found.evaluates and not counted and wanted:
        refusing = [x for x in found.leases if x.outcome in UNWILLING]
        if refusing:
            return _unscored(state, refusing, now_s), (*told, Judged(found.number, ()))
    if found.evaluates:
        after = _gather(state, (found.number + 1, False), now_s)
        return after, (*told, Judged(found.number, counted))
    state = replace(state, phase=Phase.REDUCING, since_s=now_s)
    return state, (*told, Reduce(found.number, counted))


def _give_up(state: RunState, why: str, now_s: float) -> RunState:
    again = replace(_gather(state, state.turn, now_s), attempt=state.attempt + 1)
    if again.attempt < MAX_GIVEN_UP:
        if state.rules >= RULES_WITH_PAUSES:
            pause_s = min(FIRST_PAUSE_S * 2 ** (again.attempt - 1), MAX_PAUSE_S)
            again = replace(again, not_before_s=now_s + pause_s)
        return again
    reason = f"{MAX_GIVEN_UP} rounds in a row were given up; the last had {why}"
    return replace(again, phase=Phase.STOPPED, reason=reason)


def _unscored(state: RunState, refusing: list[Lease], now_s: float) -> RunState:
    """Nobody would score: whatever the reason, a result that nobody measured is not registered."""
    kinds = f"{len(refusing)} devices declined or were refused"
    reason = (
        f"no device scored round {state.turn[0]}: {kinds}, {refusing[0].device} because: "
        f"{refusing[0].reason}"
    )
    again = replace(_gather(state, state.turn, now_s), attempt=state.attempt + 1)
    return replace(again, phase=Phase.STOPPED, reason=reason)


def _pauses_after(state: RunState) -> str:
    why = state.history[-1].given_up if state.history else ""
    return f"a round was given up ({why}); the next begins after a pause"


def _gather(state: RunState, turn: tuple[int, bool], now_s: float) -> RunState:
    return replace(state, phase=Phase.GATHERING, since_s=now_s, turn=turn, round=None)


def _able(member: RunMember, *, evaluates: bool) -> bool:
    return member.held_out > 0 if evaluates else member.examples > 0


def _chosen(state: RunState, able: list[RunMember]) -> list[str]:
    """A fair draw that depends on seed, round and names alone."""
    number = state.turn[0]

    def rank(member: RunMember) -> tuple[int, bytes]:
        text = f"{state.plan.seed}\n{number}\n{state.attempt}\n{member.device}"
        rests = max(0, member.rests_until - number)
        return rests, hashlib.sha256(text.encode()).digest()

    drawn = sorted(able, key=rank)[: state.plan.asked]
    return sorted(member.device for member in drawn)


def _waits_for(able: list[RunMember], state: RunState, *, evaluates: bool) -> str:
    away = sorted(m.device for m in state.members.values() if not m.connected)
    wanted = "" if evaluates else f" of {state.plan.asked}"
    text = f"{len(able)}{wanted} devices are connected"
    return f"{text}; away: {', '.join(away[:5])}" if away else text


def _with(state: RunState, member: RunMember) -> RunState:
    return replace(state, members={**state.members, member.device: member})


def _away(state: RunState, device: str, since_s: float | None) -> RunState:
    """Whose stream is closed keeps its lease for a while."""
    found = open_lease(state, device)
    return state if found is None else _put(state, replace(found, away_s=since_s))


def _held(state: RunState, event: Any) -> Lease | None:
    """The open lease of that id, if it is this device's."""
    found = open_lease(state, event.device)
    return found if found is not None and found.id == event.lease else None


def _put(state: RunState, lease: Lease) -> RunState:
    assert state.round is not None
    leases = tuple(lease if x.id == lease.id else x for x in state.round.leases)
    return replace(state, round=replace(state.round, leases=leases))


def _settle(state: RunState, lease: Lease) -> tuple[RunState, Effects]:
    """End a lease and tell its device."""
    counted = lease.outcome is Outcome.COUNTED
    member = state.members[lease.device]
    member = replace(
        member,
        counted=member.counted + counted,
        dropped=member.dropped + (not counted),
        declined=member.declined + (lease.outcome is Outcome.DECLINED),
        why=member.why if counted else _tallied(member.why, lease.reason),
        settled=Settled(lease=lease.id, counted=counted, reason=lease.reason),
        counted_lease=lease.id if counted else member.counted_lease,
    )
    if lease.outcome in {Outcome.COUNTED, Outcome.DECLINED, Outcome.REFUSED}:
        member = replace(member, missed=0, rests_until=0)
    return _with(_put(state, lease), member), (Tell(lease.device),)


def _unwanted(state: RunState, device: str, lease: str) -> tuple[RunState, Effects]:
    """A contribution to what is over, or the same one again: told so, and nothing else changes."""
    member = state.members.get(device)
    if member is None or (member.settled is not None and member.settled.lease == lease):
        return state, (Tell(device),) if member else ()
    told = Settled(lease=lease, counted=False, reason="its round is over, or it was never asked")
    why = _tallied(member.why, told.reason)
    after = replace(member, settled=told, dropped=member.dropped + 1, why=why)
    return _with(state, after), (Tell(device),)


def _tallied(why: Mapping[str, int], reason: str) -> Mapping[str, int]:
    cut = reason[:MAX_WHY_CHARS]
    key = cut if cut in why or len(why) < MAX_WHY else OTHER
    return {**why, key: why.get(key, 0) + 1}


def _open_leases(state: RunState) -> list[Lease]:
    found = state.round.leases if state.round else ()
    return [x for x in found if x.outcome is Outcome.OPEN]


def _counted(found: Round) -> tuple[Lease, ...]:
    return tuple(x for x in found.leases if x.outcome is Outcome.COUNTED)


def _ended(found: Round, now_s: float, given_up: str) -> Ended:
    tally = dict.fromkeys(Outcome, 0)
    for lease in found.leases:
        tally[lease.outcome] += 1
    updates = [x.update for x in found.leases if x.update is not None]
    weight = sum(u.examples for u in updates)
    loss = sum(u.examples * u.loss for u in updates) / weight if weight else math.nan
    return Ended(
        number=found.number,
        evaluates=found.evaluates,
        opened_s=found.opened_s,
        closed_s=now_s,
        asked=len(found.leases),
        counted=tally[Outcome.COUNTED],
        refused=tally[Outcome.REFUSED] + tally[Outcome.DECLINED],
        late=tally[Outcome.LATE],
        lost=tally[Outcome.LOST],
        loss=loss,
        bytes_up=sum(u.size for u in updates),
        bytes_down=sum(x.bytes_down for x in found.leases),
        given_up=given_up,
    )
