"""`triplane federate simulate`: compare federated algorithms on simulated devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from triplane.proto.errors import InvalidInput, Unavailable
from triplane.unified_ir.cli import data_options
from triplane.unified_ir.cli.algorithms import FILES, AlgorithmCommand
from triplane.unified_ir.cli.number_options import flag, parse_seeds
from triplane.unified_ir.cli.privacy import study_facts, study_masking, study_privacy
from triplane.unified_ir.cli.robustness import round_lines
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
from triplane.unified_ir.cli.stopped_runs import StoppedRun, nothing_finished, reason, seeds_stopped
from triplane.unified_ir.cli.study_options import check_effects
from triplane.unified_ir.cli.unlearnable import left_out, left_out_line
from triplane.unified_ir.federated.core import defaults

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triplane.unified_ir.federated.core.metric import Metric
    from triplane.unified_ir.federated.study import DeviceScore, RoundRow, Study, Summary, Trial
    from triplane.unified_ir.federated.study.partition import Shards
    from triplane.unified_ir.federated.study.seeds import Completion
    from triplane.unified_ir.federated.study.server import StudyServer
    from triplane.unified_ir.federated.study.source import SampleSource
    from triplane.unified_ir.ir import Module

    Groups = tuple[Shards, Shards]
    Note = Callable[[str], None]
    Served = tuple[StudyServer, Mapping[str, float]]
    """(the cloud's side of a study, the hyperparameters that are set)."""
    ServerOf = Callable[[str, Mapping[str, float]], Served]
    """(algorithm, hyperparameters of the command line) -> its server."""

EPILOG = """\b
Examples:
  triplane train examples/digits.py:Digits --data digits --epochs 1 --out digits.tpm
  triplane federate simulate digits.tpm --data digits --partition labels --unseen 0.5
  triplane federate simulate gait.tpm --data steps.csv --x 'ch*:2x64' --y activity --group person
  triplane federate simulate net.tpm --data writers.npz --x images --y labels --group writer \\
      --split split --algorithm fedavg --algorithm maml --rounds 200 --devices 10 \\
      --rate 0.01 --rate 0.1 --folder study --out study.html
  triplane federate simulate digits.tpm --data digits --partition labels --seeds 3 \\
      --algorithm fedavg --algorithm mine.py:FedNag --momentum 0.8 --out-csv scores.csv

\b
MODEL.tpm needs the entry `loss` (`triplane train` exports it); all algorithms start from its
weights. Each device gets samples in two disjoint parts: to train and adapt on, and for scoring
(--held-out).

CHOICES
\b
ALGORITHM_SUMMARIES
  NAME+adam  the same, with Adam on the cloud

\b
FILE.py:NAME is an algorithm of your own: a triplane.unified_ir.federated.algorithms.Algorithm.
The file is run; the algorithm's hyperparameters become options.

\b
In the table, `start` is the accuracy of MODEL.tpm, `before` that of the shared model at the end,
and `adapted` its accuracy after --inner-steps steps on a device's own support, at --lr or the best
--rate. Warnings, such as that adaptation hurts, come first. Compare algorithms with the same
rounds, devices and steps; give several --rate to those without a rate of adaptation. A model whose
`evaluate` returns no accuracy is scored by its loss, of which a lower value is better.

\b
Each of --seeds divides the samples again and repeats the run. Means over seeds have the standard
deviation behind them, and algorithms are compared seed by seed.

\b
--out-csv has one row per scored device, seed, round (0: the start) and rate of adaptation:
algorithm, seed, round, devices (training or unseen), device, samples, metric, before, adapted,
rate (empty: the run's own, if no other was tried), final (1 in rows that the table summarizes).
Accuracies are shares.
--out-json has the document of --json.

\b
The same seed gives the same bits, and so does a real run with the same device names and seed. With
--folder, a killed study continues where it was. If an algorithm diverges, the others continue, and
the exit code is 2. Only algorithms that finished all seeds are ranked. One that cannot learn the
model at all is refused if --algorithm names it, and else left out.
""".replace("CHOICES\n", f"{data_options.CHOICES}\n")
MAX_TITLED: Final = 3
"""Number of commas up to which the title of the page names all algorithms."""
DIVERGING_RATIO: Final = 10
"""Ratio of adapted to unadapted loss at the start from which the rate is likely too large."""
ALL = "all"
OUTPUTS: Final = ("out", "out_csv", "out_json")
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
    option("--algorithm NAME", "Algorithm, listed below, or all, or FILE.py:NAME; may be repeated.",
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
    option("--ways N", "Classes of an episode, drawn and numbered anew for each; --support and "
           "--query are multiples of it.  [default: the samples' own labels]",
           click.IntRange(2)),
    option("--rate RATE", "Rate of adaptation to try at the end; the best one is used; may be "
           "repeated.", NOT_NEGATIVE, name="rates", multiple=True),
    option("--evaluate-every N", "Rounds between scorings.  [default: once, at the end]",
           NATURAL, default=0, show_default=False),
    option("--compression", "Compression of updates.", click.Choice(["int8", "top-k"])),
    option("--keep SHARE", "For --compression top-k: the share that is sent.",
           click.FloatRange(0, 1, min_open=True), default=defaults.KEEP),
    option("--engine", "What runs and scores devices: one after the other, or (xla, by JAX) many "
           "at once.", click.Choice(["onnx", "xla"]), default="onnx"),
    option("--seed N", "Seed of partition, rounds and steps.", NATURAL, default=0),
    option("--seeds SEEDS", "Several seeds: their number, from --seed on, or a list such as 0,7.",
           callback=parse_seeds),
    option("--folder",
           "Save the state of each algorithm after each round, to resume from.", FOLDER),
    option("--out", "Write the report as one HTML page.", OUTPUT_FILE),
    option("--out-csv", "Write the scores of all devices as CSV.", OUTPUT_FILE),
    option("--out-json", "Write the result as JSON.", OUTPUT_FILE),
)
# fmt: on


@click.command(
    "simulate", short_help="Compare algorithms on simulated devices.", epilog=EPILOG,
    cls=AlgorithmCommand, params=[*OPTIONS], from_files=True,
)  # fmt: skip
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL.tpm")
@json_option
def simulate(**options: Any) -> None:
    """Compare federated algorithms on simulated devices, starting from MODEL.tpm."""
    compare(options, own_server)


def own_server(_algorithm: str, hyper: Mapping[str, float]) -> Served:
    """Return the cloud's side that the row of the algorithm describes; see `ServerOf`."""
    from triplane.unified_ir.federated.study.server import MeanServer

    return MeanServer(), hyper


def compare(options: dict[str, Any], server_of: ServerOf) -> None:
    """Run the studies that the options of `simulate` describe, and write what they ask for.

    options: of `simulate`; others are shown on the page. server_of: see `ServerOf`.
    """
    options["server_of"] = server_of
    output = open_output(options["as_json"])
    check_effects(options)
    outputs = {flag(k): options[k] for k in OUTPUTS}
    own_files = click.get_current_context().meta.get(FILES, ())
    check_distinct_files([options["model"], options["data"], *own_files], outputs)
    from triplane.unified_ir.convert.conversion import read_model

    studies = _studies(options, 0)  # refuses options before anything is read
    warning = studies[0][0].robustness.warning
    if warning and studies[0][0].privacy is None:
        output.note(warning)
    module, _ = read_model(options["model"])
    if options["engine"] == "xla":
        from triplane.unified_ir.engines.xla.engine import XlaEngine

        # Without what follows on meshes, which studies have none of.
        output.note(f"engine xla on {str(XlaEngine().devices).partition(';')[0]}")
    with output.user_code():
        unlearned = _leave_out(module, options, studies)
        absent = [left_out_line(unlearned)] if unlearned else []
        for line in absent:
            output.note(line)
        trials, stops, groups = _trials(module, options, output.note)
    record = _record(trials, stops, groups) | {"left_out": unlearned}
    reasons = {f"{stop.label} stopped": stop.reason for stop in stops}
    rest = [*record["verdicts"], *map(": ".join, reasons.items()), *absent]
    reasons |= {f"{name} left out": why for name, why in unlearned.items()}
    text = "\n".join([*record["warnings"], *_lines(trials, seeds_stopped(stops)), *rest])
    if not output.as_json:
        output.result(record, text)  # first: a file that cannot be written costs no study
    _write(options, trials, record, _facts(options, groups) | reasons, seeds_stopped(stops))
    if output.as_json:
        output.result(record, text)  # last: an error is a document, too, and there is one
    if stops:
        click.get_current_context().exit(EXIT_CODES[InvalidInput])


def _seeds(options: dict[str, Any]) -> tuple[int, ...]:
    seeds, first = options["seeds"], options["seed"]
    if isinstance(seeds, tuple):
        return seeds
    return tuple(range(first, first + (seeds or 1)))


def _studies(options: dict[str, Any], seed: int) -> list[tuple[Study, StudyServer]]:
    studies = []
    for name in _names(options["algorithms"]):
        server, hyper = options["server_of"](name, options["hyper"])
        studies.append((_study(name, options | {"hyper": hyper}, seed), server))
    return studies


def _leave_out(
    module: Module, options: dict[str, Any], studies: Sequence[tuple[Study, StudyServer]]
) -> dict[str, str]:
    """Take algorithms that cannot learn the module out of the options; return the reasons."""
    source = click.get_current_context().get_parameter_source("algorithms")
    named = () if source is ParameterSource.DEFAULT else options["algorithms"]
    hypers = {study.algorithm: study.hyper for study, _ in studies}
    reasons = left_out(module, hypers, named, options["model"].name)
    options["algorithms"] = tuple(name for name in hypers if name not in reasons)
    return reasons


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
    module: Module, options: dict[str, Any], note: Note
) -> tuple[list[Trial], list[StoppedRun], Groups]:
    """Return the finished trials of all seeds, why others stopped, and the first seed's devices."""
    trials: list[Trial] = []
    stops: list[StoppedRun] = []
    seeds, first = _seeds(options), None
    for seed in seeds:
        try:
            groups = _groups(options, seed, module)
        except InvalidInput as error:
            if not trials:
                raise
            # Another seed divides the samples otherwise.
            stops.append(StoppedRun("", seed, str(error), f"seed {seed}"))
            note(f"seed {seed} stopped: {error}")
            continue
        first = first or groups
        note(_population(groups) + (f"; seed {seed}" if len(seeds) > 1 else ""))
        for study, server in _studies(options, seed):
            title = server.title(study.algorithm)
            label = title if len(seeds) == 1 else f"{title} seed {seed}"
            folder = _folder(options, study, title)
            try:
                trials.append(_trial((study, server), module, groups, folder, label, note))
            except InvalidInput as error:
                stops.append(
                    StoppedRun(
                        title, seed, reason(error, study, has_strategy="strategy" in options), label
                    )
                )
                note(f"{label} stopped: {stops[-1].reason}")
    if not trials or first is None:
        # With several trials one that diverges is a result of the comparison; alone it is an error.
        files = [flag(k) for k in OUTPUTS if options[k] is not None]
        raise nothing_finished(stops, files, several=len(seeds) > 1)
    return trials, stops, first


