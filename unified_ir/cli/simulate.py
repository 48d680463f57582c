"""`triplane federate simulate`: compare algorithms on simulated devices, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.algorithms import AlgorithmCommand
from triplane.unified_ir.cli.shell import (
    EXIT_CODES,
    OUTPUT_FILE,
    check_distinct_files,
    json_option,
    open_output,
)
from triplane.unified_ir.federated.core import defaults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
  triplane federate simulate net.tpm --data writers.npz --x images --y labels --group writer \\
      --split split --algorithm fedavg --algorithm maml --rounds 200 --devices 10 \\
      --rate 0.01 --rate 0.1 --folder study --out study.html

\b
MODEL.tpm has the entry `loss` (`triplane train` exports it); all start from its weights.
DATA is the name digits, an .npz, MNIST IDX files or a folder of images by class. Each device gets
samples in two disjoint parts: for training and adapting, and for scoring (--held-out).

\b
ALGORITHM_SUMMARIES

\b
In the table, `before` is the accuracy of the shared model, and `adapted` that after --inner-steps
steps on a device's own support, at --lr or the best --rate. For a fair comparison, use the same
rounds, devices and steps, and several --rate for algorithms without a rate of adaptation.

\b
The same seed gives the same bits, as does a real run with the same device names and seed. With
--folder, a killed study resumes where it was. If an algorithm diverges, the others continue, and
the exit code is 2.
"""
RATE = click.FloatRange(min=0)
SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
COUNT = click.IntRange(min=1)
ALL = "all"
GROUPS = (("training", True), ("unseen", False))


@click.command(
    "simulate", short_help="Compare algorithms on simulated devices.", epilog=EPILOG,
    cls=AlgorithmCommand, rate=RATE, count=COUNT,
)  # fmt: skip
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL.tpm")
@click.option("--data", required=True, metavar="DATA", help="Labelled samples; see below.")
@click.option("--x", default="x", show_default=True, metavar="KEY", help="Samples in an .npz.")
@click.option("--y", default="y", show_default=True, metavar="KEY", help="Labels in an .npz.")
@click.option(
    "--group", default="", metavar="KEY",
    help="Integer array in an .npz that assigns each sample to a device.",
)  # fmt: skip
@click.option(
    "--split", default="", metavar="KEY",
    help="With --group: integer array in an .npz, not 0 for samples of unseen devices.",
)  # fmt: skip
@click.option(
    "--least", type=COUNT, default=10, show_default=True, metavar="N",
    help="With --group: ignore devices with fewer samples.",
)  # fmt: skip
@click.option(
    "--partition", "way", type=click.Choice(["even", "dirichlet", "labels"]), default="even",
    show_default=True,
    help="Without --group: equal shares, shares of each class at random, or few classes each.",
)  # fmt: skip
@click.option(
    "--population", type=COUNT, default=20, show_default=True, metavar="N",
    help="Without --group: total number of devices.",
)  # fmt: skip
@click.option(
    "--alpha", type=RATE, default=0.3, show_default=True, metavar="A",
    help="For --partition dirichlet: a small value gives each device few classes.",
)  # fmt: skip
@click.option(
    "--label-shards", type=COUNT, default=2, show_default=True, metavar="N",
    help="For --partition labels: single-class pieces per device.",
)  # fmt: skip
@click.option(
    "--held-out", type=SHARE, default=defaults.HELD_OUT, show_default=True, metavar="SHARE",
    help="Share of a device's samples that are used only for scoring.",
)  # fmt: skip
@click.option(
    "--unseen", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True,
    metavar="SHARE", help="Share of devices that never train, without --split.",
)  # fmt: skip
@click.option(
    "--algorithm", "algorithms", multiple=True, default=("fedavg", "maml"), show_default=True,
    metavar="NAME", help="Algorithm, listed below, or all; may be repeated.",
)  # fmt: skip
@click.option("--rounds", type=COUNT, default=defaults.ROUNDS, show_default=True, metavar="N")
@click.option(
    "--devices", type=click.IntRange(min=0), default=0, metavar="N",
    help="Devices per round, drawn at random for each round.  [default: all]",
)  # fmt: skip
@click.option(
    "--steps", type=COUNT, default=defaults.STEPS, show_default=True, metavar="N",
    help="Steps of a device per round.",
)  # fmt: skip
@click.option(
    "--batch-size", type=COUNT, default=defaults.BATCH_SIZE, show_default=True, metavar="N",
    help="Samples of a step, of algorithms that learn from batches.",
)  # fmt: skip
@click.option(
    "--support", type=click.IntRange(min=0), default=defaults.SUPPORT, show_default=True,
    metavar="N",
    help="Samples to adapt with; 0: all of a device, in scoring only.",
)  # fmt: skip
@click.option(
    "--query", type=COUNT, default=defaults.QUERY, show_default=True, metavar="N",
    help="Samples of a step beside its support, of algorithms that learn from episodes.",
)  # fmt: skip
@click.option(
    "--rate", "rates", type=RATE, multiple=True, metavar="RATE",
    help="Rate of adaptation to try at the end; the best one is used; may be repeated.",
)  # fmt: skip
@click.option(
    "--evaluate-every", type=click.IntRange(min=0), default=0, metavar="N",
    help="Rounds between scorings.  [default: once, at the end]",
)  # fmt: skip
@click.option("--compression", type=click.Choice(["int8", "top-k"]), help="Compression of updates.")
@click.option(
    "--keep", type=click.FloatRange(0, 1, min_open=True), default=defaults.KEEP, show_default=True,
    metavar="SHARE", help="For --compression top-k: the share that is sent.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N")
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False),
    help="Save the state of each algorithm after each round, to resume from.",
)  # fmt: skip
@click.option("--out", type=OUTPUT_FILE, help="Write the report as one HTML page.")
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
            f"--devices {options['devices']}: a round asks at most the {len(groups[0])} devices "
            "that learn; ask fewer, or 0 for all"
        )
    output.note(_population(groups))
    trials, stopped = _trials(studies, module, groups, options["folder"], output.note)
    record = {
        "devices": len(groups[0]),
        "unseen": len(groups[1]),
        "trials": [_record(trial) for trial in trials],
        "stopped": stopped,
    }
    if options["out"] is not None:
        _write(
            options,
            trials,
            _facts(options, groups) | {f"{k} stopped": v for k, v in stopped.items()},
        )
    output.result(record, "\n".join([*_lines(trials), *verdicts(trials), *_stopped(stopped)]))
    if stopped:
        click.get_current_context().exit(EXIT_CODES[InvalidInput])


