# ruff: noqa: ARG001 -- every rule of the table has the same parameters
"""The state machine of a rollout: `step(rollout, event, now_s) -> (rollout, effects)`.

Pure: no clock, no database, no stream. An event changes what is known (a bundle, a report, which
nodes count), then `wave_transitions` derives what follows, so the same facts in any order lead to
the same state.

Invariants:
* a node is assigned the version only after its wave opened, and only a signed bundle that fits it;
* while the rollout is RUNNING, no open wave has more failed nodes than its share;
* a rollout that has neither ended nor paused names in `reason` what it waits for.

A node that is excused (cordoned, relabelled, gone) counts neither as success nor as failure, and
keeps what was assigned to it. A node whose deadline passed counts as failed but keeps its
assignment, so it can still catch up later, and then counts as committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from triplane.cloud.fleet.choice import choose_target, choose_targets, with_member
from triplane.cloud.fleet.values import (
    DONE,
    LOST,
    SETTLED,
    Abort,
    BundleFailed,
    BundleReady,
    BundleSupply,
    Effect,
    Event,
    Excused,
    NodeStage,
    Pause,
    Reported,
    Restore,
    Result,
    Resume,
    Rollout,
    RolloutMember,
    RolloutPlan,
    RolloutState,
    TimePassed,
)
from triplane.cloud.fleet.wave_transitions import is_closed, settle, tallies, under_way
from triplane.proto.errors import Conflict

Rule = Callable[[Rollout, Any, float], Result]


def begin(
    id: str,  # noqa: A002 - the field's name
    plan: RolloutPlan,
    members: Iterable[RolloutMember],
    now_s: float,
    *,
    left_out: str = "",
) -> Result:
    """Return a new rollout in PREPARING, which asks for the bundles that its members prefer."""
    allowed = 0 if plan.pause_between_waves else len(plan.waves) - 1
    start = Rollout(
        id=id, plan=plan, members={m.name: m for m in members}, supplies={}, allowed=allowed,
        left_out=left_out,
    )  # fmt: skip
    return settle(choose_targets(start), now_s)


def step(rollout: Rollout, event: Event, now_s: float) -> Result:
    """Apply an event to a rollout. Conflict: a person's event in a state that forbids it."""
    return step_all(rollout, (event,), now_s)


def step_all(rollout: Rollout, events: Iterable[Event], now_s: float) -> Result:
    """Apply several events that became known together, then settle once.

    Settling looks at every node, so a thousand reports one by one would cost a million looks.
    """
    effects: tuple[Effect, ...] = ()
    for event in events:
        rollout, more = RULES[rollout.state, type(event)](rollout, event, now_s)
        effects += more
    rollout, more = settle(rollout, now_s)
    return rollout, effects + more


# Rules: each applies one event.


def _bundle_ready(r: Rollout, e: BundleReady, now_s: float) -> Result:
    before = r.supplies.get(e.target)
    supply = BundleSupply(
        e.needs,
        e.path or (before.path if before else ""),
        sha256=e.sha256 or (before.sha256 if before else ""),
    )
    # Polling finds the same bundle again and again; only a change is an event.
    if before is None or before == supply:
        return r, ()
    return choose_targets(replace(r, supplies={**r.supplies, e.target: supply})), ()


def _bundle_failed(r: Rollout, e: BundleFailed, now_s: float) -> Result:
    before = r.supplies.get(e.target)
    # The bundle existed before; its loss now does not undo the choice of it.
    if before is None or before.needs is not None:
        return r, ()
    supplies = {**r.supplies, e.target: BundleSupply(refusal=e.reason)}
    return choose_targets(replace(r, supplies=supplies)), ()


def _reported(r: Rollout, e: Reported, now_s: float) -> Result:
    before = r.members.get(e.name)
    if before is None:
        return r, ()
    member = replace(before, capability=e.capability)
    if member.assigned:
        member = replace(member, committed_version=e.committed_version)
        sha256 = r.supplies[before.target].sha256 if before.target in r.supplies else ""
        return with_member(r, _progress(member, e, r.plan.version, sha256)), ()
    if before.capability == e.capability:  # reports about an unassigned version do not count
        return r, ()
    member = replace(member, stage=NodeStage.WAITING, reason="")
    return choose_target(with_member(r, member), e.name), ()


def _progress(m: RolloutMember, e: Reported, version: int, sha256: str) -> RolloutMember:
    """Return the member after its report.

    sha256: of the bundle that the node was assigned; the number alone does not identify content.
    """
    # Later reports, such as one that was delayed, do not undo a commit.
    if m.stage in DONE:
        return m
    mine = (e.version, e.attempt) == (version, m.attempt)
    is_it = not (sha256 and e.committed_sha256) or sha256 == e.committed_sha256
    if mine and e.stage is NodeStage.COMMITTED and e.committed_version == version and is_it:
        return replace(m, stage=NodeStage.COMMITTED, reason="")
    # Reports about an earlier attempt do not count. A lost node can still commit, see above.
    if not mine or m.stage in LOST or e.stage in {NodeStage.WAITING, NodeStage.COMMITTED}:
        return m
    return replace(
        m, stage=e.stage, reason=e.reason,
        downloaded_bytes=e.downloaded_bytes, total_bytes=e.total_bytes,
    )  # fmt: skip


