"""`triplane cloud keys`: which keys sign what, and until when; renewed in time, replaced."""

from __future__ import annotations

from pathlib import Path

import click

from triplane.cloud.cli.connection import calls, client_options
from triplane.unified_ir.cli.shell import json_option, open_output

OFFLINE_ROLES = ("root", "targets", "release")
ALL_ROLES = (*OFFLINE_ROLES, "auto", "snapshot", "timestamp")
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

RENEW_EPILOG = """\b
Example, once a year, with the offline folder plugged in:
  triplane cloud keys renew --keys /media/usb/triplane-keys

\b
What people signed holds for a year (the root for five), so that what was forgotten ends by itself.
Past that nodes go on serving and take nothing new. `triplane cloud status` says so 30 days before.
Nothing but the date changes: the lists are checked against the keys and signed once more. Signing a
version or a policy renews its list too. Where several must sign, each runs this command.
"""

ROTATE_EPILOG = """\b
Examples, with the offline folder plugged in:
  triplane cloud keys rotate release --keys DIR                 a new key, made in DIR
  triplane cloud keys rotate release --keys DIR --stolen        drop what the old key signed
  triplane cloud keys rotate release --keys DIR --public alex.pub --public kim.pub --threshold 2
  triplane cloud keys rotate timestamp --keys DIR --public timestamp-2.pub

\b
Who decides: the root key about root, targets, snapshot and timestamp; the targets key about release
and auto. From the answer on the old keys count no more; nodes follow by themselves.
With a new key in DIR the list of targets or release is signed again with it at once. Keys of others
come as --public files (triplane cloud keys make): they sign their versions again.
snapshot, timestamp and auto sign by themselves, so make their keys on the cloud's machine, in the
folder `keys` of the cloud's home, before: triplane cloud keys make timestamp-2 --keys HOME/keys
After a theft: rotate what the thief has, with --stolen, and sign the versions you know again.
Do not rotate while a rollout runs: for a moment nothing is signed.
"""


@click.group("keys")
def command() -> None:
    """See which keys sign what, until when; renew, replace."""


@command.command("show", short_help="Roles, their keys, how many must sign, when it ends.")
@click.option(
    "--keys", type=FOLDER, metavar="DIR",
    help="The offline folder: verify from its root.json, and mark the keys that it holds.",
)  # fmt: skip
@client_options
def show(*, keys: Path | None, identity: Path | None, as_json: bool) -> None:
    """Show every role of the signed metadata: its keys, how many must sign, when it ends."""
    from triplane.cloud.cli.keeping import shown

    with calls(identity) as cloud:
        record, text = shown(cloud, keys)
    open_output(as_json).result(record, text)


@command.command("renew", epilog=RENEW_EPILOG)
@click.option(
    "--keys", required=True, type=FOLDER, metavar="DIR",
    help="The offline folder that `triplane cloud init` wrote.",
)  # fmt: skip
@click.option(
    "--role", "roles", multiple=True, type=click.Choice(OFFLINE_ROLES),
    help="Only this one; repeatable.  [default: targets and release, and root in its last year; "
    "those whose keys are in DIR]",
)  # fmt: skip
@click.option(
    "--past", type=click.IntRange(1, 1 << 30), metavar="N",
    help="Sign as often as it takes to get above version N of --role, which nodes have seen: after "
    "a backup of the cloud was restored.",
)  # fmt: skip
@client_options
def renew(
    *,
    keys: Path,
    roles: tuple[str, ...],
    past: int | None,
    identity: Path | None,
    as_json: bool,
) -> None:
    """Sign what people signed once more, before it ends."""
    from triplane.cloud.cli.keeping import renewed

    if past is not None and len(roles) != 1:
        raise click.UsageError("--past is a version of one role; name it with --role")
    output = open_output(as_json)
    with calls(identity) as cloud:
        record, text = renewed(cloud, output, keys, roles, past=past or 0)
    output.result(record, text)


@command.command("rotate", short_help="Give a role other keys.", epilog=ROTATE_EPILOG)
@click.argument("role", type=click.Choice(ALL_ROLES), metavar="ROLE")
@click.option(
    "--keys", required=True, type=FOLDER, metavar="DIR",
    help="The folder with the key that decides: root, or targets for release and auto.",
)  # fmt: skip
@click.option(
    "--public", "publics", multiple=True, metavar="FILE.pub",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A key that the role shall have; repeatable.  [default: a new one, made in --keys]",
)  # fmt: skip
@click.option(
    "--threshold", type=click.IntRange(1, 16), metavar="N",
    help="How many of them must sign.  [default: as before]",
)  # fmt: skip
@click.option(
    "--stolen", is_flag=True,
    help="Drop what the old keys signed, for the thief may have signed it.",
)  # fmt: skip
@client_options
def rotate(
    *,
    role: str,
    keys: Path,
    publics: tuple[Path, ...],
    threshold: int | None,
    stolen: bool,
    identity: Path | None,
    as_json: bool,
) -> None:
    """Give ROLE (root, targets, release, auto, snapshot or timestamp) other keys."""
    from triplane.cloud.cli.keeping import rotated

    output = open_output(as_json)
    with calls(identity) as cloud:
        record, text = rotated(
            cloud, role, keys, publics=publics, threshold=threshold, stolen=stolen
        )
    output.result(record, text)


@command.command("make", short_help="Make a key for a role to be given.")
@click.argument("name", metavar="NAME")
@click.option(
    "--keys", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="The folder to make it in; made where it is not there.",
)  # fmt: skip
@json_option
def make(*, name: str, keys: Path, as_json: bool) -> None:
    """Make a signing key: NAME.pem stays in DIR, NAME.pub goes to whoever rotates.

    It signs nothing until a role names it (triplane cloud keys rotate ROLE --public NAME.pub).
    """
    from triplane.cloud.cli.keeping import generate_key

    record, text = generate_key(name, keys)
    open_output(as_json).result(record, text)
