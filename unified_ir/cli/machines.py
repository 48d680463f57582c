"""Options that the verbs of clouds, nodes and devices have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from triplane.unified_ir.cli.shell import SECRET

F = TypeVar("F", bound=Callable[..., Any])


def home_option(machine: str, variable: str, default: str) -> Callable[[F], F]:
    """Return the option `--home DIR` for the home of a machine."""
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        envvar=variable,
        default=default,
        show_default=True,
        metavar="DIR",
        help=f"The {machine}'s folder (also {variable}).",
        # The default contains "~", and a value from the environment has not been through a shell.
        callback=lambda _ctx, _param, path: path.expanduser(),
    )


def token_options(function: F) -> F:
    """Add the argument TOKEN and the option `--cloud`, with which a machine enrols."""
    token = click.argument(
        "token_text", metavar="TOKEN|@FILE|-", type=SECRET, envvar="TRIPLANE_TOKEN"
    )
    cloud = click.option(
        "--cloud", "address", required=True, metavar="HOST:PORT", help="The cloud's enrolment port."
    )
    return token(cloud(function))


def root_option(machine: str) -> Callable[[F], F]:
    """Return the option `--root root.json`, the first root of signed metadata to trust."""
    return click.option(
        "--root",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="root.json",
        help="A copy of root.json from the folder of the offline keys, brought here by hand. The "
        f"{machine} then accepts only metadata that follows from it.  [default: the cloud's own]",
    )


def log_level_option(default: str) -> Callable[[F], F]:
    """Return the option `--log-level`."""
    return click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default=default,
        show_default=True,
        help="Least severe events to log to standard error.",
    )


ready_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print the ready line as one JSON object."
)
