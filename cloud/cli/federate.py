"""`triplane federate`: let devices learn together; list, watch, stop and resume runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.cloud.cli.connection import (
    Answer,
    Calls,
    calls_cloud,
    client_options,
    new_key,
    print_answer,
    repeated,
)
from triplane.cloud.cli.options import (
    DIGEST,
    DURATION,
    MAX_COUNT,
    MAX_NUMBER,
    example,
    keys_option,
    least_option,
)
from triplane.cloud.cli.strategies import SHARE, simulate, strategy_options
from triplane.unified_ir.cli.algorithms import NAMES, AlgorithmCommand
from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.core.masked_step import PHASE_S
from triplane.unified_ir.federated.core.metric import Scores

if TYPE_CHECKING:
    from triplane.proto.federation_pb2 import Noise, Spec

EPILOG = """\b
Examples:
  triplane federate run digits@latest --population phones --rounds 20 --devices 10
  triplane federate run digits --population phones --algorithm maml --rounds 100 --quorum 0.8
  triplane federate run digits --population phones --compression int8 --alias learnt --detach
  triplane federate run digits --population phones --strategy fedadam --option eta=0.01

\b
What happens: the cloud makes a training plan of the model, which devices execute with onnxruntime
alone. In each round it selects devices of the population, collects their updates, and computes the
next state from the mean of the updates. A cloud or a device that is killed continues where it was.
The result is registered as the model's next version; nothing is deployed unless you give --release.

\b
--algorithm NAME+adam is the same with Adam on the cloud.

\b
--strategy replaces the cloud's own mean and optimizer by a strategy of Flower; --algorithm then
decides only what devices do. The strategy runs in a child process of the cloud, which needs
triplane[flower]; devices need nothing more. Your own strategies are files NAME.py in the folder
`strategies` of the cloud's home.

\b
Options that you leave unset have the cloud's defaults, which the answer shows too (--json).
Simulations (triplane federate simulate) have the same defaults.
Ctrl-C closes the table and does not stop the run.
Exit codes: 0 done (or begun, with --detach); 4 stopped or failed.
"""

SIGN_EPILOG = """\b
Example, on a machine other than the cloud's, with the offline folder plugged in:
  triplane federate sign last --keys /media/usb/triplane-keys --identity ~/signer

\b
What happens: the model file is downloaded and verified, the training plan is made of it on this
machine, and its digest is signed together with the names of the tensors that may leave a device and
the smallest round in which it may run. The run goes on if the cloud made the same plan. Later runs
with the same model, algorithm and rates need no new signature.
The comparison proves that the plan was made of this model file. Whether that is the model you
trained, only you can tell: --model-digest refuses any other.
If the role plans needs several signatures, each signer runs this command with the same options.
"""

UNSIGN_EPILOG = """\b
Examples, with the offline folder plugged in:
  triplane federate unsign last --keys /media/usb/triplane-keys
  triplane federate unsign 5e0f...c3 --keys /media/usb/triplane-keys

