"""The verb `triplane edge`: commands of an edge node. Imports only click until it is called."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from triplane.proto.logs import quiet_grpc
from triplane.unified_ir.cli import data_options, predict
from triplane.unified_ir.cli.machines import (
    home_option,
    log_level_option,
    ready_option,
    root_option,
    token_options,
)
from triplane.unified_ir.cli.shell import EXIT_CODES, Tier, json_option, open_output

if TYPE_CHECKING:
    from triplane.edge.home import NodeHome

F = TypeVar("F", bound=Callable[..., Any])

EXAMPLE = """
\b
Serve a bundle, then call it from another terminal or machine with any client of the protocol:
  triplane edge serve digits.bundle
  python -c 'import tritonclient.grpc as c; print(c.InferenceServerClient("localhost:8001")
             .get_model_metadata("digits"))'

\b
Let the system choose the ports and read them from the first line of output:
  triplane edge serve digits.bundle --port 0 --metrics-port 0 --json

\b
Raise one limit (docs/serving.md lists all of them):
  triplane edge serve digits.bundle --limit rows=10000 --limit queued_calls=1000
"""

PORT = click.IntRange(0, 65535)
MODULES = "grpc grpc_health grpc_reflection prometheus_client starlette uvicorn tuf"
TIER = Tier(verbs={"edge": 130}, extras=dict.fromkeys(MODULES.split(), "edge"))


def address_options(function: F) -> F:
    """Add the addresses that a server listens on."""
    host = click.option(
        "--host", default="127.0.0.1", show_default=True, help="Address to listen on."
    )
    port = click.option(
        "--port",
        type=PORT,
        default=8001,
        show_default=True,
        help="gRPC port; 0: any free one, which `edge up` keeps for later starts.",
    )
    metrics = click.option(
        "--metrics-port",
        type=PORT,
        default=8002,
        show_default=True,
        help="Port of the Prometheus page; 0: as above.",
    )
    return host(port(metrics(function)))


device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where models run; cuda needs onnxruntime-gpu in place of onnxruntime.",
)


def tls_option(name: str, text: str) -> Callable[[F], F]:
    """Return an option that names a PEM file."""
    return click.option(name, type=click.Path(dir_okay=False), help=f"{text} (PEM).")


@click.group()
def edge() -> None:
    """Run an edge node, or only its inference server."""


node_home = home_option("node", "TRIPLANE_NODE_HOME", "~/.triplane/node")
ENROL_EXAMPLE = """
\b
An operator makes a token on a machine that reaches the cloud:
  triplane cloud token --role node --label site=factory
\b
Then, here, once, and from now on:
  triplane edge enrol TOKEN --cloud cloud.example:8444
  triplane edge up
\b
Every user of a machine can see its command lines. To type the token, or read a file or pipe:
  triplane edge enrol - --cloud cloud.example:8444
  triplane edge enrol @token.txt --cloud cloud.example:8444
  ssh operator@cloud triplane cloud token --role node | triplane edge enrol - --cloud ...
"""
UP_EXAMPLE = """
\b
Examples:
  triplane edge up
  triplane edge up --json > ready.json &        for scripts: one line, once calls are answered
\b
The cloud decides what the node serves (triplane deploy). To see it here: triplane edge status
"""


SAMPLES_EXAMPLE = f"""
\b
Examples:
  triplane edge samples question labelled.npz
  python -c 'import numpy as np; np.savez("labelled.npz", x=images, y=classes)'
  triplane edge samples gait steps.csv --x 'ch*:2x64' --y activity
\b
PATH is an .npz, another file with samples (.csv, .parquet, ...) or a folder of images by class,
which get the size of the model that serves here. Names of classes get the numbers of that model.

{data_options.CHOICES}"""


@edge.command(epilog=ENROL_EXAMPLE, short_help="Make this machine a node, with a token.")
@token_options
@node_home
@root_option("node")
@address_options
@device_option
@click.option(
    "--target",
    "targets",
    multiple=True,
    help="Target of the converter whose bundles this node takes.  [default: by processor]",
)
@click.option(
    "--probation-seconds",
    "probation_s",
    default=5.0,
    show_default=True,
    help="How long to watch a new version before it is committed, unless the rollout sets it.",
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

    It can be repeated with the same token after an interruption. The token identifies the cloud, so
    no other server can impersonate it, although the enrolment port has no TLS. --root also protects
    against a cloud that was compromised before.
    """
    from triplane.edge.enrolling import enrol as enrol_node
    from triplane.edge.home import NodeHome, NodeSettings

    if options["device"] != "cpu":  # before the token is used up
        from triplane.unified_ir.runtime.session import check_device

        check_device(options["device"])
    node = NodeHome(home)
    identity = enrol_node(node, token_text, address, root)
    options["targets"] = targets
    if node.settings_file.exists():  # a node that enrols again keeps its other settings
        source = click.get_current_context().get_parameter_source
        default = click.core.ParameterSource.DEFAULT
        options = {name: value for name, value in options.items() if source(name) is not default}
        node.save_settings(replace(node.settings, **options))
    else:
        node.save_settings(NodeSettings(**options))
    record = {"name": identity.name, "home": str(node.path), "cloud": identity.cloud}
    text = f"{identity.name}: enrolled in {node.path}; now: triplane edge up --home {node.path}"
    open_output(as_json).result(record, text)


