"""Runs, devices and events for tests of the rules."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from triplane.unified_ir.federated.core import lease_changes, rules
from triplane.unified_ir.federated.core.rules import lease_id
from triplane.unified_ir.federated.core.run import (
    NEWEST_RULES,
    Answered,
    Arrived,
    Asked,
    Declined,
    Joined,
    Left,
    Reduce,
    Reduced,
    Refused,
    Restarted,
    Resumed,
    RunState,
    Score,
    Scored,
    Stopped,
    Tick,
    Update,
)
from triplane.unified_ir.federated.core.run_plan import RunPlan

step: Any = rules.step
open_lease: Any = lease_changes.open_lease
DEVICES = ("ada", "bea", "cem", "dia", "eli")


def plan(**changes):
    given_ = {
        "rounds": 2, "devices": 3, "asked": 3, "quorum": 2, "deadline_s": 60.0, "patience_s": 5.0,
    }  # fmt: skip
    return RunPlan(**{**given_, **changes})


def fresh(asked, rules=NEWEST_RULES):
    return RunState(plan=asked, run="r1", shared="s0", rules=rules)


def begun(joined=DEVICES[:3], **changes):
    """A run whose devices have joined at second 0."""
    state, effects = fresh(plan(**changes)), ()
    for name in joined:
        state, more = step(state, Joined(at_s=0.0, device=name, examples=10, held_out=4))
        effects += more
    return state, effects


def update(device, *, blob="u"):
    return Update(blob=f"{blob}-{device}", size=100, examples=10, loss=0.5, seconds=0.1)


def arrived(state, device, at_s=1.0):
    lease = open_lease(state, device)
    return Arrived(at_s=at_s, device=device, lease=lease.id, update=update(device))


def all_arrive(state, at_s=1.0):
    effects = ()
    for lease in state.round.leases:
        if open_lease(state, lease.device):
            state, more = step(state, arrived(state, lease.device, at_s))
            effects += more
    return state, effects


def reduces(effects):
    return [effect for effect in effects if isinstance(effect, Reduce)]


def asked(state, *devices, at_s=1.0):
    found = state.round
    return Asked(
        at_s=at_s, number=found.number, evaluates=found.evaluates, attempt=found.attempt,
        messages=dict.fromkeys(devices, ""),
    )  # fmt: skip


def declined(state, device, at_s, reason="too hot"):
    lease = open_lease(state, device).id
    return Declined(at_s=at_s, device=device, lease=lease, reason=reason, bytes_down=7)


def all_decline(state, at_s):
    for name in DEVICES[:3]:
        state, _ = step(state, declined(state, name, at_s))
    return state


def judging(rules=NEWEST_RULES):
    """A run of one round whose devices are asked to score it."""
    state, _ = begun(rounds=1)
    state, _ = all_arrive(replace(state, rules=rules))
    return step(state, Reduced(at_s=2.0, number=1, shared="s1"))[0]


def opcodes(run, *arguments):
    """(what it gives, instructions of Python that it took)."""
    taken = 0

    def trace(frame, kind, _):
        nonlocal taken
        frame.f_trace_opcodes = True
        taken += kind == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = run(*arguments)
    finally:
        sys.settrace(before)
    return found, taken


NAMES = st.sampled_from(DEVICES)
LEASES = st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 2), NAMES)


@st.composite
def events(draw):
    """Any events in order of time, most of them about leases that may exist."""
    now, found = 0.0, []
    for _ in range(draw(st.integers(5, 60))):
        now += draw(st.sampled_from([0.0, 0.5, 4.0, 70.0]))
        device = draw(NAMES)
        number, evaluates, attempt, holder = draw(LEASES)
        lease = lease_id("r1", number, evaluates=evaluates, attempt=attempt, device=holder)
        score = Score(samples=4, before=0.5, after=0.6, round=number)
        found.append(
            draw(
                st.sampled_from(
                    [
                        Joined(at_s=now, device=device, examples=5, held_out=2),
                        Joined(at_s=now, device=device, examples=5, held_out=2),
                        Left(at_s=now, device=device),
                        Arrived(at_s=now, device=holder, lease=lease, update=update(holder)),
                        Arrived(at_s=now, device=holder, lease=lease, update=update(holder)),
                        Arrived(at_s=now, device=device, lease=lease, update=update(device)),
                        Answered(at_s=now, device=holder, lease=lease, update=update(holder)),
                        Asked(
                            at_s=now,
                            number=number,
                            evaluates=evaluates,
                            attempt=attempt,
                            messages={device: "", holder: ""},
                        ),
                        Scored(at_s=now, device=holder, lease=lease, score=score),
                        Refused(at_s=now, device=holder, lease=lease, kind="shape", reason="r"),
                        Declined(at_s=now, device=holder, lease=lease, reason="no"),
                        Restarted(at_s=now),
                        Restarted(at_s=now, epoch="e1"),
                        Tick(at_s=now),
                        Reduced(at_s=now, number=number, shared=f"s{number}"),
                        Stopped(at_s=now, reason="s"),
                        Resumed(at_s=now, reason="r"),
                    ]
                )
            )
        )
    return found
