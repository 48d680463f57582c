"""The live table of a rollout: redrawn in place, cut to the window, most urgent nodes first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from triplane.cloud.cli.rollouts import (
    NODE_HEADINGS,
    counts,
    headline,
    node_rows,
    sorted_nodes,
    state_of,
    waves,
)
from triplane.cloud.cli.text import duration
from triplane.proto.fleet_pb2 import Rollout

REDRAWS_PER_S: Final = 4
LINES_AROUND: Final = 10
BAR_CELLS: Final = 30
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


@contextlib.contextmanager
def live_table(console: Console | None = None) -> Iterator[Callable[[Rollout], None]]:
    """Gives a function that puts a rollout on the screen; clears the table at the end."""
    console = console or Console()
    start_s = time.monotonic()
    shown: list[Rollout] = []

    def render() -> RenderableType:
        if not shown:
            return Text("waiting for the cloud")
        room = max(3, console.height - LINES_AROUND)
        return drawn(shown[-1], room=room, seconds=time.monotonic() - start_s)

    live = Live(
        get_renderable=render, console=console, refresh_per_second=REDRAWS_PER_S, transient=True
    )
    with live:

        def show(rollout: Rollout) -> None:
            shown[:] = [rollout]
            live.refresh()

        yield show


def drawn(rollout: Rollout, *, room: int, seconds: float) -> RenderableType:
    """The headline, one bar a wave, and at most `room` nodes."""
    state = state_of(rollout)
    title = Text(f"{headline(rollout)}, {duration(seconds)}", STYLES.get(state, "bold"))
    nodes = sorted_nodes(rollout)
    table = Table(box=None, pad_edge=False)
    for heading in NODE_HEADINGS:
        table.add_column(heading)
    for row in node_rows(nodes[:room]):
        style = STYLES.get(row[2].partition(" ")[0], "")
        table.add_row(*(Text(cell, style) for cell in row))
    rest = [Text(f"and {len(nodes) - room} more", "dim")] if len(nodes) > room else []
    bars = [_bar(rollout, wave) for wave in range(waves(rollout))]
    return Group(title, *bars, Text(), table, *rest)


def _bar(rollout: Rollout, wave: int) -> Text:
    nodes = [node for node in rollout.nodes if node.wave == wave]
    by_state = counts(nodes)
    failed = by_state["failed"] + by_state["returned"]
    good, bad = (round(BAR_CELLS * n / max(1, len(nodes))) for n in (by_state["committed"], failed))
    mark = ">" if wave == rollout.wave and state_of(rollout) in {"running", "paused"} else " "
    bar = Text(f"{mark} wave {wave + 1}  ")
    bar.append("#" * good, "green").append("x" * bad, "red")
    bar.append("." * max(0, BAR_CELLS - good - bad), "dim")
    return bar.append(f"  {by_state['committed']} of {len(nodes)}")
