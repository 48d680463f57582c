"""The fleet as one value, and how reports, people and rollouts change it.

Pure, like the rollouts it holds: each function takes a state and returns the next one. A node's
desired number grows with every change of its desired document, and with nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from triplane.cloud.fleet.capability import Capability
from triplane.cloud.fleet.rollout import step_all
from triplane.cloud.fleet.selector import ALL, Selector
from triplane.cloud.fleet.values import (
    ENDED,
    Assign,
    Effect,
    Event,
    Excused,
    NodeStage,
    Reported,
    Restore,
    Rollout,
    TimePassed,
)
from triplane.proto.fleet_pb2 import DeployRequest, ModelReport, Report
from triplane.proto.messages import value_from


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAssignment:
    """One model on one node.

    good: the newest assignment that the node reported as committed. back: what was good when
    `rollout` first assigned the node a version; an abort returns to it. sha256: of each signed
    bundle, in hexadecimal; empty where an older release assigned it.
    """

    version: int = 0
    path: str = ""
    rollout: str = ""
    attempt: int = 0
    probation_s: float = 0.0
    good_version: int = 0
    good_path: str = ""
    back_version: int = 0
    back_path: str = ""
    sha256: str = ""
    good_sha256: str = ""
    back_sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNode:
    """A node of the fleet. gone: why it left the fleet, or empty."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    cordoned: bool = False
    gone: str = ""
    last_seen_s: float = 0.0
    desired_number: int = 0
    report: Report | None = None
    held: Mapping[str, NodeAssignment] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """A rollout with its request, and when and by whom it was created."""

    rollout: Rollout
    request: DeployRequest
    created_s: float
    created_by: str

    @property
    def is_ended(self) -> bool:
        """Whether the rollout has ended, so that nothing changes it."""
        return self.rollout.state in ENDED


@dataclass(frozen=True, slots=True)
class FleetState:
    """Every node, and the rollouts that have not ended."""

    nodes: Mapping[str, FleetNode] = field(default_factory=dict)
    rollouts: Mapping[str, RolloutRecord] = field(default_factory=dict)


def with_node(fleet: FleetState, node: FleetNode) -> FleetState:
    """Return the fleet with this node in place of the one of its name."""
    return replace(fleet, nodes={**fleet.nodes, node.name: node})


def without_ended(fleet: FleetState) -> FleetState:
    """Return the fleet without the rollouts that have ended."""
    going = {name: record for name, record in fleet.rollouts.items() if not record.is_ended}
    return fleet if len(going) == len(fleet.rollouts) else replace(fleet, rollouts=going)


def with_rollout(fleet: FleetState, record: RolloutRecord, effects: Iterable[Effect]) -> FleetState:
    """Return the fleet with this rollout, and its effects in the nodes' desired documents."""
    nodes = dict(fleet.nodes)
    for effect in effects:
        if effect.name in nodes:
            nodes[effect.name] = _ordered(nodes[effect.name], record, effect)
    rollouts = {**fleet.rollouts, record.rollout.id: record}
    return FleetState(nodes, rollouts)


def _ordered(node: FleetNode, record: RolloutRecord, effect: Assign | Restore) -> FleetNode:
    plan = record.rollout.plan
    held = node.held.get(plan.model, NodeAssignment())
    # The first assignment of this rollout: remember where an abort returns to. Later assignments of
    # the same rollout must not overwrite it.
    if held.rollout != record.rollout.id:
        held = replace(
            held, back_version=held.good_version, back_path=held.good_path,
            back_sha256=held.good_sha256,
        )  # fmt: skip
    version, path, sha256 = held.back_version, held.back_path, held.back_sha256
    if isinstance(effect, Assign):
        version, path, sha256 = plan.version, effect.path, effect.sha256
    assignment = replace(
        held, version=version, path=path, sha256=sha256, rollout=record.rollout.id,
        attempt=effect.attempt, probation_s=record.request.probation_s,
    )  # fmt: skip
    return replace(
        node, desired_number=node.desired_number + 1, held={**node.held, plan.model: assignment}
    )


def after_event(fleet: FleetState, rollout_id: str, event: Event, now_s: float) -> FleetState:
    """Apply an event to a rollout. Raises what `rollout.step` raises."""
    return _after_events(fleet, rollout_id, (event,), now_s)


def _after_events(
    fleet: FleetState, rollout_id: str, events: Iterable[Event], now_s: float
) -> FleetState:
    record = fleet.rollouts[rollout_id]
    rollout, effects = step_all(record.rollout, events, now_s)
    # The same object, so that `storage.save` sees that there is nothing to write.
    if rollout is record.rollout and not effects:
        return fleet
    return with_rollout(fleet, replace(record, rollout=rollout), effects)


def after_tick(fleet: FleetState, now_s: float) -> FleetState:
    """Apply the current time to every rollout."""
    for rollout_id in list(fleet.rollouts):
        fleet = after_event(fleet, rollout_id, TimePassed(), now_s)
    return fleet