def _excused(r: Rollout, e: Excused, now_s: float) -> Result:
    changed = {
        name: replace(m, excused=why)
        for name, m in r.members.items()
        if m.excused != (why := e.reasons.get(name) or m.left_out)
    }
    back = {
        name: replace(m, deadline_s=now_s + r.plan.node_deadline_s)
        for name, m in changed.items()
        # A node that counts again gets a full deadline: its old one may have passed meanwhile.
        if not m.excused and m.wave <= r.wave and m.stage not in SETTLED
    }
    return replace(r, members={**r.members, **changed, **back}), ()


def _tick(r: Rollout, e: TimePassed, now_s: float) -> Result:
    reason = f"not committed within {r.plan.node_deadline_s:g} s"
    late = {
        name: replace(
            m,
            stage=NodeStage.FAILED,
            reason=f"{reason}; last seen {m.stage.name.lower()}{m.reason and f': {m.reason}'}",
        )
        for name, m in r.members.items()
        if under_way(r, m) and now_s >= m.deadline_s
    }
    return (replace(r, members={**r.members, **late}) if late else r), ()


def _pause(r: Rollout, e: Pause, now_s: float) -> Result:
    return replace(r, state=RolloutState.PAUSED, reason=e.reason or "paused by a person"), ()


def _resume(r: Rollout, e: Resume, now_s: float) -> Result:
    refused = [target for target, supply in r.supplies.items() if supply.refusal]
    again = {
        name: replace(m, stage=NodeStage.WAITING, reason="")
        for name, m in r.members.items()
        if m.stage in LOST
    }
    closed = r.wave >= 0 and is_closed(r, tallies(r)[-1])
    start = replace(
        r,
        state=RolloutState.PREPARING if r.wave < 0 else RolloutState.RUNNING,
        reason="",
        resumed=e.note,
        # Resuming after a closed wave permits the next one; otherwise it only retries this one.
        allowed=max(r.allowed, r.wave + 1) if closed else r.allowed,
        members={**r.members, **again},
        supplies={**r.supplies, **dict.fromkeys(refused, BundleSupply())},
    )
    return choose_targets(start), ()


def _abort(r: Rollout, e: Abort, now_s: float) -> Result:
    back = {
        # A new attempt number, since a node does not repeat an attempt that has ended.
        name: replace(
            m,
            stage=NodeStage.RETURNED,
            attempt=m.attempt + 1,
            reason=_and_before("the rollout was aborted", m.reason if m.stage in LOST else ""),
        )
        for name, m in r.members.items()
        if m.assigned and (e.revert or m.stage is not NodeStage.COMMITTED)
    }
    # A running rollout's reason is what it waits for, which is over.
    paused_for = r.reason if r.state is RolloutState.PAUSED else ""
    ended = replace(
        r, state=RolloutState.ABORTED, ended_s=now_s, members={**r.members, **back},
        reason=_and_before(e.reason or "aborted by a person", paused_for),
    )  # fmt: skip
    return ended, tuple(Restore(m.name, m.attempt) for m in back.values())


def _and_before(reason: str, before: str) -> str:
    """Keep why something failed beside why it was ended; else nobody could look it up later."""
    return f"{reason}; before that: {before}" if before else reason


def _stay(r: Rollout, e: Event, now_s: float) -> Result:
    return r, ()


def _refuse(r: Rollout, e: Event, now_s: float) -> Result:
    verb = _VERBS[type(e)]
    why = f": {r.reason}" if r.reason else ""
    raise Conflict(
        f"{verb} needs a rollout that has not ended; {r.id} is {r.state.name.lower()}{why}; "
        "deploy again"
    )


_VERBS: Final[Mapping[type[Event], str]] = {Pause: "pause", Resume: "resume", Abort: "abort"}
_COLUMNS: Final = tuple(RolloutState)
# fmt: off
_ROWS: Final[Mapping[type[Event], tuple[Rule, ...]]] = {
    #             PREPARING       RUNNING         PAUSED          DONE     ABORTED  FAILED
    BundleReady:  (_bundle_ready,  _bundle_ready,  _bundle_ready,  _stay,   _stay,   _stay),
    BundleFailed: (_bundle_failed, _bundle_failed, _bundle_failed, _stay,   _stay,   _stay),
    Reported:     (_reported,      _reported,      _reported,      _stay,   _stay,   _stay),
    Excused:      (_excused,       _excused,       _excused,       _stay,   _stay,   _stay),
    TimePassed:         (_tick,          _tick,          _tick,          _stay,   _stay,   _stay),
    Pause:        (_pause,         _pause,         _stay,          _refuse, _refuse, _refuse),
    Resume:       (_stay,          _stay,          _resume,        _refuse, _refuse, _refuse),
    Abort:        (_abort,         _abort,         _abort,         _refuse, _stay,   _refuse),
}
# fmt: on
RULES: Final[Mapping[tuple[RolloutState, type[Event]], Rule]] = {
    (state, event): rule
    for event, row in _ROWS.items()
    for state, rule in zip(_COLUMNS, row, strict=True)
}
