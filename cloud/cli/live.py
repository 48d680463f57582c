"""Views on the terminal that are redrawn in place: the frame, bars and tables."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

REDRAWS_PER_S: Final = 4
BAR_CELLS: Final = 30

Draw = Callable[[T, int, float], RenderableType]
"""Draws a value, given the height of the window in lines and the seconds since the view began."""


@contextlib.contextmanager
def live_view(draw: Draw[T], console: Console | None = None) -> Iterator[Callable[[T], None]]:
    """Give a function that shows a value on the screen; the view is cleared at the end."""
    console = console or Console()
    start_s = time.monotonic()
    newest: list[T] = []

    def render() -> RenderableType:
        if not newest:
            return Text("waiting for the cloud")
        return draw(newest[-1], console.height, time.monotonic() - start_s)

    live = Live(
        get_renderable=render, console=console, refresh_per_second=REDRAWS_PER_S, transient=True
    )
    with live:

        def show(value: T) -> None:
            newest[:] = [value]
            live.refresh()

        yield show


def bar(good: int, of: int, bad: int = 0) -> Text:
    """Draw shares of `of` as a bar: `good` in green, `bad` in red."""
    greens, reds = (min(BAR_CELLS, round(BAR_CELLS * n / max(1, of))) for n in (good, bad))
    text = Text().append("#" * greens, "green").append("x" * reds, "red")
    return text.append("." * max(0, BAR_CELLS - greens - reds), "dim").append(f"  {good} of {of}")


def styled_table(headings: Sequence[str], rows: Iterable[tuple[Sequence[str], str]]) -> Table:
    """Return a table; each row comes with its style."""
    table = Table(*headings, box=None, pad_edge=False)
    for cells, style in rows:
        table.add_row(*(Text(cell, style) for cell in cells))
    return table
