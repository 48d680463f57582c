"""Nodes as the fleet verbs list and show them."""

from __future__ import annotations

from typing import Final

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.text import age, enum_text, facts, labels_text, size, table
from triplane.proto.fleet_pb2 import ListNodesRequest, ModelReport, Node

PAGE_NODES: Final = 500
HEADINGS: Final = ("NODE", "LABELS", "CONNECTED", "SERVES", "STATE", "SEEN")


def all_nodes(cloud: Calls, selector: str) -> list[Node]:
    """Return every node that matches `selector`, page by page, in name order."""
    request = ListNodesRequest(selector=selector, page_size=PAGE_NODES)
    page = cloud.fleet.ListNodes(request)
    nodes = list(page.nodes)
    while page.next:
        request.after = page.next
        page = cloud.fleet.ListNodes(request)
        nodes += page.nodes
    return nodes


def node_table(nodes: list[Node]) -> str:
    """Return a table with one line for each node."""
    return table(HEADINGS, [_row(node) for node in nodes])


def serves(node: Node) -> str:
    """Format the served versions as "digits@3, faces@1"."""
    models = node.report.models
    return ", ".join(f"{m.model}@{m.committed_version}" for m in models if m.committed_version)


def state(node: Node) -> str:
    """Describe what the node does beside serving, and what is wrong."""
    states = [
        f"{m.model}@{m.version} {enum_text(m, 'state')}"
        for m in node.report.models
        # Equal numbers mean that the newest attempt was committed, which `serves` shows already.
        if m.version != m.committed_version
    ]
    if node.cordoned:
        states.append("cordoned")
    if node.warnings:
        states.append("see fleet show")
    if node.HasField("report") and node.connected and not node.report.serving_up:
        states.append("serving down")
    return ", ".join(states)


def _row(node: Node) -> tuple[str, ...]:
    connected = "yes" if node.connected else "no"
    seen = age(node.last_seen_s)
    return node.name, labels_text(dict(node.labels)), connected, serves(node), state(node), seen


def node_text(node: Node) -> str:
    """Describe one node."""
    if not node.HasField("report"):
        return facts([*_identity_rows(node), ("report", "none yet: this node never connected")])
    report = node.report
    capability = report.capability
    memory, free = size(capability.memory_bytes), size(capability.free_disk_bytes)
    rows = [
        *_identity_rows(node),
        ("serving", f"{'up' if report.serving_up else 'down'} {report.serving_address}".rstrip()),
        ("metadata", _metadata_text(report.metadata_age_s)),
        ("machine", f"{capability.machine}, {memory} memory, {free} disk free"),
        (
            "runtime",
            f"{capability.runtime} {capability.runtime_version}, opset {capability.max_opset}",
        ),
        ("targets", ", ".join(capability.targets)),
        ("instructions", ", ".join(capability.instructions)),
    ]
    rows += [("model", _model_text(model)) for model in report.models]
    rows += [
        ("wanted", f"{w.model}@{w.version} (rollout {w.rollout}, attempt {w.attempt})")
        for w in node.desired.assignments
    ]
    rows += [("WARNING", text) for text in node.warnings]
    rows += [("incident", f"{age(i.time_s)}: {i.kind}: {i.text}") for i in report.incidents]
    return facts(rows)


def _identity_rows(node: Node) -> list[tuple[str, str]]:
    seen = f", seen {age(node.last_seen_s)}" if node.last_seen_s else ""
    return [
        ("node", node.name),
        ("labels", labels_text(dict(node.labels))),
        ("connected", f"{'yes' if node.connected else 'no'}{seen}"),
        ("cordoned", "yes" if node.cordoned else "no"),
    ]


def _metadata_text(age_s: float) -> str:
    return "never verified" if age_s < 0 else f"verified {int(age_s)} s before the report"


def _model_text(model: ModelReport) -> str:
    served = (
        f"serves {model.model}@{model.committed_version}" if model.committed_version else "none"
    )
    tried = f"; {model.model}@{model.version} {enum_text(model, 'state')}" if model.version else ""
    return f"{served}{tried}{f': {model.reason}' if model.reason else ''}"
