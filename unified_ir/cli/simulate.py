"""`triplane federate simulate`: algorithms compared on simulated devices, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from triplane.unified_ir.cli.shell import OUTPUT_FILE, json_option, open_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from triplane.unified_ir.federated.study import Study, Trial
    from triplane.unified_ir.federated.study.source import Source
    from triplane.unified_ir.ir import Module

EPILOG = """\b
Examples:
  triplane federate simulate digits.tpm --data digits --partition labels --unseen 0.5
  triplane federate simulate net.tpm --data writers.npz --x images --y labels --group writer \\
      --split split --algorithm fedavg --algorithm maml --rounds 200 --out study.html

\b
MODEL.tpm has the entry `loss` (`triplane train` exports it). DATA is the name digits, an .npz,
MNIST IDX files or a folder of images. Each device gets its samples in two disjoint parts, to learn
and adapt with and to be scored on. The same seed gives the same bits; a real run of the same names
and seed gives them too. With --folder a killed study goes on where it was.
"""
RATE = click.FloatRange(min=0)
COUNT = click.IntRange(min=1)


@click.command("simulate", short_help="Compare algorithms on simulated devices.", epilog=EPILOG)
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL.tpm")
@click.option("--data", required=True, metavar="DATA", help="Labelled samples; see below.")
@click.option("--x", default="x", show_default=True, metavar="KEY", help="Samples in an .npz.")
@click.option("--y", default="y", show_default=True, metavar="KEY", help="Labels in an .npz.")
@click.option("--group", default="", metavar="KEY", help="Whose a sample is: a device per value.")
@click.option(
    "--split", default="", metavar="KEY", help="Not 0 where a sample is an unseen device's."
)
@click.option(
    "--partition", "way", type=click.Choice(["even", "dirichlet", "labels"]), default="even",
    show_default=True, help="How devices get samples where no --group says it.",
)  # fmt: skip
@click.option("--population", type=COUNT, default=20, show_default=True, help="Devices in all.")
@click.option(
    "--alpha", type=RATE, default=0.3, show_default=True, help="Of --partition dirichlet."
)
@click.option(
    "--label-shards", type=COUNT, default=2, show_default=True,
    help="Pieces of one class each, of --partition labels.",
)  # fmt: skip
@click.option(
    "--held-out", type=RATE, default=0.2, show_default=True,
    help="Share of a device's samples that only score it.",
)  # fmt: skip
@click.option(
    "--unseen", type=RATE, default=0.0, show_default=True,
    help="Share of devices that never learn, where no --split says it.",
)  # fmt: skip
@click.option(
    "--algorithm", "algorithms", multiple=True, default=("fedavg", "maml"), show_default=True,
    metavar="NAME", help="fedavg, fedprox, fedadam, maml, fomaml, meta-sgd, reptile; repeatable.",
)  # fmt: skip
@click.option("--rounds", type=COUNT, default=50, show_default=True)
@click.option(
    "--devices", type=click.IntRange(min=0), default=0, help="In a round.  [default: all]"
)
@click.option("--steps", type=COUNT, default=5, show_default=True, help="Of a device in a round.")
@click.option("--batch-size", type=COUNT, default=32, show_default=True)
@click.option(
    "--support", type=click.IntRange(min=0), default=20, show_default=True,
    help="Samples of adaptation; 0 scores with all a device has.",
)  # fmt: skip
@click.option("--query", type=COUNT, default=20, show_default=True, help="Samples of a meta-step.")
@click.option("--lr", type=RATE, default=0.05, show_default=True, help="Rate of a device's steps.")
@click.option("--meta-lr", type=RATE, default=0.05, show_default=True, help="Rate of meta-steps.")
@click.option("--inner-steps", type=COUNT, default=3, show_default=True, help="Of an adaptation.")
@click.option("--proximal", type=RATE, default=0.01, show_default=True, help="Weight of FedProx.")
@click.option("--server-lr", type=RATE, help="The cloud's rate.  [default: the algorithm's]")
@click.option(
    "--rate", "rates", type=RATE, multiple=True,
    help="Rate of adaptation to try at the end, the best one counts; repeatable.",
)  # fmt: skip
@click.option(
    "--evaluate-every", type=click.IntRange(min=0), default=0, help="Rounds.  [default: at the end]"
)
@click.option("--compression", type=click.Choice(["int8", "top-k"]), help="Of updates.")
@click.option("--keep", type=RATE, default=0.1, show_default=True, help="Share that top-k sends.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False),
    help="Keeps the place of each algorithm, to go on from.",
)  # fmt: skip
@click.option("--out", type=OUTPUT_FILE, help="Write the report as one HTML page.")
@json_option
def simulate(**options: Any) -> None:
    """Let simulated devices learn together from MODEL.tpm and compare how well each ends up."""
    output = open_output(options["as_json"])
    from triplane.unified_ir.convert.conversion import read_model
    from triplane.unified_ir.federated.study import page
    from triplane.unified_ir.federated.study.source import devices_of

    studies = [_study(name, options) for name in dict.fromkeys(options["algorithms"])]
    module, _ = read_model(options["model"])
    groups = devices_of(_source(options), module)
    trials = [_trial(study, module, groups, options["folder"], output.note) for study in studies]
    record = {
        "devices": len(groups[0]),
        "unseen": len(groups[1]),
        "trials": [_record(trial) for trial in trials],
    }
    if options["out"] is not None:
        from triplane.proto.disk import write_atomic

        facts = _facts(options, groups)
        title = f"{options['model'].name}: {', '.join(t.algorithm for t in trials)}"
        write_atomic(options["out"], page(trials, title, facts).encode())
    output.result(record, "\n".join(_lines(trials)))


def _source(options: dict[str, Any]) -> Source:
    from triplane.unified_ir.federated.study.source import Source

    names = ("data", "x", "y", "group", "split", "alpha", "label_shards", "held_out", "unseen")
    return Source(
        way="group" if options["group"] else options["way"],
        devices=options["population"],
        seed=options["seed"],
        **{name: options[name] for name in names},
    )


def _study(name: str, options: dict[str, Any]) -> Study:
    from triplane.unified_ir.federated.algorithms import Hyper, algorithm
    from triplane.unified_ir.federated.study import Study

    row = algorithm(name)
    server_lr = row.server_lr if options["server_lr"] is None else options["server_lr"]
    given = {k: options[k] for k in ("lr", "meta_lr", "inner_steps", "proximal")}
    names = ("rounds", "devices", "steps", "batch_size", "support", "query", "evaluate_every")
    compression = options["compression"] or ""
    return Study(
        algorithm=name,
        hyper=Hyper(server_lr=server_lr, **given),
        rates=() if row.learns_rates else options["rates"],
        compression=compression,
        keep=options["keep"] if compression == "top-k" else 1.0,
        seed=options["seed"],
        **{k: options[k] for k in names},
    )


def _trial(
    study: Study, module: Module, groups: Any, folder: Path | None, note: Callable[[str], None]
) -> Trial:
    from triplane.unified_ir.federated.study import simulate as run

    seen, unseen = groups
    return run(
        module, seen, study, unseen=unseen, folder=folder and folder / study.algorithm,
        on_round=lambda row: note(
            f"{study.algorithm} round {row.number}/{study.rounds}  loss {row.loss:.4f}"
        ),
    )  # fmt: skip


def _record(trial: Trial) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "algorithm": trial.algorithm,
        "bytes_up": trial.bytes_up,
        "bytes_down": trial.bytes_down,
        "seconds": trial.seconds,
        "rounds": [asdict(row) for row in trial.rounds],
        **{
            group: [asdict(score) for score in trial.final(seen=seen)]
            for group, seen in (("training", True), ("unseen", False))
        },
        "rates": {
            group: best[0]
            for group, seen in (("training", True), ("unseen", False))
            if (best := trial.best_rate(seen=seen)) is not None
        },
    }


def _lines(trials: list[Trial]) -> list[str]:
    from triplane.unified_ir.federated.study import summary

    lines = ["algorithm  devices           before  adapted  worst tenth     MB up"]
    for trial in trials:
        for group, seen in (("training", True), ("unseen", False)):
            found = summary(trial.final(seen=seen))
            if found is not None:
                lines.append(
                    f"{trial.algorithm:10} {found.devices:5} {group:9} {100 * found.before:8.1f} "
                    f"{100 * found.after:8.1f} {100 * found.after_worst_tenth:12.1f} "
                    f"{trial.bytes_up / 1e6:9.1f}"
                )
    return lines


def _facts(options: dict[str, Any], groups: Any) -> dict[str, str]:
    """What a reader of the page has to know."""
    left_out = {"as_json", "folder", "out", "model", "algorithms"}
    told = {k.replace("_", " "): _shown(v) for k, v in options.items() if k not in left_out}
    sizes = {"devices taking part": str(len(groups[0])), "devices unseen": str(len(groups[1]))}
    return sizes | {k: v for k, v in told.items() if v}


def _shown(value: object) -> str:
    """An option as text; empty for nothing."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
