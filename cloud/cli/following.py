"""Follows a federated run until it ends or stops: a live table on a terminal, lines elsewhere.

The run lives in the cloud: a cloud that restarts meanwhile, or a watcher that leaves, changes
nothing about it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from triplane.cloud.cli.runs import STANDING, aftermath, changes, headline, phase_of
from triplane.cloud.cli.text import record
from triplane.cloud.cli.watching import NOT_DONE, kept_open
from triplane.proto.federation_pb2 import GetRunRequest, Run
from triplane.proto.federation_pb2_grpc import FederationStub

if TYPE_CHECKING:
    from triplane.cloud.cli.connection import Calls

Show = Callable[[Run], None]


def follow_to_end(cloud: Calls, run: Run, *, as_json: bool) -> int:
    """Show every change until the run ends or stops; the exit code is 0 if it is done."""
    last = run
    try:
        with _display(as_json=as_json) as show:
            for last in updates(cloud, run.id):
                show(last)
                if phase_of(last) in STANDING:
                    break
    except KeyboardInterrupt:
        click.echo(f"\n{leaving(run.id)}", err=True)
        raise
    if not as_json:
        first = [headline(last)] if sys.stdout.isatty() else []  # else the last line was it
        for line in (*first, *aftermath(last)):
            click.echo(line)
    return 0 if phase_of(last) == "done" else NOT_DONE


def leaving(run_id: str) -> str:
    """Return the state at one moment, for a reader that does not watch."""
    return (
        f"The run goes on without you: triplane federate watch {run_id}; "
        f"stop it: triplane federate stop {run_id}"
    )


def updates(cloud: Calls, run_id: str) -> Iterator[Run]:
    """The run now and after each change, without end; Unavailable when the cloud stays away."""
    federation = FederationStub(cloud.channel)
    return kept_open(
        lambda: federation.WatchRun(GetRunRequest(id=run_id)),
        f"run {run_id}",
        f"triplane federate watch {run_id}",
    )


@contextlib.contextmanager
def _display(*, as_json: bool) -> Iterator[Show]:
    if as_json:
        yield _json_line
    elif sys.stdout.isatty():
        from triplane.cloud.cli.live_run import live_run

        with live_run() as show:
            yield show
    else:
        yield printed_changes()


def _json_line(run: Run) -> None:
    import json

    click.echo(json.dumps(record(run)))
    sys.stdout.flush()


def printed_changes() -> Show:
    """A function that prints what is new since its last call."""
    before: Run | None = None

    def show(run: Run) -> None:
        nonlocal before
        for line in changes(before, run):
            click.echo(line)
        sys.stdout.flush()
        before = run

    return show
