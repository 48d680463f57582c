"""`triplane rollout`: the rollouts there are and were; watch, pause, resume or abort one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from triplane.cloud.cli.connection import calls, client_options
from triplane.unified_ir.cli.shell import open_output

if TYPE_CHECKING:
    from triplane.proto.fleet_pb2 import Rollout

ID = click.argument("rollout_id", metavar="ROLLOUT", default="last")
REASON = click.option(
    "--reason", default="", metavar="TEXT", help="Shown with the rollout and in the audit log."
)


@click.group("rollout")
def command() -> None:
    """See and steer rollouts. ROLLOUT is an id, the beginning of one, or `last`."""


@command.command("ls")
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@client_options
def ls(*, limit: int, identity: Path | None, as_json: bool) -> None:
    """List rollouts, newest first."""
    from triplane.cloud.cli.rollouts import rollout_table
    from triplane.cloud.cli.text import record
    from triplane.proto.fleet_pb2 import ListRolloutsRequest

    with calls(identity) as cloud:
        rollouts = cloud.fleet.ListRollouts(ListRolloutsRequest(page_size=limit)).rollouts
    none = "no rollout yet; begin one with: triplane deploy MODEL --to SELECTOR"
    text = rollout_table(rollouts) if rollouts else none
    open_output(as_json).result({"rollouts": [record(r) for r in rollouts]}, text)


@command.command("show", short_help="Waves, nodes with their states, and the reasons.")
@ID
@click.option("--watch", is_flag=True, help="Stay and show every change until it ends.")
@client_options
@click.pass_context
def show(
    ctx: click.Context, *, rollout_id: str, watch: bool, identity: Path | None, as_json: bool
) -> None:
    """Show a rollout: its waves, each node's state, and the reasons.

    With --watch the exit code is that of `triplane deploy`: 0 done, 4 paused, failed or aborted.
    """
    from triplane.cloud.cli.live_rollout import watchable
    from triplane.cloud.cli.rollouts import rollout_text
    from triplane.cloud.cli.text import record
    from triplane.cloud.cli.watching import watch_to_end
    from triplane.proto.fleet_pb2 import GetRolloutRequest

    with calls(identity) as cloud:
        rollout = cloud.fleet.GetRollout(GetRolloutRequest(id=rollout_id))
        watched = watchable(cloud, rollout.id)
        code = watch_to_end(watched, rollout, as_json=as_json) if watch else 0
    if not watch:
        open_output(as_json).result(record(rollout), rollout_text(rollout))
    ctx.exit(code)


@command.command("pause", short_help="Open no further wave until it is resumed.")
@ID
@REASON
@client_options
def pause(*, rollout_id: str, reason: str, identity: Path | None, as_json: bool) -> None:
    """Hold a rollout: nodes finish what they have begun, no further node begins."""
    from triplane.proto.fleet_pb2 import ChangeRolloutRequest

    with calls(identity) as cloud:
        rollout = cloud.fleet.Pause(ChangeRolloutRequest(id=rollout_id, reason=reason))
    _tell(rollout, as_json=as_json)


@command.command("resume", short_help="Go on; nodes that failed try once more.")
@ID
@REASON
@client_options
def resume(*, rollout_id: str, reason: str, identity: Path | None, as_json: bool) -> None:
    """Let a paused rollout go on; nodes that failed try once more."""
    from triplane.proto.fleet_pb2 import ChangeRolloutRequest

    with calls(identity) as cloud:
        rollout = cloud.fleet.Resume(ChangeRolloutRequest(id=rollout_id, reason=reason))
    _tell(rollout, as_json=as_json)


@command.command("abort")
@ID
@REASON
@click.option(
    "--revert", is_flag=True,
    help="Nodes that have the new version go back to what they served before.",
)  # fmt: skip
@client_options
def abort(
    *, rollout_id: str, reason: str, revert: bool, identity: Path | None, as_json: bool
) -> None:
    """End a rollout for good. Nodes that have the new version keep it, unless --revert."""
    from triplane.proto.fleet_pb2 import AbortRequest

    with calls(identity) as cloud:
        rollout = cloud.fleet.Abort(AbortRequest(id=rollout_id, reason=reason, revert=revert))
    _tell(rollout, as_json=as_json)


def _tell(rollout: Rollout, *, as_json: bool) -> None:
    from triplane.cloud.cli.rollouts import headline
    from triplane.cloud.cli.text import record

    open_output(as_json).result(record(rollout), headline(rollout))
