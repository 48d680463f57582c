"""The live table of a federated run: cut to the window, newest rounds last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from triplane.cloud.cli.live import bar, live_view, styled_table
from triplane.cloud.cli.runs import (
    INACTIVE,
    ROUND_HEADINGS,
    aftermath,
    changes,
    dropped,
    headline,
    phase_of,
    refusals,
    round_row,
)
from triplane.cloud.cli.text import shown
from triplane.cloud.cli.watching import Watchable
from triplane.proto.federation_pb2 import GetRunRequest, Run

if TYPE_CHECKING:
    from triplane.cloud.cli.connection import Calls

LINES_AROUND: Final = 14
# fmt: off
STYLES: Final = {
    "done":       "bold green",
    "stopped":    "bold yellow",
    "failed":     "bold red",
}
# fmt: on


def watchable(cloud: Calls, run_id: str) -> Watchable[Run]:
    """Describe how a run is watched."""
    return Watchable(
        name=f"run {run_id}",
        watch=f"triplane federate watch {run_id}",
        stop=f"triplane federate stop {run_id}",
        stream=lambda: cloud.federation.WatchRun(GetRunRequest(id=run_id)),
        state_of=phase_of,
        stopped=INACTIVE,
        headline=headline,
        changes=changes,
        aftermath=aftermath,
        live=lambda: live_view(draw_in),
    )


def draw_in(run: Run, lines: int, _seconds: float) -> RenderableType:
    """See `live.Draw`."""
    return drawn(run, room=max(3, lines - LINES_AROUND), now_s=time.time())


def drawn(run: Run, *, room: int, now_s: float) -> RenderableType:
    """Draw the headline, bars of the run and its current round, and at most `room` rounds."""
    title = Text(headline(run), STYLES.get(phase_of(run), "bold"))
    done = sum(1 for r in run.rounds if r.closed_s and not r.evaluates and not r.given_up)
    lines = [title, Text("  rounds   ") + bar(done, run.spec.rounds)]
    if run.rounds and not run.rounds[-1].closed_s:
        newest = run.rounds[-1]
        left_s = max(0.0, newest.opened_s + run.spec.cohort.deadline_s - now_s)
        devices = Text("  devices  ") + bar(newest.counted, newest.asked)
        lines.append(devices.append(f", {left_s:.0f} s to the deadline", "dim"))
    closed = [r for r in run.rounds if r.closed_s]
    rows = (
        ([shown(cell) for cell in round_row(r)], "red" if r.given_up else "")
        for r in closed[-room:]
    )
    reasons = (Text(line, "red") for line in (*dropped(None, run), *refusals(run)))
    return Group(*lines, Text(), styled_table(ROUND_HEADINGS, rows), *reasons)
