"""The page's rows: the parts of a node, version, rollout or incident that it draws.

A state is five sections of rows by key. A change is the rows that differ, from which a browser that
has one state gets the next. Sections are bounded; the page shows the totals.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from triplane.cloud.dashboard.runs import run_row, same_fields
from triplane.cloud.dashboard.source import NodeIncident
from triplane.proto import fleet_pb2, registry_pb2
from triplane.proto.federation_pb2 import Run
from triplane.proto.fleet_pb2 import FAILED, RETURNED, ModelReport, Node, Rollout, RolloutNode, Wave
from triplane.proto.registry_pb2 import Bundle, Version

Row = dict[str, Any]
Section = dict[str, Row]
State = dict[str, Section]

SECTIONS: Final = ("nodes", "rollouts", "runs", "versions", "incidents")
# fmt: off
MOST_ROWS: Final[Mapping[str, int]] = {
    "nodes":     1000,
    "rollouts":  20,
    "runs":      10,
    "versions":  50,
    "incidents": 50,
}
# fmt: on
MOST_TEXT_CHARS: Final = 500
MOST_DRAWN_NODES: Final = 60
"""Largest wave whose nodes are drawn one by one; a larger one is drawn by counts."""
MOST_REASONS: Final = 10
"""Largest number of reasons shown for a wave."""


def state_from(
    nodes: Sequence[Node],
    rollouts: Sequence[Rollout],
    runs: Sequence[Run],
    versions: Sequence[Version],
    incidents: Sequence[NodeIncident],
    due: Sequence[str] = (),
) -> State:
    """Return everything that the page shows, cut to `MOST_ROWS`."""
    connected = sum(node.connected for node in nodes)
    return {
        "nodes": _section("nodes", ((node.name, node_row(node)) for node in nodes)),
        "rollouts": _section("rollouts", ((r.id, rollout_row(r)) for r in rollouts)),
        "runs": _section("runs", ((run.id, run_row(run)) for run in runs)),
        "versions": _section("versions", (_keyed_version(version) for version in versions)),
        "incidents": _section("incidents", (_keyed_incident(incident) for incident in incidents)),
        "totals": {"all": {"nodes": len(nodes), "connected": connected, "due": list(due)}},
    }


def change(before: State | None, after: State) -> dict[str, Any]:
    """Return, by section, new or changed rows (`set`) and the keys of removed ones (`gone`)."""
    changed = {}
    for name, rows in after.items():
        known = (before or {}).get(name, {})
        new = {key: row for key, row in rows.items() if known.get(key) != row}
        gone = [key for key in known if key not in rows]
        if new or gone:
            changed[name] = {"set": new, "gone": gone}
    return changed


def node_row(node: Node) -> Row:
    """Return the row of a node. `last_seen_s` of a connected one is None, or it changed always."""
    report = node.report
    return {
        **same_fields(node, "name", "connected", "cordoned"),
        "labels": dict(sorted(node.labels.items())),
        "last_seen_s": None if node.connected else round(node.last_seen_s),
        "serving_up": report.serving_up,
        "address": _cut(report.serving_address),
        "models": [_model_row(model) for model in report.models],
        "targets": list(report.capability.targets),
    }


def _model_row(model: ModelReport) -> Row:
    return {
        **same_fields(model, "model", "version"),
        "serves": model.committed_version,
        "state": _name(fleet_pb2.NodeState, model.state),
        "reason": _cut(model.reason),
    }


def rollout_row(rollout: Rollout) -> Row:
    """Return the row of a rollout with its waves, each with its nodes."""
    sizes = [wave_text(wave) for wave in rollout.request.waves] or ["100%"]
    by_wave: defaultdict[int, list[RolloutNode]] = defaultdict(list)
    for node in rollout.nodes:
        by_wave[node.wave].append(node)
    return {
        **same_fields(rollout, "id", "model", "version", "selector", "wave", "created_by"),
        "state": _name(Rollout.State, rollout.state),
        "reason": _cut(rollout.reason),
        "waves": [_wave(size, by_wave[i]) for i, size in enumerate(sizes)],
        "created_s": round(rollout.created_s),
        "ended_s": round(rollout.ended_s),
    }


def _wave(size: str, nodes: Sequence[RolloutNode]) -> Row:
    """Return a wave: its nodes if they are few, counts, and the first failures with reasons."""
    tally = Counter(_name(fleet_pb2.NodeState, number) for number in (n.state for n in nodes))
    failed = (node for node in nodes if node.state in {FAILED, RETURNED})
    return {
        "size": size,
        "tally": dict(tally),
        "nodes": [_rollout_node(n) for n in nodes] if len(nodes) <= MOST_DRAWN_NODES else [],
        "failed": [_rollout_node(node) for node in islice(failed, MOST_REASONS)],
    }


def wave_text(wave: Wave) -> str:
    """Format the size of a wave as "5%" or "3 nodes"."""
    if wave.WhichOneof("size") == "nodes":
        return "1 node" if wave.nodes == 1 else f"{wave.nodes} nodes"
    return f"{wave.percent:g}%"


def _rollout_node(node: RolloutNode) -> Row:
    share = node.downloaded_bytes / node.total_bytes if node.total_bytes else 0.0
    return {
        **same_fields(node, "name", "connected"),
        "state": _name(fleet_pb2.NodeState, node.state),
        "reason": _cut(node.reason),
        "share": round(min(share, 1.0), 2),
    }


def _keyed_version(version: Version) -> tuple[str, Row]:
    reference = f"{version.model}@{version.version}"
    return reference, {
        "reference": reference,
        **same_fields(version, "size", "created_by"),
        "aliases": list(version.aliases),
        "digest": version.model_digest.hex(),
        "created_s": round(version.created_s),
        "bundles": [_bundle_row(bundle) for bundle in version.bundles],
    }


def _bundle_row(bundle: Bundle) -> Row:
    return {
        "target": bundle.target,
        "state": _name(registry_pb2.Bundle.State, bundle.state),
        "reason": _cut(bundle.reason),
        "signed": bundle.signed_path,
    }


def _keyed_incident(entry: NodeIncident) -> tuple[str, Row]:
    incident = entry.incident
    row = {
        "node": entry.node,
        "time_s": round(incident.time_s, 3),
        "kind": _cut(incident.kind),
        "text": _cut(incident.text),
    }
    # Incidents have no id on the wire, so the key is the whole content.
    return f"{entry.node} {row['time_s']} {row['kind']} {row['text']}", row


def _section(name: str, rows: Any) -> Section:
    return dict(islice(rows, MOST_ROWS[name]))


def _name(enum: Any, number: int) -> str:
    """Return the lower-case name of a value, or the number if this program does not know it."""
    try:
        return str(enum.Name(number)).lower()
    except ValueError:
        return str(number)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT_CHARS else text[: MOST_TEXT_CHARS - 1] + "…"