def _groups(options: dict[str, Any], seed: int, module: Module) -> Groups:
    from triplane.unified_ir.federated.study.source import devices_of

    groups = devices_of(_source(options, seed), module)
    if options["devices"] > len(groups[0]):
        raise InvalidInput(
            f"--devices {options['devices']} is more than the {len(groups[0])} devices that learn; "
            "give a smaller number, or 0 for all"
        )
    return groups


def _folder(options: dict[str, Any], study: Study, title: str) -> Path | None:
    """Return the folder of a trial; that of --seed is the same as in a study of one seed."""
    if options["folder"] is None:
        return None
    folder: Path = options["folder"] / title
    return folder if study.seed == options["seed"] else folder / f"seed-{study.seed}"


def _write(
    options: dict[str, Any],
    trials: list[Trial],
    record: dict[str, Any],
    facts: dict[str, str],
    stopped: dict[str, list[int]],
) -> None:
    """Write the files that were asked for, as many as possible; raise the first error."""
    from triplane.proto.disk import write_atomic
    from triplane.unified_ir.federated.study.export import scores_csv
    from triplane.unified_ir.federated.study.report import page

    names = ", ".join(dict.fromkeys(t.algorithm for t in trials))
    title = f"{options['model'].name}: {names if names.count(',') < MAX_TITLED else 'a comparison'}"
    contents: dict[str, Callable[[], str]] = {
        "out": lambda: page(trials, title, facts, stopped=stopped),
        "out_csv": lambda: scores_csv(trials),
        "out_json": lambda: json.dumps(record, indent=1, ensure_ascii=False) + "\n",
    }
    errors: list[Unavailable] = []
    for key, content in contents.items():
        if options[key] is not None:
            try:
                write_atomic(options[key], content().encode())
            except Unavailable as error:
                errors.append(error)
    if errors:
        raise errors[0]


