"""`triplane federate`: let devices learn together; see, stop and resume runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.cloud.cli.connection import calls, client_options
from triplane.cloud.cli.options import DURATION, MAX_COUNT, MAX_NUMBER
from triplane.unified_ir.cli.algorithms import NAMES, AlgorithmCommand
from triplane.unified_ir.cli.shell import open_output
from triplane.unified_ir.cli.simulate import simulate
from triplane.unified_ir.federated.core import defaults

if TYPE_CHECKING:
    from triplane.cloud.cli.connection import Calls
    from triplane.proto.federation_pb2 import Run, Spec
    from triplane.proto.federation_pb2_grpc import FederationStub

EPILOG = """\b
Examples:
  triplane federate run digits@latest --population phones --rounds 20 --devices 10
  triplane federate run digits --population phones --algorithm maml --rounds 100 --quorum 0.8
  triplane federate run digits --population phones --compression int8 --alias learnt --detach
  triplane federate run digits --population phones --strategy fedadam --option eta=0.01

\b
What happens: the cloud makes a plan of the model, which devices run with onnxruntime alone. Each
round it asks devices of the population, gathers their updates, and makes the next state of their
mean; a killed cloud or device goes on where it was. The result is registered as the model's next
version; nothing is deployed.

\b
--strategy puts a strategy of Flower in place of the cloud's own mean and optimizer; --algorithm
then says what devices do. It runs in a process of the cloud, which needs triplane[flower]; devices
need nothing. One of your own is NAME.py in the folder `strategies` of the cloud's home.

