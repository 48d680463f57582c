"""Follow a rollout or a federated run until it stops: a live table on a terminal, else lines.

Both run in the cloud: it may restart, and a watcher may leave, without any effect on them. A lost
stream is opened again until the cloud was unreachable for `AWAY_S`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import click
import grpc
from google.protobuf.message import Message
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from triplane.cloud.cli.text import record
from triplane.proto.errors import Unavailable

T = TypeVar("T", bound=Message)
Draw = Callable[[T, int, float], RenderableType]
"""Draws a value, given the height of the window in lines and the seconds since the view began."""

REDRAWS_PER_S: Final = 4
BAR_CELLS: Final = 30
AWAY_S: Final = 300.0
RETRY_S: Final = 1.0
NOT_DONE: Final = 4
"""Exit code for a rollout or run that stopped before it was done."""
_TRANSIENT: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchable(Generic[T]):
    """Describes how to watch something. name: such as "rollout r-1". watch, stop: its commands.

    stopped: states in which nothing changes by itself. changes: lines about what is new in the
    second value. live: shows values on a terminal.
    """

    name: str
    watch: str
    stop: str
    stream: Callable[[], Iterable[T]]
    state_of: Callable[[T], str]
    stopped: Collection[str]
    headline: Callable[[T], str]
    changes: Callable[[T | None, T], list[str]]
    aftermath: Callable[[T], list[str]]
    live: Callable[[], AbstractContextManager[Callable[[T], None]]]


def watch_to_end(watched: Watchable[T], newest: T, *, as_json: bool) -> int:
    """Show every change until it stops; return the exit code, which is 0 if it is done."""
    last = newest
    try:
        with _display(watched, as_json=as_json) as show:
            for last in updates(watched):
                show(last)
                if watched.state_of(last) in watched.stopped:
                    break
    except KeyboardInterrupt:
        # Raised again below, so that the exit code is that of an interrupted program.
        click.echo(f"\n{leaving(watched)}", err=True)
        raise
    if not as_json:
        first = [watched.headline(last)] if sys.stdout.isatty() else []  # else the last line
        for line in (*first, *watched.aftermath(last)):
            click.echo(line)
    return 0 if watched.state_of(last) == "done" else NOT_DONE


def leaving(watched: Watchable[Any]) -> str:
    """Return the message to a user who stops watching."""
    kind = watched.name.partition(" ")[0]
    return f"The {kind} continues without you. Watch it: {watched.watch}; stop it: {watched.stop}"


def updates(watched: Watchable[T]) -> Iterator[T]:
    """Yield the newest state now and after each change, reconnecting as needed, without end.

    Unavailable: the cloud was unreachable for `AWAY_S`.
    """
    heard_s = time.monotonic()
    while True:
        why = "the stream ended"
        try:
            for message in watched.stream():
                heard_s = time.monotonic()
                yield message
        except grpc.RpcError as error:
            # Such as a rollout that does not exist: reconnecting would not help.
            if error.code() not in _TRANSIENT:
                raise
            why = error.details() or error.code().name
        if time.monotonic() - heard_s > AWAY_S:
            raise Unavailable(
                f"no news of {watched.name} for {AWAY_S:.0f} s ({why}); it continues when the "
                f"cloud is back: {watched.watch}"
            )
        time.sleep(RETRY_S)


@contextlib.contextmanager
def _display(watched: Watchable[T], *, as_json: bool) -> Iterator[Callable[[T], None]]:
    if not as_json and sys.stdout.isatty():
        with watched.live() as show:
            yield show
        return
    before: T | None = None

    def print_change(value: T) -> None:
        nonlocal before
        for line in [json.dumps(record(value))] if as_json else watched.changes(before, value):
            click.echo(line)
        # Output to a pipe is buffered, and a script wants to see each change at once.
        sys.stdout.flush()
        before = value

    yield print_change


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


def bar(good: int, of: int, bad: int = 0, undone: int = 0) -> Text:
    """Draw shares of `of` as a bar: `good` in green, `bad` in red, `undone` in yellow."""
    text = Text()
    for n, mark, style in ((good, "#", "green"), (bad, "x", "red"), (undone, "<", "yellow")):
        cells = round(BAR_CELLS * n / max(1, of))
        text.append(mark * min(BAR_CELLS - len(text), cells), style)
    return text.append("." * (BAR_CELLS - len(text)), "dim").append(f"  {good} of {of}")


def styled_table(headings: Sequence[str], rows: Iterable[tuple[Sequence[str], str]]) -> Table:
    """Return a table; each row comes with its style."""
    table = Table(*headings, box=None, pad_edge=False)
    for cells, style in rows:
        table.add_row(*(Text(cell, style) for cell in cells))
    return table