def _names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return each algorithm once, in the order given."""
    from triplane.unified_ir.federated.algorithms import ALGORITHMS

    every = [n for name in names for n in (ALGORITHMS if name == ALL else (name,))]
    return tuple(dict.fromkeys(every))


def _population(groups: Groups) -> str:
    seen, unseen = groups
    held = [shard.examples + shard.held_out_samples for part in groups for shard in part.values()]
    others = f", {len(unseen)} are only scored" if unseen else ""
    samples = f"{min(held)} to {max(held)}" if min(held) < max(held) else str(held[0])
    return f"{len(seen)} devices learn{others}; each has {samples} samples"


def _trials(
    studies: list[Study], module: Module, groups: Groups, folder: Path | None, note: Note
) -> tuple[list[Trial], dict[str, str]]:
    """Return what ran to its end, and why others did not; raise what stops every algorithm."""
    trials, stopped = [], {}
    for study in studies:
        try:
            trials.append(_trial(study, module, groups, folder, note))
        except InvalidInput as error:
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

    names = ("data", "x", "y", "group", "split", "alpha", "label_shards", "held_out", "unseen",
             "least")  # fmt: skip
    return SampleSource(
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
        hyper=defaults_of(name).but(**options["hyper"]),
        rates=() if row.learns_rates else options["rates"],
        compression=compression,
        keep=options["keep"] if compression == "top-k" else 1.0,
        seed=options["seed"],
        **{k: options[k] for k in names},
    )


def _trial(study: Study, module: Module, groups: Groups, folder: Path | None, note: Note) -> Trial:
    """Run one algorithm, reporting its progress."""
    from triplane.unified_ir.federated.study import simulate as run

    name, (seen, unseen) = study.algorithm, groups
    heard: list[int] = []

    def on_round(row: RoundRow) -> None:
        if not heard and row.number > 1:
            note(f"{name} goes on after round {row.number - 1}")
        heard.append(row.number)
        note(f"{name} round {row.number}/{study.rounds}  loss {row.loss:.4f}  {row.seconds:.2f} s")

    def on_scores(number: int, rate: float | None, scores: Sequence[DeviceScore]) -> None:
        at = "" if rate is None else f"  at rate {rate:g}"
        heard.extend([number] if rate is None else [])
        note(f"{name} scored after round {number}{at}  {_accuracies(scores)}")

    trial = run(
        module, seen, study, unseen=unseen, folder=folder and folder / name,
        on_round=on_round, on_scores=on_scores,
    )  # fmt: skip
    if not heard:
        note(f"{name} was finished; read back from {folder}")
    return trial


def _accuracies(scores: Sequence[DeviceScore]) -> str:
    """Format mean accuracy in percent before and after adaptation, by group of devices."""
    from triplane.unified_ir.federated.study import summary

    means = {group: summary(s for s in scores if s.seen is seen) for group, seen in GROUPS}
    return ", ".join(
        f"{group} {100 * s.before:.1f} -> {100 * s.after:.1f}" for group, s in means.items() if s
    )


def _record(trial: Trial) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "algorithm": trial.algorithm,
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

    lines = ["algorithm  devices           before  adapted  worst tenth     MB up"]
    for trial in trials:
        for group, seen in GROUPS:
            scores = summary(trial.final(seen=seen))
            if scores is not None:
                lines.append(
                    f"{trial.algorithm:10} {scores.devices:5} {group:9} {100 * scores.before:8.1f} "
                    f"{100 * scores.after:8.1f} {100 * scores.after_worst_tenth:12.1f} "
                    f"{trial.bytes_up / 1e6:9.1f}"
                )
    return lines


def _stopped(stopped: dict[str, str]) -> list[str]:
    return [f"{name} stopped: {why}" for name, why in stopped.items()]


def _facts(options: dict[str, Any], groups: Groups) -> dict[str, str]:
    """Return the options that mattered, by name, for the reader of the page."""
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
    matters = {
        "x": options["data"].endswith(".npz"), "y": options["data"].endswith(".npz"),
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
        k.replace("_", " ").replace("way", "partition"): _shown(v)
        for k, v in options.items()
        if k not in left_out and matters.get(k, True)
    }
    sizes = {"devices taking part": str(len(groups[0])), "devices unseen": str(len(groups[1]))}
    return sizes | {k: v for k, v in facts.items() if v}


def _shown(value: object) -> str:
    """Format an option; empty for an unset one."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
