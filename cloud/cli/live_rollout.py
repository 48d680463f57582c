"""The live table of a rollout: cut to the window, most urgent nodes first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from triplane.cloud.cli.live import bar, live_view, styled_table
from triplane.cloud.cli.rollouts import (
    NODE_HEADINGS,
    STOPPED,
    aftermath,
    changes,
    counts,
    headline,
    node_rows,
    sorted_nodes,
    state_of,
    waves,
)
from triplane.cloud.cli.text import duration
from triplane.cloud.cli.watching import Watchable
from triplane.proto.fleet_pb2 import GetRolloutRequest, Rollout

if TYPE_CHECKING:
    from triplane.cloud.cli.connection import Calls

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
    """See `live.Draw`."""
    return drawn(rollout, room=max(3, lines - LINES_AROUND), seconds=seconds)


def drawn(rollout: Rollout, *, room: int, seconds: float) -> RenderableType:
    """Draw the headline, one bar for each wave, and at most `room` nodes."""
    state = state_of(rollout)
    title = Text(f"{headline(rollout)}, {duration(seconds)}", STYLES.get(state, "bold"))
    nodes = sorted_nodes(rollout)
    rows = ((row, STYLES.get(row[2].partition(" ")[0], "")) for row in node_rows(nodes[:room]))
    rest = [Text(f"and {len(nodes) - room} more", "dim")] if len(nodes) > room else []
    bars = [_bar(rollout, wave) for wave in range(waves(rollout))]
    return Group(title, *bars, Text(), styled_table(NODE_HEADINGS, rows), *rest)


def _bar(rollout: Rollout, wave: int) -> Text:
    nodes = [node for node in rollout.nodes if node.wave == wave]
    by_state = counts(nodes)
    failed = by_state["failed"] + by_state["returned"]
    mark = ">" if wave == rollout.wave and state_of(rollout) in {"running", "paused"} else " "
    return Text(f"{mark} wave {wave + 1}  ") + bar(by_state["committed"], len(nodes), failed)
