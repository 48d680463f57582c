"""Rollouts as text: one line, a table of nodes, what changed, and how it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from triplane.cloud.cli.text import age, duration, enum_text, shown, table
from triplane.proto.fleet_pb2 import Rollout, RolloutNode

NODE_HEADINGS: Final = ("NODE", "WAVE", "STATE", "REASON")
# Most urgent first, so that a table that is cut shows failures and nodes in progress.
ORDER: Final = (
    "failed", "returned", "probation", "tried", "staged", "verified", "downloading", "assigned",
    "committed", "node_state_unspecified",
)  # fmt: skip
ENDED: Final = ("done", "failed", "aborted")
STOPPED: Final = (*ENDED, "paused")
MOST_REASONS: Final = 5


def state_of(rollout: Rollout) -> str:
    """Return the state of a rollout, such as "running"."""
    return enum_text(rollout, "state")


def node_state(node: RolloutNode) -> str:
    """Return the state of a node, such as "committed", "downloading 40%" or "waiting"."""
    state = enum_text(node, "state")
    if state == "node_state_unspecified":
        return "waiting"
    if state == "downloading" and node.total_bytes:
        return f"downloading {100 * node.downloaded_bytes // node.total_bytes}%"
    return state


def waves(rollout: Rollout) -> int:
    """Return the number of waves; without a list of waves it is one."""
    return max(1, len(rollout.request.waves))


def counts(nodes: Iterable[RolloutNode]) -> Counter[str]:
    """Count nodes by state."""
    return Counter(enum_text(node, "state") for node in nodes)


def headline(rollout: Rollout) -> str:
    """Summarize a rollout's version, selector, progress and reason in one line."""
    state = state_of(rollout)
    by_state = counts(rollout.nodes)
    failed = by_state["failed"] + by_state["returned"]
    parts = [f"{rollout.model}@{rollout.version} to {rollout.selector}: {state}"]
    if state in {"running", "paused"}:
        parts.append(f"wave {rollout.wave + 1} of {waves(rollout)}")
    if rollout.nodes:
        parts.append(f"{by_state['committed']} of {len(rollout.nodes)} nodes committed")
    if failed:
        parts.append(f"{failed} failed")
    if rollout.reason:
        parts.append(rollout.reason)
    return shown(f"[{rollout.id}] {', '.join(parts)}")


def sorted_nodes(rollout: Rollout) -> list[RolloutNode]:
    """Return the nodes by urgency, then wave, then name."""
    rank = {state: i for i, state in enumerate(ORDER)}
    return sorted(
        rollout.nodes,
        key=lambda n: (rank.get(enum_text(n, "state"), len(rank)), n.wave, n.name),
    )


def node_rows(nodes: Iterable[RolloutNode]) -> list[tuple[str, ...]]:
    """Return the rows of the table of nodes; a disconnected node is marked."""
    return [
        (
            shown(node.name),
            str(node.wave + 1),
            node_state(node) + ("" if node.connected else " (offline)"),
            shown(node.reason),
        )
        for node in nodes
    ]


def rollout_text(rollout: Rollout) -> str:
    """Describe a rollout with every node."""
    when = f"begun {age(rollout.created_s)} by {rollout.created_by}"
    if rollout.ended_s:
        when += f", took {duration(rollout.ended_s - rollout.created_s)}"
    lines = [headline(rollout), shown(when)]
    if rollout.nodes:
        lines += ["", table(NODE_HEADINGS, node_rows(sorted_nodes(rollout)))]
    return "\n".join(lines)


def rollout_table(rollouts: Sequence[Rollout]) -> str:
    """Return a table with one line for each rollout."""
    headings = ("ROLLOUT", "VERSION", "TO", "STATE", "BEGUN", "BY", "REASON")
    rows = []
    for r in rollouts:
        version, begun = f"{r.model}@{r.version}", age(r.created_s)
        rows.append((r.id, version, r.selector, state_of(r), begun, r.created_by, r.reason))
    return table(headings, rows)


def changes(before: Rollout | None, after: Rollout) -> list[str]:
    """Return lines about what is new in `after`, for output that cannot be redrawn."""
    lines = []
    if before is None or (before.state, before.reason, before.wave) != (
        after.state, after.reason, after.wave,
    ):  # fmt: skip
        lines.append(headline(after))
    known = {node.name: node for node in before.nodes} if before else {}
    for node in after.nodes:
        old = known.get(node.name)
        if (node.state, node.reason) != ((old.state, old.reason) if old else (0, "")):
            reason = f": {node.reason}" if node.reason else ""
            lines.append(shown(f"  {node.name}: {enum_text(node, 'state')}{reason}"))
    return lines


def aftermath(rollout: Rollout) -> list[str]:
    """Describe a rollout that stopped short: the reasons of failed nodes, and the next command."""
    failed = [n for n in sorted_nodes(rollout) if enum_text(n, "state") in {"failed", "returned"}]
    lines = [shown(f"  {node.name}: {node.reason or 'failed'}") for node in failed[:MOST_REASONS]]
    if len(failed) > MOST_REASONS:
        lines.append(f"  and {len(failed) - MOST_REASONS} more: triplane rollout show {rollout.id}")
    if state_of(rollout) == "paused":
        lines += [
            "Nodes that did not commit serve what they served before.",
            f"  continue, failed nodes retry:  triplane rollout resume {rollout.id}",
            f"  end it, keep what committed:   triplane rollout abort {rollout.id}",
            f"  end it, revert all nodes:      triplane rollout abort {rollout.id} --revert",
        ]
    return lines
