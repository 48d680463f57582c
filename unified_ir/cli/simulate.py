"""`triplane federate simulate`: compare federated algorithms on simulated devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import data_options
from triplane.unified_ir.cli.algorithms import AlgorithmCommand
from triplane.unified_ir.cli.shell import (
    COUNT,
    EXIT_CODES,
    FOLDER,
    NATURAL,
    NOT_NEGATIVE,
    OUTPUT_FILE,
    check_distinct_files,
    json_option,
    open_output,
    option,
)
from triplane.unified_ir.federated.core import defaults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triplane.unified_ir.federated.core.metric import Metric
    from triplane.unified_ir.federated.study import DeviceScore, RoundRow, Study, Trial
    from triplane.unified_ir.federated.study.partition import Shards
    from triplane.unified_ir.federated.study.source import SampleSource
    from triplane.unified_ir.ir import Module

    Groups = tuple[Shards, Shards]
    Note = Callable[[str], None]

EPILOG = """\b
Examples:
  triplane train examples/digits.py:Digits --data digits --epochs 1 --out digits.tpm
  triplane federate simulate digits.tpm --data digits --partition labels --unseen 0.5
  triplane federate simulate gait.tpm --data steps.csv --x 'ch*:2x64' --y activity --group person
  triplane federate simulate net.tpm --data writers.npz --x images --y labels --group writer \\
      --split split --algorithm fedavg --algorithm maml --rounds 200 --devices 10 \\
      --rate 0.01 --rate 0.1 --folder study --out study.html

\b
MODEL.tpm needs the entry `loss` (`triplane train` exports it); all algorithms start from its
weights. Each device gets samples in two disjoint parts: to train and adapt on, and for scoring
(--held-out).

CHOICES
\b
ALGORITHM_SUMMARIES

\b
In the table, `before` is the accuracy of the shared model, and `adapted` its accuracy after
--inner-steps steps on a device's own support, at --lr or the best --rate. Compare algorithms with
the same rounds, devices and steps; give several --rate to those without a rate of adaptation. A
model whose `evaluate` returns no accuracy is scored by its loss, of which a lower value is better.

\b
The same seed gives the same bits, and so does a real run with the same device names and seed. With
--folder, a killed study continues where it was. If an algorithm diverges, the others continue, and
the exit code is 2.
""".replace("CHOICES\n", f"{data_options.CHOICES}\n")
ALL = "all"
GROUPS = (("training", True), ("unseen", False))


# fmt: off
OPTIONS: Final = (
    data_options.data_option("Labelled samples", required=True),
    *data_options.choices(),
    option("--group COLUMN", "Column that assigns each sample to a device: its name, or a whole "
           "number.", default="", show_default=False),
    option("--split COLUMN", "With --group: column of whole numbers, not 0 for samples of unseen "
           "devices.", default="", show_default=False),
    *data_options.forms(),
    option("--least N", "With --group: ignore devices with fewer samples.", COUNT, default=10),
    option("--partition",
           "Without --group: equal shares, shares of each class at random, or few classes each.",
           click.Choice(["even", "dirichlet", "labels"]), name="way", default="even"),
    option("--population N", "Without --group: total number of devices.", COUNT, default=20),
    option("--alpha A", "For --partition dirichlet: a small value gives each device few classes.",
           NOT_NEGATIVE, default=0.3),
    option("--label-shards N",
           "For --partition labels: single-class pieces per device.", COUNT, default=2),
    option("--held-out SHARE", "Share of a device's samples that are used only for scoring.",
           click.FloatRange(0, 1, min_open=True, max_open=True), default=defaults.HELD_OUT),
    option("--unseen SHARE", "Share of devices that never train, without --split.",
           click.FloatRange(0, 1, max_open=True), default=0.0),
    option("--algorithm NAME", "Algorithm, listed below, or all; may be repeated.",
           name="algorithms", multiple=True, default=("fedavg", "maml")),
    option("--rounds N", "Total number of rounds.", COUNT, default=defaults.ROUNDS),
    option("--devices N", "Devices per round, drawn at random for each round.  [default: all]",
           NATURAL, default=0, show_default=False),
    option("--steps N", "Steps of a device per round.", COUNT, default=defaults.STEPS),
    option("--batch-size N", "Samples of a step, for algorithms that learn from batches.",
           COUNT, default=defaults.BATCH_SIZE),
    option("--support N", "Samples to adapt with; 0: all of a device, in scoring only.",
           NATURAL, default=defaults.SUPPORT),
    option("--query N", "Samples of a step in addition to its support, for algorithms that learn "
           "from episodes.", COUNT, default=defaults.QUERY),
    option("--rate RATE", "Rate of adaptation to try at the end; the best one is used; may be "
           "repeated.", NOT_NEGATIVE, name="rates", multiple=True),
    option("--evaluate-every N", "Rounds between scorings.  [default: once, at the end]",
           NATURAL, default=0, show_default=False),
    option("--compression", "Compression of updates.", click.Choice(["int8", "top-k"])),
    option("--keep SHARE", "For --compression top-k: the share that is sent.",
           click.FloatRange(0, 1, min_open=True), default=defaults.KEEP),
    option("--seed N", "Seed of partition, rounds and steps.", NATURAL, default=0),
    option("--folder",
           "Save the state of each algorithm after each round, to resume from.", FOLDER),
    option("--out", "Write the report as one HTML page.", OUTPUT_FILE),
)
# fmt: on


@click.command(
    "simulate", short_help="Compare algorithms on simulated devices.", epilog=EPILOG,
    cls=AlgorithmCommand, params=[*OPTIONS],
)  # fmt: skip
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL.tpm")
@json_option
def simulate(**options: Any) -> None:
    """Compare federated algorithms on simulated devices, starting from MODEL.tpm."""
    output = open_output(options["as_json"])
    check_distinct_files([options["model"], options["data"]], {"--out": options["out"]})
    from triplane.unified_ir.convert.conversion import read_model
    from triplane.unified_ir.federated.study import verdicts
    from triplane.unified_ir.federated.study.source import devices_of

    studies = [_study(name, options) for name in _names(options["algorithms"])]
    module, _ = read_model(options["model"])
    groups = devices_of(_source(options), module)
    if options["devices"] > len(groups[0]):
        raise InvalidInput(
            f"--devices {options['devices']} is more than the {len(groups[0])} devices that learn; "
            "give a smaller number, or 0 for all"
        )
    output.note(_population(groups))
    trials, stopped = _trials(studies, module, groups, options["folder"], output.note)
    record = {
        "devices": len(groups[0]),
        "unseen": len(groups[1]),
        "trials": [_record(trial) for trial in trials],
        "stopped": stopped,
    }
    failures = {f"{name} stopped": reason for name, reason in stopped.items()}
    if options["out"] is not None:
        _write(options, trials, _facts(options, groups) | failures)
    lines = [*_lines(trials), *verdicts(trials), *map(": ".join, failures.items())]
    output.result(record, "\n".join(lines))
    if stopped:
        click.get_current_context().exit(EXIT_CODES[InvalidInput])


def _names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return each algorithm once, in the order given."""
    from triplane.unified_ir.federated.algorithms import ALGORITHMS

    every = [n for name in names for n in (ALGORITHMS if name == ALL else (name,))]
    return tuple(dict.fromkeys(every))


