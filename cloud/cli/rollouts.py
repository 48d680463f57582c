"""Rollouts as text: one line, a table of nodes, what changed, and how it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from triplane.cloud.cli.text import age, duration, enum_text, shown, table
from triplane.proto.fleet_pb2 import Rollout, RolloutNode

NODE_HEADINGS: Final = ("NODE", "WAVE", "STATE", "REASON")
# Most urgent first, so a table that is cut still shows what went wrong and what moves.
ORDER: Final = (
    "failed", "returned", "probation", "tried", "staged", "verified", "downloading", "assigned",
    "committed", "node_state_unspecified",
)  # fmt: skip
ENDED: Final = ("done", "failed", "aborted")
STOPPED: Final = (*ENDED, "paused")
MOST_REASONS: Final = 5


def state_of(rollout: Rollout) -> str:
    """As "running"."""
    return enum_text(rollout, "state")


def node_state(node: RolloutNode) -> str:
    """As "committed", "downloading 40%" or "waiting"."""
    state = enum_text(node, "state")
    if state == "node_state_unspecified":
        return "waiting"
    if state == "downloading" and node.total_bytes:
        return f"downloading {100 * node.downloaded_bytes // node.total_bytes}%"
    return state


def waves(rollout: Rollout) -> int:
    """How many there are; all at once is one."""
    return max(1, len(rollout.request.waves))


def counts(nodes: Iterable[RolloutNode]) -> Counter[str]:
    """Nodes by state."""
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
    """By urgency, then wave, then name."""
    rank = {state: i for i, state in enumerate(ORDER)}
    return sorted(
        rollout.nodes,
        key=lambda n: (rank.get(enum_text(n, "state"), len(rank)), n.wave, n.name),
    )


def node_rows(nodes: Iterable[RolloutNode]) -> list[tuple[str, ...]]:
    """Cells of the table of nodes; a node that is away is marked."""
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
    """The headline, where and when, and every node."""
    when = f"begun {age(rollout.created_s)} by {rollout.created_by}"
    if rollout.ended_s:
        when += f", took {duration(rollout.ended_s - rollout.created_s)}"
    lines = [headline(rollout), shown(when)]
    if rollout.nodes:
        lines += ["", table(NODE_HEADINGS, node_rows(sorted_nodes(rollout)))]
    return "\n".join(lines)


def rollout_table(rollouts: Sequence[Rollout]) -> str:
    """One line a rollout."""
    headings = ("ROLLOUT", "VERSION", "TO", "STATE", "BEGUN", "BY", "REASON")
    return table(
        headings,
        [
            (
                r.id,
                f"{r.model}@{r.version}",
                r.selector,
                state_of(r),
                age(r.created_s),
                r.created_by,
                r.reason,
            )
            for r in rollouts
        ],
    )


def changes(before: Rollout | None, after: Rollout) -> list[str]:
    """Lines that say what is new in `after`; for output that cannot be redrawn."""
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
            f"  go on, failed nodes try again:  triplane rollout resume {rollout.id}",
            f"  end it, keep what committed:    triplane rollout abort {rollout.id}",
            f"  end it, take it back:           triplane rollout abort {rollout.id} --revert",
        ]
    return lines
