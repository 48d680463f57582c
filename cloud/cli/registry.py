"""`triplane registry`: models by name and version, and the names that move between versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from triplane.cloud.cli.connection import calls, client_options, home_option
from triplane.cloud.cli.options import DURATION, MAX_COUNT
from triplane.unified_ir.cli.shell import json_option, open_output

PUSH_EPILOG = """\b
Examples:
  triplane registry push digits.tpm
  triplane registry push digits.tpm --alias stable --target ort-x64 --target ort-arm64
  triplane registry push digits.tpm --quantize int8 --calibrate samples.npz --evaluate held_out.npz

\b
Each push of a name is its next version, and a version never changes. How bundles are made of it
(quantization, samples, budget) is part of the version. A bundle is made when a rollout first needs
it for a kind of machine; --target has it made now and waits. An upload that broke off goes on
where it stopped when the same file is pushed again.
"""
COLLECT_EPILOG = """\b
Examples, on the cloud's machine while the cloud does not run:
  triplane registry collect                       what would go
  triplane registry collect --older-than 1h --yes

\b
A running cloud does this by itself once a day, for what is older than a week; this is for a full
disk. Files stay that a version, a bundle, a policy or a federated run names. What goes: uploads
that broke off, uploads that were never registered, samples of former policies.
"""
REFERENCE = "MODEL[@VERSION|@ALIAS]"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group("registry")
def command() -> None:
    """Keep models: push, list and name versions."""


@command.command(
    "push", short_help="Register a model file as the next version.", epilog=PUSH_EPILOG
)
@click.argument("file", type=FILE, metavar="MODEL.tpm")
@click.option("--name", metavar="NAME", help="The model's name.  [default: that of the file]")
@click.option(
    "--alias", "aliases", multiple=True, metavar="NAME",
    help="Let this name point at the new version; repeatable.",
)  # fmt: skip
@click.option("--quantize", type=click.Choice(["int8"]), help="Integers instead of float32.")
@click.option("--calibrate", type=FILE, help="Typical inputs (.npz); --quantize needs it.")
@click.option("--evaluate", type=FILE, help="Labelled data (.npz with x and y).")
@click.option(
    "--max-accuracy-drop", type=click.FloatRange(min=0), default=0.0, metavar="POINTS",
    help="Points that int8 may lose on --evaluate.  [default: the converter's, 1.0]",
)  # fmt: skip
@click.option("--entry", default="predict", show_default=True, help="Function to serve.")
@click.option("--parent", default="", metavar="MODEL@VERSION", help="What it was made from.")
@click.option("--note", default="", metavar="TEXT", help="A word about this version.")
@click.option(
    "--target", "targets", multiple=True, metavar="NAME",
    help="Make the bundle for this kind of machine now (ort-x64, ort-arm64), and wait; repeatable.",
)  # fmt: skip
@client_options
def push(*, identity: Path | None, as_json: bool, **options: Any) -> None:
    """Upload a model file and register it as the next version of its name."""
    from triplane.cloud.cli.pushing import push_file

    output = open_output(as_json)
    with calls(identity) as cloud:
        record, text = push_file(cloud, output, **options)
    output.result(record, text)


@command.command("ls")
@click.argument("model", required=False)
@client_options
def ls(*, model: str | None, identity: Path | None, as_json: bool) -> None:
    """List models, or the versions of MODEL, newest first."""
    from triplane.cloud.cli import models

    with calls(identity) as cloud:
        record, text = (
            models.list_models(cloud) if model is None else models.list_versions(cloud, model)
        )
    open_output(as_json).result(record, text)


@command.command("show", short_help="One version: digests, lineage, bundles, signatures.")
@click.argument("reference", metavar=REFERENCE)
@client_options
def show(*, reference: str, identity: Path | None, as_json: bool) -> None:
    """Show one version: digests, lineage, recipe, the bundles made of it and who signed."""
    from triplane.cloud.cli.models import version_text
    from triplane.cloud.cli.text import record
    from triplane.proto.registry_pb2 import GetVersionRequest

    with calls(identity) as cloud:
        version = cloud.registry.GetVersion(GetVersionRequest(reference=reference))
    open_output(as_json).result(record(version), version_text(version))


@command.command("pull", short_help="Download the model file of a version.")
@click.argument("reference", metavar=REFERENCE)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Where to.  [default: MODEL-VERSION.tpm]",
)  # fmt: skip
@client_options
def pull(*, reference: str, out: Path | None, identity: Path | None, as_json: bool) -> None:
    """Download a version's model file, as in: triplane registry pull digits@stable."""
    from triplane.cloud.cli.pulling import pull_file

    output = open_output(as_json)
    with calls(identity) as cloud:
        record, text = pull_file(cloud, output, reference=reference, out=out)
    output.result(record, text)


@command.command("alias", short_help="Let a name point at a version.")
@click.argument("model")
@click.argument("alias")
@click.argument("version", type=click.IntRange(1, MAX_COUNT), required=False)
@click.option("--remove", is_flag=True, help="Take the alias away instead of a VERSION.")
@client_options
def alias(
    *,
    model: str,
    alias: str,
    version: int | None,
    remove: bool,
    identity: Path | None,
    as_json: bool,
) -> None:
    """Let ALIAS of MODEL point at VERSION, as in: triplane registry alias digits stable 3.

    A rollout resolves its alias once, when it begins; moving one deploys nothing.
    """
    from triplane.cloud.cli.models import aliases_text
    from triplane.cloud.cli.text import record
    from triplane.proto.registry_pb2 import SetAliasRequest

    if remove == (version is not None):
        raise click.UsageError("give either a VERSION or --remove")
    request = SetAliasRequest(model=model, alias=alias, version=version or 0)
    with calls(identity) as cloud:
        response = cloud.registry.SetAlias(request)
    open_output(as_json).result(record(response), f"{response.name}: {aliases_text(response)}")


@command.command(
    "collect",
    short_help="Remove files that nothing names, from a stopped cloud.",
    epilog=COLLECT_EPILOG,
)
@home_option
@click.option(
    "--older-than", "older_than_s", type=DURATION, default="7d", show_default=True, metavar="TIME",
    help="Only what was untouched for so long, at least 1h.",
)  # fmt: skip
@click.option(
    "--yes/--dry-run", "is_meant", default=False, show_default=True,
    help="Remove it, or only say what would go.",
)  # fmt: skip
@json_option
def collect(*, home: Path, older_than_s: float, is_meant: bool, as_json: bool) -> None:
    """Remove uploaded files that nothing names any more, from a cloud that does not run."""
    from triplane.cloud.cli.collecting import collected, looked

    record, text = (collected if is_meant else looked)(home, older_than_s)
    open_output(as_json).result(record, text)