\b
Devices do not begin the plan again, and stop going on with it within an hour. The list of signed
plans has room for about 490 plans of 200 tensors each, and for fewer beside a large roster.
A plan that the policy for plans allows needs no signature of people: triplane cloud policy show
"""

RUN: Final = click.argument("run_id", metavar="RUN", default="last")
REASON: Final = click.option(
    "--reason", default="", metavar="TEXT", help="Shown with the run and in the audit log."
)
_COHORT: Final = ("devices", "over_selection", "quorum", "deadline_s", "patience_s")
_SAMPLING: Final = ("steps", "batch_size", "support", "query")


COUNT: Final = click.IntRange(1, MAX_COUNT)


def _or(text: str, default: object) -> str:
    """Add to a help text the default that the cloud uses for an unset option."""
    return f"{text}  [default: {default}]"


def _positive(_ctx: click.Context, _param: click.Parameter, seconds: float | None) -> float | None:
    if seconds == 0:
        raise click.BadParameter("give a time above 0, or leave the option out for the default")
    return seconds


@click.group("federate")
def command() -> None:
    """Let devices learn together; list, watch and stop runs.

    RUN is an id, the beginning of one, or `last`, which is the default.
    """


command.add_command(simulate)


@command.command("run", epilog=EPILOG, cls=AlgorithmCommand, zero_is_unset=True)
@click.argument("model", metavar="MODEL[@VERSION|@ALIAS]")
@click.option(
    "--population", default="", metavar="NAME",
    help="Name of the group of devices that may take part; each device is configured with it.",
)  # fmt: skip
@click.option("--algorithm", default="", metavar="NAME", help=_or(f"{NAMES}.", defaults.ALGORITHM))
@strategy_options
@click.option(
    "--app", is_flag=True, help="Devices run the Flower ClientApp that their owner configured."
)
@click.option("--rounds", type=COUNT, help=_or("Total number of rounds.", defaults.ROUNDS))
@click.option("--devices", type=COUNT, help=_or("Updates that complete a round.", defaults.DEVICES))
@click.option(
    "--over-selection", type=click.FloatRange(0), default=0.0,
    help="Share of additional devices to select: 0.2 selects 12 for 10, and the last two may be "
    "late.  [default: 0]",
)  # fmt: skip
@click.option(
    "--quorum", type=SHARE,
    help=_or("Least share of --devices for a round to count at its deadline.", defaults.QUORUM),
)  # fmt: skip
@click.option(
    "--deadline", "deadline_s", type=DURATION, callback=_positive,
    help=_or("Time limit of a round.", f"{defaults.DEADLINE_S / 60:g}min"),
)  # fmt: skip
@click.option(
    "--patience", "patience_s", type=DURATION, callback=_positive,
    help=_or(
        "Time that a round waits for selected devices that disconnected.",
        f"{defaults.PATIENCE_S:g}s",
    ),
)  # fmt: skip
@click.option(
    "--phase-s", type=DURATION, callback=_positive,
    help=_or(
        "Time limit of each step of a masked round after learning; needs --mask.", f"{PHASE_S:g}s"
    ),
)  # fmt: skip
@click.option(
    "--steps", type=COUNT, help=_or("Training steps of a device in a round.", defaults.STEPS)
)
@click.option(
    "--batch-size", type=COUNT, help=_or("Samples in a training step.", defaults.BATCH_SIZE)
)
@click.option("--support", type=COUNT, help=_or("Samples to adapt to.", defaults.SUPPORT))
@click.option(
    "--query", type=COUNT, help=_or("Samples to evaluate an adapted model on.", defaults.QUERY)
)
@click.option(
    "--evaluate-every", type=click.IntRange(0, MAX_COUNT), default=0,
    help="Rounds between evaluations on every device.  [default: only after the last round]",
)  # fmt: skip
@click.option(
    "--scores", type=click.Choice([x.value for x in Scores]),
    help="How devices score the models: each in the clear, as a masked mean, or not at all. "
    " [default: masked with --mask, off with --noise distributed without --evaluate-every]",
)  # fmt: skip
@click.option(
    "--compression",
    default="",
    metavar="NAME",
    help="Compression of updates: int8 or top-k.  [default: none]",
)
@click.option(
    "--keep",
    type=SHARE,
    help=_or("Share of the entries of an update that top-k sends.", defaults.KEEP),
)
@click.option(
    "--seed", type=click.IntRange(0, MAX_NUMBER), default=0, show_default=True, metavar="N",
    help="Seed of every random choice in the run.",
)  # fmt: skip
@click.option(
    "--release",
    default="",
    metavar="auto",
    help="Release the result automatically, under the release policy.",
)
@click.option("--alias", default="", metavar="NAME", help="Alias to set on the resulting version.")
@click.option("--detach", is_flag=True, help="Begin the run and return without watching it.")
@client_options
def run(*, detach: bool, identity: Path | None, as_json: bool, **options: Any) -> None:
    """Begin a run over the devices of a population.

    MODEL is the version from which they learn. The run is watched until it ends.
    """
    spec = _spec(**options)
    print_answer(_start, identity=identity, as_json=as_json, spec=spec, detach=detach)


def _spec(
    *,
    strategy: str,
    strategy_options: list[tuple[str, str]],
    app: bool,
    hyper: dict[str, float],
    robustness: dict[str, Any],
    privacy: dict[str, Any] | None,
    masking: dict[str, Any] | None,
    phase_s: float | None,
    **options: Any,
) -> Spec:
    """Return the request's spec; the cloud fills in what is left unset."""
    from triplane.proto.federation_pb2 import (
        Cohort,
        Flower,
        MaskedRounds,
        Option,
        Robustness,
        Sampling,
        Spec,
    )
    from triplane.proto.hyperparameters import set_values

    # Checked here, because without a strategy the request has no field that could carry them.
    if (strategy_options or app) and not strategy:
        raise click.UsageError("--option and --app belong to a strategy; name one with --strategy")
    if phase_s is not None and masking is None:
        raise click.UsageError("--phase-s has no effect without --mask; add it")
    arguments = [Option(name=name, json=value) for name, value in strategy_options]
    flower = Flower(strategy=strategy, options=arguments, app=app) if strategy else None
    spec = Spec(
        cohort=Cohort(**{name: options.pop(name) for name in _COHORT}),
        sampling=Sampling(**{name: options.pop(name) for name in _SAMPLING}),
        flower=flower,
        # Absent if nothing was set: a strategy of Flower does without, and others have defaults.
        robustness=Robustness(**robustness) if robustness else None,
        noise=None if privacy is None else _noise(privacy),
        masking=None if masking is None else MaskedRounds(phase_s=phase_s or 0, **masking),
        **options,
    )
    set_values(spec.hyperparameters, hyper)
    return spec


def _noise(options: dict[str, Any]) -> Noise:
    from triplane.proto.federation_pb2 import Noise

    return Noise(adaptive="clip_quantile" in options, **options)


