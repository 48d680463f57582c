"""`triplane fleet`: list nodes and what they serve; label and cordon them."""

from __future__ import annotations

from typing import Any

import click

from triplane.cloud.cli.connection import Answer, Calls, calls_cloud, client_options, print_answer
from triplane.cloud.cli.options import example
from triplane.proto.errors import InvalidInput

LABEL_EPILOG = """\b
Examples:
  triplane fleet label camera-7 site=factory line=3
  triplane fleet label camera-7 line-             remove the label `line`
"""


@click.group("fleet")
def command() -> None:
    """List, label and cordon nodes."""


@command.command("ls", epilog=example("fleet ls --to site=factory"))
@click.option(
    "--to", "selector", default="", metavar="SELECTOR",
    help="Only nodes with these labels, such as site=factory,camera!=old.  [default: all]",
)  # fmt: skip
@calls_cloud
def ls(cloud: Calls, *, selector: str) -> Answer:
    """List nodes: labels, connection, what each serves."""
    from triplane.cloud.cli.nodes import all_nodes, node_table

    nodes = all_nodes(cloud, selector)
    none = "no node yet; let one in with: triplane cloud token --role node"
    if selector:
        none = f"no node matches {selector}; triplane fleet ls shows all labels"
    return {"nodes": nodes}, node_table(nodes) if nodes else none


@command.command("show", epilog=example("fleet show camera-7"))
@click.argument("node")
@calls_cloud
def show(cloud: Calls, *, node: str) -> Answer:
    """Show everything about NODE, with its incidents."""
    from triplane.cloud.cli.nodes import node_text
    from triplane.proto.fleet_pb2 import GetNodeRequest

    message = cloud.fleet.GetNode(GetNodeRequest(name=node))
    return message, node_text(message)


@command.command("label", epilog=LABEL_EPILOG)
@click.argument("node")
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE|KEY-...")
@client_options
def label(*, changes: tuple[str, ...], **options: Any) -> None:
    """Set or remove labels of NODE.

    Rollouts that have begun keep the nodes they began with.
    """
    wanted = dict(change.split("=", 1) for change in changes if "=" in change)
    removed = [change[:-1] for change in changes if "=" not in change and change.endswith("-")]
    # Fewer entries than arguments: a key was given twice, or an argument has neither form.
    if len(wanted) + len(removed) != len(changes) or "" in wanted or "" in removed:
        raise InvalidInput(
            f"label changes are KEY=VALUE or KEY-, each key once; got {' '.join(changes)}"
        )
    print_answer(_set_labels, wanted=wanted, removed=removed, **options)


def _set_labels(cloud: Calls, *, node: str, wanted: dict[str, str], removed: list[str]) -> Answer:
    from triplane.cloud.cli.text import labels_text
    from triplane.proto.fleet_pb2 import SetLabelsRequest

    message = cloud.fleet.SetLabels(SetLabelsRequest(name=node, set=wanted, remove=removed))
    return message, f"{message.name}: {labels_text(dict(message.labels)) or 'no labels'}"


@command.command("cordon", epilog=example("fleet cordon camera-7"))
@click.argument("node")
@calls_cloud
def cordon(cloud: Calls, *, node: str) -> Answer:
    """Give NODE nothing new; it keeps what it serves."""
    return _set_cordoned(cloud, node, "cordoned, keeps what it serves", cordoned=True)


@command.command("uncordon", epilog=example("fleet uncordon camera-7"))
@click.argument("node")
@calls_cloud
def uncordon(cloud: Calls, *, node: str) -> Answer:
    """Let NODE take new versions again."""
    return _set_cordoned(cloud, node, "takes new versions", cordoned=False)


def _set_cordoned(cloud: Calls, node: str, text: str, *, cordoned: bool) -> Answer:
    from triplane.proto.fleet_pb2 import CordonRequest

    message = cloud.fleet.Cordon(CordonRequest(name=node, cordoned=cordoned))
    return message, f"{message.name}: {text}"
