"""Which devices a round may ask, and why it waits.

In a run with differential privacy a device whose update counted in round r, also if that round was
given up, is not asked again before round r + `separation`; it may be asked for r itself again,
which still publishes one sum. In masked rounds that holds once it was asked for its masked input.
Once it took part in `most_uses` rounds, it is never asked again. The first round waits until as
many devices are known as rounds of different devices need.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from triplane.unified_ir.federated.core.lease_changes import members_of
from triplane.unified_ir.federated.core.run import NEVER, RULES_WITH_WAITS, Lease, RunState
from triplane.unified_ir.federated.core.sorted_map import SortedMap

MAX_NAMED: Final = 5
"""Number of absent devices that the reason of a waiting run names."""


def learners(state: RunState) -> SortedMap[Any, str]:
    """Return the connected devices that may learn in the present round, by (rests_until, name).

    With a separation, the time grows with the number of devices that rest from a use.
    """
    members = members_of(state)
    able = members.indexed("learners")
    for name in _barred(state, "used"):
        able = able.without((members[name].rests_until, name))
    return able


def count_learners(state: RunState) -> tuple[int, int]:
    """Return the number of `learners`, and how many of them do not rest in the present round."""
    members, number = members_of(state), state.turn[0]
    able = members.indexed("learners")
    drawn = able.count_until(lambda key: key[0] > number)
    barred = _count_barred(state)
    resting = sum(members[name].rests_until > number for name in _barred(state, "used_resting"))
    return len(able) - barred, drawn - (barred - resting)


def chosen(state: RunState, able: Iterable[tuple[int, str]]) -> list[str]:
    """Draw devices fairly, only by seed, round and names; resting devices come last.

    able: pairs (`RunMember.rests_until`, name).
    """
    number = state.turn[0]

    def rank(key: tuple[int, str]) -> tuple[int, bytes]:
        text = f"{state.plan.seed}\n{number}\n{state.attempt}\n{key[1]}"
        # A hash as random rank: it depends on no generator, and on no other device.
        return max(0, key[0] - number), hashlib.sha256(text.encode()).digest()

    return sorted(name for _, name in sorted(able, key=rank)[: state.plan.asked])


def waits_for(able: int, state: RunState, *, evaluates: bool) -> str:
    """Return why a round does not open yet. able: connected devices that may be asked."""
    away = list(itertools.islice(members_of(state).indexed("absent"), MAX_NAMED))
    wanted = "" if evaluates else f" of {state.plan.asked}"
    text = f"{able}{wanted} devices are connected"
    barred = 0 if evaluates else _count_barred(state)
    if barred and (budget := state.plan.budget) is not None:
        text += (
            f"; {barred} more may not be asked, because uses of a device are {budget.separation} "
            f"rounds apart, and at most {budget.most_uses}"
        )
    return f"{text}; away: {', '.join(away)}" if away else text


def lacks_population(state: RunState) -> str:
    """Return why the first round of a run with a separation waits for devices, or empty."""
    budget = state.plan.budget
    if budget is None or budget.separation == 1 or state.turn != (1, False):
        return ""
    apart = min(budget.separation, state.plan.rounds)  # in fewer rounds no device comes again
    needed = state.plan.asked * apart
    known = len(members_of(state).indexed("known"))
    if known >= needed:
        return ""
    return (
        f"{state.plan.asked} devices a round that rest until {apart} rounds later need "
        f"{needed} devices, {known} have joined; wait for more, or begin a run with fewer devices "
        "a round or a shorter separation"
    )


def lacks_uses(state: RunState) -> str:
    """Return why no round can begin before new devices join, or empty.

    Too few of the devices that are known may ever be used again, so a wait for them has no end.
    """
    budget, members = state.plan.budget, members_of(state)
    if budget is None or state.rules < RULES_WITH_WAITS:
        return ""
    known, used_up = len(members.indexed("known")), len(members.indexed("used_up"))
    left, needed = known - used_up, max(state.plan.quorum, state.plan.least)
    if not used_up or left >= needed:
        return ""
    return (
        f"{used_up} of {known} devices were used in {budget.most_uses} rounds, and none may be "
        f"used more often (most uses); {left} are left of {needed} needed. Add devices and resume "
        "the run, or start a new one"
    )


def note_published(state: RunState, leases: Iterable[Lease]) -> RunState:
    """Return the state after the sum of these leases was published.

    Of masked rounds, `note_asked` has counted them.
    """
    if state.plan.budget is None or state.plan.least:
        return state
    return _with_uses(state, [lease.device for lease in leases])


def note_asked(state: RunState, devices: Iterable[str]) -> RunState:
    """Return the state after these devices were asked for their masked inputs.

    They charge their accounts now, and the cloud may see a sum of theirs although the round is
    given up, so it is a use whatever becomes of the round.
    """
    if state.plan.budget is None or state.round is None:
        return state
    members, number = members_of(state), state.round.number
    for device in devices:
        members = members.with_(device, replace(members[device], used_round=number))
    return _with_uses(replace(state, members=members), devices)


def _with_uses(state: RunState, devices: Iterable[str]) -> RunState:
    budget, members = state.plan.budget, members_of(state)
    assert budget is not None
    for device in devices:
        member = members[device]
        uses = member.uses + 1
        last = NEVER if uses >= budget.most_uses else member.used_round
        members = members.with_(device, replace(member, uses=uses, used_round=last))
    return replace(state, members=members)


def _barred(state: RunState, index: str) -> list[str]:
    """Return the learners of an index that were used too recently or too often for this round."""
    budget, number = state.plan.budget, state.turn[0]
    if budget is None:
        return []
    used = members_of(state).indexed(index)
    early = used.count_until(lambda key: key[0] > number - budget.separation)
    later = itertools.islice(used, early, None)
    return [name for round_, name in later if round_ != number]


def _count_barred(state: RunState) -> int:
    """Return the number of `_barred` learners, by bisection."""
    budget, number = state.plan.budget, state.turn[0]
    if budget is None:
        return 0
    used = members_of(state).indexed("used")
    early = used.count_until(lambda key: key[0] > number - budget.separation)
    before, until = (
        used.count_until(partial(_is_used_since, least=n)) for n in (number, number + 1)
    )
    return len(used) - early - (until - before)


def _is_used_since(key: tuple[int, str], least: int) -> bool:
    return key[0] >= least
