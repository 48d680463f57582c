"""`triplane rollout`: list and show rollouts; watch, pause, resume or abort one."""

from __future__ import annotations

import click

from triplane.cloud.cli.connection import Answer, Calls, calls_cloud
from triplane.cloud.cli.options import example

ID = click.argument("rollout_id", metavar="ROLLOUT", default="last")
REASON = click.option(
    "--reason", default="", metavar="TEXT", help="Shown with the rollout and in the audit log."
)


@click.group("rollout")
def command() -> None:
    """Show and control rollouts.

    ROLLOUT is an id, the beginning of one, or `last`, which is the default.
    """


@command.command("ls", epilog=example("rollout ls --limit 5"))
@click.option(
    "--limit", type=click.IntRange(1, 500), default=50, show_default=True, metavar="N",
    help="Largest number of rollouts to list.",
)  # fmt: skip
@calls_cloud
def ls(cloud: Calls, *, limit: int) -> Answer:
    """List rollouts, newest first."""
    from triplane.cloud.cli.rollouts import rollout_table
    from triplane.proto.fleet_pb2 import ListRolloutsRequest

    rollouts = cloud.fleet.ListRollouts(ListRolloutsRequest(page_size=limit)).rollouts
    none = "no rollout yet; begin one with: triplane deploy MODEL --to SELECTOR"
    return {"rollouts": rollouts}, rollout_table(rollouts) if rollouts else none


@command.command("show", epilog=example("rollout show last --watch"))
@ID
@click.option("--watch", is_flag=True, help="Keep printing changes until the rollout stops.")
@calls_cloud
def show(cloud: Calls, *, rollout_id: str, watch: bool) -> Answer:
    """Show the waves of a rollout, its nodes and reasons.

    With --watch the exit code is that of `triplane deploy`: 0 done, 4 paused, failed or aborted.
    """
    from triplane.cloud.cli.rollouts import rollout_text, watchable
    from triplane.cloud.cli.watching import watch_to_end
    from triplane.proto.fleet_pb2 import GetRolloutRequest

    rollout = cloud.fleet.GetRollout(GetRolloutRequest(id=rollout_id))
    if watch:
        return watch_to_end(watchable(cloud, rollout.id), rollout, as_json=cloud.output.as_json)
    return rollout, rollout_text(rollout)


@command.command("pause", epilog=example('rollout pause --reason "night shift"'))
@ID
@REASON
@calls_cloud
def pause(cloud: Calls, *, rollout_id: str, reason: str) -> Answer:
    """Start no further node until `resume`.

    Nodes finish what they have begun.
    """
    from triplane.cloud.cli.rollouts import headline
    from triplane.proto.fleet_pb2 import ChangeRolloutRequest

    rollout = cloud.fleet.Pause(ChangeRolloutRequest(id=rollout_id, reason=reason))
    return rollout, headline(rollout)


@command.command("resume", epilog=example("rollout resume last"))
@ID
@REASON
@calls_cloud
def resume(cloud: Calls, *, rollout_id: str, reason: str) -> Answer:
    """Continue a paused rollout; failed nodes try once more."""
    from triplane.cloud.cli.rollouts import headline
    from triplane.proto.fleet_pb2 import ChangeRolloutRequest

    rollout = cloud.fleet.Resume(ChangeRolloutRequest(id=rollout_id, reason=reason))
    return rollout, headline(rollout)


@command.command("abort", epilog=example("rollout abort last --revert"))
@ID
@REASON
@click.option(
    "--revert", is_flag=True,
    help="Nodes that have the new version go back to the version that they served before.",
)  # fmt: skip
@calls_cloud
def abort(cloud: Calls, *, rollout_id: str, reason: str, revert: bool) -> Answer:
    """End a rollout for good.

    Nodes that have the new version keep it, unless you give --revert.
    """
    from triplane.cloud.cli.rollouts import headline
    from triplane.proto.fleet_pb2 import AbortRequest

    rollout = cloud.fleet.Abort(AbortRequest(id=rollout_id, reason=reason, revert=revert))
    return rollout, headline(rollout)
