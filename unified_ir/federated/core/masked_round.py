"""Rules of a masked round: its steps, who is left in each, and who contributed for a state.

The whole round is in the phase of collecting, with one lease for each device. A step takes one
answer from each device that is left; when all are there, or its time is over, the cloud takes them
(`Exchange`) and the next step begins (`Exchanged`). Devices learn before they answer `keys`, and
may learn for another run when their shares are due, so those steps may last until the deadline of
the round. The others have `phase_s`.

    lost in keys, shares or inputs           its update is not in the sum; the lease ends
    lost in signatures or reveals            its update stays in the sum; the lease is left open
    in a group that is left out              no update of the group counts; the lease ends

A device that was asked for its masked input is spent: whatever happens to the round, it contributes
for this state no second time, because two sums that differ by one device tell its update.
An evaluating round can be masked, too: its inputs are scores, and it is not repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from triplane.unified_ir.federated.core.lease_changes import (
    Step,
    away_since,
    held_lease,
    leases_of,
    members_of,
    open_leases,
    put_lease,
    resting,
    settle,
    unwanted,
    with_member,
    with_rest,
)
from triplane.unified_ir.federated.core.limits import EXAMPLES_FACTOR, lower_median
from triplane.unified_ir.federated.core.masked_step import (
    LostGroup,
    MaskedProgress,
    MaskedStep,
    StepAnswer,
)
from triplane.unified_ir.federated.core.run import (
    RULES_WITH_WAITS,
    UNWILLING,
    Effects,
    Exchange,
    Exchanged,
    Lease,
    Masked,
    Outcome,
    Phase,
    Round,
    RunState,
    Tell,
)
from triplane.unified_ir.federated.core.selection import note_asked

REFUSED: Final = "masking"
"""The kind under which refused answers are counted."""
GIVEN_UP: Final = "the round was given up"
GROUP_LEFT_OUT: Final = "the round goes on without this device's group"
MAX_LEFT_OUT_CHARS: Final = 500
"""What a round's record says at most about groups that were left out."""
MAX_KEYS: Final = 4
"""Times that a device may advertise keys in a round: its process may end and begin again."""


def begun(state: RunState, chosen: Iterable[str], now_s: float) -> MaskedProgress:
    """Return the first step of a round of these devices."""
    members, evaluates = [state.members[device] for device in chosen], state.turn[1]
    examples = [m.held_out if evaluates else m.examples for m in members]
    # As in `limits.limited`, but by what devices offer: nobody sees the weight of an update.
    cap = min(max(examples), EXAMPLES_FACTOR * int(lower_median(examples)))
    return MaskedProgress(step=MaskedStep.KEYS, opened_s=now_s, cap=cap)


def step_ends_s(state: RunState, masked: MaskedProgress) -> float:
    """Return when the present step of the open round ends although answers are missing."""
    plan, round_ = state.plan, state.round
    assert round_ is not None
    deadline_s, ends_s = round_.opened_s + plan.deadline_s, masked.opened_s + plan.phase_s
    if masked.step is MaskedStep.KEYS:
        return deadline_s
    if masked.step is MaskedStep.SHARES and state.rules >= RULES_WITH_WAITS:
        # Nobody is spent before the inputs, so there is time for a device that is busy.
        return max(deadline_s, ends_s)
    return ends_s


def is_in_step(lease: Lease, masked: MaskedProgress) -> bool:
    """Return whether the device of an open lease takes part in the present step."""
    return lease.due is masked.step or answer_of(lease, masked.step) is not None


def answer_of(lease: Lease, step: MaskedStep) -> StepAnswer | None:
    """Return the newest answer to a step, taken or not."""
    return next((x for x in reversed(lease.answers) if x.step is step), None)


def has_taken(lease: Lease, step: MaskedStep) -> bool:
    """Return whether the cloud took the device's answer to that step."""
    return lease.taken is not None and lease.taken.is_at_least(step)


def is_wanted(state: RunState, lease: Lease, answer: StepAnswer) -> bool:
    """Return whether the answer of an open lease is due, or replaces keys that nobody saw yet."""
    masked = state.round.masked if state.round else None
    if masked is None or lease.due is answer.step:
        return masked is not None
    return (
        answer.step is masked.step is MaskedStep.KEYS
        and not masked.exchanging
        and len(lease.answers) < MAX_KEYS
        and answer not in lease.answers
    )


