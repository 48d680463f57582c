"""The live table of a federated run: cut to the window, newest rounds last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from triplane.cloud.cli.live import live_view
from triplane.cloud.cli.runs import (
    ROUND_HEADINGS,
    STANDING,
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
from triplane.proto.federation_pb2 import GetRunRequest, Round, Run
from triplane.proto.federation_pb2_grpc import FederationStub

if TYPE_CHECKING:
    from triplane.cloud.cli.connection import Calls

LINES_AROUND: Final = 14
BAR_CELLS: Final = 30
# fmt: off
STYLES: Final = {
    "done":       "bold green",
    "stopped":    "bold yellow",
    "failed":     "bold red",
}
# fmt: on


def watchable(cloud: Calls, run_id: str) -> Watchable[Run]:
    """Return how to watch a run."""
    federation = FederationStub(cloud.channel)
    return Watchable(
        name=f"run {run_id}",
        watch=f"triplane federate watch {run_id}",
        stop=f"triplane federate stop {run_id}",
        stream=lambda: federation.WatchRun(GetRunRequest(id=run_id)),
        state_of=phase_of,
        stopped=STANDING,
        headline=headline,
        changes=changes,
        aftermath=aftermath,
        live=lambda: live_view(draw_in),
    )


def draw_in(run: Run, lines: int, _seconds: float) -> RenderableType:
    """See `live.Draw`."""
    return drawn(run, room=max(3, lines - LINES_AROUND), now_s=time.time())


def drawn(run: Run, *, room: int, now_s: float) -> RenderableType:
    """The headline, a bar of rounds, a bar of the current round, and at most `room` rounds."""
    title = Text(headline(run), STYLES.get(phase_of(run), "bold"))
    done = sum(1 for r in run.rounds if r.closed_s and not r.evaluates and not r.given_up)
    lines: list[RenderableType] = [title, _bar("rounds ", done, run.spec.rounds)]
    if run.rounds and not run.rounds[-1].closed_s:
        lines.append(_at_hand(run.rounds[-1], run.spec.cohort.deadline_s, now_s))
    grid = Table(box=None, pad_edge=False)
    for heading in ROUND_HEADINGS:
        grid.add_column(heading)
    closed = [r for r in run.rounds if r.closed_s]
    for round_ in closed[-room:]:
        style = "red" if round_.given_up else ""
        grid.add_row(*(Text(shown(cell), style) for cell in round_row(round_)))
    why = (Text(line, "red") for line in (*dropped(None, run), *refusals(run)))
    return Group(*lines, Text(), grid, *why)


def _at_hand(round_: Round, deadline_s: float, now_s: float) -> Text:
    left_s = max(0.0, round_.opened_s + deadline_s - now_s)
    return _bar("devices", round_.counted, round_.asked).append(
        f", {left_s:.0f} s to the deadline", "dim"
    )


def _bar(name: str, done: int, of: int) -> Text:
    full = min(BAR_CELLS, round(BAR_CELLS * done / max(1, of)))
    bar = Text(f"  {name}  ").append("#" * full, "green").append("." * (BAR_CELLS - full), "dim")
    return bar.append(f"  {done} of {of}")
