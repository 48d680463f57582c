"""The verb `triplane device`: a device from the shell. Imports only click until it is called."""

from pathlib import Path
from typing import Any, Final

import click

from triplane.unified_ir.cli import data_options
from triplane.unified_ir.cli.machines import (
    home_option,
    log_level_option,
    ready_option,
    root_option,
    token_options,
)
from triplane.unified_ir.cli.shell import Tier, json_option, open_output, option

TIER = Tier(verbs={"device": 140}, extras={"cryptography": "device"})
device_home = home_option("device", "TRIPLANE_DEVICE_HOME", "~/.triplane/device")
ENROL_EXAMPLE = f"""
\b
An operator makes a token on a machine that reaches the cloud:
  triplane cloud token --role device
\b
Then, here, once, and from now on:
  triplane device enrol TOKEN --cloud cloud.example:8444 --population cameras --data samples.npz
  triplane device run

{data_options.CHOICES}"""
RUN_EXAMPLE = f"""
\b
Examples:
  triplane device run
  triplane device run --data other.npz --json
  triplane device run --app my_app:app
\b
samples.npz holds arrays x and y, one row for each sample. Samples in held_out.x and held_out.y are
never used for learning; without these arrays one sample of five is held out. Other files and
folders serve as well: columns without a name of the model's are its inputs and its target in
order, and classes with names get the numbers that the model gives to these names.

{data_options.CHOICES}"""


# fmt: off
SAMPLE_OPTIONS: Final = (
    option("--data PATH", "The samples: an .npz, another file (.csv, .parquet, .txt, ...), or a "
           "folder.", click.Path(exists=True, path_type=Path)),
    *data_options.choices(),
    data_options.window_group(),
    *data_options.forms(),
    option("--population NAME", "Take part in runs of this population."),
    option("--held-out SHARE", "Share of samples that are never used for learning.",
           click.FloatRange(0, 1, max_open=True)),
)
# fmt: on


def _samples(options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `SAMPLE_OPTIONS` as settings and clients take them."""
    form = data_options.reading_by_group(options)
    columns = {name: form.pop(name) for name in ("x", "y")}
    form = {name: value for name, value in form.items() if value is not None}
    return columns | {"form": form, **{k: options[k] for k in ("data", "population", "held_out")}}


@click.group()
def device() -> None:
    """Learn with other devices from the samples of this one."""


@device.command(epilog=ENROL_EXAMPLE, params=[*SAMPLE_OPTIONS])
@token_options
@root_option("device")
@device_home
@json_option
def enrol(
    *,
    token_text: str,
    address: str,
    root: Path | None,
    home: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Make this machine a device: create its key here and get a certificate for TOKEN.

    It can be repeated with the same token after an interruption. The options for samples and
    population become the defaults of `run`. --root protects against a cloud that is compromised
    already.
    """
    from triplane.device.enrolling import enrol as enrol_at
    from triplane.device.home import DeviceHome

    place = DeviceHome(home)
    settings = place.settings.but(**_samples(options))
    name = enrol_at(place, settings, token_text, address, root).name
    record = {"name": name, "home": str(place.path), "cloud": place.identity.cloud}
    text = f"{name}: enrolled in {place.path}; now: triplane device run --home {place.path}"
    open_output(as_json).result(record, text)


@device.command(epilog=RUN_EXAMPLE, params=[*SAMPLE_OPTIONS])
@device_home
@click.option(
    "--app", metavar="MODULE:NAME", help="A ClientApp of yours, for runs with a Flower strategy."
)
@log_level_option("info")
@ready_option
def run(*, home: Path, app: str | None, log_level: str, as_json: bool, **options: Any) -> None:
    """Take part in runs until SIGTERM or Ctrl-C.

    It prints one line when it has begun. Killing this process loses nothing: the next one sends the
    updates that were not sent yet.
    """
    import json

    from triplane.device.__main__ import main, text

    line = json.dumps if as_json else text
    main(home, app=app, log_level=log_level, line=line, **_samples(options))


@device.command()
@device_home
@json_option
def status(*, home: Path, as_json: bool) -> None:
    """Show what this device works on, its model and how good that is, and what waits to be sent.

    If there is no work, the line `work` says whether a run of the cloud asks the population of this
    device. If one does, the device waits for its turn; if none does, the name of the population may
    be wrong. Clouds of earlier releases do not report it.

    This only reads the home, so it works without the cloud and beside a running device. What it
    shows of the cloud is the newest answer that the running device has received.
    """
    from triplane.device.status import look

    report = look(home)
    open_output(as_json).result(report.record(), report.text())


if __name__ == "__main__":
    device()