def take_answer(state: RunState, event: Masked) -> Step:
    """Keep an answer that is wanted; another one changes nothing."""
    lease = held_lease(state, event)
    if lease is None:
        return unwanted(state, event)
    if not is_wanted(state, lease, event.answer):
        return state, ()
    answers = (*lease.answers, event.answer)
    answered = replace(lease, due=None, answers=answers, bytes_down=event.bytes_down)
    return put_lease(state, answered), ()


def leave(state: RunState, lease: Lease, outcome: Outcome) -> Step:
    """Take a device out of the round; its lease stays open while its update is in the sum."""
    gone = replace(lease, due=None)
    if has_taken(lease, MaskedStep.INPUTS):
        return put_lease(state, gone), (Tell(lease.device),)
    return settle(state, gone, outcome)


def lose_silent(state: RunState, round_: Round, masked: MaskedProgress, now_s: float) -> Step:
    """Take out the devices whose answer is overdue, or that were away for too long."""
    gone_s = now_s - state.plan.patience_s
    if now_s >= step_ends_s(state, masked):
        silent: Iterable[Lease] = leases_of(round_).listed("waiting")
    else:
        silent = [x for x in away_since(round_, gone_s) if x.due]
    tells: Effects = ()
    for lease in silent:
        away = lease.away_s is not None and lease.away_s <= gone_s
        why = "its stream was away too long" if away else f"the step {masked.step} took too long"
        state, more = leave(state, replace(lease, reason=why), Outcome.LOST)
        if not away:
            state = with_member(state, resting(state.members[lease.device], state.turn[0]))
        tells += more
    return state, tells


def complete(
    state: RunState, round_: Round, masked: MaskedProgress
) -> tuple[RunState, Effects, str]:
    """Ask for the exchange once all answers are there; the text says why the round is given up."""
    leases = leases_of(round_)
    waiting = len(leases.indexed("waiting"))
    answered = len(leases.indexed("open")) - waiting
    enough = masked.step is MaskedStep.KEYS and answered >= state.plan.devices
    if masked.exchanging or (waiting and not enough):
        return state, (), ""
    tells: Effects = ()
    for lease in leases.listed("waiting"):
        slower = replace(lease, due=None, reason="enough others were faster")
        state, more = settle(state, slower, Outcome.LATE)
        tells += more
    needed = state.plan.fewest(evaluates=round_.evaluates)
    if masked.step is MaskedStep.KEYS and answered < needed:
        refusing = next((x for x in round_.leases if x.outcome in UNWILLING), None)
        because = f"; {refusing.device} did not: {refusing.reason}" if refusing else ""
        return state, tells, f"{answered} devices of {needed} needed advertised keys{because}"
    state = _with_step(state, replace(masked, exchanging=True))
    return state, (*tells, *pending(state)), ""


def is_masking(state: RunState) -> bool:
    """Return whether devices of the open round were asked for their input, which spends them."""
    masked = state.round.masked if state.round and state.phase is Phase.COLLECTING else None
    return masked is not None and masked.step.is_at_least(MaskedStep.INPUTS)


def is_exchanging(state: RunState) -> bool:
    """Return whether the cloud takes the answers of a step at the moment."""
    round_ = state.round
    return round_ is not None and round_.masked is not None and round_.masked.exchanging


def pending(state: RunState) -> Effects:
    """Return the exchange that is under way, if one is."""
    round_ = state.round
    if not is_exchanging(state):
        return ()
    assert round_ is not None
    assert round_.masked is not None
    step = round_.masked.step
    answered = tuple(x for x in open_leases(state) if answer_of(x, step))
    return (Exchange(round_.number, round_.attempt, step, answered),)


def restarted(state: RunState, now_s: float) -> RunState:
    """Begin the time of a step again: devices could not answer while the cloud was away."""
    masked = state.round.masked if state.round else None
    if masked is None or masked.step is MaskedStep.KEYS:
        return state
    return _with_step(state, replace(masked, opened_s=now_s))


def is_expected(state: RunState, event: Exchanged) -> bool:
    """Return whether the event is of the exchange that is under way."""
    round_ = state.round
    return (
        is_exchanging(state)
        and round_ is not None
        and round_.masked is not None
        and (event.number, event.attempt) == (round_.number, round_.attempt)
        and event.step is round_.masked.step
    )


