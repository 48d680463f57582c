"""Transitions that follow from a rollout's facts: waves that open, pauses, the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from triplane.cloud.fleet.values import (
    DONE,
    LOST,
    SETTLED,
    Assign,
    Effect,
    NodeStage,
    Result,
    Rollout,
    RolloutMember,
    RolloutState,
)
from triplane.cloud.fleet.waves import exceeds, least

_DONE: Final = tuple(DONE)
_LOST: Final = tuple(LOST)
"""Tuples are searched by identity, while the hash of an enum member is computed in Python."""


@dataclass(slots=True)
class WaveTally:
    """Nodes of one wave: those that count, and of them the committed, lost and still under way."""

    counted: int = 0
    done: int = 0
    lost: int = 0
    going: int = 0


def settle(r: Rollout, now_s: float) -> Result:
    """Apply transitions until none follows."""
    effects: tuple[Effect, ...] = ()
    while r.state in {RolloutState.PREPARING, RolloutState.RUNNING}:
        before = r
        r, more = (_prepare if r.state is RolloutState.PREPARING else _run)(r, now_s)
        effects += more
        if r is before:
            break
    return r, effects


def _prepare(r: Rollout, now_s: float) -> Result:
    counted = [m for m in r.members.values() if not m.excused]
    hopeful = [m for m in counted if m.stage is not NodeStage.FAILED]
    if not hopeful:
        why = counted[0].reason if counted else "all of its nodes are excused"
        what = f"{r.plan.model}@{r.plan.version}"
        reason = f"no node can take {what}: {why}"
        return replace(r, state=RolloutState.FAILED, reason=reason, ended_s=now_s), ()
    reason = _missing(r, hopeful)
    if reason:
        return _waiting(r, reason), ()
    return _open(replace(r, state=RolloutState.RUNNING), 0, now_s), ()


def _missing(r: Rollout, members: Iterable[RolloutMember]) -> str:
    """Name the bundles and signatures that the members wait for; empty if there are none."""
    targets = sorted({m.target for m in members if m.target})
    making = [t for t in targets if r.supplies[t].needs is None]
    unsigned = [t for t in targets if t not in making and not r.supplies[t].path]
    what = f"{r.plan.model}@{r.plan.version}"
    parts = [f"waits for the bundle of {what} for {', '.join(making)}"] if making else []
    parts += [
        f"waits for a signature of {what} for {target}: "
        f"triplane sign {what} --target {target} --keys DIR"
        for target in unsigned
    ]
    return "; ".join(parts)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _open(r: Rollout, wave: int, now_s: float) -> Rollout:
    deadline_s = now_s + r.plan.node_deadline_s
    opened = {
        name: replace(m, deadline_s=deadline_s)
        for name, m in r.members.items()
        if m.wave == wave and m.stage not in SETTLED
    }
    return replace(r, wave=wave, reason="", members={**r.members, **opened})


def _run(r: Rollout, now_s: float) -> Result:
    # Assign first. `settle` then calls this again, and the tallies count what was assigned.
    assigned, effects = _assign(r, now_s)
    if assigned is not r:
        return assigned, effects
    waves = tallies(r)
    for wave, tally in enumerate(waves, 1):
        # Every open wave is checked, since a node of an earlier one may fail later.
        if exceeds(tally.lost, r.plan.failure_share, tally.counted):
            what = f"wave {wave}: {tally.lost} of {_nodes(tally.counted)} failed"
            return _paused(r, f"{what} (limit {100 * r.plan.failure_share:.4g}%)"), ()
    if is_closed(r, waves[-1]):
        return _run_closed(r, waves, now_s), ()
    return _run_open(r, waves[-1]), ()


def _assign(r: Rollout, now_s: float) -> Result:
    ready = [m for m in r.members.values() if _assignable(r, m)]
    if not ready:
        return r, ()
    effects = []
    members = dict(r.members)
    for m in ready:
        supply = r.supplies[m.target]
        assigned = replace(
            m, assigned=True, attempt=m.attempt + 1,
            stage=NodeStage.ASSIGNED, reason="",
            deadline_s=now_s + r.plan.node_deadline_s, downloaded_bytes=0, total_bytes=0,
        )  # fmt: skip
        members[m.name] = assigned
        effects.append(Assign(m.name, supply.path, assigned.attempt, supply.sha256))
    return replace(r, members=members), tuple(effects)


def _assignable(r: Rollout, m: RolloutMember) -> bool:
    if m.stage is not NodeStage.WAITING or m.excused or m.wave > r.wave or not m.target:
        return False
    return bool(r.supplies[m.target].path)


def _run_open(r: Rollout, tally: WaveTally) -> Rollout:
    """Wait for the open wave to reach its share, or pause if it no longer can."""
    need = least(r.plan.success_share, tally.counted)
    said = f"wave {r.wave + 1}: {tally.done} of {_nodes(tally.counted)} committed, {need} needed"
    if tally.done + tally.going < need:
        return _paused(r, f"{said}, and the others failed")
    missing = _missing(r, [m for m in r.members.values() if not m.assigned and under_way(r, m)])
    return _waiting(r, f"{said}; {missing}" if missing else said)


def _run_closed(r: Rollout, waves: Iterable[WaveTally], now_s: float) -> Rollout:
    going = sum(tally.going for tally in waves)
    if r.wave + 1 < len(r.plan.waves):
        if r.wave + 1 > r.allowed:
            return _paused(r, f"wave {r.wave + 1} is done; resume opens wave {r.wave + 2}")
        return _open(r, r.wave + 1, now_s)
    # The last wave has reached its share, but the rollout ends only when no node is under way.
    if going:
        verb = "is" if going == 1 else "are"
        said = f"all waves reached their share; {_nodes(going)} {verb} still under way"
        return _waiting(r, said)
    return replace(r, state=RolloutState.DONE, reason="", ended_s=now_s)


def _waiting(r: Rollout, reason: str) -> Rollout:
    return r if r.reason == reason else replace(r, reason=reason)


def _paused(r: Rollout, reason: str) -> Rollout:
    return replace(r, state=RolloutState.PAUSED, reason=reason)


def is_closed(r: Rollout, tally: WaveTally) -> bool:
    """Return whether a wave with this tally reached its share of committed nodes."""
    return tally.done >= least(r.plan.success_share, tally.counted)


def tallies(r: Rollout) -> list[WaveTally]:
    """Count each wave that opened, all in one pass: a fleet has many nodes and reports often."""
    waves = [WaveTally() for _ in range(r.wave + 1)]
    for m in r.members.values():
        if m.wave > r.wave or m.excused:
            continue
        tally, stage = waves[m.wave], m.stage
        tally.counted += 1
        if stage in _DONE:
            tally.done += 1
        elif stage in _LOST:
            tally.lost += 1
        else:
            tally.going += 1
    return waves


def under_way(r: Rollout, m: RolloutMember) -> bool:
    """Return whether the node's wave has opened and the node may still commit."""
    return m.wave <= r.wave and not m.excused and m.stage not in SETTLED
