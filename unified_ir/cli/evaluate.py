"""`triplane evaluate`: loss and metrics of a model over labelled samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import data_options, models, training
from triplane.unified_ir.cli.shell import COUNT, json_option, open_output, option

if TYPE_CHECKING:
    from triplane.unified_ir.cli.models import FileModel
    from triplane.unified_ir.data import Dataset
    from triplane.unified_ir.engines.modules import EntryProgram
    from triplane.unified_ir.ir.graph import Array
    from triplane.unified_ir.train.history import Place
    from triplane.unified_ir.train.scoring import OutputScores

ENTRY: Final = "evaluate"
OTHER: Final = "other"
"""Kind of targets that no metric by name compares."""
CONFUSION: Final = "confusion"
MAX_CLASSES: Final = 1000
"""Largest number of classes whose confusion matrix is counted."""
MANY_CLASSES: Final = 5
SHOWN: Final = 8
DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "classes": ("accuracy", "precision", "recall", "f1"),
    "shares": ("accuracy", "precision", "recall", "f1"),
    "numbers": ("mae", "rmse", "r2"),
}
"""Metrics without --metric, for each kind of target."""
_BY_CLASS: Final = {"precision", "recall", "f1"}

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
    for text in (*dataset.notes, *_doubts(model, dataset)):
        output.note(text)
    evaluation = _Evaluation(model, dataset, options)
    evaluation.run()
    record = {
        "model": str(options["model"]),
        "data": options["data"],
        "samples": evaluation.rows,
        "measures": evaluation.measures(),
        **evaluation.classes(),
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


class _Evaluation:
    """Sums of the measures of one model over one dataset."""

    def __init__(self, model: FileModel, dataset: Dataset, options: dict[str, Any]) -> None:
        from triplane.unified_ir.data.choosing import class_places
        from triplane.unified_ir.train.history import Place

        self.model, self.dataset, self.options = model, dataset, options
        self.rows = 0
        self.places = class_places(dataset, model.labels)
        self.entry = _evaluate_entry(model)
        self.place: Place = Place()
        self.scores: OutputScores | None = None
        self.count: int | None = None
        self.kind = self.output = ""

    def run(self) -> None:
        """Read all samples."""
        for arrays in models.batches(self.dataset, self.options["batch_size"]):
            feeds = models.feeds_of(self.dataset, arrays, self.model, self.options["x"])
            targets = [self._target(y) for y in arrays[len(self.dataset.inputs) :]]
            # Several targets have no metrics by name; the file's own entry compares them.
            if self.kind != OTHER and (len(targets) == 1 or self.entry is None):
                self._add_scores(feeds, targets)
            if self.entry is not None:
                self._add_entry(self.entry, feeds, targets)
            self.rows += len(targets[0])
        if not self.rows:
            raise InvalidInput("there is no data to evaluate on")

    def measures(self) -> dict[str, float]:
        """Return loss and metrics."""
        means = self.place.means()
        scores = {} if self.scores is None else self.scores.measures()
        scores.pop(CONFUSION, None)
        wanted = self.options["metrics"]
        own = {k: x for k, x in means.items() if not wanted or k == "loss" or k in wanted}
        return {**own, **scores}

    def classes(self) -> dict[str, Any]:
        """Return what is known of each class; nothing where targets are no classes."""
        if self.scores is None or CONFUSION not in self.scores.metrics:
            return {}
        from triplane.unified_ir.train.scoring import by_class

        counts = self.scores.counts(CONFUSION)
        names = self.model.labels or self.dataset.labels
        names = (*names, *map(str, range(len(names), len(counts))))[: len(counts)]
        return {
            "classes": list(names),
            "confusion": counts.astype(int).tolist(),
            "per_class": by_class(counts),
        }

    def _target(self, y: Array) -> Array:
        return y if self.places is None or y.dtype.kind not in "iu" else self.places[y]

    def _add_entry(
        self, entry: EntryProgram, feeds: Mapping[str, Array], targets: Sequence[Array]
    ) -> None:
        from triplane.unified_ir.train.history import split

        names = [p.name for p in entry.inputs if p.name not in feeds]
        if len(names) != len(targets):
            raise InvalidInput(
                f"the model compares with {', '.join(names)}, but the data has the targets "
                f"{', '.join(self.dataset.targets)}; choose columns: one --y for each"
            )
        for p, y in zip((p for p in entry.inputs if p.name in names), targets, strict=True):
            if y.ndim != p.type.rank:
                hint = data_options.shape_hint(self.dataset, self.options["x"], self.options["y"])
                raise InvalidInput(f"the model compares with {p.name}: {p.type}, but {hint}")
        results = entry.run({**feeds, **dict(zip(names, targets, strict=True))})
        self.place.advance(split(results)[0], len(targets[0]), {}, {})

    def _check_classes(self, y: Array, count: int) -> None:
        from triplane.unified_ir.files.samples import check_classes

        numbers = range(self.rows, self.rows + len(y))
        giver = f"the model gives {count} scores"
        check_classes(y, count, giver, "sample {} of the data", numbers=numbers)

    def _add_scores(self, feeds: Mapping[str, Array], targets: Sequence[Array]) -> None:
        if len(targets) != 1:
            raise InvalidInput(
                f"the data has the targets {', '.join(self.dataset.targets)}; the model has no "
                "entry evaluate, so it is compared with one: --y"
            )
        outputs = self.model.run(feeds)
        if self.scores is None:
            self._start(outputs, targets[0])
        if self.scores is None:
            return
        y = outputs[self.output]
        # A graph refuses a label out of range too, but cannot name the sample.
        if self.kind == "classes":
            self._check_classes(targets[0], y.shape[-1])
        self.scores.add(y, targets[0])

    def _start(self, outputs: Mapping[str, Array], target: Array) -> None:
        """Choose the output and the metrics; classifiers often return the best class first."""
        from triplane.unified_ir.train import Confusion
        from triplane.unified_ir.train.scoring import OutputScores

        kinds = {name: _kind(self.model, outputs[name], target) for name in self.model.outputs}
        self.output = next((n for n, kind in kinds.items() if kind != OTHER), next(iter(kinds)))
        self.kind, y = kinds[self.output], outputs[self.output]
        if self.kind == OTHER and self.entry is not None and not self.options["metrics"]:
            return  # the file itself knows how to compare such targets
        if self.kind == OTHER:
            raise InvalidInput(self._why_other(y, target))
        self.count = {"classes": y.shape[-1], "shares": 2}.get(self.kind)
        names = self._metric_names()
        what = f"as {self.dataset.targets[0]} does of this model"
        metrics = training.metrics_of(names, self.kind, what)
        if self.count is not None and self.count <= MAX_CLASSES:
            metrics[CONFUSION] = Confusion()
        self.scores = OutputScores(metrics)

    def _metric_names(self) -> tuple[str, ...]:
        stated: tuple[str, ...] = self.options["metrics"]
        count = self.count or 0
        if not stated:
            many = ("top5",) if self.kind == "classes" and count > MANY_CLASSES else ()
            names = (*DEFAULTS[self.kind], *many)
            return names if count <= MAX_CLASSES else ("accuracy", "top5")
        if count > MAX_CLASSES and _BY_CLASS.intersection(stated):
            raise InvalidInput(
                f"{', '.join(sorted(_BY_CLASS))} are counted for at most {MAX_CLASSES} classes, "
                f"the model has {count}; choose --metric accuracy or top5"
            )
        return stated

    def _why_other(self, y: Array, target: Array) -> str:
        hint = data_options.shape_hint(self.dataset, self.options["x"], self.options["y"])
        return (
            f"the output {self.output!r} is {y.dtype}{list(y.shape)} for a target of "
            f"{target.dtype}{list(target.shape)}; whole numbers are compared with one score for "
            f"each class in the last axis, numbers with an output of their own shape; {hint}"
        )


def _evaluate_entry(model: FileModel) -> EntryProgram | None:
    from triplane.unified_ir.engines.modules import program_of

    # An entry of a fixed batch size has no mean over a last, smaller batch.
    if model.module is None or ENTRY not in model.module.entries or model.batch is not None:
        return None
    return program_of(model.module, ENTRY)


def _kind(model: FileModel, y: Array, target: Array) -> str:
    """Return the kind of target: classes, shares, numbers, or `OTHER`."""
    if y.dtype.kind != "f":
        return OTHER
    known = dict(training.LOSSES.values()).get(model.loss)
    if target.dtype.kind in "iub" and y.shape[:-1] == target.shape and known in {None, "classes"}:
        return "classes"
    if y.shape == target.shape:
        return "shares" if known == "shares" else "numbers"
    return OTHER


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