def refuse(state: RunState, refused: Iterable[tuple[str, str]]) -> Step:
    """Take out the devices whose answers could not be taken, for these reasons."""
    tells: Effects = ()
    for device, reason in refused:
        assert state.round is not None
        lease = leases_of(state.round).of(device)
        if lease is None or lease.outcome is not Outcome.OPEN:
            continue
        count = state.refusals.get(REFUSED, 0) + 1
        state = replace(state, refusals={**state.refusals, REFUSED: count})
        kept = tuple(x for x in lease.answers if has_taken(lease, x.step))
        gone = replace(lease, reason=reason, answers=kept)
        after, more = leave(state, gone, Outcome.REFUSED)
        state = with_rest(state, after, device)
        tells += more
    return state, tells


def leave_out(state: RunState, groups: Iterable[LostGroup]) -> Step:
    """Take groups out of the round: none of their updates counts, and their devices stay spent."""
    tells: Effects = ()
    for group in groups:
        for device in group.devices:
            assert state.round is not None
            lease = leases_of(state.round).of(device)
            if lease is None or lease.outcome is not Outcome.OPEN:
                continue
            ended = replace(lease, due=None, reason=GROUP_LEFT_OUT)
            state, more = settle(state, ended, Outcome.LOST)
            tells += more
        assert state.round is not None
        text = "; ".join(filter(None, [state.round.left_out, group.reason]))[:MAX_LEFT_OUT_CHARS]
        state = replace(state, round=replace(state.round, left_out=text))
    return state, tells


def advance(state: RunState, masked: MaskedProgress, now_s: float) -> Step:
    """Begin the next step for the devices whose answers were taken."""
    following = masked.step.next
    taken = [x for x in open_leases(state) if answer_of(x, masked.step)]
    for lease in taken:
        state = put_lease(state, replace(lease, taken=masked.step, due=following))
    if following is None:
        return state, ()
    assert state.round is not None
    # The ledgers of devices keep scores apart: one for a state, beside one update.
    if following is MaskedStep.INPUTS and not state.round.evaluates:
        asked = [x.device for x in taken]
        spent = sorted({*state.spent, *asked})
        state = note_asked(replace(state, spent=tuple(spent)), asked)
    after = replace(masked, step=following, opened_s=now_s, exchanging=False)
    state = _with_step(state, after)
    assert state.round is not None
    # Those whose patience ended in the step before: no tick comes for them again.
    state, tells = lose_silent(state, state.round, after, now_s)
    return state, (*(Tell(x.device) for x in taken), *tells)


def settle_all(state: RunState, reason: str) -> Step:
    """End the open leases of a round: they count if they are in the sum and nothing failed.

    reason: why the round is given up, or empty. It may name devices, and they know each other by
    pseudonyms only, so they are not sent it.
    """
    tells: Effects = ()
    for lease in open_leases(state):
        counts = has_taken(lease, MaskedStep.INPUTS) and not reason
        ended = replace(lease, due=None, reason=GIVEN_UP if reason else "")
        outcome = Outcome.COUNTED if counts else Outcome.LOST
        state, more = settle(state, ended, outcome)
        tells += more
    return state, tells


def unspent(state: RunState, keys: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the keys of an index of members without those that contributed for this state."""
    spent = frozenset(state.spent)
    return [key for key in keys if key[1] not in spent]


def why_exhausted(state: RunState) -> str:
    """Return why no round can begin from this state any more, or empty."""
    if not state.spent:
        return ""
    unusable = {*state.spent}
    if state.rules >= RULES_WITH_WAITS:
        unusable |= {*members_of(state).indexed("used_up").values()}
    left = sum(m.examples > 0 and m.device not in unusable for m in members_of(state).values())
    needed = state.plan.fewest(evaluates=False)
    if left >= needed:
        return ""
    last = state.history[-1].given_up if state.history else ""
    why = f" (the last one: {last})" if last else ""
    return (
        f"a device masks an update for one state only once, and {len(state.spent)} were asked "
        f"to in rounds without a sum{why}; {left} others are left of {needed} needed. Add devices "
        "and resume the run, or start a new one"
    )


def _with_step(state: RunState, masked: MaskedProgress) -> RunState:
    assert state.round is not None
    return replace(state, round=replace(state.round, masked=masked))
