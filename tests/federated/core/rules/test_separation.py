"""Runs with a budget: who may be asked again, how often, and what is charged."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.federated.core.rules.runs import arrived, begun, open_lease, plan, step

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core import rules
from triplane.unified_ir.federated.core.rules import due_s
from triplane.unified_ir.federated.core.run import (
    NEVER,
    NEWEST_RULES,
    RULES_WITH_WATCHES,
    Declined,
    Joined,
    Phase,
    Reduced,
    Resumed,
    RunMember,
    RunState,
    Tick,
)
from triplane.unified_ir.federated.core.selection import count_learners, learners
from triplane.unified_ir.federated.privacy.budget import RunBudget, run_budget


def private(rounds=6, *, separation=2, most_uses=1000, devices=2):
    budget = run_budget(4.0, 1e-5, rounds, separation=separation, most_uses=most_uses)
    return plan(rounds=rounds, devices=devices, asked=devices, quorum=1, budget=budget, clip=1.0)


def reduced(state, at_s, clip=0.0):
    number = state.turn[0]
    return step(state, Reduced(at_s=at_s, number=number, shared=f"s{number}", charged=number,
                               clip=clip))[0]  # fmt: skip


def names(count):
    return [f"d{i}" for i in range(count)]


@pytest.mark.long
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_no_device_is_used_too_early_or_too_often(data, separation, most_uses):
    """Whatever devices do: sums that are published never break what the account assumes."""
    asked = private(8, separation=separation, most_uses=most_uses)
    state, _ = begun(names(2 * separation + 2), **{f: getattr(asked, f) for f in
                     ("rounds", "devices", "asked", "quorum", "budget", "clip")})  # fmt: skip
    published: dict[str, list[int]] = {}
    now_s = 0.0
    for _ in range(60):
        now_s += 1.0
        if state.phase is Phase.REDUCING:
            for lease in state.round.leases:
                if lease.update is not None:
                    published.setdefault(lease.device, []).append(state.round.number)
            state = reduced(state, now_s)
        elif state.phase is Phase.COLLECTING and not state.round.evaluates:
            lease = data.draw(st.sampled_from([x for x in state.round.leases
                                               if open_lease(state, x.device)]))  # fmt: skip
            if data.draw(st.booleans()):
                state, _ = step(state, arrived(state, lease.device, now_s))
            else:
                event = Declined(at_s=now_s, device=lease.device, lease=lease.id, reason="no")
                state, _ = step(state, event)
        else:
            later_s = due_s(state)
            if later_s is None:
                break
            now_s = max(now_s, later_s)
            state, _ = step(state, Tick(at_s=now_s))
    for rounds in published.values():
        assert all(b - a >= separation for a, b in itertools.pairwise(rounds))
        assert len(rounds) <= most_uses
    assert state.charged == len({r for rounds in published.values() for r in rounds})
    assert state.budget == replace(asked.budget, rounds=state.charged)
    assert state.budget.spent <= 4.0


def test_a_run_shorter_than_its_separation_needs_devices_for_its_rounds_only():
    asked = private(2, separation=1000)
    fields = {f: getattr(asked, f) for f in ("devices", "asked", "quorum", "rounds", "budget")}
    state, _ = begun(names(4), **fields)
    assert state.phase is Phase.COLLECTING


def test_the_first_round_waits_for_the_population_and_says_so():
    asked = private(separation=3)
    fields = {f: getattr(asked, f) for f in ("devices", "asked", "quorum", "rounds", "budget")}
    state, _ = begun(names(5), **fields)
    state, _ = step(state, Tick(at_s=100.0))
    assert state.phase is Phase.GATHERING
    assert "2 devices a round that rest until 3 rounds later need 6 devices, 5 have joined" in (
        state.reason
    )
    state, _ = step(state, Joined(at_s=101.0, device="late", examples=4))
    assert state.phase is Phase.COLLECTING


def test_devices_that_rest_are_named_while_a_round_waits_for_them():
    asked = private(separation=2)
    fields = {f: getattr(asked, f) for f in ("devices", "asked", "quorum", "rounds", "budget")}
    state, _ = begun(names(4), **fields)
    first = [x.device for x in state.round.leases]
    for device in first:
        state, _ = step(state, arrived(state, device))
    state = reduced(state, 2.0)
    assert not {x.device for x in state.round.leases} & set(first)
    third = [x.device for x in state.round.leases]
    for device in third:
        lease = open_lease(state, device).id
        state, _ = step(state, Declined(at_s=3.0, device=device, lease=lease, reason="no"))
    assert state.phase is Phase.GATHERING, "given up"
    state, _ = step(state, Tick(at_s=50.0))
    assert not {x.device for x in state.round.leases} & set(first), "round 2 again, of the others"


def used_up(rules=NEWEST_RULES, quorum=2):
    """Return the run after a round of two devices of three, which may be used once."""
    asked = private(separation=1, most_uses=1)
    fields = {f: getattr(asked, f) for f in ("devices", "asked", "rounds", "budget")}
    state, _ = begun(names(3), quorum=quorum, **fields)
    state = replace(state, rules=rules)
    for lease in state.round.leases:
        state, _ = step(state, arrived(state, lease.device))
    return reduced(state, 2.0)


def test_a_run_whose_devices_may_not_be_used_again_stops_and_goes_on_with_new_ones():
    state = used_up()
    assert state.phase is Phase.STOPPED
    assert state.reason.startswith(
        "2 of 3 devices were used in 1 rounds, and none may be used more often (most uses); 1 are "
        "left of 2 needed. Add devices"
    )
    stopped, _ = step(state, Resumed(at_s=3.0, reason="go"))
    assert stopped.phase is Phase.STOPPED, "nobody is new"
    state, _ = step(state, Joined(at_s=4.0, device="new", examples=4))
    state, _ = step(state, Resumed(at_s=5.0, reason="go"))
    assert {x.device for x in state.round.leases} > {"new"}


def test_a_run_goes_on_while_devices_that_may_be_used_make_its_quorum():
    state, _ = step(used_up(quorum=1), Tick(at_s=100.0))
    assert (state.phase, len(state.round.leases)) == (Phase.COLLECTING, 1)


def test_a_run_of_earlier_rules_waits_for_devices_of_which_none_may_be_used_again():
    state, _ = step(used_up(RULES_WITH_WATCHES), Tick(at_s=100.0))
    assert state.phase is Phase.GATHERING
    assert "more may not be asked" in state.reason


def test_a_plan_has_no_more_rounds_than_its_budget_allows():
    budget = RunBudget(1.0, 1e-5, 5.0)
    most = budget.most_rounds(100)
    assert 0 < most < 100
    plan(rounds=most, budget=budget)
    with pytest.raises(InvalidInput, match="do not fit into the budget"):
        plan(rounds=most + 1, budget=budget)


def test_the_norm_of_a_round_is_that_of_the_one_before():
    asked = private(separation=1)
    fields = {f: getattr(asked, f) for f in ("devices", "asked", "quorum", "rounds", "budget")}
    state, _ = begun(names(2), clip=3.0, **fields)
    assert state.norm == 3.0
    for device in names(2):
        state, _ = step(state, arrived(state, device))
    assert reduced(state, 2.0, clip=2.5).norm == 2.5


@given(st.data())
def test_learners_are_counted_without_a_look_at_each(data):
    budget = run_budget(
        4.0,
        1e-5,
        20,
        separation=data.draw(st.integers(1, 5)),
        most_uses=data.draw(st.integers(1, 3)),
    )
    number = data.draw(st.integers(1, 9))
    members = {
        name: RunMember(
            device=name,
            connected=data.draw(st.booleans()),
            examples=data.draw(st.integers(0, 1)),
            used_round=data.draw(st.sampled_from([*range(10), NEVER])),
            rests_until=data.draw(st.integers(0, 10)),
        )
        for name in names(data.draw(st.integers(0, 12)))
    }
    state = RunState(
        plan=plan(rounds=9, budget=budget), run="r", shared="", members=members,
        turn=(number, False),
    )  # fmt: skip
    able = list(learners(state))
    assert count_learners(state) == (len(able), sum(rests <= number for rests, _ in able))


def test_devices_that_come_while_others_rest_from_a_use_are_not_each_looked_at(monkeypatch):
    """Otherwise 10,000 devices that come back while a round waits cost 10,000 looks each."""
    resting = [RunMember(device=n, connected=True, examples=5, used_round=4) for n in names(5)]
    state = RunState(
        plan=private(separation=3), run="r", shared="", members={m.device: m for m in resting},
        turn=(5, False), rules=NEWEST_RULES,
    )  # fmt: skip
    monkeypatch.setattr(rules, "learners", None)
    after, _ = step(state, Joined(at_s=1.0, device=resting[0].device, examples=6, held_out=0))
    assert "5 more may not be asked" in after.reason
