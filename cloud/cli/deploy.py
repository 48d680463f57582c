"""`triplane deploy`: bring a version to nodes, wave by wave, and watch it get there."""

from __future__ import annotations

from typing import Any

import click

from triplane.cloud.cli.connection import Answer, Calls, calls_cloud, new_key, repeated
from triplane.cloud.cli.options import DURATION, SHARE, WAVES

EPILOG = """\b
Examples:
  triplane deploy digits@3 --to all
  triplane deploy digits@stable --to site=factory,camera!=old --waves 5%,25%,100%
  triplane deploy digits --to site=lab --waves 1,100% --pause-between-waves
  triplane deploy digits@3 --to all --detach --json

\b
What happens: the cloud converts the version for each kind of machine, waits until the bundles are
signed (it says so; triplane sign), and opens the first wave. Each node downloads its bundle,
verifies signatures and digests, tries the new version in a child process against its golden samples
and limits, switches without failing a call, watches it for the probation time, and then commits it
or goes back by itself.
Reaching --success opens the next wave; exceeding --failure pauses the rollout, and a paused rollout
changes nothing until you resume or abort it. A node that is silent past --node-deadline counts as
failed; if it comes back later, it still gets the version.

\b
Waves are cumulative: 5%,25%,100% of 40 nodes are 2, then 10 in all, then 40. A number without % is
a number of nodes.
On a terminal a table follows the rollout; elsewhere one line per change; with --json one object per
change. Ctrl-C closes the table and does not stop the rollout.
Exit codes: 0 done (or begun, with --detach); 4 paused, failed or aborted.
"""


@click.command("deploy", epilog=EPILOG)
@click.argument("reference", metavar="MODEL[@VERSION|@ALIAS]")
@click.option(
    "--to", "selector", required=True, metavar="SELECTOR",
    help="The nodes that match all of these labels, joined by commas (site=factory,camera!=old), "
    "or `all`.",
)  # fmt: skip
@click.option(
    "--waves", type=WAVES, default="100%", show_default=True, metavar="SIZES",
    help="Nodes that have the version after each wave: growing shares or counts.",
)  # fmt: skip
@click.option(
    "--success", "success_share", type=SHARE, default="100%", show_default=True, metavar="SHARE",
    help="Share of a wave's nodes that must commit before the next wave opens.",
)  # fmt: skip
@click.option(
    "--failure", "failure_share", type=SHARE, default="0%", show_default=True, metavar="SHARE",
    help="Share of a wave's nodes that may fail; more failures pause the rollout.",
)  # fmt: skip
@click.option(
    "--node-deadline", "node_deadline_s", type=DURATION, default="10min", show_default=True,
    metavar="TIME", help="A node that has not committed this long after its wave began has failed.",
)  # fmt: skip
@click.option(
    "--probation", "probation_s", type=DURATION, default="0", metavar="TIME",
    help="Time that a node watches the new version before it commits.  [default: the node's own]",
)  # fmt: skip
@click.option(
    "--pause-between-waves", is_flag=True,
    help="Wait for `triplane rollout resume` after each wave.",
)  # fmt: skip
@click.option(
    "--role", type=click.Choice(["release", "auto"]), default="release", show_default=True,
    help="Required signature: a person's (release), or the cloud's own within the release "
    "policy (auto).",
)  # fmt: skip
@click.option("--detach", is_flag=True, help="Begin the rollout and return without watching it.")
@calls_cloud
def command(
    cloud: Calls,
    *,
    reference: str,
    waves: tuple[tuple[str, float], ...],
    detach: bool,
    **options: Any,
) -> Answer:
    """Bring a version to nodes, wave by wave."""
    from triplane.cloud.cli.rollouts import headline, watchable
    from triplane.cloud.cli.watching import watch_to_end
    from triplane.proto.fleet_pb2 import DeployRequest, Wave

    sizes = [
        Wave(percent=amount) if unit == "percent" else Wave(nodes=int(amount))
        for unit, amount in waves
    ]
    request = DeployRequest(reference=reference, waves=sizes, key=new_key(), **options)
    # One key for all attempts, so a repeated call never begins a second rollout.
    rollout = repeated(lambda: cloud.fleet.Deploy(request))
    if not detach:
        # The exit code: this function prints by itself.
        return watch_to_end(watchable(cloud, rollout.id), rollout, as_json=cloud.output.as_json)
    return rollout, f"{headline(rollout)}\nWatch it: triplane rollout show {rollout.id} --watch"
