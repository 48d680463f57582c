"""`triplane cloud keys`: which keys sign what, and until when; renewed in time, replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from triplane.cloud.cli.connection import Answer, Calls, calls_cloud, client_options, print_answer
from triplane.cloud.cli.options import example, keys_option
from triplane.unified_ir.cli.shell import json_option, open_output

OFFLINE_ROLES = ("root", "targets", "release", "plans")
ALL_ROLES = (*OFFLINE_ROLES, "auto", "snapshot", "timestamp")

RENEW_EPILOG = """\b
Example, once a year, with the offline folder plugged in:
  triplane cloud keys renew --keys /media/usb/triplane-keys

\b
Signatures of people are valid for a year (five years for the root), so that what nobody maintains
expires. After that, nodes keep serving and accept nothing new. `triplane cloud status` warns 30
days before. Only the expiry date changes: each list is verified and signed once more. Signing a
version or a policy renews its list too. If several people must sign, each runs this command.
"""

ROTATE_EPILOG = """\b
Examples, with the offline folder plugged in:
  triplane cloud keys rotate release --keys DIR                 a new key, created in DIR
  triplane cloud keys rotate release --keys DIR --stolen        drop what the old key signed
  triplane cloud keys rotate release --keys DIR --public alex.pub --public kim.pub --threshold 2
  triplane cloud keys rotate timestamp --keys DIR --public timestamp-2.pub

\b
The root key decides about root, targets, snapshot and timestamp; the targets key decides about
release, auto and plans. A cloud that an earlier release made has no role plans, for the plans of
federated runs: this verb adds it. Once this call returns, signatures of the old keys no longer
count; nodes and devices follow by themselves.
If the new key is in DIR, the list of targets or release is signed again with it at once. Keys of
other people come as --public files (triplane cloud keys make); they sign their versions again.
The cloud itself signs for snapshot, timestamp and auto, so create their keys first, on the cloud's
machine: triplane cloud keys make timestamp-2 --keys HOME/keys
After a theft, rotate every role whose key the thief has, with --stolen, and sign the versions that
you know again. Do not rotate during a rollout: for a moment nothing is signed.
"""


@click.group("keys")
def command() -> None:
    """Show, renew and replace the keys that sign metadata."""


@command.command("show", epilog=example("cloud keys show --keys /media/usb/triplane-keys"))
@keys_option(
    "The offline folder: verify from its root.json, and mark the keys in it.", required=False
)
@calls_cloud
def show(cloud: Calls, *, keys: Path | None) -> Answer:
    """Show roles, keys, thresholds and when each expires.

    The threshold is the number of keys that must sign.
    """
    from triplane.cloud.cli.keeping import describe_roles

    return describe_roles(cloud, keys)


@command.command("renew", epilog=RENEW_EPILOG)
@keys_option()
@click.option(
    "--role", "roles", multiple=True, type=click.Choice(OFFLINE_ROLES),
    help="Renew only this role; repeatable.  [default: targets, release and plans, and root in "
    "its last year; those whose keys are in DIR]",
)  # fmt: skip
@click.option(
    "--past", type=click.IntRange(1, 1 << 30), metavar="N",
    help="Sign repeatedly until the version of --role is above N, which nodes have already seen; "
    "for a cloud that was restored from a backup.",
)  # fmt: skip
@client_options
def renew(*, roles: tuple[str, ...], past: int | None, **options: Any) -> None:
    """Sign the offline roles again before they expire."""
    from triplane.cloud.cli.keeping import renew_roles

    if past is not None and len(roles) != 1:
        raise click.UsageError("--past is a version of one role; name it with --role")
    print_answer(renew_roles, roles=roles, past=past or 0, **options)


@command.command("rotate", epilog=ROTATE_EPILOG)
@click.argument("role", type=click.Choice(ALL_ROLES), metavar="ROLE")
@keys_option("Folder with the key that decides: root, or targets for release, auto and plans.")
@click.option(
    "--public", "publics", multiple=True, metavar="FILE.pub",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A new key of the role; repeatable.  [default: a new one, created in --keys]",
)  # fmt: skip
@click.option(
    "--threshold", type=click.IntRange(1, 16), metavar="N",
    help="Number of these keys that must sign.  [default: unchanged]",
)  # fmt: skip
@click.option(
    "--stolen", is_flag=True,
    help="Drop what the old keys signed, because the thief may have signed it.",
)  # fmt: skip
@calls_cloud
def rotate(cloud: Calls, **options: Any) -> Answer:
    """Replace the keys of a role.

    ROLE is root, targets, release, plans, auto, snapshot or timestamp.
    """
    from triplane.cloud.cli.keeping import rotate_role

    return rotate_role(cloud, **options)


@command.command("make", epilog=example("cloud keys make alex --keys ~/keys"))
@click.argument("name", metavar="NAME")
@click.option(
    "--keys", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Folder for the key; it is created if it does not exist.",
)  # fmt: skip
@json_option
def make(*, name: str, keys: Path, as_json: bool) -> None:
    """Create a signing key.

    NAME.pem, the private key, stays in DIR; NAME.pub goes to the person who rotates. The key signs
    nothing until a role names it (triplane cloud keys rotate ROLE --public NAME.pub).
    """
    from triplane.cloud.cli.keeping import generate_key

    open_output(as_json).result(*generate_key(name, keys))
