"""The verb `triplane edge`: what runs on an edge node. Imports click only until it is called."""

import click

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


@click.group()
def edge() -> None:
    """Run the parts of an edge node: today the inference server."""


@edge.command(epilog=EXAMPLE)
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
