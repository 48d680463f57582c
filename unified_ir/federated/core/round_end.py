"""What rules note when a round is over: its record, the loss over devices, the next turn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from triplane.unified_ir.federated.core.lease_base import LeaseBase
from triplane.unified_ir.federated.core.limits import lower_median
from triplane.unified_ir.federated.core.metric import Scores
from triplane.unified_ir.federated.core.run import (
    RULES_WITH_WATCHES,
    UNWILLING,
    Ended,
    Lease,
    Members,
    Outcome,
    Reduced,
    Round,
    RunState,
)
from triplane.unified_ir.federated.core.spoilt import after_loss, is_spoilt, most_loss


def ended(round_: Round, now_s: float, given_up: str) -> Ended:
    """Return the record of a round. given_up: why it is abandoned, or empty."""
    tally = dict.fromkeys(Outcome, 0)
    for lease in round_.leases:
        tally[lease.outcome] += 1
    updates = [x.update for x in round_.leases if x.update is not None]
    weight = sum(u.examples for u in updates)
    loss = sum(u.examples * u.loss for u in updates) / weight if weight else math.nan
    return Ended(
        number=round_.number,
        evaluates=round_.evaluates,
        opened_s=round_.opened_s,
        closed_s=now_s,
        asked=len(round_.leases),
        counted=tally[Outcome.COUNTED],
        refused=tally[Outcome.REFUSED] + tally[Outcome.DECLINED],
        late=tally[Outcome.LATE],
        lost=tally[Outcome.LOST],
        # Devices may claim losses whose sum float64 does not hold; a stored number is finite.
        loss=loss if math.isfinite(loss) else math.nan,
        bytes_up=sum(u.size for u in updates)
        + sum(answer.size for x in round_.leases for answer in x.answers),
        bytes_down=sum(x.bytes_down for x in round_.leases),
        given_up=given_up,
        left_out=round_.left_out,
    )


def turn_after(state: RunState, number: int) -> tuple[int, bool]:
    """Return the turn after a learning round that is over."""
    every = state.plan.evaluate_every
    judged = number == state.plan.rounds or (every > 0 and number % every == 0)
    judged = judged and state.plan.scores is not Scores.OFF
    return (number, True) if judged else (number + 1, False)


def with_included(state: RunState, counted: Iterable[Lease]) -> RunState:
    """Return the state whose members know that these updates are in the next shared state."""
    members = state.members
    assert isinstance(members, Members)
    for lease in counted if state.rules >= RULES_WITH_WATCHES else ():
        member = replace(members[lease.device], included_lease=lease.id)
        members = members.with_(lease.device, member)
    return replace(state, members=members)


def amended(state: RunState, **fields: Any) -> tuple[Ended, ...]:
    """Return the history with fields of its newest record changed."""
    return (*state.history[:-1], replace(state.history[-1], **fields))


def next_base(state: RunState) -> LeaseBase:
    """Return the base of leases that are opened now, when no round is open."""
    # Counted in the history, which earlier releases stored as well.
    published = sum(not x.evaluates and (not x.given_up or bool(x.returned)) for x in state.history)
    return LeaseBase(version=published, state=state.shared)


def with_bounds(state: RunState, event: Reduced) -> tuple[Ended, ...]:
    """Return the history with what the newest round's reduction says of its norm bound."""
    follows = bool(event.clip and state.plan.least)
    if not event.scaled and not follows:
        return state.history
    return amended(state, scaled=event.scaled, norm_bound=state.norm if follows else 0.0)


def watches(state: RunState) -> bool:
    """Return whether the run looks at the loss over devices."""
    return state.rules >= RULES_WITH_WATCHES and state.plan.returns > 0


def watched(state: RunState, round_: Round, counted: tuple[Lease, ...], *, short: bool) -> RunState:
    """Return the state after the loss of a round that is over."""
    if not short:
        loss = _typical_loss(counted)
    elif 2 * sum(x.outcome in UNWILLING for x in round_.leases) > len(round_.leases):
        loss = math.nan  # devices decline where their loss is not finite
    else:
        return state
    return replace(state, watch=after_loss(state.watch, loss))


def must_return(state: RunState, round_: Round, *, short: bool) -> bool:
    """Return whether the state is replaced by the last good one after a watched learning round.

    After the last round no other one could tell, so there a single bad round is enough: what is
    registered began from a state that devices found good.
    """
    is_last = round_.number == state.plan.rounds and not short
    return bool(state.good) and (is_spoilt(state.watch) or (is_last and state.watch.bad > 0))


def _typical_loss(counted: Iterable[Lease]) -> float:
    """Return the lower median over devices, which a minority cannot raise."""
    return lower_median([x.update.loss for x in counted if x.update is not None])


def why_spoilt(state: RunState, counted: Iterable[Lease], given_up: str) -> str:
    """Return the reason of a return, for people. given_up: why the round was, or empty."""
    watch = state.watch
    if given_up:
        why = f"most devices declined ({given_up})"
    else:
        why = f"the loss over devices is {_typical_loss(counted):.4g}, above {most_loss(watch):.4g}"
    rounds = f"{watch.bad} rounds in a row" if watch.bad > 1 else "the last round"
    return f"{why}, in {rounds}; returned to the last good state"
