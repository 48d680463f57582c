"""Bases of leases, what a run references, and what comes while a round is reduced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.federated.core.rules.runs import (
    DEVICES,
    all_arrive,
    arrived,
    begun,
    events,
    fresh,
    plan,
    reduces,
    step,
    update,
)

from triplane.cloud.federation.coding import from_json, to_json
from triplane.cloud.federation.messages import settlements
from triplane.unified_ir.federated.core.lease_base import LeaseBase
from triplane.unified_ir.federated.core.lease_changes import base_of, referenced_states
from triplane.unified_ir.federated.core.run import (
    NEWEST_RULES,
    RULES_OF_OLD,
    Arrived,
    Joined,
    Lease,
    Outcome,
    Phase,
    Reduced,
    Restarted,
    Resumed,
    Round,
    RunState,
    Stopped,
)


def published(before: Any, after: Any, event: Any) -> int:
    """How many states a step has published: a reduction, or a return to an earlier state."""
    returned = [x for x in after.history[len(before.history) :] if x.returned]
    is_reduced = isinstance(event, Reduced) and before.phase is Phase.REDUCING
    return len(returned) + (is_reduced and event.number == before.turn[0])


def check_bases(before: Any, after: Any, version: int) -> None:
    """Leases of a new round learn from the newest of so many states; no lease changes its base."""
    known = {x.id: x.base for x in before.round.leases} if before.round else {}
    for lease in after.round.leases if after.round else ():
        if lease.id in known:
            assert lease.base == known[lease.id]
        else:
            assert lease.base == LeaseBase(version=version, state=after.shared)
        if lease.outcome is Outcome.OPEN:
            assert lease.base.state in referenced_states(after)


@given(events(), st.integers(RULES_OF_OLD, NEWEST_RULES))
def test_a_lease_learns_from_the_newest_state_and_says_how_many_came_before(found, rules):
    state: Any = fresh(plan(), rules)
    version = 0
    for event in found:
        before = state
        state, _ = step(state, event)
        version += published(before, state, event)
        check_bases(before, state, version)


@pytest.mark.slow
@given(st.lists(st.sampled_from([0.5, 50.0]), min_size=8, max_size=40))
def test_a_return_publishes_an_earlier_state_again(losses):
    state: Any = begun(rounds=60, returns=3)[0]
    version = 0
    for loss in losses:
        for event in round_of(state, loss, version):
            before = state
            state, _ = step(state, event)
            version += published(before, state, event)
            check_bases(before, state, version)
            assert {state.shared, state.good} - {""} <= referenced_states(state)


def round_of(state: Any, loss: float, version: int) -> Any:
    """The events of a round in which all devices report this loss; a return takes no `Reduced`."""
    for lease in state.round.leases if state.round else ():
        made = replace(update(lease.device), loss=loss)
        yield Arrived(at_s=1.0, device=lease.device, lease=lease.id, update=made)
    yield Reduced(at_s=1.0, number=state.turn[0], shared=f"s{version}x")


def test_a_stored_lease_has_its_base_and_one_of_an_earlier_release_the_present_state():
    base = LeaseBase(version=4, state="s4")
    text = (
        '{"id":"l1","device":"ann","outcome":"open","update":null,"away_s":null,"reason":"",'
        '"bytes_down":0'
    )
    said = f'{text},"base":{{"version":4,"state":"s4"}}}}'
    lease, old = Lease(id="l1", device="ann", base=base), Lease(id="l1", device="ann")
    assert (to_json(lease), to_json(old)) == (said, f"{text}}}")
    assert (from_json(Lease, said), from_json(Lease, f"{text}}}")) == (lease, old)
    state = replace(fresh(plan()), shared="s9", phase=Phase.COLLECTING)
    assert (base_of(state, lease), base_of(state, old)) == ("s4", "s9")


def test_a_snapshot_without_bases_goes_on_to_the_same_leases():
    """What an earlier release stored in the middle of a round."""
    state, _ = begun(rounds=3)
    leases = [replace(x, base=None) for x in state.round.leases]
    old = from_json(RunState, to_json(replace(state, round=replace(state.round, leases=leases))))
    assert '"base"' not in to_json(old)
    reduced = Reduced(at_s=2.0, number=1, shared="s1")
    rounds = [step(all_arrive(x)[0], reduced)[0].round for x in (state, old)]
    assert rounds[0] == rounds[1]
    assert {x.base for x in rounds[0].leases} == {LeaseBase(version=1, state="s1")}


def test_a_run_references_the_bases_of_open_leases_only():
    """Leases of one round with different bases, as rounds without a barrier would have them."""
    bases = [LeaseBase(version=n, state=f"s{n}") for n in range(3)]
    outcomes = (Outcome.OPEN, Outcome.COUNTED, Outcome.OPEN)
    leases = tuple(
        Lease(id=name, device=name, outcome=outcome, base=base)
        for name, outcome, base in zip("abc", outcomes, bases, strict=True)
    )
    state = replace(
        fresh(plan()), shared="s3", good="g", phase=Phase.COLLECTING,
        round=Round(number=4, evaluates=False, attempt=0, opened_s=0.0, leases=leases),
    )  # fmt: skip
    assert referenced_states(state) == {"s0", "s2", "s3", "g"}
    assert referenced_states(replace(state, round=None, good="")) == {"s3"}


DURING = st.lists(
    st.tuples(
        st.sampled_from(["join", "again", "strange", "restart", "stop"]),
        st.sampled_from(DEVICES),
    ),
    max_size=12,
)


@given(DURING)
def test_what_comes_while_a_round_is_reduced_is_answered_and_takes_nothing_from_the_round(during):
    """More devices are asked than needed, so that one is late; another one joins meanwhile."""
    state: Any = begun(DEVICES[:4], asked=4, rounds=3)[0]
    leases = {x.device: x.id for x in state.round.leases}
    ids = set(leases.values())
    effects: Any = ()
    for name in DEVICES[:3]:
        state, effects = step(state, arrived(state, name))
    (order,) = reduces(effects)
    assert state.phase is Phase.REDUCING
    joined = set(DEVICES[:4])
    for kind, name in during:
        state, orders = _meanwhile(state, kind, name, leases)
        joined = set() if kind == "restart" else joined | ({name} if kind == "join" else set())
        assert all(x == order for x in reduces(orders)), "the same updates, whatever happens"
        if kind in {"again", "strange"} and name in state.members:
            lease = _lease_of(kind, name, leases)
            answers = {x.lease.hex(): x for x in settlements("r1", state.members[name])}
            assert answers[lease].counted == (lease in {x.id for x in order.leases})
            assert answers[lease].counted or answers[lease].reason
    state, _ = step(state, Reduced(at_s=3.0, number=1, shared="s1"))
    state, _ = step(state, Joined(at_s=3.0, device="zoe", examples=10, held_out=4))
    for name in DEVICES[:3]:
        assert state.members[name].counted == 1
    counted = [x for x in state.history if not x.evaluates]
    assert [(x.counted, x.late) for x in counted] == [(3, 1)]
    asked = {x.device for x in state.round.leases} if state.round else set()
    assert asked <= joined | {"zoe"}, "who joined meanwhile may be asked next"
    assert not {x.id for x in (state.round.leases if state.round else ())} & ids


def _lease_of(kind, name, leases):
    return "ab" * 16 if kind == "strange" else leases.get(name, "ab" * 16)


def _meanwhile(state, kind, name, leases):
    match kind:
        case "join":
            return step(state, Joined(at_s=2.0, device=name, examples=10, held_out=4))
        case "restart":
            return step(state, Restarted(at_s=2.0))
        case "stop":
            stopped, _ = step(state, Stopped(at_s=2.0, reason="look"))
            return step(stopped, Resumed(at_s=2.0, reason=""))
    lease = _lease_of(kind, name, leases)  # of its update that counted, that was late, or of none
    return step(state, Arrived(at_s=2.0, device=name, lease=lease, update=update(name)))