def _population(groups: Groups) -> str:
    seen, unseen = groups
    counts = [shard.examples + shard.held_out_samples for part in groups for shard in part.values()]
    others = f", {len(unseen)} are only scored" if unseen else ""
    samples = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    return f"{len(seen)} devices learn{others}; each has {samples} samples"


def _trials(
    studies: list[Study], module: Module, groups: Groups, folder: Path | None, note: Note
) -> tuple[list[Trial], dict[str, str]]:
    """Return the finished trials and why others stopped; raise the last error if all stopped."""
    trials, stopped = [], {}
    for study in studies:
        try:
            trials.append(_trial(study, module, groups, folder, note))
        except InvalidInput as error:
            # With several algorithms one that diverges is a result of the comparison; alone it is
            # an error.
            if len(studies) == 1:
                raise
            stopped[study.algorithm] = str(error)
            failure = error
            note(f"{study.algorithm} stopped: {error}")
    if not trials:
        raise failure
    return trials, stopped


def _write(options: dict[str, Any], trials: list[Trial], facts: dict[str, str]) -> None:
    from triplane.proto.disk import write_atomic
    from triplane.unified_ir.federated.study import page

    names = ", ".join(t.algorithm for t in trials)
    title = f"{options['model'].name}: {names if len(trials) < 4 else 'algorithms compared'}"
    write_atomic(options["out"], page(trials, title, facts).encode())


def _source(options: dict[str, Any]) -> SampleSource:
    from triplane.unified_ir.federated.study.source import SampleSource

    names = ("data", "group", "split", "alpha", "label_shards", "held_out", "unseen", "least")
    form = data_options.reading(options)
    return SampleSource(
        x=form.pop("x"),
        y=form.pop("y"),
        form=form,
        way="group" if options["group"] else options["way"],
        devices=options["population"],
        seed=options["seed"],
        **{name: options[name] for name in names},
    )


def _study(name: str, options: dict[str, Any]) -> Study:
    from triplane.unified_ir.federated.algorithms import algorithm
    from triplane.unified_ir.federated.algorithms import defaults as defaults_of
    from triplane.unified_ir.federated.study import Study

    row = algorithm(name)
    names = ("rounds", "devices", "steps", "batch_size", "support", "query", "evaluate_every")
    compression = options["compression"] or ""
    return Study(
        algorithm=name,
        # Algorithms have different defaults; options that were given hold for all of them.
        hyper=defaults_of(name).but(**options["hyper"]),
        # Meta-SGD learns its rates, and would refuse others.
        rates=() if row.learns_rates else options["rates"],
        compression=compression,
        keep=options["keep"] if compression == "top-k" else 1.0,
        seed=options["seed"],
        **{k: options[k] for k in names},
    )