def _source(options: dict[str, Any], seed: int) -> SampleSource:
    from triplane.unified_ir.federated.study.source import SampleSource

    names = ("data", "group", "split", "alpha", "label_shards", "held_out", "unseen", "least")
    form = data_options.reading(options)
    return SampleSource(
        x=form.pop("x"),
        y=form.pop("y"),
        form=form,
        way="group" if options["group"] else options["way"],
        devices=options["population"],
        seed=seed,
        any_labels=options["ways"] is not None,
        **{name: options[name] for name in names},
    )


def _study(name: str, options: dict[str, Any], seed: int) -> Study:
    from triplane.unified_ir.federated.algorithms import algorithm
    from triplane.unified_ir.federated.algorithms import defaults as defaults_of
    from triplane.unified_ir.federated.algorithms.aggregators import Robustness
    from triplane.unified_ir.federated.study import Study

    row = algorithm(name)
    names = ("rounds", "devices", "steps", "batch_size", "support", "query", "engine")
    compression = options["compression"] or ""
    return Study(
        algorithm=name,
        # Algorithms have different defaults; options that were given hold for all of them.
        hyper=defaults_of(name).but(**options["hyper"]),
        # Meta-SGD learns its rates, and would refuse others.
        rates=() if row.learns_rates else options["rates"],
        compression=compression,
        keep=options["keep"] if compression == "top-k" else 1.0,
        seed=seed,
        ways=options["ways"] or 0,
        evaluate_every=options["evaluate_every"],
        robustness=Robustness(**options["robustness"]),
        privacy=study_privacy(options),
        masking=study_masking(options),
        **{k: options[k] for k in names},
    )


