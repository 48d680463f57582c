"""From a request to a rollout: selected nodes, excluded nodes, and waves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from triplane.cloud.fleet import messages, state
from triplane.cloud.fleet.rollout import begin
from triplane.cloud.fleet.rollout_eligibility import ineligible_reason, limit_text
from triplane.cloud.fleet.selector import Selector
from triplane.cloud.fleet.state import FleetNode, FleetState, NodeAssignment, RolloutRecord
from triplane.cloud.fleet.values import Limit, RolloutMember
from triplane.cloud.fleet.waves import wave_of
from triplane.proto.errors import Conflict, NotFound
from triplane.proto.fleet_pb2 import DeployRequest
from triplane.proto.status import with_details

MAX_ASSIGNMENTS: Final = 64


@dataclass(frozen=True, slots=True)
class ResolvedDeploy:
    """A resolved deploy request. limit: limit of the automatic role, or None."""

    id: str
    request: DeployRequest
    model: str
    version: int
    limit: Limit | None
    by: str
    now_s: float


def begin_rollout(fleet: FleetState, asked: ResolvedDeploy) -> FleetState:
    """Return the fleet with the new rollout.

    Conflict: another rollout of the model is running, or the policy excludes every node. NotFound:
    no node is selected.
    """
    _check_free(fleet, asked.model)
    meant = _meant(fleet, asked.request.selector)
    why = {name: _left_out(fleet.nodes[name], asked) for name in meant}
    counted = [name for name in meant if not why[name]]
    if asked.limit and not counted:
        raise Conflict(
            f"all {len(meant)} nodes are {limit_text(asked.model, asked.limit)}; "
            "deploy a version that people have signed"
        )
    plan = messages.plan_from(asked.request, asked.model, asked.version, len(counted))
    members = [
        _member(fleet.nodes[name], asked.model, wave)
        for i, name in enumerate(counted)
        if (wave := wave_of(i, plan.waves)) is not None
    ]
    # Nodes that the policy excludes are listed in the last wave, so that people see why they are
    # left out.
    last = len(plan.waves) - 1
    members += [
        _member(fleet.nodes[name], asked.model, last, left_out=reason)
        for name, reason in why.items()
        if reason
    ]
    note = _note(meant, counted, asked)
    rollout, effects = begin(asked.id, plan, members, asked.now_s, left_out=note)
    record = RolloutRecord(
        rollout=rollout, request=asked.request, created_s=asked.now_s, created_by=asked.by
    )
    return state.with_rollout(fleet, record, effects)


def _check_free(fleet: FleetState, model: str) -> None:
    for record in fleet.rollouts.values():
        other = record.rollout
        # Two rollouts of one model would overwrite each other's assignments.
        if other.plan.model == model and not record.is_ended:
            text = (
                f"rollout {other.id} of {model}@{other.plan.version} is "
                f"{other.state.name.lower()}; end it first: triplane rollout abort {other.id}"
            )
            raise with_details(Conflict(text), rollout=other.id)


def _meant(fleet: FleetState, text: str) -> list[str]:
    selector = Selector.parse(text)
    meant = sorted(n.name for n in fleet.nodes.values() if not state.excuse_reason(n, selector))
    if not meant:
        raise NotFound(
            f"no node is selected by {text!r} ({len(fleet.nodes)} are known; cordoned "
            "ones are never selected); triplane fleet ls shows labels"
        )
    return meant


def _left_out(node: FleetNode, asked: ResolvedDeploy) -> str:
    targets = node.report.capability.targets if node.report else ()
    return ineligible_reason(node.name, asked.model, targets, asked.limit)


def _note(meant: Sequence[str], counted: Sequence[str], asked: ResolvedDeploy) -> str:
    if asked.limit is None or len(counted) == len(meant):
        return ""
    count = f"{len(meant) - len(counted)} of {len(meant)} nodes are left out"
    return f"{count}: {limit_text(asked.model, asked.limit)}"


def _member(node: FleetNode, model: str, wave: int, *, left_out: str = "") -> RolloutMember:
    held = node.held.get(model, NodeAssignment())
    wanted = sum(row.version > 0 for name, row in node.held.items() if name != model)
    if wanted >= MAX_ASSIGNMENTS:
        raise Conflict(f"node {node.name} has {wanted} models (limit {MAX_ASSIGNMENTS})")
    return RolloutMember(
        name=node.name,
        wave=wave,
        capability=state.capability_of(node.report) if node.report else None,
        attempt=held.attempt,
        committed_version=held.good_version,
        excused=left_out,
        left_out=left_out,
    )