def _trial(study: Study, module: Module, groups: Groups, folder: Path | None, note: Note) -> Trial:
    """Run one algorithm, reporting its progress."""
    from triplane.unified_ir.federated.core.metric import metric_of
    from triplane.unified_ir.federated.study import simulate as run

    name, (seen, unseen) = study.algorithm, groups
    metric = metric_of(module.entry("evaluate").result_names)
    reported: list[int] = []

    def on_round(row: RoundRow) -> None:
        if not reported and row.number > 1:
            note(f"{name} continues after round {row.number - 1}")
        reported.append(row.number)
        note(f"{name} round {row.number}/{study.rounds}  loss {row.loss:.4f}  {row.seconds:.2f} s")

    def on_scores(number: int, rate: float | None, scores: Sequence[DeviceScore]) -> None:
        at = "" if rate is None else f"  at rate {rate:g}"
        reported.extend([number] if rate is None else [])
        means = _means(scores, metric) or "the loss is not finite: left out"
        note(f"{name} scored after round {number}{at}  {means}")

    trial = run(
        module, seen, study, unseen=unseen, folder=folder and folder / name,
        on_round=on_round, on_scores=on_scores,
    )  # fmt: skip
    if not reported:
        note(f"{name} was already finished; read from {folder}")
    return trial


def _means(scores: Sequence[DeviceScore], metric: Metric) -> str:
    """Format mean scores before and after adaptation, by group of devices."""
    from triplane.unified_ir.federated.study import summary

    means = {group: summary(s for s in scores if s.seen is seen) for group, seen in GROUPS}
    return ", ".join(
        f"{group} {metric.text(s.before)} -> {metric.text(s.after)}"
        for group, s in means.items()
        if s
    )


def _record(trial: Trial) -> dict[str, Any]:
    from dataclasses import asdict

    # Accuracy is the default of readers, who know records without the field.
    metric = {} if trial.metric.share else {"metric": trial.metric.name}
    return {
        "algorithm": trial.algorithm,
        **metric,
        "bytes_up": trial.bytes_up,
        "bytes_down": trial.bytes_down,
        "seconds": trial.seconds,
        "rounds": [asdict(row) for row in trial.rounds],
        **{group: [asdict(score) for score in trial.final(seen=seen)] for group, seen in GROUPS},
        "rates": {
            group: best[0]
            for group, seen in GROUPS
            if (best := trial.best_rate(seen=seen)) is not None
        },
    }


def _lines(trials: list[Trial]) -> list[str]:
    from triplane.unified_ir.federated.study import summary

    metric = trials[0].metric
    before = "before" if metric.share else f"{metric.name} before"
    lines = [f"algorithm  devices     {before:>12}  adapted  worst tenth     MB up"]
    for trial in trials:
        for group, seen in GROUPS:
            scores = summary(trial.final(seen=seen), metric)
            if scores is not None:
                worst = scores.after_worst_tenth
                lines.append(
                    f"{trial.algorithm:10} {scores.devices:5} {group:9} "
                    f"{metric.text(scores.before):>8} {metric.text(scores.after):>8} "
                    f"{metric.text(worst):>12} {trial.bytes_up / 1e6:9.1f}"
                )
    return lines


def _facts(options: dict[str, Any], groups: Groups) -> dict[str, str]:
    """Return the options that had an effect, by name, for the reader of the page."""
    from triplane.unified_ir.federated.algorithms import ALGORITHMS

    rows = [ALGORITHMS[name] for name in _names(options["algorithms"])]
    numbers: dict[str, dict[str, None]] = {}
    for row in rows:
        for hyper in row.hyper:
            number = f"{options['hyper'].get(hyper.name, hyper.default):g}"
            numbers.setdefault(hyper.name, {})[number] = None
    options = {k: v for k, v in options.items() if k != "hyper"} | {
        name: tuple(values) for name, values in numbers.items()
    }
    meta = any(row.episodes for row in rows)
    # fmt: off
    # False for an option without an effect on these algorithms and this partition: on the page it
    # would mislead the reader.
    matters = {
        "least": options["group"], "way": not options["group"],
        "population": not options["group"], "unseen": not options["split"],
        "alpha": options["way"] == "dirichlet" and not options["group"],
        "label_shards": options["way"] == "labels" and not options["group"],
        "batch_size": not all(row.episodes for row in rows), "query": meta,
        "keep": options["compression"] == "top-k",
        "devices": options["devices"], "evaluate_every": options["evaluate_every"],
    }
    # fmt: on
    left_out = {"as_json", "folder", "out", "model", "algorithms"}
    facts = {
        k.replace("_", " ").replace("way", "partition"): (
            ", ".join(map(str, v)) if isinstance(v, tuple) else str(v)
        )
        for k, v in options.items()
        if k not in left_out and matters.get(k, True) and v not in {None, "", ()}
    }
    sizes = {"devices taking part": str(len(groups[0])), "devices unseen": str(len(groups[1]))}
    return sizes | facts
