"""Rollouts as text: one line, a table of nodes, what changed, and how it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.text import age, duration, enum_text, shown, table
from triplane.cloud.cli.watching import Watchable, bar, live_view, styled_table
from triplane.proto.fleet_pb2 import GetRolloutRequest, Rollout, RolloutNode

NODE_HEADINGS: Final = ("NODE", "WAVE", "STATE", "REASON")
# Most urgent first, so that a table that is cut shows failures and nodes in progress.
ORDER: Final = (
    "failed", "returned", "probation", "tried", "staged", "verified", "downloading", "assigned",
    "committed", "node_state_unspecified",
)  # fmt: skip
ENDED: Final = ("done", "failed", "aborted")
STOPPED: Final = (*ENDED, "paused")
MOST_REASONS: Final = 5
MOST_NAMES: Final = 3
LINES_AROUND: Final = 10
# fmt: off
STYLES: Final = {
    "failed":      "red",
    "returned":    "red",
    "committed":   "green",
    "waiting":     "dim",
    "done":        "bold green",
    "paused":      "bold yellow",
    "aborted":     "bold red",
}
# fmt: on


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
    failed, returned = _losses(rollout, by_state)
    parts = [f"{rollout.model}@{rollout.version} to {rollout.selector}: {state}"]
    if state in {"running", "paused"}:
        parts.append(f"wave {rollout.wave + 1} of {waves(rollout)}")
    if rollout.nodes:
        nodes = "node" if len(rollout.nodes) == 1 else "nodes"
        parts.append(f"{by_state['committed']} of {len(rollout.nodes)} {nodes} committed")
    if failed:
        parts.append(f"{failed} failed")
    if returned:
        parts.append(f"{returned} returned")
    if away := _disconnected(rollout):
        parts.append(f"waiting for {away} to connect")
    if rollout.reason:
        parts.append(rollout.reason)
    return shown(f"[{rollout.id}] {', '.join(parts)}")


def _losses(rollout: Rollout, by_state: Counter[str]) -> tuple[int, int]:
    """Return how many nodes failed, and how many an abort took back.

    Before an abort, a node returns by itself, because the new version failed on it.
    """
    failed, returned = by_state["failed"], by_state["returned"]
    return (failed, returned) if state_of(rollout) == "aborted" else (failed + returned, 0)


def _disconnected(rollout: Rollout) -> str:
    """Return the names of nodes of open waves that have work left and are not connected."""
    names = [
        node.name
        for node in rollout.nodes
        if not node.connected
        and node.wave <= rollout.wave
        and state_of(rollout) == "running"
        and enum_text(node, "state") not in {"committed", "failed", "returned"}
    ]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*names[:MOST_NAMES], *more])


def sorted_nodes(rollout: Rollout) -> list[RolloutNode]:
    """Return the nodes by urgency, then wave, then name."""
    # A state that a newer cloud adds has no rank and comes last.
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


def watchable(cloud: Calls, rollout_id: str) -> Watchable[Rollout]:
    """Describe how a rollout is watched."""
    return Watchable(
        name=f"rollout {rollout_id}",
        watch=f"triplane rollout show {rollout_id} --watch",
        stop=f"triplane rollout pause {rollout_id}",
        stream=lambda: cloud.fleet.WatchRollout(GetRolloutRequest(id=rollout_id)),
        state_of=state_of,
        stopped=STOPPED,
        headline=headline,
        changes=changes,
        aftermath=aftermath,
        live=lambda: live_view(draw_in),
    )


def draw_in(rollout: Rollout, lines: int, seconds: float) -> RenderableType:
    """See `watching.Draw`."""
    return draw(rollout, room=max(3, lines - LINES_AROUND), seconds=seconds)


def draw(rollout: Rollout, *, room: int, seconds: float) -> RenderableType:
    """Draw the headline, one bar for each wave, and at most `room` nodes."""
    state = state_of(rollout)
    title = Text(f"{headline(rollout)}, {duration(seconds)}", STYLES.get(state, "bold"))
    nodes = sorted_nodes(rollout)
    styles = STYLES | ({"returned": "yellow"} if state == "aborted" else {})
    rows = ((row, styles.get(row[2].partition(" ")[0], "")) for row in node_rows(nodes[:room]))
    rest = [Text(f"and {len(nodes) - room} more", "dim")] if len(nodes) > room else []
    bars = [_bar(rollout, wave) for wave in range(waves(rollout))]
    return Group(title, *bars, Text(), styled_table(NODE_HEADINGS, rows), *rest)


def _bar(rollout: Rollout, wave: int) -> Text:
    nodes = [node for node in rollout.nodes if node.wave == wave]
    by_state = counts(nodes)
    failed, returned = _losses(rollout, by_state)
    mark = ">" if wave == rollout.wave and state_of(rollout) in {"running", "paused"} else " "
    return Text(f"{mark} wave {wave + 1}  ") + bar(
        by_state["committed"], len(nodes), failed, returned
    )
