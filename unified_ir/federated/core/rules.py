"""A federated run as a pure state machine: `step(state, event) -> (state, effects)`.

    gathering -> collecting -> reducing -> gathering ... -> finishing -> done
    stopped and failed are reached from any phase; stopped returns to the phase before.

Ids are derived from the state, and events carry the time, so the same events give the same state,
byte for byte. An update counts once: for the device that holds the lease, while its round collects.
A device that disconnects keeps its lease for `patience_s` and may resume it. A connected device
that misses a deadline, or whose contribution is refused, is not drawn for some rounds if the others
make the quorum. Where the loss over devices shows that the state is spoilt, the run returns to its
last good one. `due_s` returns when the next `Tick` matters. The effect of a rule on journaled
events never changes: `RunState.rules` is the version of the rules that a run uses.

The cost of one device's event is logarithmic in the number of devices: a rule that concerns all
members or leases uses their indexes. Only the beginning and end of a round, and a restart, iterate
over all of them. An event that changes nothing returns the same `RunState` object.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from triplane.unified_ir.federated.core import masked_round
from triplane.unified_ir.federated.core.lease_changes import (
    Step,
    away_since,
    counted_leases,
    held_lease,
    leases_of,
    members_of,
    open_lease,
    open_leases,
    put_lease,
    resting,
    settle,
    unwanted,
    with_member,
    with_rest,
)
from triplane.unified_ir.federated.core.round_end import (
    amended,
    ended,
    must_return,
    next_base,
    turn_after,
    watched,
    watches,
    why_spoilt,
    with_bounds,
    with_included,
)
from triplane.unified_ir.federated.core.run import (
    RULES_WITH_PAUSES,
    RULES_WITH_RESTS,
    RULES_WITH_WAITS,
    RULES_WITH_WATCHES,
    UNWILLING,
    Answered,
    Arrived,
    Asked,
    Declined,
    Effects,
    Event,
    Exchanged,
    Failed,
    Finish,
    Finished,
    Joined,
    Judged,
    Lease,
    Left,
    Masked,
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
    Stopped,
    Tell,
    Tick,
)
from triplane.unified_ir.federated.core.selection import (
    chosen,
    count_learners,
    lacks_population,
    lacks_uses,
    learners,
    note_published,
    waits_for,
)
from triplane.unified_ir.federated.core.sorted_map import SortedMap

LEASE_CHARS: Final = 32
MAX_GIVEN_UP: Final = 10
"""Number of rounds in a row without a quorum after which the run stops for a person to look."""
FIRST_PAUSE_S: Final = 0.5
"""Pause after an abandoned round; it doubles with each further one in a row."""
MAX_PAUSE_S: Final = 30.0

Rule = Callable[[RunState, Any], Step]


def step(state: RunState, event: Event) -> Step:
    """Return the state after `event`, and the effects that follow."""
    rule = RULES.get((state.phase, type(event)))
    after, effects = rule(state, event) if rule else (state, ())
    if isinstance(event, Tick):
        # Also without a rule for ticks in this phase: `due_s` must not ask for the same moment
        # again.
        after = replace(after, looked_s=event.at_s)
    return _advance(after, event.at_s, effects)


def due_s(state: RunState) -> float | None:
    """Return when a `Tick` could change something; None while only other events can."""
    patience_s = state.plan.patience_s
    if state.phase is Phase.GATHERING:
        if state.not_before_s > state.looked_s:
            return state.not_before_s
        away, waits = members_of(state).indexed("away"), [state.since_s + patience_s]
    elif state.phase is Phase.COLLECTING and state.round is not None:
        masked = state.round.masked
        if masked is not None and masked.exchanging:
            return None
        away = leases_of(state.round).indexed("away")
        ends_s = state.round.opened_s + state.plan.deadline_s
        waits = [masked_round.step_ends_s(state, masked) if masked else ends_s]
    else:
        return None
    # Sorted by the time of leaving, so the first device whose patience has not ended is the next
    # whose patience ends.
    first = away.first(lambda since: since[0] + patience_s > state.looked_s)
    waits += [] if first is None else [first[0] + patience_s]
    return min((at_s for at_s in waits if at_s > state.looked_s), default=None)


def lease_id(
    run: str, number: int, *, evaluates: bool, attempt: int, device: str, epoch: str = ""
) -> str:
    """Return the id of a lease: the same round, attempt, device and epoch give the same id.

    A cloud that was restored from a backup repeats rounds from other states. Because the id depends
    on the epoch of the process, a device does not mistake such a lease for one that it has already
    answered.
    """
    text = f"{run}\n{number}\n{int(evaluates)}\n{attempt}\n{device}"
    # Left out when empty, so that runs from before epochs keep their ids.
    text += f"\n{epoch}" if epoch else ""
    return hashlib.sha256(text.encode()).hexdigest()[:LEASE_CHARS]


# Rules, one per phase and event; an event without a rule changes nothing.


def _join(state: RunState, event: Joined) -> Step:
    known = state.members.get(event.device)
    fresh = known or RunMember(device=event.device, connected=True, examples=event.examples)
    member = replace(
        fresh, connected=True, away_s=None, examples=event.examples, held_out=event.held_out
    )
    return _away(with_member(state, member), event.device, None), (Tell(event.device),)


def _leave(state: RunState, event: Left) -> Step:
    known = state.members.get(event.device)
    if known is None:
        return state, ()
    gone = replace(known, connected=False, away_s=event.at_s)
    return _away(with_member(state, gone), event.device, event.at_s), ()


def _restart(state: RunState, event: Restarted) -> Step:
    """Mark every member as disconnected and restart its patience."""
    if state.members:
        gone = {
            name: replace(m, connected=False, away_s=event.at_s)
            for name, m in state.members.items()
        }
        state = replace(state, members=gone)
    if event.epoch != state.epoch:
        state = replace(state, epoch=event.epoch)
    # The process is new, so no stream is open; patience starts now, since nobody knows when they
    # left.
    for lease in open_leases(state):
        state = put_lease(state, replace(lease, away_s=event.at_s))
    if state.phase is Phase.GATHERING:
        state = replace(state, since_s=event.at_s)
    return masked_round.restarted(state, event.at_s), _due(state)


def _due(state: RunState) -> Effects:
    """Return the effects that may have been lost with the old process."""
    if state.phase is Phase.REDUCING and state.round is not None:
        return (Reduce(state.round.number, counted_leases(state.round)),)
    if state.phase is Phase.COLLECTING:
        return masked_round.pending(state)
    return (Finish(),) if state.phase is Phase.FINISHING else ()


def _ask(state: RunState, event: Asked) -> Step:
    round_ = state.round
    assert round_ is not None
    if (event.number, event.evaluates, event.attempt) != (
        # A strategy may answer late, for a round that has been abandoned since.
        round_.number, round_.evaluates, round_.attempt,
    ):  # fmt: skip
        return state, ()
    leases = tuple(x for x in round_.leases if x.device in event.messages)
    asked = replace(state, round=replace(round_, leases=leases))
    return asked, tuple(Tell(x.device) for x in leases if x.outcome is Outcome.OPEN)


def _arrive(state: RunState, event: Arrived) -> Step:
    if state.round and state.round.evaluates:
        return unwanted(state, event)
    return _answer(state, event)


def _answer(state: RunState, event: Arrived | Answered) -> Step:
    lease = held_lease(state, event)
    if lease is None:
        return unwanted(state, event)
    counted = replace(lease, update=event.update, away_s=None, bytes_down=event.bytes_down)
    return settle(state, counted, Outcome.COUNTED)


def _score(state: RunState, event: Scored) -> Step:
    lease = held_lease(state, event)
    if lease is None or not (state.round and state.round.evaluates):
        return unwanted(state, event)
    scored = with_member(state, replace(state.members[event.device], score=event.score))
    counted = replace(lease, away_s=None, bytes_down=event.bytes_down)
    return settle(scored, counted, Outcome.COUNTED)


def _refuse(state: RunState, event: Refused | Declined) -> Step:
    """End the lease of a contribution that cannot count or of work that the device declined."""
    if masked_round.is_exchanging(state) and held_lease(state, event) is not None:
        # The cloud takes the device's answer just now: it leaves in the next step at the earliest.
        return state, ()
    outcome = Outcome.DECLINED
    if isinstance(event, Refused):
        outcome = Outcome.REFUSED
        counts = {**state.refusals, event.kind: state.refusals.get(event.kind, 0) + 1}
        state = replace(state, refusals=counts)
    lease = held_lease(state, event)
    if lease is None:
        return state, ()
    ended = replace(lease, reason=event.reason, bytes_down=event.bytes_down)
    after, tells = masked_round.leave(state, ended, outcome)
    if outcome is Outcome.REFUSED and state.rules >= RULES_WITH_WATCHES:
        after = with_rest(state, after, lease.device)
    return after, tells


def _tick(state: RunState, event: Tick) -> Step:
    assert state.round is not None
    if state.round.masked is not None:
        return masked_round.lose_silent(state, state.round, state.round.masked, event.at_s)
    over = event.at_s >= state.round.opened_s + state.plan.deadline_s
    gone = event.at_s - state.plan.patience_s
    # At the deadline all open leases end, before it only those of devices that were away too long.
    tells: Effects = ()
    for lease in open_leases(state) if over else away_since(state.round, gone):
        away = lease.away_s is not None and lease.away_s <= gone
        why = "its stream was away too long" if away else "the round's deadline passed"
        state, more = settle(state, replace(lease, reason=why), Outcome.LOST)
        # A device that was away is not drawn anyway until it returns; only one that was connected
        # and silent rests.
        if not away and state.rules >= RULES_WITH_RESTS:
            state = with_member(state, resting(state.members[lease.device], state.turn[0]))
        tells += more
    return state, tells


def _reduce(state: RunState, event: Reduced) -> Step:
    # The end of a reduction that was requested again after a restart.
    if event.number != state.turn[0]:
        return state, ()
    good = state.good if state.watch.bad or not watches(state) else state.shared
    assert state.round is not None
    counted, left_out = counted_leases(state.round), frozenset(event.left_out)
    # The others take back what they imply: a control variate of a device would stay in no sum.
    included = [x for x in counted if x.device not in left_out]
    reduced = replace(
        note_published(with_included(state, included), counted),
        shared=event.shared, attempt=0, fresh_optimizer=False,
        charged=event.charged, clip=event.clip, buffer_clip=event.buffer_clip,
        spent=state.spent if event.shared == state.shared else (),
        # No later round could return to it.
        good="" if event.number == state.plan.rounds else good,
        history=with_bounds(state, event),
    )  # fmt: skip
    return _gather(reduced, turn_after(state, event.number), event.at_s), ()


def _exchange(state: RunState, event: Exchanged) -> Step:
    if not masked_round.is_expected(state, event):
        return state, ()
    assert state.round is not None
    state, effects = masked_round.refuse(state, sorted(event.refused.items()))
    if event.failure:  # which says what it is of groups: the round does not go on without them
        state, more = _end_masked(state, event.failure, event.at_s)
        return state, effects + more
    state, more = masked_round.leave_out(state, event.left_out)
    effects += more
    assert state.round is not None
    masked = state.round.masked
    assert masked is not None
    state, more = masked_round.advance(state, masked, event.at_s)
    effects += more
    if event.step.next is None:
        state, more = _end_masked(state, "", event.at_s)
        effects += more
    return state, effects


def _end_masked(state: RunState, why: str, now_s: float) -> Step:
    """End a masked round; why: it is given up for this reason, or empty."""
    state, tells = masked_round.settle_all(state, why)
    state, effects = _end(state, why, now_s)
    return state, tells + effects


def _finish(state: RunState, event: Finished) -> Step:
    return replace(state, phase=Phase.DONE, reason="", since_s=event.at_s), ()


def _stop(state: RunState, event: Stopped) -> Step:
    tells = tuple(Tell(lease.device) for lease in open_leases(state))
    # The updates of a complete round are on disk, so their reduction is kept for `_resume`; a round
    # that was still collecting is repeated under another attempt.
    kept = state.round if state.phase is Phase.REDUCING else None
    after = replace(
        state, phase=Phase.STOPPED, reason=event.reason, since_s=event.at_s, round=kept,
        attempt=state.attempt + 1,
    )  # fmt: skip
    return after, tells


def _resume(state: RunState, event: Resumed) -> Step:
    """Resume; a reduction that was due when the run stopped is done now."""
    if state.round is not None:
        again = replace(state, phase=Phase.REDUCING, reason="", since_s=event.at_s)
        return again, _due(again)
    return replace(_gather(state, state.turn, event.at_s), reason=""), ()


def _fail(state: RunState, event: Failed) -> Step:
    tells = tuple(Tell(lease.device) for lease in open_leases(state))
    after = replace(
        state, phase=Phase.FAILED, reason=event.reason, since_s=event.at_s, round=None, good=""
    )
    return after, tells


# What follows from any event.


def _advance(state: RunState, now_s: float, effects: Effects) -> Step:
    """Close the round if it is complete, open the next if enough devices are there."""
    if state.phase is Phase.COLLECTING and state.round is not None:
        close = _close if state.round.masked is None else _close_step
        state, more = close(state, state.round, now_s)
        effects += more
    if state.phase is Phase.GATHERING:
        state, more = _open(state, now_s)
        effects += more
    return state, effects


def _open(state: RunState, now_s: float) -> Step:
    number, evaluates = state.turn
    if number > state.plan.rounds:
        return replace(state, phase=Phase.FINISHING, reason="", since_s=now_s), (Finish(),)
    if not evaluates and (why := masked_round.why_exhausted(state) or lacks_uses(state)):
        return replace(state, phase=Phase.STOPPED, reason=why, since_s=now_s), ()
    if now_s < state.not_before_s:
        why = state.history[-1].given_up if state.history else ""
        reason = f"a round was given up ({why}); the next begins after a pause"
        return _because(state, reason), ()
    if why := lacks_population(state):
        return _because(state, why), ()
    # Keys are (rests_until, name): those that rest longer than this round come last.
    able, rested = _count_able(state, number, evaluates=evaluates)
    waited = now_s >= state.since_s + state.plan.patience_s
    least = state.plan.fewest(evaluates=evaluates)
    if not evaluates and state.rules < RULES_WITH_WAITS:
        least = state.plan.quorum
    drawn = rested if rested >= least else able  # without a quorum, those who rest as well
    given_up = _given_up(state, now_s)
    # Devices whose patience is over, and those that rest, are not waited for: the round opens with
    # fewer.
    usual = state.plan.asked - given_up - (able - drawn)
    wanted = least if waited or evaluates else max(least, usual)
    # No device is away that may still return within the patience.
    here = waited or len(members_of(state).indexed("absent")) == given_up
    if drawn < wanted or not here:
        if evaluates and here:
            return _open(_gather(state, (number + 1, False), now_s), now_s)
        return _because(state, waits_for(able, state, evaluates=evaluates)), ()
    names = itertools.islice(_able(state, evaluates=evaluates), drawn)
    is_masked = state.plan.masks(evaluates=evaluates)
    asks_all = evaluates and not is_masked
    asked = sorted(name for _, name in names) if asks_all else chosen(state, names)
    attempt = state.attempt
    identify = partial(
        lease_id, state.run, number, evaluates=evaluates, attempt=attempt, epoch=state.epoch
    )
    masked = masked_round.begun(state, asked, now_s) if is_masked else None
    due, base = masked.step if masked else None, next_base(state)
    leases = tuple(Lease(id=identify(device=x), device=x, due=due, base=base) for x in asked)
    opened = Round(
        number=number, evaluates=evaluates, attempt=attempt, opened_s=now_s, leases=leases,
        population=sum(m.examples > 0 for m in state.members.values()), masked=masked,
    )  # fmt: skip
    state = replace(state, phase=Phase.COLLECTING, reason="", since_s=now_s, round=opened)
    return state, tuple(Tell(device) for device in asked)


def _able(state: RunState, *, evaluates: bool) -> Sequence[tuple[int, str]] | SortedMap[Any, str]:
    """Return the connected members that can do a round's work: (`RunMember.rests_until`, name)."""
    if evaluates:
        return members_of(state).indexed("scorers")
    able = learners(state)
    return masked_round.unspent(state, able) if state.spent else able


