"""`triplane deploy`: bring a version to nodes, wave by wave, and watch it get there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triplane.cloud.cli.connection import calls, client_options
from triplane.cloud.cli.options import DURATION, SHARE, WAVES
from triplane.unified_ir.cli.shell import open_output

if TYPE_CHECKING:
    from triplane.cloud.cli.connection import Calls
    from triplane.proto.fleet_pb2 import DeployRequest, Rollout

EPILOG = """\b
Examples:
  triplane deploy digits@3 --to all
  triplane deploy digits@stable --to site=factory,camera!=old --waves 5%,25%,100%
  triplane deploy digits --to site=lab --waves 1,100% --pause-between-waves
  triplane deploy digits@3 --to all --detach --json

\b
What happens: the cloud makes the bundle each kind of machine needs, waits until it is signed (it
says so; triplane sign), and opens the first wave. Each node downloads, checks signatures and
digests, tries the new version in a child process against its golden samples and limits, switches
without failing a call, watches it for the probation time, and commits or goes back by itself.
Reaching --success opens the next wave; exceeding --failure pauses the rollout, and a paused one
changes nothing until you resume or abort it. A node that is silent past --node-deadline counts as
failed; one that comes back later still catches up.

\b
Waves are cumulative: 5%,25%,100% of 40 nodes are 2, then 10 in all, then 40. A number counts nodes.
On a terminal a table follows the rollout; elsewhere one line per change; with --json one object per
change. Ctrl-C leaves the table, not the rollout.
Exit codes: 0 done (or begun, with --detach); 4 paused, failed or aborted.
"""


@click.command("deploy", short_help="Bring a version to nodes, wave by wave.", epilog=EPILOG)
@click.argument("reference", metavar="MODEL[@VERSION|@ALIAS]")
@click.option(
    "--to", "selector", required=True, metavar="SELECTOR",
    help="Which nodes: labels joined by commas, all of which hold (site=factory,camera!=old), "
    "or `all`.",
)  # fmt: skip
@click.option(
    "--waves", type=WAVES, default="100%", show_default=True, metavar="SIZES",
    help="How many nodes have it after each wave: shares or counts, growing.",
)  # fmt: skip
@click.option(
    "--success", "success_share", type=SHARE, default="100%", show_default=True, metavar="SHARE",
    help="Of a wave's nodes that must commit before the next wave opens.",
)  # fmt: skip
@click.option(
    "--failure", "failure_share", type=SHARE, default="0%", show_default=True, metavar="SHARE",
    help="Of a wave's nodes that may fail; more of them pause the rollout.",
)  # fmt: skip
@click.option(
    "--node-deadline", "node_deadline_s", type=DURATION, default="10min", show_default=True,
    metavar="TIME", help="A node that has not committed this long after its wave opened failed.",
)  # fmt: skip
@click.option(
    "--probation", "probation_s", type=DURATION, default="0", metavar="TIME",
    help="How long a node watches the new version before it commits.  [default: the node's own]",
)  # fmt: skip
@click.option(
    "--pause-between-waves", is_flag=True,
    help="Wait for `triplane rollout resume` after each wave.",
)  # fmt: skip
@click.option(
    "--role", type=click.Choice(["release", "auto"]), default="release", show_default=True,
    help="Whose signature nodes accept: a person's (release), or the cloud's own within the "
    "release policy (auto).",
)  # fmt: skip
@click.option("--detach", is_flag=True, help="Begin the rollout and leave.")
@client_options
@click.pass_context
def command(
    ctx: click.Context, /, *, detach: bool, identity: Path | None, as_json: bool, **options: Any
) -> None:
    """Bring a version of a model to the nodes that SELECTOR names, wave by wave."""
    with calls(identity) as cloud:
        rollout = _begun(cloud, _request(**options))
        code = 0 if detach else _watched(cloud, rollout, as_json=as_json)
    if detach:
        _tell_detached(rollout, as_json=as_json)
    ctx.exit(code)


def _request(
    *, waves: tuple[tuple[str, float], ...], reference: str, **options: Any
) -> DeployRequest:
    from triplane.cloud.cli.connection import new_key
    from triplane.proto.fleet_pb2 import DeployRequest, Wave

    sizes = [
        Wave(percent=amount) if unit == "percent" else Wave(nodes=int(amount))
        for unit, amount in waves
    ]
    return DeployRequest(reference=reference, waves=sizes, key=new_key(), **options)


def _begun(cloud: Calls, request: DeployRequest) -> Rollout:
    from triplane.cloud.cli.connection import repeated

    return repeated(lambda: cloud.fleet.Deploy(request))


def _watched(cloud: Calls, rollout: Rollout, *, as_json: bool) -> int:
    from triplane.cloud.cli.live_rollout import watchable
    from triplane.cloud.cli.watching import watch_to_end

    return watch_to_end(watchable(cloud, rollout.id), rollout, as_json=as_json)


def _tell_detached(rollout: Rollout, *, as_json: bool) -> None:
    from triplane.cloud.cli.rollouts import headline
    from triplane.cloud.cli.text import record

    text = f"{headline(rollout)}\nWatch it: triplane rollout show {rollout.id} --watch"
    open_output(as_json).result(record(rollout), text)
