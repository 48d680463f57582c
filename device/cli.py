"""The verb `triplane device`: a device from the shell. Imports only click until it is called."""

from pathlib import Path
from typing import Any

import click

from triplane.unified_ir.cli.shell import SECRET, Tier, json_option, open_output

TIER = Tier(verbs={"device": 140}, extras={"cryptography": "device"})
DEFAULT_HOME = "~/.triplane/device"
ENROL_EXAMPLE = """
\b
An operator makes a token on a machine that reaches the cloud:
  triplane cloud token --role device
\b
Then, here, once, and from now on:
  triplane device enrol TOKEN --cloud cloud.example:8444 --population cameras --data samples.npz
  triplane device run
"""
RUN_EXAMPLE = """
\b
Examples:
  triplane device run
  triplane device run --data other.npz --json
  triplane device run --app my_app:app
\b
samples.npz holds arrays x and y, one row for each sample. Samples that are never learned from may
be in held_out.x and held_out.y; otherwise one sample of five is held out.
"""


def home_option(function: Any) -> Any:
    """`--home DIR`: the home of a device."""
    return click.option(
        "--home",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="TRIPLANE_DEVICE_HOME",
        default=DEFAULT_HOME,
        show_default=True,
        metavar="DIR",
        help="The device's folder (also TRIPLANE_DEVICE_HOME).",
        callback=lambda _ctx, _param, path: path.expanduser(),
    )(function)


def sample_options(function: Any) -> Any:
    """Options for the samples and the population of a device."""
    for option in (
        click.option(
            "--held-out",
            type=click.FloatRange(0, 1, max_open=True),
            help="Share of samples that are never learned from.",
        ),
        click.option("--population", metavar="NAME", help="Take part in runs of this population."),
        click.option(
            "--data",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE.npz",
            help="The samples.",
        ),
    ):
        function = option(function)
    return function


@click.group()
def device() -> None:
    """Learn with other devices from the samples of this one."""


@device.command(epilog=ENROL_EXAMPLE)
@click.argument("token_text", metavar="TOKEN|@FILE|-", type=SECRET, envvar="TRIPLANE_TOKEN")
@click.option(
    "--cloud", "address", required=True, metavar="HOST:PORT", help="The cloud's enrolment port."
)
@home_option
@sample_options
@json_option
def enrol(
    *,
    token_text: str,
    address: str,
    home: Path,
    data: Path | None,
    population: str | None,
    held_out: float | None,
    as_json: bool,
) -> None:
    """Make this machine a device: create its key here and get a certificate for TOKEN.

    It may be repeated with the same token after an interruption. The options for samples and
    population become the defaults of `run`.
    """
    from triplane.device.enrolling import enrol as enrol_at
    from triplane.device.home import DeviceHome

    place = DeviceHome(home)
    settings = place.settings.but(data=data, population=population, held_out=held_out)
    name = enrol_at(place, settings, token_text, address).name
    record = {"name": name, "home": str(place.path), "cloud": place.identity.cloud}
    text = f"{name}: enrolled in {place.path}; now: triplane device run --home {place.path}"
    open_output(as_json).result(record, text)


@device.command(epilog=RUN_EXAMPLE)
@home_option
@sample_options
@click.option(
    "--app", metavar="MODULE:NAME", help="A ClientApp of yours, for runs of a Flower strategy."
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Events on standard error.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as one JSON object.")
def run(
    *,
    home: Path,
    data: Path | None,
    population: str | None,
    held_out: float | None,
    app: str | None,
    log_level: str,
    as_json: bool,
) -> None:
    """Take part in runs until SIGTERM or Ctrl-C.

    One line on standard output says that it has begun. Killing this process loses nothing: the next
    one sends the updates that were not sent yet.
    """
    import json

    from triplane.device.__main__ import main, text

    main(
        home,
        data,
        population=population,
        held_out=held_out,
        app=app,
        log_level=log_level,
        line=json.dumps if as_json else text,
    )


@device.command()
@home_option
@json_option
def status(*, home: Path, as_json: bool) -> None:
    """Show what this device works on, its model, how good that is here, and what waits to be sent.

    Without work, the line `work` says whether a run of the cloud asks the device's population. If
    one does, the device waits for its turn; if none does, the name of the population may be wrong.
    Clouds of earlier releases do not say which it is.

    This reads the home only, so it works without the cloud and beside a running device. What it
    shows of the cloud is the newest answer that the running device got.
    """
    from triplane.device.status import look

    report = look(home)
    open_output(as_json).result(report.record(), report.text())


if __name__ == "__main__":
    device()
