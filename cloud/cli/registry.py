"""`triplane registry`: models by name and version, and the aliases that move between versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from triplane.cloud.cli.connection import (
    Answer,
    Calls,
    calls_cloud,
    client_options,
    home_option,
    print_answer,
)
from triplane.cloud.cli.options import DURATION, MAX_COUNT, example
from triplane.unified_ir.cli import data_options
from triplane.unified_ir.cli.shell import json_option, open_output, option
from triplane.unified_ir.convert.targets import TARGET_LIST

PUSH_EPILOG = f"""\b
Examples:
  triplane registry push digits.tpm
  triplane registry push digits.tpm --alias stable --target ort-x64 --target ort-arm64
  triplane registry push digits.tpm --quantize int8 --calibrate samples.npz --evaluate held_out.npz
  triplane registry push shapes.tpm --quantize int8 --calibrate photos --evaluate photos/eve

\b
Each push of a name is its next version, and a version never changes. The version includes how it is
converted to bundles (quantization, samples, budget). A bundle is made when a rollout first needs it
for a kind of machine; --target makes it now and waits for it. If an upload is interrupted, push the
same file again, and the upload continues where it stopped.

{data_options.CHOICES}"""
COLLECT_EPILOG = """\b
Examples, on the cloud's machine while the cloud is stopped:
  triplane registry collect                       list the files that would be removed
  triplane registry collect --older-than 1h --yes

\b
A running cloud does this by itself once a day, for files that are older than a week; this command
is for a full disk. Files that a version, a bundle, a policy or a federated run uses are kept. What
is removed: interrupted uploads, uploads that were never registered, samples of former policies.
"""
REFERENCE = click.argument("reference", metavar="MODEL[@VERSION|@ALIAS]")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group("registry")
def command() -> None:
    """Store models: push, list, pull and name versions."""


# fmt: off
SAMPLE_OPTIONS: Final = (
    option("--calibrate DATA", "Typical inputs, from which --quantize learns ranges."),
    option("--evaluate DATA", "Labelled data to measure the accuracy on."),
    *data_options.choices(),
    *data_options.forms(),
)
# fmt: on


@command.command("push", epilog=PUSH_EPILOG, params=[*SAMPLE_OPTIONS])
@click.argument("file", type=FILE, metavar="MODEL.tpm")
@click.option("--name", metavar="NAME", help="The model's name.  [default: that of the file]")
@click.option(
    "--alias", "aliases", multiple=True, metavar="NAME",
    help="Alias to set on the new version; repeatable.",
)  # fmt: skip
@click.option("--quantize", type=click.Choice(["int8"]), help="Integers instead of float32.")
@click.option(
    "--max-accuracy-drop", type=click.FloatRange(min=0), default=0.0, metavar="POINTS",
    help="Percentage points that int8 may lose on --evaluate.  [default: the converter's, 1.0]",
)  # fmt: skip
@click.option("--entry", default="predict", show_default=True, help="Function to serve.")
@click.option(
    "--parent", default="", metavar="MODEL@VERSION", help="Version that it was made from."
)
@click.option("--note", default="", metavar="TEXT", help="Comment on this version.")
@click.option(
    "--target", "targets", multiple=True, metavar="NAME",
    help=f"Make a bundle for this kind of machine now, and wait; repeatable. One of {TARGET_LIST}.",
)  # fmt: skip
@calls_cloud
def push(cloud: Calls, **options: Any) -> Answer:
    """Register a model file as the next version."""
    from triplane.cloud.cli.pushing import push_file

    choice = data_options.reading(options)
    others = {k: value for k, value in options.items() if k not in data_options.READ}
    return push_file(cloud, choice=choice, **others)


@command.command("ls", epilog=example("registry ls digits"))
@click.argument("model", required=False)
@calls_cloud
def ls(cloud: Calls, *, model: str | None) -> Answer:
    """List models, or the versions of MODEL, newest first."""
    from triplane.cloud.cli import models

    return models.list_models(cloud) if model is None else models.list_versions(cloud, model)


@command.command("show", epilog=example("registry show digits@stable"))
@REFERENCE
@calls_cloud
def show(cloud: Calls, *, reference: str) -> Answer:
    """Show the digests, origin and bundles of a version.

    Also the recipe of its bundles, and which of them are signed.
    """
    from triplane.cloud.cli.models import version_text
    from triplane.proto.registry_pb2 import GetVersionRequest

    version = cloud.registry.GetVersion(GetVersionRequest(reference=reference))
    return version, version_text(version)


@command.command("pull", epilog=example("registry pull digits@stable"))
@REFERENCE
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="File to write.  [default: MODEL-VERSION.tpm]",
)  # fmt: skip
@calls_cloud
def pull(cloud: Calls, *, reference: str, out: Path | None) -> Answer:
    """Download the model file of a version.

    An interrupted download continues where it stopped.
    """
    from triplane.cloud.cli.pulling import pull_file

    return pull_file(cloud, reference=reference, out=out)


@command.command("alias", epilog=example("registry alias digits stable 3"))
@click.argument("model")
@click.argument("alias")
@click.argument("version", type=click.IntRange(1, MAX_COUNT), required=False)
@click.option("--remove", is_flag=True, help="Remove the alias, instead of a VERSION.")
@client_options
def alias(*, version: int | None, remove: bool, **options: Any) -> None:
    """Set or remove an alias of a version.

    A rollout resolves its alias once, when it begins; moving an alias deploys nothing.
    """
    # Both or neither: refuse instead of guessing what was meant.
    if remove == (version is not None):
        raise click.UsageError("give either a VERSION or --remove")
    print_answer(_set_alias, version=version or 0, **options)


def _set_alias(cloud: Calls, **fields: Any) -> Answer:
    from triplane.cloud.cli.models import aliases_text
    from triplane.proto.registry_pb2 import SetAliasRequest

    model = cloud.registry.SetAlias(SetAliasRequest(**fields))
    return model, f"{model.name}: {aliases_text(model)}"


@command.command("collect", epilog=COLLECT_EPILOG)
@home_option
@click.option(
    "--older-than", "older_than_s", type=DURATION, default="7d", show_default=True, metavar="TIME",
    help="Only files that were not used for this long, at least 1h.",
)  # fmt: skip
@click.option(
    "--yes/--dry-run", "is_meant", default=False, show_default=True,
    help="Remove the files, or only list them.",
)  # fmt: skip
@json_option
def collect(*, home: Path, older_than_s: float, is_meant: bool, as_json: bool) -> None:
    """Remove unused files from a stopped cloud."""
    from triplane.cloud.cli.collecting import list_unwanted, remove_unwanted

    answer = (remove_unwanted if is_meant else list_unwanted)(home, older_than_s)
    open_output(as_json).result(*answer)
