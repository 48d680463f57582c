"""Follows a rollout or a federated run to where it stops: a live table on a terminal, else lines.

Both live in the cloud: a cloud that restarts meanwhile, or a watcher that leaves, changes nothing
about them. A lost stream is opened again for `AWAY_S`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import click
import grpc
from google.protobuf.message import Message

from triplane.cloud.cli.text import record
from triplane.proto.errors import Unavailable

T = TypeVar("T", bound=Message)

AWAY_S: Final = 300.0
RETRY_S: Final = 1.0
NOT_DONE: Final = 4
"""Exit code of what stopped before it was done."""
_PASSING: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchable(Generic[T]):
    """What is watched. name: such as "rollout r-1". watch, stop: commands for it.

    stopped: states in which nothing happens by itself. changes: lines that say what is new in the
    second value. live: puts values on a terminal.
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
    """Show every change until it stops; the exit code is 0 if it is done."""
    last = newest
    try:
        with _display(watched, as_json=as_json) as show:
            for last in updates(watched):
                show(last)
                if watched.state_of(last) in watched.stopped:
                    break
    except KeyboardInterrupt:
        click.echo(f"\n{leaving(watched)}", err=True)
        raise
    if not as_json:
        first = [watched.headline(last)] if sys.stdout.isatty() else []  # else the last line
        for line in (*first, *watched.aftermath(last)):
            click.echo(line)
    return 0 if watched.state_of(last) == "done" else NOT_DONE


def leaving(watched: Watchable[Any]) -> str:
    """Return the message for a watcher that leaves."""
    kind = watched.name.partition(" ")[0]
    return f"The {kind} goes on without you: {watched.watch}; stop it: {watched.stop}"


def updates(watched: Watchable[T]) -> Iterator[T]:
    """Yield the newest state now and after each change; reconnects, without end.

    Unavailable: the cloud stays away for `AWAY_S`.
    """
    heard_s = time.monotonic()
    while True:
        why = "the stream ended"
        try:
            for message in watched.stream():
                heard_s = time.monotonic()
                yield message
        except grpc.RpcError as error:
            if error.code() not in _PASSING:
                raise
            why = error.details() or error.code().name
        if time.monotonic() - heard_s > AWAY_S:
            raise Unavailable(
                f"no word of {watched.name} for {AWAY_S:.0f} s ({why}); it goes on when the cloud "
                f"is back: {watched.watch}"
            )
        time.sleep(RETRY_S)


@contextlib.contextmanager
def _display(watched: Watchable[T], *, as_json: bool) -> Iterator[Callable[[T], None]]:
    if as_json:
        yield lambda value: _print_lines([json.dumps(record(value))])
    elif sys.stdout.isatty():
        with watched.live() as show:
            yield show
    else:
        yield _printed_changes(watched)


def _printed_changes(watched: Watchable[T]) -> Callable[[T], None]:
    """Return a function that prints what is new since its last call."""
    before: T | None = None

    def show(value: T) -> None:
        nonlocal before
        _print_lines(watched.changes(before, value))
        before = value

    return show


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
    sys.stdout.flush()