def _count_able(state: RunState, number: int, *, evaluates: bool) -> tuple[int, int]:
    """Return how many members can do a round's work, and how many of them do not rest."""
    if not evaluates and not state.spent:
        return count_learners(state)
    able = _able(state, evaluates=evaluates)
    if isinstance(able, SortedMap):
        return len(able), able.count_until(lambda key: key[0] > number)
    return len(able), sum(key[0] <= number for key in able)


def _given_up(state: RunState, now_s: float) -> int:
    """Count the members that were away for longer than the patience; no round waits for them."""
    patience_s = state.plan.patience_s
    return members_of(state).indexed("away").count_until(lambda key: key[0] + patience_s > now_s)


def _close(state: RunState, round_: Round, now_s: float) -> Step:
    leases = leases_of(round_)
    # More devices were asked than are needed, as insurance against slow ones (`asked` >=
    # `devices`).
    enough = not round_.evaluates and len(leases.indexed("counted")) >= state.plan.devices
    if len(leases.indexed("open")) and not enough:
        return state, ()
    tells: Effects = ()
    for lease in leases.listed("open"):
        slower = replace(lease, reason="enough others were faster")
        state, more = settle(state, slower, Outcome.LATE)
        tells += more
    assert state.round is not None
    counted = len(counted_leases(state.round))
    short = not round_.evaluates and counted < state.plan.quorum
    why = f"{counted} updates of {state.plan.quorum} needed" if short else ""
    state, effects = _end(state, why, now_s)
    return state, tells + effects