def after_nodes_changed(fleet: FleetState, now_s: float) -> FleetState:
    """Update the excused nodes of every rollout, after labels, cordons or nodes changed."""
    for rollout_id, record in list(fleet.rollouts.items()):
        selector = Selector.parse(record.request.selector or ALL)
        reasons = {
            name: reason
            for name in record.rollout.members
            if (reason := excuse_reason(fleet.nodes.get(name), selector))
        }
        fleet = after_event(fleet, rollout_id, Excused(reasons), now_s)
    return fleet


def excuse_reason(node: FleetNode | None, selector: Selector) -> str:
    """Return why a rollout does not count this node; empty if it does."""
    if node is None or node.gone:
        return node.gone if node else "it is not a node"
    if node.cordoned:
        return "cordoned"
    return "" if selector.matches(node.labels) else "its labels no longer match"


def after_reports(
    fleet: FleetState, reports: Iterable[tuple[str, Report]], now_s: float
) -> FleetState:
    """Apply reports of nodes in this order. An unknown name changes nothing."""
    nodes = dict(fleet.nodes)
    events: dict[str, list[Event]] = {}
    for name, report in reports:
        node = nodes.get(name)
        if node is None or node.gone:
            continue
        models = {model.model: model for model in report.models}
        held = {model: _good(row, models.get(model)) for model, row in node.held.items()}
        nodes[name] = replace(node, report=report, last_seen_s=now_s, held=held)
        capability = capability_of(report)
        for rollout_id, record in fleet.rollouts.items():
            if name in record.rollout.members:
                reported = models.get(record.rollout.plan.model, ModelReport())
                events.setdefault(rollout_id, []).append(_report_event(name, capability, reported))
    fleet = replace(fleet, nodes=nodes)
    for rollout_id, said in events.items():
        fleet = _after_events(fleet, rollout_id, said, now_s)
    return fleet


def _good(held: NodeAssignment, model: ModelReport | None) -> NodeAssignment:
    if model is None or not held.version or model.committed_version != held.version:
        return held
    # The same number with other content, which a cloud restored from a backup may have reused.
    if not _same(held.sha256, model.committed_sha256.hex()):
        return held
    return replace(held, good_version=held.version, good_path=held.path, good_sha256=held.sha256)


def _same(ours: str, theirs: str) -> bool:
    """Return whether two digests agree; an empty one (older releases) agrees with every other."""
    return not (ours and theirs) or ours == theirs


AFTER_RESTORE: Final = (
    'if this cloud was restored from a backup, see "Restore a backup" in docs/operations.md'
)


def warnings(node: FleetNode, metadata_versions: Mapping[str, int]) -> list[str]:
    """Return where a node's report contradicts this cloud's records, and the way out."""
    report = node.report
    if report is None:
        return []
    texts = [text for model in report.models if (text := _contradiction(node, model))]
    ahead = {
        role: version
        for role, version in sorted(report.metadata_versions.items())
        if version > metadata_versions.get(role, version)
    }
    if ahead:
        versions = ", ".join(
            f"{r} {v} (this cloud: {metadata_versions[r]})" for r, v in ahead.items()
        )
        signed = [f"triplane cloud keys renew --role {r} --past {ahead[r]} --keys DIR"
                  for r in ("targets", "release") if r in ahead]  # fmt: skip
        texts.append(
            f"it has verified newer signed metadata than this cloud has: {versions}; it accepts "
            f"nothing new until the versions here are higher{': ' if signed else ''}"
            f"{'; '.join(signed)}; {AFTER_RESTORE}"
        )
    return texts


def _contradiction(node: FleetNode, model: ModelReport) -> str:
    if not model.committed_version:
        return ""
    held = node.held.get(model.model, NodeAssignment())
    theirs = model.committed_sha256.hex()
    ours = [
        (held.version, held.sha256),
        (held.back_version, held.back_sha256),
        (held.good_version, held.good_sha256),
    ]
    what = f"it serves {model.model}@{model.committed_version}"
    if model.committed_version not in dict(ours):
        return f"{what}, which this cloud did not assign to it; {AFTER_RESTORE}"
    if any(version == model.committed_version and _same(x, theirs) for version, x in ours):
        return ""
    known = dict(ours)[model.committed_version]
    return (
        f"{what} with other content: sha256 {theirs[:16]}..., this cloud's version has "
        f"{known[:16]}...; deploy the version that it should serve; {AFTER_RESTORE}"
    )


def capability_of(report: Report) -> Capability:
    """Return what the node can run, according to its report."""
    capability = report.capability
    instructions, targets = tuple(capability.instructions), tuple(capability.targets)
    return value_from(Capability, capability, instructions=instructions, targets=targets)


def _report_event(name: str, capability: Capability, model: ModelReport) -> Reported:
    return value_from(
        Reported, model, name=name, capability=capability, stage=NodeStage(model.state),
        committed_sha256=model.committed_sha256.hex(),
    )  # fmt: skip
