"""The verb `triplane edge`: commands of an edge node. Imports only click until it is called."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triplane.proto.logs import quiet_grpc
from triplane.unified_ir.cli.shell import (
    EXIT_CODES,
    SECRET,
    CommandOutput,
    Tier,
    json_option,
    open_output,
)

if TYPE_CHECKING:
    from triplane.edge.home import NodeHome
    from triplane.edge.supervisor.ready import Ready

EXAMPLE = """
\b
Serve a bundle, then ask it from another terminal or machine with any client of the protocol:
  triplane edge serve digits.bundle
  python -c 'import tritonclient.grpc as c; print(c.InferenceServerClient("localhost:8001")
             .get_model_metadata("digits"))'

\b
Let the system choose the ports and read them from the first line of output:
  triplane edge serve digits.bundle --port 0 --metrics-port 0 --json

\b
Raise one bound (docs/serving.md lists all of them):
  triplane edge serve digits.bundle --limit rows=10000 --limit queued_calls=1000
"""

PORT = click.IntRange(0, 65535)
TIER = Tier(
    verbs={"edge": 130},
    extras={
        "grpc": "edge",
        "grpc_health": "edge",
        "grpc_reflection": "edge",
        "prometheus_client": "edge",
        "starlette": "edge",
        "uvicorn": "edge",
        "tuf": "edge",
    },
)


@click.group()
def edge() -> None:
    """Run an edge node, or only its inference server."""


DEFAULT_HOME = "~/.triplane/node"
ENROL_EXAMPLE = """
\b
An operator makes a token on a machine that reaches the cloud:
  triplane cloud token --role node --label site=factory
\b
Then, here, once, and from now on:
  triplane edge enrol TOKEN --cloud cloud.example:8444
  triplane edge up
\b
Every user of the machine can see a command line. To read the token from a file, or a pipe:
  triplane edge enrol @token.txt --cloud cloud.example:8444
  ssh operator@cloud triplane cloud token --json | jq -r .token | triplane edge enrol - --cloud ...
"""
UP_EXAMPLE = """
\b
Examples:
  triplane edge up
  triplane edge up --json | head -1        where calls are answered, for scripts
\b
The cloud decides what the node serves (triplane deploy); see it here with: triplane edge status
"""


SAMPLES_EXAMPLE = """
\b
Examples:
  triplane edge samples question labelled.npz
  python -c 'import numpy as np; np.savez("labelled.npz", x=images, y=classes)'
"""


def home_option(function: Any) -> Any:
    """`--home DIR`: the home of a node."""
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="TRIPLANE_NODE_HOME",
        default=DEFAULT_HOME,
        show_default=True,
        metavar="DIR",
        help="The node's folder (also TRIPLANE_NODE_HOME).",
        callback=lambda _ctx, _param, path: path.expanduser(),
    )(function)


@edge.command(epilog=ENROL_EXAMPLE, short_help="Make this machine a node, with a token.")
@click.argument("token_text", metavar="TOKEN|@FILE|-", type=SECRET, envvar="TRIPLANE_TOKEN")
@click.option(
    "--cloud", "address", required=True, metavar="HOST:PORT", help="The cloud's enrolment port."
)
@home_option
@click.option(
    "--root", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="root.json",
    help="The file from beside the offline keys, copied here by hand: what may run here must "
    "follow from it, whatever the cloud says.  [default: the cloud's own]",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to serve calls.")
@click.option(
    "--port", type=PORT, default=8001, show_default=True,
    help="gRPC port; 0: a free one, taken at the first start and kept.",
)  # fmt: skip
@click.option(
    "--metrics-port", type=PORT, default=8002, show_default=True,
    help="Prometheus page; 0: as above.",
)  # fmt: skip
@click.option(
    "--target", "targets", multiple=True, help="Converter target to take.  [default: by processor]"
)
@click.option(
    "--probation-seconds",
    "probation_s",
    default=5.0,
    show_default=True,
    help="How long a new version is watched before it is committed, unless a rollout sets it.",
)
@json_option
def enrol(
    *,
    token_text: str,
    address: str,
    home: Path,
    root: Path | None,
    targets: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Make this machine a node: create its key here and get a certificate for TOKEN.

    It may be repeated with the same token after an interruption. The token identifies the cloud, so
    no other server can take its place, although the enrolment port has no TLS. --root protects even
    against a cloud that was compromised before.
    """
    from triplane.edge.enrolling import enrol as enrol_node
    from triplane.edge.home import NodeHome, NodeSettings

    node = NodeHome(home)
    identity = enrol_node(node, token_text, address, root)
    changes = {name: value for name, value in options.items() if _was_given(name)}
    settings = replace(node.settings, **changes) if node.settings_file.exists() else None
    if settings is not None and targets:
        settings = replace(settings, targets=targets)
    node.save_settings(settings or NodeSettings(targets=targets, **options))
    record = {"name": identity.name, "home": str(node.path), "cloud": identity.cloud}
    text = f"{identity.name}: enrolled in {node.path}; now: triplane edge up --home {node.path}"
    open_output(as_json).result(record, text)


