"""`triplane evaluate`: loss and metrics of a model over labelled samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import data_options, evaluation, models, training
from triplane.unified_ir.cli.shell import COUNT, json_option, open_output, option
from triplane.unified_ir.files.html_table import printable

if TYPE_CHECKING:
    from triplane.unified_ir.cli.models import FileModel
    from triplane.unified_ir.data import Dataset

SHOWN: Final = 8
MAX_GROUPS_SHOWN: Final = 20
WORST_SHOWN: Final = 15
"""Of more groups than `MAX_GROUPS_SHOWN`, so many of the worst and the rest of the best."""

EPILOG = f"""\b
Examples:
  triplane evaluate digits.tpm --data digits
  triplane evaluate digits.bundle --data held_out.npz --per-class
  triplane evaluate gait.tpm --data steps.csv --x 'ch*:2x64' --y speed:1 --metric r2
  triplane evaluate gait.tpm --data steps.csv --x 'ch*:2x64' --y speed:1 --group person
  triplane evaluate resnet.onnx --data photos --size 224x224 --json

\b
MODEL is {models.KINDS}.
A model file with an entry evaluate also gives the loss of its training. The rest is computed from
the first output that fits: scores of classes if the target holds whole numbers or texts, else
numbers of the target's shape. Where the data has a held-out part of its own, that part is read.
Groups are printed from the worst by the first metric; --json has all of them.
With --json the result has the confusion matrix, whose rows are true classes.

{data_options.CHOICES}"""


# fmt: off
OPTIONS: Final = (
    data_options.data_option("Labelled samples", required=True),
    *data_options.choices(),
    data_options.group_option("Also measure each group: the samples with one value in this "
                              "column."),
    *data_options.forms(),
    option("--metric", "Metric to measure; may be repeated.  [default: accuracy, precision, "
           "recall, f1, and top5 of many classes; mae, rmse, r2 for numbers]",
           click.Choice(list(training.METRICS)), name="metrics", multiple=True, show_default=False),
    option("--ignore-index LABEL", "A label that does not count.  [default: that of the loss of "
           "training, where the file has it]", int),
    option("--per-class", "Also print precision, recall and f1 of each class.", is_flag=True),
    option("--batch-size N", "Samples per batch.", COUNT, default=models.BATCH),
    data_options.seed_option(),
)
# fmt: on


@click.command("evaluate", epilog=EPILOG, params=[*OPTIONS])
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL")
@json_option
def command(**options: Any) -> None:
    """Measure MODEL on labelled samples: loss and metrics over all of them.

    Samples are read batch by batch, so the data may be larger than the memory.
    """
    output = open_output(options["as_json"])
    model = models.seeded(models.open_file(options["model"]), options["seed"])
    dataset = _dataset(options, model)
    sums = evaluation.Evaluation(model, dataset, options)
    notes = (models.repeated_draws(model), *dataset.notes, *_doubts(model, dataset), *sums.notes())
    for text in filter(None, notes):
        output.note(text)
    sums.run()
    record = {
        "model": str(options["model"]),
        "data": options["data"],
        "samples": sums.total.rows,
        "measures": sums.measures(),
        **sums.classes(),
        **_groups(sums, options["group"]),
    }
    output.result(record, "\n".join(_lines(record, per_class=options["per_class"])))


def _dataset(options: dict[str, Any], model: FileModel) -> Dataset:
    from triplane.unified_ir.data.by_name import load_held_out

    group = options["group"] or ""
    dataset = load_held_out(options["data"], group=group, **models.reading(options, model))
    if not dataset.targets:
        raise InvalidInput(f"{options['data']} has no target to compare with; name its column: --y")
    return dataset


def _doubts(model: FileModel, dataset: Dataset) -> Iterator[str]:
    if dataset.labels and not model.labels:
        names = ", ".join(dataset.labels[:SHOWN]) + (", ..." if len(dataset.labels) > SHOWN else "")
        yield (
            "the model has no names of classes, so those of the data are numbered from 0 in order: "
            f"{printable(names)}"
        )


def _groups(sums: evaluation.Evaluation, column: str | None) -> dict[str, Any]:
    if column is None:
        return {}
    return {"group": column, "ranked_by": sums.ranked_by(), "groups": sums.by_group()}


def _lines(record: Mapping[str, Any], *, per_class: bool) -> Iterator[str]:
    yield f"{record['model']} on {record['data']}: {record['samples']:,} samples"
    width = max(map(len, record["measures"]))
    for name, x in record["measures"].items():
        yield f"  {name.ljust(width)}  {x:.4g}"
    if "groups" in record:
        yield from _group_lines(record)
    if per_class and "classes" not in record:
        yield "no classes: the target holds numbers, or there are too many classes"
    elif per_class:
        yield ""
        classes = [*map(printable, record["classes"])]
        width = max(5, *map(len, classes))
        yield f"  {'class'.ljust(width)}  precision  recall     f1  samples"
        for name, row in zip(classes, record["per_class"], strict=True):
            ratios = f"{row['precision']:9.3f}  {row['recall']:6.3f}  {row['f1']:5.3f}"
            yield f"  {name.ljust(width)}  {ratios}  {row['samples']:7,}"


def _group_lines(record: Mapping[str, Any]) -> Iterator[str]:
    rows, names = record["groups"], list(record["measures"])
    yield ""
    shown = [r for r in rows if r["measures"]]
    spread = _spread([r["measures"][record["ranked_by"]] for r in shown])
    yield f"{record['ranked_by']} over {len(rows):,} groups of {record['group']}: {spread}"
    # The worst are what a mean hides; the best show how far apart groups are.
    middle = len(rows) - MAX_GROUPS_SHOWN
    cut = slice(WORST_SHOWN, WORST_SHOWN + middle) if middle > 0 else slice(0, 0)
    table = [[record["group"], "samples", *names]]
    for row in rows[: cut.start] + rows[cut.stop :]:
        cells = [f"{row['measures'][n]:.4g}" if row["measures"] else "-" for n in names]
        table.append([printable(str(row["group"])), f"{row['samples']:,}", *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for k, cells in enumerate(table):
        if middle > 0 and k == WORST_SHOWN + 1:
            yield f"  ... {middle:,} more groups"
        first, *rest = zip(cells, widths, strict=True)
        yield "  ".join(["", first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)])


def _spread(values: Sequence[float]) -> str:
    """Return the worst, the median and the best of values in order from the worst."""
    if not values:
        return "no label of any group counts"
    middle = median(values)
    return f"worst {values[0]:.4g}, median {middle:.4g}, best {values[-1]:.4g}"
