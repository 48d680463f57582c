"""The target of each node of a rollout: its first that is available and fits."""

from __future__ import annotations

from dataclasses import replace

from triplane.cloud.fleet.values import (
    AskBundle,
    BundleSupply,
    Effect,
    NodeStage,
    Result,
    Rollout,
    RolloutMember,
)
from triplane.proto.fitting import fits


def choose_targets(r: Rollout) -> Result:
    """`choose_target` for every node that waits."""
    effects: tuple[Effect, ...] = ()
    for name in r.members:
        r, more = choose_target(r, name)
        effects += more
    return r, effects


def choose_target(r: Rollout, name: str) -> Result:
    """Choose the node's first target that is available and fits; asks for its bundle if needed."""
    m = r.members[name]
    if m.capability is None or m.stage is not NodeStage.WAITING or m.left_out:
        return r, ()
    refusals = []
    for target in m.capability.targets:
        supply = r.supplies.get(target)
        if supply is None:
            supplies = {**r.supplies, target: BundleSupply()}
            return with_member(replace(r, supplies=supplies), replace(m, target=target)), (
                AskBundle(target),
            )
        why = supply.refusal or (supply.needs and fits(supply.needs, m.capability))
        if not why:
            return (r if m.target == target else with_member(r, replace(m, target=target))), ()
        refusals.append(f"{target}: {why}")
    reason = "; ".join(refusals) or "the node takes no target of the converter"
    return with_member(r, replace(m, target="", stage=NodeStage.FAILED, reason=reason)), ()


def with_member(r: Rollout, m: RolloutMember) -> Rollout:
    """The rollout with this member instead of its former self."""
    return r if r.members[m.name] == m else replace(r, members={**r.members, m.name: m})
