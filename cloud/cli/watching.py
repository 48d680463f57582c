"""Follows a rollout to where it stops: a live table on a terminal, lines elsewhere.

The rollout lives in the cloud: a cloud that restarts meanwhile, or a watcher that leaves, changes
nothing about it. A lost stream is opened again for `AWAY_S`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

import click
import grpc

from triplane.cloud.cli.rollouts import STOPPED, aftermath, changes, headline, state_of
from triplane.cloud.cli.text import record
from triplane.proto.errors import Unavailable
from triplane.proto.fleet_pb2 import GetRolloutRequest, Rollout

if TYPE_CHECKING:
    from triplane.cloud.cli.connection import Calls

T = TypeVar("T")

AWAY_S: Final = 300.0
RETRY_S: Final = 1.0
NOT_DONE: Final = 4
"""Exit code of a rollout that paused, failed or was aborted."""
_PASSING: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

Show = Callable[[Rollout], None]


def watch_to_end(cloud: Calls, rollout: Rollout, *, as_json: bool) -> int:
    """Shows every change until the rollout stops; the exit code is 0 where it is done."""
    last = rollout
    try:
        with _display(as_json=as_json) as show:
            for last in updates(cloud, rollout.id):
                show(last)
                if state_of(last) in STOPPED:
                    break
    except KeyboardInterrupt:
        click.echo(f"\n{leaving(rollout.id)}", err=True)
        raise
    if not as_json:
        first = [headline(last)] if sys.stdout.isatty() else []  # else the last line was it
        for line in (*first, *aftermath(last)):
            click.echo(line)
    return 0 if state_of(last) == "done" else NOT_DONE


def leaving(rollout_id: str) -> str:
    """Return the state at one moment, for a reader that does not watch."""
    return (
        f"The rollout goes on without you: triplane rollout show {rollout_id} --watch; "
        f"stop it: triplane rollout pause {rollout_id}"
    )


def updates(cloud: Calls, rollout_id: str) -> Iterator[Rollout]:
    """The rollout now and after each change, without end; Unavailable when the cloud stays away."""
    return kept_open(
        lambda: cloud.fleet.WatchRollout(GetRolloutRequest(id=rollout_id)),
        f"rollout {rollout_id}",
        f"triplane rollout show {rollout_id} --watch",
    )


def kept_open(stream: Callable[[], Iterable[T]], what: str, again: str) -> Iterator[T]:
    """Yield the messages of a stream of the cloud; reconnects when it is lost, without end.

    what, again: named where the cloud stays away for `AWAY_S`, with the command to go on.
    """
    heard_s = time.monotonic()
    while True:
        why = "the stream ended"
        try:
            for message in stream():
                heard_s = time.monotonic()
                yield message
        except grpc.RpcError as error:
            if error.code() not in _PASSING:
                raise
            why = error.details() or error.code().name
        if time.monotonic() - heard_s > AWAY_S:
            raise Unavailable(
                f"no word of {what} for {AWAY_S:.0f} s ({why}); it goes on when the cloud is "
                f"back: {again}"
            )
        time.sleep(RETRY_S)


@contextlib.contextmanager
def _display(*, as_json: bool) -> Iterator[Show]:
    if as_json:
        yield _json_line
    elif sys.stdout.isatty():
        from triplane.cloud.cli.live import live_table

        with live_table() as show:
            yield show
    else:
        yield printed_changes()


def _json_line(rollout: Rollout) -> None:
    import json

    click.echo(json.dumps(record(rollout)))
    sys.stdout.flush()


def printed_changes() -> Show:
    """A function that prints what is new since its last call."""
    before: Rollout | None = None

    def show(rollout: Rollout) -> None:
        nonlocal before
        for line in changes(before, rollout):
            click.echo(line)
        sys.stdout.flush()
        before = rollout

    return show
