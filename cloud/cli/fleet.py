"""`triplane fleet`: which nodes there are, what they serve, how they are labelled."""

from __future__ import annotations

from pathlib import Path

import click

from triplane.cloud.cli.connection import calls, client_options
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.shell import open_output

LABEL_EPILOG = """\b
Examples:
  triplane fleet label camera-7 site=factory line=3
  triplane fleet label camera-7 line-             remove the label `line`
"""


@click.group("fleet")
def command() -> None:
    """See and arrange the nodes."""


@command.command("ls", short_help="List nodes: labels, what each serves, its state.")
@click.option(
    "--to", "selector", default="", metavar="SELECTOR",
    help="Only nodes with these labels, as site=factory,camera!=old.  [default: all]",
)  # fmt: skip
@client_options
def ls(*, selector: str, identity: Path | None, as_json: bool) -> None:
    """List nodes: labels, whether connected, what each serves and what it is at."""
    from triplane.cloud.cli.nodes import all_nodes, node_table
    from triplane.cloud.cli.text import record

    with calls(identity) as cloud:
        nodes = all_nodes(cloud, selector)
    text = node_table(nodes) if nodes else _none(selector)
    open_output(as_json).result({"nodes": [record(node) for node in nodes]}, text)


def _none(selector: str) -> str:
    if selector:
        return f"no node matches {selector}; triplane fleet ls shows all labels"
    return "no node yet; let one in with: triplane cloud token --role node"


@command.command("show", short_help="All that is known of a node, with its incidents.")
@click.argument("node")
@client_options
def show(*, node: str, identity: Path | None, as_json: bool) -> None:
    """Show all that is known of NODE, with the incidents it reported."""
    from triplane.cloud.cli.nodes import node_text
    from triplane.cloud.cli.text import record
    from triplane.proto.fleet_pb2 import GetNodeRequest

    with calls(identity) as cloud:
        message = cloud.fleet.GetNode(GetNodeRequest(name=node))
    open_output(as_json).result(record(message), node_text(message))


@command.command("label", epilog=LABEL_EPILOG)
@click.argument("node")
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE|KEY-...")
@client_options
def label(*, node: str, changes: tuple[str, ...], identity: Path | None, as_json: bool) -> None:
    """Set or remove labels of NODE. Running rollouts keep the nodes they began with."""
    from triplane.cloud.cli.text import labels_text, record
    from triplane.proto.fleet_pb2 import SetLabelsRequest

    wanted = dict(change.split("=", 1) for change in changes if "=" in change)
    removed = [change[:-1] for change in changes if "=" not in change and change.endswith("-")]
    if len(wanted) + len(removed) != len(changes) or "" in wanted or "" in removed:
        raise InvalidInput(
            f"label changes are KEY=VALUE or KEY-, each key once; got {' '.join(changes)}"
        )
    with calls(identity) as cloud:
        message = cloud.fleet.SetLabels(SetLabelsRequest(name=node, set=wanted, remove=removed))
    text = f"{message.name}: {labels_text(dict(message.labels)) or 'no labels'}"
    open_output(as_json).result(record(message), text)


@command.command("cordon")
@click.argument("node")
@client_options
def cordon(*, node: str, identity: Path | None, as_json: bool) -> None:
    """Let NODE keep what it serves and give it nothing new."""
    _set_cordoned(node, identity, cordoned=True, as_json=as_json)


@command.command("uncordon")
@click.argument("node")
@client_options
def uncordon(*, node: str, identity: Path | None, as_json: bool) -> None:
    """Let NODE take new versions again."""
    _set_cordoned(node, identity, cordoned=False, as_json=as_json)


def _set_cordoned(node: str, identity: Path | None, *, cordoned: bool, as_json: bool) -> None:
    from triplane.cloud.cli.text import record
    from triplane.proto.fleet_pb2 import CordonRequest

    with calls(identity) as cloud:
        message = cloud.fleet.Cordon(CordonRequest(name=node, cordoned=cordoned))
    text = (
        f"{message.name}: {'cordoned, keeps what it serves' if cordoned else 'takes new versions'}"
    )
    open_output(as_json).result(record(message), text)
