"""Nodes as the fleet verbs list and show them."""

from __future__ import annotations

from typing import Final

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.text import age, enum_text, facts, labels_text, size, table
from triplane.proto.fleet_pb2 import Assignment, Capability, ListNodesRequest, ModelReport, Node

PAGE_NODES: Final = 500
HEADINGS: Final = ("NODE", "LABELS", "CONNECTED", "SERVES", "STATE", "SEEN")


def all_nodes(cloud: Calls, selector: str) -> list[Node]:
    """Every node that `selector` names, page by page, in name order."""
    nodes: list[Node] = []
    after = ""
    while True:
        request = ListNodesRequest(selector=selector, page_size=PAGE_NODES, after=after)
        page = cloud.fleet.ListNodes(request)
        nodes += page.nodes
        after = page.next
        if not after:
            return nodes


def node_table(nodes: list[Node]) -> str:
    """One line a node."""
    return table(HEADINGS, [_row(node) for node in nodes])


def serves(node: Node) -> str:
    """As "digits@3, faces@1": what calls are answered with."""
    held = [f"{m.model}@{m.committed_version}" for m in node.report.models if m.committed_version]
    return ", ".join(held)


def state(node: Node) -> str:
    """Describe what the node is doing beside serving."""
    at = [
        f"{m.model}@{m.version} {enum_text(m, 'state')}"
        for m in node.report.models
        if m.version != m.committed_version
    ]
    if node.cordoned:
        at.append("cordoned")
    if node.warnings:
        at.append("see fleet show")
    if node.HasField("report") and node.connected and not node.report.serving_up:
        at.append("serving down")
    return ", ".join(at)


def _row(node: Node) -> tuple[str, ...]:
    connected = "yes" if node.connected else "no"
    seen = age(node.last_seen_s)
    return node.name, labels_text(dict(node.labels)), connected, serves(node), state(node), seen


def node_text(node: Node) -> str:
    """Everything known of one node."""
    report = node.report
    capability = report.capability
    rows = [
        ("node", node.name),
        ("labels", labels_text(dict(node.labels))),
        ("connected", f"{'yes' if node.connected else 'no'}, seen {age(node.last_seen_s)}"),
        ("cordoned", "yes" if node.cordoned else "no"),
        ("serving", f"{'up' if report.serving_up else 'down'} {report.serving_address}"),
        ("metadata", _metadata_text(report.metadata_age_s)),
        ("machine", _machine_text(capability)),
        ("runtime", _runtime_text(capability)),
        ("targets", ", ".join(capability.targets)),
        ("instructions", ", ".join(capability.instructions)),
    ]
    rows += [("model", _model_text(model)) for model in report.models]
    rows += [("wanted", _wanted_text(wanted)) for wanted in node.desired.assignments]
    rows += [("WARNING", text) for text in node.warnings]
    rows += [("incident", f"{age(i.time_s)}: {i.kind}: {i.text}") for i in report.incidents]
    return facts(rows)


def _machine_text(capability: Capability) -> str:
    memory, free = size(capability.memory_bytes), size(capability.free_disk_bytes)
    return f"{capability.machine}, {memory} memory, {free} disk free"


def _runtime_text(capability: Capability) -> str:
    return f"{capability.runtime} {capability.runtime_version}, opset {capability.max_opset}"


def _wanted_text(wanted: Assignment) -> str:
    return f"{wanted.model}@{wanted.version} (rollout {wanted.rollout}, attempt {wanted.attempt})"


def _metadata_text(age_s: float) -> str:
    return "never verified" if age_s < 0 else f"verified {int(age_s)} s before the report"


def _model_text(model: ModelReport) -> str:
    held = f"serves {model.model}@{model.committed_version}" if model.committed_version else "none"
    tried = f"; {model.model}@{model.version} {enum_text(model, 'state')}" if model.version else ""
    return f"{held}{tried}{f': {model.reason}' if model.reason else ''}"