def _trial(
    served: tuple[Study, StudyServer],
    module: Module,
    groups: Groups,
    folder: Path | None,
    label: str,
    note: Note,
) -> Trial:
    """Run one algorithm with one seed, reporting its progress."""
    from triplane.unified_ir.federated.core.metric import metric_of
    from triplane.unified_ir.federated.study import simulate as run

    study, server = served
    seen, unseen = groups
    metric = metric_of(module.entry("evaluate").result_names)
    reported: list[int] = []
    if study.masking is not None:
        note(study.masking.text(study.devices or len(seen)))

    def on_round(row: RoundRow) -> None:
        if not reported and row.number > 1:
            note(f"{label} continues after round {row.number - 1}")
        reported.append(row.number)
        note(f"{label} round {row.number}/{study.rounds}  loss {row.loss:.4f}  {row.seconds:.2f} s")
        for line in round_lines(row.scaled, row.returned):
            note(f"{label} round {row.number}: {line}")

    def on_scores(number: int, rate: float | None, scores: Sequence[DeviceScore]) -> None:
        at = "" if rate is None else f"  at rate {rate:g}"
        reported.extend([number] if rate is None else [])
        means = _means(scores, metric) or "the loss is not finite: left out"
        when = f"after round {number}" if number else "at the start"
        note(f"{label} scored {when}{at}  {means}")
        for line in [] if number else _diverging(scores, metric):
            note(f"{label}: {line}; try a smaller --lr ({study.hyper.lr:g})")

    trial = run(
        module, seen, study, unseen=unseen, folder=folder, server=server, on_round=on_round,
        on_scores=on_scores,
    )  # fmt: skip
    if trial.privacy is not None:
        note(f"{label}: {trial.privacy.text}")
    if trial.ended:
        note(f"{label} ended: {trial.ended}")
    if not reported:
        note(f"{label} was already finished; read from {folder}")
    # The report needs no weights, and those of many trials may not fit into memory.
    return replace(trial, state={})


def _summaries(scores: Sequence[DeviceScore]) -> dict[str, Summary]:
    """Return the summary of each group of devices that was scored."""
    from triplane.unified_ir.federated.study import summary

    groups = {group: [s for s in scores if s.seen is seen] for group, seen in GROUPS}
    return {group: s for group, own in groups.items() if (s := summary(own))}


def _means(scores: Sequence[DeviceScore], metric: Metric) -> str:
    """Format mean scores before and after adaptation, by group of devices."""
    return ", ".join(
        f"{group} {metric.text(s.before)} -> {metric.text(s.after)}"
        for group, s in _summaries(scores).items()
    )


