"""`triplane cloud roster`: the devices that people have confirmed, in one signed list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from triplane.cloud.cli.connection import Answer, Calls, calls_cloud
from triplane.cloud.cli.options import DURATION, example, keys_option

ADD_EPILOG: Final = """\b
Examples, with the offline folder plugged in:
  triplane cloud roster add phone-1 phone-2 --keys DIR
  triplane cloud roster add --file fleet.txt --keys DIR       digests that you collected yourself
  triplane cloud roster add --all --dry-run --keys DIR        show what would change

\b
A roster lists the SHA-256 of each device's key. In a masked round, devices count no other device,
so that an intruder in the cloud cannot surround one with devices that he made up.
By name, and with --all, the cloud says which key a device has. Do that only while you trust the
cloud, or compare the digests with those that `triplane device status` shows on the devices.
In FILE each line begins with a digest of 64 hexadecimal digits; the rest of the line is ignored.
If the role plans needs several signatures, each signer runs this command with the same options.
"""

DEVICES: Final = click.argument("devices", nargs=-1, metavar="[NAME|DIGEST]...")


def _changing(verb: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the verbs that sign a roster."""
    valid = click.option(
        "--valid", "valid_s", type=DURATION, default="365d", show_default=True, metavar="DURATION",
        help="Time until the roster expires, such as 90d.",
    )  # fmt: skip
    dry = click.option("--dry-run", is_flag=True, help="Show what would change, and sign nothing.")
    return keys_option()(valid(dry(verb)))


_FILE: Final = click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="A text file of digests, one on each line.",
)  # fmt: skip


@click.group("roster")
def command() -> None:
    """Show and sign the roster of devices.

    Without a roster, nothing protects the devices of a masked round from a cloud that invents
    others.
    """


@command.command("show", epilog=example("cloud roster show --keys /media/usb/triplane-keys"))
@keys_option("The offline folder: verify from its root.json.", required=False)
@calls_cloud
def show(cloud: Calls, *, keys: Path | None) -> Answer:
    """Show the roster, and which devices of the cloud are in it."""
    from triplane.cloud.cli.rosters import describe_roster

    return describe_roster(cloud, keys)


@command.command("add", epilog=ADD_EPILOG)
@DEVICES
@_FILE
@click.option("--all", "every", is_flag=True, help="Add every device that the cloud has enrolled.")
@_changing
@calls_cloud
def add(cloud: Calls, **options: Any) -> Answer:
    """Add devices to the roster and sign it."""
    from triplane.cloud.cli.rosters import add_devices

    return add_devices(cloud, **options)


@command.command("remove", epilog=example("cloud roster remove phone-2 --keys DIR"))
@DEVICES
@_FILE
@click.option("--gone", is_flag=True, help="Remove keys that no enrolled device has any more.")
@_changing
@calls_cloud
def remove(cloud: Calls, **options: Any) -> Answer:
    """Remove devices from the roster and sign it."""
    from triplane.cloud.cli.rosters import remove_devices

    return remove_devices(cloud, **options)


@command.command("renew", epilog=example("cloud roster renew --keys /media/usb/triplane-keys"))
@_changing
@calls_cloud
def renew(cloud: Calls, **options: Any) -> Answer:
    """Sign the same roster again before it expires."""
    from triplane.cloud.cli.rosters import renew_roster

    return renew_roster(cloud, **options)