def _was_given(name: str) -> bool:
    """Return whether an option was given: a node that enrols again keeps its other settings."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not click.core.ParameterSource.DEFAULT


@edge.command(epilog=UP_EXAMPLE, short_help="Keep the node running, and print where it answers.")
@home_option
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as one JSON object.")
def up(*, home: Path, as_json: bool) -> None:
    """Keep the node running until SIGTERM or Ctrl-C: supervisor, agent and inference server.

    One line on standard output says that calls are answered, and where. Logs are in HOME/logs;
    starts and ends of processes are logged on standard error. Killing this process leaves agent and
    server running; the next `up` takes them over.
    """
    from triplane.edge.supervisor import ready
    from triplane.edge.supervisor.__main__ import main

    main(home, _ready_json if as_json else ready.text)


def _ready_json(node: "NodeHome", ready: "Ready") -> str:
    from triplane.edge.supervisor.ready import record

    return json.dumps(record(node, ready))


@edge.command(epilog=SAMPLES_EXAMPLE, short_help="Give this node labelled samples of its own.")
@click.argument("model")
@click.argument("file", metavar="FILE.npz", type=click.Path(path_type=Path, dir_okay=False))
@home_option
@json_option
def samples(*, model: str, file: Path, home: Path, as_json: bool) -> None:
    """Give this node labelled samples for MODEL: x (N, ...) and classes y (N,).

    A start point is adapted to one half of the samples before it serves here, and it serves only if
    it then scores at least as well on the other half as the version that serves now. The samples
    stay on this machine. A later file replaces an earlier one, from the next version on.
    """
    from triplane.edge.agent.adapting import keep_samples
    from triplane.edge.home import NodeHome

    node = NodeHome(home)
    count, path = keep_samples(node.samples, model, file, bundle=_served_bundle(node, model))
    record = {"model": model, "samples": count, "file": str(path)}
    open_output(as_json).result(record, f"{count} samples for {model} in {path}")


def _served_bundle(node: "NodeHome", model: str) -> Path | None:
    """Return the bundle that this node has committed for the model, if any."""
    from triplane.edge.serving.pointers import read_pointers

    pointer = read_pointers(node.models)[0].get(model)
    path = node.bundles / pointer.sha256 if pointer else None
    return path if path is not None and path.is_file() else None


@edge.command(short_help="Show what this node serves, and how attempts ended.")
@home_option
@json_option
def status(*, home: Path, as_json: bool) -> None:
    """Show what this node serves, what it was assigned, and how the newest attempts ended.

    Reads the home, asks the server, and asks the cloud whether it takes this node; works without
    the cloud. Exit code 4: the cloud refuses this node. 5: a damaged file keeps `edge up` from
    starting.
    """
    from triplane.edge.home import NodeHome
    from triplane.edge.status import look

    quiet_grpc()
    report = look(NodeHome(home))
    output: CommandOutput = open_output(as_json)
    output.result(report.record(), report.text())
    if report.trouble is not None:
        click.get_current_context().exit(EXIT_CODES[report.trouble])


@edge.command(epilog=EXAMPLE, short_help="Answer inference calls on bundles, without a cloud.")
@click.argument("bundles", nargs=-1, required=True, metavar="BUNDLE...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=PORT, default=8001, show_default=True, help="gRPC port; 0 takes a free one."
)
@click.option(
    "--metrics-port",
    type=PORT,
    default=8002,
    show_default=True,
    help="Prometheus page; 0: any free one.",
)
@click.option("--threads", type=int, help="Calls that compute at once.  [default: 16]")
@click.option("--model-threads", default=1, show_default=True, help="Threads of one model run.")
@click.option("--max-message-mb", type=int, help="Largest request, in MiB.  [default: 64]")
@click.option("--limit", "bounds", multiple=True, metavar="NAME=VALUE", help="Set one other bound.")
@click.option(
    "--drain-seconds",
    "drain_s",
    default=30.0,
    show_default=True,
    help="How long calls may take to finish after SIGTERM or Ctrl-C.",
)
@click.option("--tls-cert", type=click.Path(dir_okay=False), help="Server certificate (PEM).")
@click.option("--tls-key", type=click.Path(dir_okay=False), help="Its private key (PEM).")
@click.option(
    "--tls-client-ca",
    type=click.Path(dir_okay=False),
    help="Let in only callers with a certificate of this authority (PEM).",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="Events on standard error.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as one JSON object.")
def serve(
    *,
    threads: int | None,
    max_message_mb: int | None,
    bounds: tuple[str, ...],
    as_json: bool,
    **options: object,
) -> None:
    """Answer inference calls on bundles until SIGTERM or Ctrl-C.

    Speaks the Open Inference Protocol v2 over gRPC. Several bundles may be given, also several
    versions of one model; a call that names no version gets the newest.
    """
    from triplane.edge.serving.__main__ import main, options_from

    limits = dict(bound.partition("=")[::2] for bound in bounds)
    if threads is not None:
        limits["threads"] = str(threads)
    if max_message_mb is not None:
        limits["message_bytes"] = str(max_message_mb << 20)
    main(options_from({**options, "json": as_json, "limits": limits}))


if __name__ == "__main__":
    edge()