def _close_step(state: RunState, round_: Round, now_s: float) -> Step:
    """Let the cloud take the answers of a masked step that is complete, or give up the round."""
    assert round_.masked is not None
    state, effects, why = masked_round.complete(state, round_, round_.masked)
    if not why:
        return state, effects
    state, more = _end_masked(state, why, now_s)
    return state, effects + more


def _end(state: RunState, why: str, now_s: float) -> Step:
    """End a round whose leases are settled. why: it is given up for this reason, or empty."""
    assert state.round is not None
    round_, counted, short = state.round, counted_leases(state.round), bool(why)
    state = replace(state, history=(*state.history, ended(round_, now_s, why)))
    if watches(state) and not round_.evaluates:
        state = watched(state, round_, counted, short=short)
        if must_return(state, round_, short=short):
            return _return(state, counted, why, now_s), ()
    if short and not round_.evaluates:
        return _give_up(state, why, now_s), ()
    if round_.evaluates:
        refusing = [x for x in round_.leases if x.outcome in UNWILLING]
        # A masked evaluation that is given up says why in its record. It is not repeated: those who
        # masked a score for this state do so no second time.
        needs_scores = state.plan.needs_scores and state.rules >= RULES_WITH_PAUSES and not short
        # Devices that were merely away do not stop a run; devices that refuse will refuse again.
        if refusing and needs_scores and not counted:
            state = _unscored(state, refusing, now_s)
        else:
            state = _gather(state, (round_.number + 1, False), now_s)
        return state, (Judged(round_.number, counted),)
    state = replace(state, phase=Phase.REDUCING, since_s=now_s)
    return state, (Reduce(round_.number, counted),)