def _start(cloud: Calls, *, spec: Spec, detach: bool) -> Answer:
    from triplane.cloud.cli.runs import headline, masking_lines, watchable
    from triplane.cloud.cli.watching import watch_to_end
    from triplane.proto.federation_pb2 import StartRequest

    request = StartRequest(spec=spec, key=new_key())
    # One key for all attempts, so a repeated call never starts a second run.
    run = repeated(lambda: cloud.federation.Start(request))
    masking = masking_lines(run)
    if not detach:
        if masking and not cloud.output.as_json:
            click.echo("\n".join(masking))
        return watch_to_end(watchable(cloud, run.id), run, as_json=cloud.output.as_json)
    lines = [*masking, headline(run), f"Watch it: triplane federate watch {run.id}"]
    return run, "\n".join(lines)


@command.command("ls", epilog=example("federate ls"))
@calls_cloud
def ls(cloud: Calls) -> Answer:
    """List runs, newest first."""
    from triplane.cloud.cli.runs import run_table
    from triplane.proto.federation_pb2 import ListRunsRequest

    runs = cloud.federation.ListRuns(ListRunsRequest()).runs
    none = "no run yet; begin one with: triplane federate run MODEL --population NAME"
    return {"runs": runs}, run_table(runs) if runs else none


@command.command("show", epilog=example("federate show last"))
@RUN
@calls_cloud
def show(cloud: Calls, *, run_id: str) -> Answer:
    """Show the rounds, devices and refused updates of a run."""
    from triplane.cloud.cli.runs import run_text
    from triplane.proto.federation_pb2 import GetRunRequest

    run = cloud.federation.GetRun(GetRunRequest(id=run_id))
    return run, run_text(run)


@command.command("watch", epilog=example("federate watch last"))
@RUN
@calls_cloud
def watch(cloud: Calls, *, run_id: str) -> Answer:
    """Follow a run, round by round, until it ends.

    The exit code is 0 if it is done, 4 if it was stopped or failed.
    """
    from triplane.cloud.cli.runs import watchable
    from triplane.cloud.cli.watching import watch_to_end
    from triplane.proto.federation_pb2 import GetRunRequest

    run = cloud.federation.GetRun(GetRunRequest(id=run_id))
    return watch_to_end(watchable(cloud, run.id), run, as_json=cloud.output.as_json)


@command.command("sign", epilog=SIGN_EPILOG)
@RUN
@keys_option()
@least_option("devices", "Fewest updates of which a round computes the next state.", "the run's")
@least_option("batch", "Fewest samples in a step of a device.", "2")
@least_option("steps", "Fewest steps of a device in a round.", "the run's")
@least_option("held-out", "Fewest held-out samples of a device in a score.", 1)
@click.option(
    "--model-digest", type=DIGEST, default="", metavar="HEX",
    help="Root digest of the model file that you reviewed; a plan of another file is not signed.",
)  # fmt: skip
@click.option(
    "--roster", is_flag=True,
    help="Devices run it only while they know a signed roster of devices; for a masked run.",
)  # fmt: skip
@calls_cloud
def sign(cloud: Calls, **options: Any) -> Answer:
    """Sign the plan of a run, after making it again here.

    Devices run a plan only with the signatures of the role plans, or within the policy for plans.
    """
    from triplane.cloud.cli.plan_policies import sign_run

    return sign_run(cloud, **options)


@command.command("unsign", epilog=UNSIGN_EPILOG)
@click.argument("run", metavar="RUN|DIGEST")
@keys_option()
@calls_cloud
def unsign(cloud: Calls, *, run: str, keys: Path) -> Answer:
    """Withdraw the signature of people of a run's plan.

    DIGEST is the root digest of a plan, all 64 hexadecimal digits.
    """
    from triplane.cloud.cli.plan_policies import unsign_run

    return unsign_run(cloud, run=run, keys=keys)


@command.command("stop", epilog=example('federate stop last --reason "wrong population"'))
@RUN
@REASON
@calls_cloud
def stop(cloud: Calls, *, run_id: str, reason: str) -> Answer:
    """Stop a run; `resume` continues it from there.

    Work in progress ends, and the state of the last finished round is kept. A masked round whose
    devices were asked for their updates is finished first, if that takes no longer than 20 s.
    """
    from triplane.cloud.cli.runs import headline
    from triplane.proto.federation_pb2 import ChangeRunRequest

    run = cloud.federation.Stop(ChangeRunRequest(id=run_id, reason=reason))
    return run, headline(run)


@command.command("resume", epilog=example("federate resume last"))
@RUN
@REASON
@calls_cloud
def resume(cloud: Calls, *, run_id: str, reason: str) -> Answer:
    """Continue a stopped run where it stopped."""
    from triplane.cloud.cli.runs import headline
    from triplane.proto.federation_pb2 import ChangeRunRequest

    run = cloud.federation.Resume(ChangeRunRequest(id=run_id, reason=reason))
    return run, headline(run)
