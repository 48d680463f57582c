"""The target of each node of a rollout: the first of the node's targets that fits."""

from __future__ import annotations

from dataclasses import replace

from triplane.cloud.fleet.values import BundleSupply, NodeStage, Rollout, RolloutMember
from triplane.proto.fitting import fits


def choose_targets(r: Rollout) -> Rollout:
    """Choose the target of every node that waits."""
    for name in r.members:
        r = choose_target(r, name)
    return r


def choose_target(r: Rollout, name: str) -> Rollout:
    """Choose the node's first target that is available and fits; ask for its bundle if needed."""
    m = r.members[name]
    if m.capability is None or m.stage is not NodeStage.WAITING or m.left_out:
        return r
    refusals = []
    for target in m.capability.targets:
        supply = r.supplies.get(target)
        # Nobody has asked for this bundle yet. An empty supply makes the fleet look for it, and the
        # choice is made again when it is known.
        if supply is None:
            supplies = {**r.supplies, target: BundleSupply()}
            return with_member(replace(r, supplies=supplies), replace(m, target=target))
        why = supply.refusal or (supply.needs and fits(supply.needs, m.capability))
        if not why:
            return with_member(r, replace(m, target=target))
        refusals.append(f"{target}: {why}")
    reason = "; ".join(refusals) or "the node takes no target of the converter"
    return with_member(r, replace(m, target="", stage=NodeStage.FAILED, reason=reason))


def with_member(r: Rollout, m: RolloutMember) -> Rollout:
    """Return the rollout with this member in place of the one of its name."""
    return r if r.members[m.name] == m else replace(r, members={**r.members, m.name: m})