def _diverging(scores: Sequence[DeviceScore], metric: Metric) -> list[str]:
    """Return a line for each group of devices whose loss adaptation multiplies at the start."""
    return [
        f"adaptation at the start makes the loss of {group} devices {s.after / s.before:.3g} times "
        "as large"
        for group, s in _summaries(scores).items()
        if not metric.share and s.after > DIVERGING_RATIO * s.before > 0
    ]


def _record(trials: Sequence[Trial], stops: Sequence[StoppedRun], groups: Groups) -> dict[str, Any]:
    from triplane.unified_ir.federated.study.export import trial_record
    from triplane.unified_ir.federated.study.verdicts import verdicts, warnings

    return {
        "devices": len(groups[0]),
        "unseen": len(groups[1]),
        "trials": [trial_record(trial) for trial in trials],
        "stopped": {stop.label: stop.reason for stop in stops},
        "warnings": warnings(trials, seeds_stopped(stops)),
        "verdicts": verdicts(trials, seeds_stopped(stops)),
    }


def _lines(trials: Sequence[Trial], stopped: dict[str, list[int]]) -> list[str]:
    """Return the table of results: a row per algorithm and group of devices."""
    from triplane.unified_ir.federated.study.seeds import by_algorithm, completion
    from triplane.unified_ir.files.text_table import aligned

    done = completion(trials, stopped)
    metric = trials[0].metric
    before = "before" if metric.share else f"{metric.name} before"
    last = ["epsilon"] if any(trial.privacy is not None for trial in trials) else []
    heads = ("algorithm", "devices", "start", before, "adapted", "worst tenth", "MB up", *last)
    rows = [
        row
        for replicates in by_algorithm(trials).values()
        for _, seen in GROUPS
        if (row := _row(replicates, trials, done, seen=seen))
    ]
    return aligned([heads, *rows], texts=2)


def _row(
    replicates: Sequence[Trial], trials: Sequence[Trial], done: Completion, *, seen: bool
) -> tuple[str, ...]:
    """Return the cells of a row; none if no such device was scored."""
    from triplane.unified_ir.federated.study.seeds import (
        final_spread,
        final_summaries,
        start_spread,
    )

    metric = replicates[0].metric
    summaries = final_summaries(replicates, seen=seen)
    if not summaries:
        return ()
    start = start_spread(replicates, trials, seen=seen)
    spreads = [
        final_spread(replicates, value, seen=seen)
        for value in (lambda s: s.before, lambda s: s.after, lambda s: s.after_worst_tenth)
    ]
    group = next(name for name, is_seen in GROUPS if is_seen is seen)
    return (
        done.label(replicates[0].algorithm),
        f"{max(s.devices for s in summaries)} {group}",
        *("-" if s is None else s.text(metric) for s in (start, *spreads)),
        f"{sum(t.bytes_up for t in replicates) / len(replicates) / 1e6:.1f}",
        *([] if replicates[0].privacy is None else [f"{replicates[0].privacy.epsilon:.4g}"]),
    )


def _facts(options: dict[str, Any], groups: Groups) -> dict[str, str]:
    """Return the options that had an effect, by name, for the reader of the page."""
    from triplane.unified_ir.federated.algorithms import algorithm

    rows = [algorithm(name) for name in _names(options["algorithms"])]
    numbers: dict[str, dict[str, None]] = {}
    for row in rows:
        _, values = options["server_of"](row.name, options["hyper"])
        for hyper in row.hyper:
            number = f"{values.get(hyper.name, hyper.default):g}"
            numbers.setdefault(hyper.name, {})[number] = None
    options = options | study_facts(options) | {k: tuple(v) for k, v in numbers.items()}
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
        "server_lr": not options.get("strategy"),
    }
    # fmt: on
    left_out = {
        "as_json",
        "folder",
        "out",
        "out_csv",
        "out_json",
        "model",
        "algorithms",
        "seed",
        "server_of",
        "hyper",
        "robustness",
        "privacy",
        "masking",
    }  # fmt: skip
    options["seeds"] = _seeds(options)
    facts = {
        ("partition" if k == "way" else k.replace("_", " ")): (
            ", ".join(map(str, v)) if isinstance(v, tuple) else str(v)
        )
        for k, v in options.items()
        if k not in left_out and matters.get(k, True) and v not in {None, "", ()}
    }
    sizes = {"devices taking part": str(len(groups[0])), "devices unseen": str(len(groups[1]))}
    return sizes | facts