@edge.command(epilog=UP_EXAMPLE, short_help="Keep the node running, and print where it answers.")
@node_home
@ready_option
def up(*, home: Path, as_json: bool) -> None:
    """Keep the node running until SIGTERM or Ctrl-C: supervisor, agent and inference server.

    It prints one line when calls are answered, with the address. Logs are in HOME/logs; starts and
    ends of processes are logged to standard error. If this process is killed, agent and server go
    on running, and the next `up` takes them over.
    """
    from triplane.edge.supervisor import ready
    from triplane.edge.supervisor.__main__ import main

    main(home, ready.json_line if as_json else ready.text)


@edge.command(
    epilog=SAMPLES_EXAMPLE, short_help="Give this node labelled samples of its own.",
    params=[*data_options.choices(), data_options.window_group(), *data_options.forms()],
)  # fmt: skip
@click.argument("model")
@click.argument("file", metavar="PATH", type=click.Path(path_type=Path))
@node_home
@json_option
def samples(*, model: str, file: Path, home: Path, as_json: bool, **options: Any) -> None:
    """Give this node labelled samples for MODEL: x (N, ...) and classes y (N,).

    A start point is adapted to one half of the samples before it serves here. It serves only if it
    then scores at least as well on the other half as the version that serves now. The samples stay
    on this machine. A later file replaces an earlier one from the next version on.
    """
    from triplane.edge.agent.adapting import keep_samples
    from triplane.edge.home import NodeHome

    node = NodeHome(home)
    served = _served_bundle(node, model)
    choice = data_options.reading_by_group(options)
    count, path = keep_samples(node.samples, model, file, bundle=served, **choice)
    record = {"model": model, "samples": count, "file": str(path)}
    open_output(as_json).result(record, f"{count} samples for {model} in {path}")


def _served_bundle(node: "NodeHome", model: str) -> Path | None:
    """Return the bundle that this node has committed for the model, if there is one."""
    from triplane.edge.serving.pointers import read_pointers

    pointer = read_pointers(node.models)[0].get(model)
    path = node.bundles / pointer.sha256 if pointer else None
    return path if path is not None and path.is_file() else None


INFER_EXAMPLE = f"""
\b
Examples:
  triplane edge infer digits seven.png
  triplane edge infer speed readings.csv --x 'ax*,ay*:2x64' --out speeds.csv
  triplane edge infer shapes photos --at camera-1:8001 --model-version 2
\b
INPUT and --out are those of `triplane predict`. Any server of the Open Inference Protocol v2
answers; a connection with TLS needs another client (docs/serving.md).

{data_options.CHOICES}"""


@edge.command(
    epilog=INFER_EXAMPLE, short_help="Ask a server for what a model answers.",
    params=[*predict.OPTIONS],
)  # fmt: skip
@click.argument("model")
@click.argument("source", metavar="INPUT")
@click.option(
    "--at", "address", default="127.0.0.1:8001", show_default=True, metavar="HOST:PORT",
    help="Address of the server.",
)  # fmt: skip
@click.option(
    "--model-version", "version", default="", metavar="VERSION",
    help="Version of the model.  [default: the server's newest]",
)  # fmt: skip
@json_option
def infer(*, address: str, version: str, **options: Any) -> None:
    """Send the samples of INPUT to a server, and print or write what MODEL answers."""
    from triplane.edge.served_model import served_model

    quiet_grpc()
    output = open_output(options["as_json"])
    predict.check_outputs(options)
    with served_model(address, options["model"], version) as model:
        predict.answer(model, options, output)


@edge.command(short_help="Show what this node serves, and how attempts ended.")
@node_home
@json_option
def status(*, home: Path, as_json: bool) -> None:
    """Show what this node serves, what it was assigned, and how the newest attempts ended.

    It reads the home, asks the server, and asks the cloud whether it accepts this node; it works
    without the cloud, too. Exit code 4: the cloud refuses this node. Exit code 5: `edge up` cannot
    start because of a damaged file.
    """
    from triplane.edge.home import NodeHome
    from triplane.edge.status import look

    quiet_grpc()
    report = look(NodeHome(home))
    open_output(as_json).result(report.record(), report.text())
    if report.trouble is not None:
        click.get_current_context().exit(EXIT_CODES[report.trouble])


@edge.command(epilog=EXAMPLE, short_help="Answer inference calls on bundles, without a cloud.")
@click.argument("bundles", nargs=-1, required=True, metavar="BUNDLE...")
@address_options
@click.option("--threads", type=int, help="Calls that compute at once.  [default: 16]")
@click.option("--model-threads", default=1, show_default=True, help="Threads of one model run.")
@device_option
@click.option("--max-message-mb", type=int, help="Largest request, in MiB.  [default: 64]")
@click.option("--limit", "bounds", multiple=True, metavar="NAME=VALUE", help="Set another limit.")
@click.option(
    "--drain-seconds",
    "drain_s",
    default=30.0,
    show_default=True,
    help="Longest wait for calls to finish after SIGTERM or Ctrl-C.",
)
@tls_option("--tls-cert", "Certificate of the server")
@tls_option("--tls-key", "Private key of --tls-cert")
@tls_option("--tls-client-ca", "Authority whose certificates callers must have")
@log_level_option("warning")
@ready_option
def serve(
    *,
    threads: int | None,
    max_message_mb: int | None,
    bounds: tuple[str, ...],
    as_json: bool,
    **options: object,
) -> None:
    """Answer inference calls on bundles until SIGTERM or Ctrl-C.

    The server speaks the Open Inference Protocol v2 over gRPC. You can give several bundles, also
    several versions of one model; a call that names no version gets the newest.
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