\b
Unset options use the cloud's defaults, which the answer shows too (--json); studies use the same.
Ctrl-C leaves the table, not the run.
Exit codes: 0 done (or begun, with --detach); 4 stopped or failed.
"""

RUN: Final = click.argument("run_id", metavar="RUN", default="last")
REASON: Final = click.option(
    "--reason", default="", metavar="TEXT", help="Shown with the run and in the audit log."
)
_COHORT: Final = ("devices", "over_selection", "quorum", "deadline_s", "patience_s")
_SAMPLING: Final = ("steps", "batch_size", "support", "query")


COUNT: Final = click.IntRange(1, MAX_COUNT)
RATE: Final = click.FloatRange(min=0, min_open=True)
SHARE: Final = click.FloatRange(0, 1, min_open=True)


def _or(text: str, default: object) -> str:
    """Add the default to a help text; the cloud fills unset options in."""
    return f"{text}  [default: {default}]"


def _some_time(_ctx: click.Context, _param: click.Parameter, seconds: float | None) -> float | None:
    if seconds == 0:
        raise click.BadParameter("it is above 0; leave it out for the default")
    return seconds


def _named(
    _ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]
) -> list[tuple[str, str]]:
    """(name, JSON) of each NAME=VALUE; what is no JSON is a string."""
    pairs = []
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise click.BadParameter(f"{text!r} is not NAME=VALUE")
        try:
            json.loads(value)
        except ValueError:
            value = json.dumps(value)
        pairs.append((name, value))
    return pairs


@click.group("federate")
def command() -> None:
    """Let devices learn together. RUN is an id, the beginning of one, or `last`."""


command.add_command(simulate)


@command.command(
    "run", short_help="Begin a run over the devices of a population.", epilog=EPILOG,
    cls=AlgorithmCommand, rate=RATE, count=COUNT,
)  # fmt: skip
@click.argument("model", metavar="MODEL[@VERSION|@ALIAS]")
@click.option(
    "--population", default="", metavar="NAME",
    help="Devices that offer themselves under this name; each device says itself which that is.",
)  # fmt: skip
@click.option(
    "--algorithm", default="", metavar="NAME",
    help=_or(f"{NAMES}.", defaults.ALGORITHM),
)  # fmt: skip
@click.option(
    "--strategy", default="", metavar="NAME",
    help="Of Flower: fedavg, fedadam, krum, ... or NAME[:ATTRIBUTE] of the cloud's own.",
)  # fmt: skip
@click.option(
    "--option", "strategy_options", multiple=True, metavar="NAME=VALUE", callback=_named,
    help="An argument of the strategy; may be repeated.",
)  # fmt: skip
@click.option("--app", is_flag=True, help="Devices answer with the ClientApp their owner gave.")
@click.option("--rounds", type=COUNT, help=_or("In all.", defaults.ROUNDS))
@click.option("--devices", type=COUNT, help=_or("Whose updates make a round.", defaults.DEVICES))
@click.option(
    "--over-selection", type=click.FloatRange(0), default=0.0,
    help="Ask so many more, as a share: 0.2 asks 12 for 10, and the last two may be late.",
)  # fmt: skip
@click.option(
    "--quorum", type=SHARE,
    help=_or("Share of --devices below which a round is given up.", defaults.QUORUM),
)  # fmt: skip
@click.option(
    "--deadline", "deadline_s", type=DURATION, callback=_some_time,
    help=_or("Of a round.", f"{defaults.DEADLINE_S / 60:g}min"),
)  # fmt: skip
@click.option(
    "--patience", "patience_s", type=DURATION, callback=_some_time,
    help=_or(
        "How long a round waits for devices that were there and are away.",
        f"{defaults.PATIENCE_S:g}s",
    ),
)  # fmt: skip
@click.option("--steps", type=COUNT, help=_or("Of a device in one round.", defaults.STEPS))
@click.option("--batch-size", type=COUNT, help=_or("Samples of a step.", defaults.BATCH_SIZE))
@click.option("--support", type=COUNT, help=_or("Samples to adapt on.", defaults.SUPPORT))
@click.option("--query", type=COUNT, help=_or("Samples to judge a start by.", defaults.QUERY))
@click.option(
    "--evaluate-every", type=click.IntRange(0, MAX_COUNT), default=0,
    help="Rounds between evaluations on every device.  [default: after the last only]",
)  # fmt: skip
@click.option("--compression", default="", metavar="NAME", help="Of updates: int8 or top-k.")
@click.option("--keep", type=SHARE, help=_or("Share of entries that top-k sends.", defaults.KEEP))
@click.option("--seed", type=click.IntRange(0, MAX_NUMBER), default=0)
@click.option("--release", default="", metavar="auto", help="Release the result by itself.")
@click.option("--alias", default="", metavar="NAME", help="To set on the result.")
@click.option("--detach", is_flag=True, help="Begin the run and leave.")
@client_options
@click.pass_context
def run(
    ctx: click.Context, /, *, detach: bool, identity: Path | None, as_json: bool, **options: Any
) -> None:
    """Begin a run from MODEL with the devices of a population, and watch it."""
    from triplane.cloud.cli.live_run import watchable
    from triplane.cloud.cli.watching import watch_to_end

    spec = _spec(**options)
    with calls(identity) as cloud:
        begun = _begun(cloud, spec)
        watched = watchable(cloud, begun.id)
        code = 0 if detach else watch_to_end(watched, begun, as_json=as_json)
    if detach:
        _tell(begun, as_json=as_json, more=f"Watch it: triplane federate watch {begun.id}")
    ctx.exit(code)


def _spec(
    *,
    strategy: str,
    strategy_options: list[tuple[str, str]],
    app: bool,
    hyper: dict[str, float],
    **options: Any,
) -> Spec:
    from triplane.proto.federation_pb2 import Cohort, Flower, Option, Sampling, Spec
    from triplane.proto.hyperparameters import set_values

    if (strategy_options or app) and not strategy:
        raise click.UsageError("--option and --app are of a strategy; name one with --strategy")
    said = [Option(name=name, json=value) for name, value in strategy_options]
    flower = Flower(strategy=strategy, options=said, app=app) if strategy else None

    def taken(names: tuple[str, ...]) -> dict[str, Any]:
        values = {name: options.pop(name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    spec = Spec(
        cohort=Cohort(**taken(_COHORT)),
        sampling=Sampling(**taken(_SAMPLING)),
        flower=flower,
        **{name: value for name, value in options.items() if value is not None},
    )
    set_values(spec.hyperparameters, hyper)
    return spec


def _begun(cloud: Calls, spec: Spec) -> Run:
    from triplane.cloud.cli.connection import new_key, repeated
    from triplane.proto.federation_pb2 import StartRequest

    request = StartRequest(spec=spec, key=new_key())
    return repeated(lambda: _stub(cloud).Start(request))


@command.command("ls")
@client_options
def ls(*, identity: Path | None, as_json: bool) -> None:
    """List runs, newest first."""
    from triplane.cloud.cli.runs import run_table
    from triplane.cloud.cli.text import record
    from triplane.proto.federation_pb2 import ListRunsRequest

    with calls(identity) as cloud:
        runs = _stub(cloud).ListRuns(ListRunsRequest()).runs
    none = "no run yet; begin one with: triplane federate run MODEL --population NAME"
    text = run_table(runs) if runs else none
    open_output(as_json).result({"runs": [record(r) for r in runs]}, text)


@command.command("show")
@RUN
@client_options
def show(*, run_id: str, identity: Path | None, as_json: bool) -> None:
    """Show a run: its rounds, its devices, what was refused."""
    from triplane.cloud.cli.runs import run_text
    from triplane.cloud.cli.text import record
    from triplane.proto.federation_pb2 import GetRunRequest

    with calls(identity) as cloud:
        run = _stub(cloud).GetRun(GetRunRequest(id=run_id))
    open_output(as_json).result(record(run), run_text(run))


@command.command("watch", short_help="Follow a run, round by round, to its end.")
@RUN
@client_options
@click.pass_context
def watch(ctx: click.Context, *, run_id: str, identity: Path | None, as_json: bool) -> None:
    """Follow a run until it is done, stopped or failed; exit codes as of `run`."""
    from triplane.cloud.cli.live_run import watchable
    from triplane.cloud.cli.watching import watch_to_end
    from triplane.proto.federation_pb2 import GetRunRequest

    with calls(identity) as cloud:
        run = _stub(cloud).GetRun(GetRunRequest(id=run_id))
        code = watch_to_end(watchable(cloud, run.id), run, as_json=as_json)
    ctx.exit(code)


@command.command("stop", short_help="Stop a run; `resume` goes on from there.")
@RUN
@REASON
@client_options
def stop(*, run_id: str, reason: str, identity: Path | None, as_json: bool) -> None:
    """Stop a run: open work ends, what was reduced stays, `resume` goes on from there."""
    from triplane.proto.federation_pb2 import ChangeRunRequest

    with calls(identity) as cloud:
        run = _stub(cloud).Stop(ChangeRunRequest(id=run_id, reason=reason))
    _tell(run, as_json=as_json)


@command.command("resume")
@RUN
@REASON
@client_options
def resume(*, run_id: str, reason: str, identity: Path | None, as_json: bool) -> None:
    """Let a stopped run go on where it stopped."""
    from triplane.proto.federation_pb2 import ChangeRunRequest

    with calls(identity) as cloud:
        run = _stub(cloud).Resume(ChangeRunRequest(id=run_id, reason=reason))
    _tell(run, as_json=as_json)


def _stub(cloud: Calls) -> FederationStub:
    from triplane.proto.federation_pb2_grpc import FederationStub

    return FederationStub(cloud.channel)


def _tell(run: Run, *, as_json: bool, more: str = "") -> None:
    from triplane.cloud.cli.runs import headline
    from triplane.cloud.cli.text import record

    text = f"{headline(run)}\n{more}" if more else headline(run)
    open_output(as_json).result(record(run), text)