def _return(state: RunState, counted: tuple[Lease, ...], given_up: str, now_s: float) -> RunState:
    """Replace a spoilt state by the last good one, or stop where that was done often enough."""
    watch, reason = state.watch, why_spoilt(state, counted, given_up)
    number = state.turn[0]
    state = replace(
        state, shared=state.good, fresh_optimizer=True, history=amended(state, returned=reason),
        watch=replace(watch, bad=0, returns=watch.returns + 1),
    )  # fmt: skip
    if given_up:
        state = _give_up(state, given_up, now_s)
    else:
        state = replace(_gather(state, turn_after(state, number), now_s), attempt=0)
    if watch.returns < state.plan.returns:
        return state
    reason += f"; it had returned {watch.returns} times before, so look at the devices, then resume"
    return replace(state, phase=Phase.STOPPED, reason=reason)


def _give_up(state: RunState, why: str, now_s: float) -> RunState:
    again = replace(_gather(state, state.turn, now_s), attempt=state.attempt + 1)
    if again.attempt >= MAX_GIVEN_UP:
        reason = f"{MAX_GIVEN_UP} rounds in a row were given up; the last had {why}"
        return replace(again, phase=Phase.STOPPED, reason=reason)
    if state.rules < RULES_WITH_PAUSES:
        return again
    pause_s = min(FIRST_PAUSE_S * 2 ** (again.attempt - 1), MAX_PAUSE_S)
    return replace(again, not_before_s=now_s + pause_s)


