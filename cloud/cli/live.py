"""A view on the terminal that is redrawn in place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

T = TypeVar("T")

REDRAWS_PER_S: Final = 4

Draw = Callable[[T, int, float], RenderableType]
"""(value, lines of the window, seconds since the view began) -> what to show."""


@contextlib.contextmanager
def live_view(draw: Draw[T], console: Console | None = None) -> Iterator[Callable[[T], None]]:
    """Give a function that puts a value on the screen; clears the view at the end."""
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
