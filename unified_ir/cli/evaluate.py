"""`triplane evaluate`: loss and metrics of a model over labelled samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import data_options, evaluation, models, training
from triplane.unified_ir.cli.shell import COUNT, json_option, open_output, option

if TYPE_CHECKING:
    from triplane.unified_ir.cli.models import FileModel
    from triplane.unified_ir.data import Dataset

SHOWN: Final = 8

EPILOG = f"""\b
Examples:
  triplane evaluate digits.tpm --data digits
  triplane evaluate digits.bundle --data held_out.npz --per-class
  triplane evaluate gait.tpm --data steps.csv --x 'ch*:2x64' --y speed:1 --metric r2
  triplane evaluate resnet.onnx --data photos --size 224x224 --json

\b
MODEL is {models.KINDS}.
A model file with an entry evaluate also gives the loss of its training. The rest is computed from
the first output that fits: scores of classes if the target holds whole numbers or texts, else
numbers of the target's shape. Where the data has a held-out part of its own, that part is read.
With --json the result has the confusion matrix, whose rows are true classes.

{data_options.CHOICES}"""


# fmt: off
OPTIONS: Final = (
    data_options.data_option("Labelled samples", required=True),
    *data_options.choices(),
    *data_options.forms(),
    option("--metric", "Metric to measure; may be repeated.  [default: accuracy, precision, "
           "recall, f1, and top5 of many classes; mae, rmse, r2 for numbers]",
           click.Choice(list(training.METRICS)), name="metrics", multiple=True, show_default=False),
    option("--ignore-index LABEL", "A label that does not count.  [default: that of the loss of "
           "training, where the file has it]", int),
    option("--per-class", "Also print precision, recall and f1 of each class.", is_flag=True),
    option("--batch-size N", "Samples per batch.", COUNT, default=models.BATCH),
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
    model = models.open_file(options["model"])
    dataset = _dataset(options, model)
    sums = evaluation.Evaluation(model, dataset, options)
    for text in (*dataset.notes, *_doubts(model, dataset), *sums.notes()):
        output.note(text)
    sums.run()
    record = {
        "model": str(options["model"]),
        "data": options["data"],
        "samples": sums.total.rows,
        "measures": sums.measures(),
        **sums.classes(),
    }
    output.result(record, "\n".join(_lines(record, per_class=options["per_class"])))


def _dataset(options: dict[str, Any], model: FileModel) -> Dataset:
    from triplane.unified_ir.data.by_name import load_held_out

    dataset = load_held_out(options["data"], **models.reading(options, model))
    if not dataset.targets:
        raise InvalidInput(f"{options['data']} has no target to compare with; name its column: --y")
    return dataset


def _doubts(model: FileModel, dataset: Dataset) -> Iterator[str]:
    if dataset.labels and not model.labels:
        names = ", ".join(dataset.labels[:SHOWN]) + (", ..." if len(dataset.labels) > SHOWN else "")
        yield (
            "the model has no names of classes, so those of the data are numbered from 0 in order: "
            f"{names}"
        )


def _lines(record: Mapping[str, Any], *, per_class: bool) -> Iterator[str]:
    yield f"{record['model']} on {record['data']}: {record['samples']:,} samples"
    width = max(map(len, record["measures"]))
    for name, x in record["measures"].items():
        yield f"  {name.ljust(width)}  {x:.4g}"
    if per_class and "classes" not in record:
        yield "no classes: the target holds numbers, or there are too many classes"
    elif per_class:
        yield ""
        width = max(5, *map(len, record["classes"]))
        yield f"  {'class'.ljust(width)}  precision  recall     f1  samples"
        for name, row in zip(record["classes"], record["per_class"], strict=True):
            ratios = f"{row['precision']:9.3f}  {row['recall']:6.3f}  {row['f1']:5.3f}"
            yield f"  {name.ljust(width)}  {ratios}  {row['samples']:7,}"