def _unscored(state: RunState, refusing: list[Lease], now_s: float) -> RunState:
    """Stop the run: no device scored, and a result without a measurement is not registered."""
    kinds = f"{len(refusing)} devices declined or were refused"
    reason = (
        f"no device scored round {state.turn[0]}: {kinds}, {refusing[0].device} because: "
        f"{refusing[0].reason}"
    )
    again = replace(_gather(state, state.turn, now_s), attempt=state.attempt + 1)
    return replace(again, phase=Phase.STOPPED, reason=reason)


def _gather(state: RunState, turn: tuple[int, bool], now_s: float) -> RunState:
    return replace(state, phase=Phase.GATHERING, since_s=now_s, turn=turn, round=None)


def _because(state: RunState, reason: str) -> RunState:
    return state if state.reason == reason else replace(state, reason=reason)


def _away(state: RunState, device: str, since_s: float | None) -> RunState:
    """Record since when a device has been away; it keeps its lease for `patience_s`."""
    lease = open_lease(state, device)
    return state if lease is None else put_lease(state, replace(lease, away_s=since_s))


# fmt: off
_LIVE: Final = (Phase.GATHERING, Phase.COLLECTING, Phase.REDUCING, Phase.FINISHING, Phase.STOPPED)
_ALWAYS: Final[Mapping[type, Rule]] = {
    Joined: _join, Left: _leave, Restarted: _restart, Refused: _refuse, Failed: _fail,
    Arrived: unwanted, Answered: unwanted, Scored: unwanted, Masked: unwanted,
}
RULES: Final[Mapping[tuple[Phase, type], Rule]] = {
    **{(phase, event): rule for phase in _LIVE for event, rule in _ALWAYS.items()},
    **{(phase, Stopped): _stop for phase in _LIVE if phase is not Phase.STOPPED},
    (Phase.COLLECTING, Asked):    _ask,
    (Phase.COLLECTING, Arrived):  _arrive,
    (Phase.COLLECTING, Answered): _answer,
    (Phase.COLLECTING, Scored):   _score,
    (Phase.COLLECTING, Declined): _refuse,
    (Phase.COLLECTING, Masked):   masked_round.take_answer,
    (Phase.COLLECTING, Exchanged): _exchange,
    (Phase.COLLECTING, Tick):     _tick,
    (Phase.REDUCING, Reduced):    _reduce,
    (Phase.FINISHING, Finished):  _finish,
    (Phase.STOPPED, Resumed):     _resume,
}
# fmt: on
