"""The measures of a model from any file: over all samples, and over each group of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import data_options, models, training

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
MAX_GROUPS: Final = 10_000
MAX_COUNTS_BYTES: Final = 1 << 30
"""Limit for the counts of all groups, which are in memory until all samples are read."""
DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "classes": ("accuracy", "precision", "recall", "f1"),
    "shares": ("accuracy", "precision", "recall", "f1"),
    "numbers": ("mae", "rmse", "r2"),
}
"""Metrics without --metric, for each kind of target."""
LOWER_IS_BETTER: Final = frozenset({"loss", "mae", "mse", "rmse", "perplexity"})
_BY_CLASS: Final = {"precision", "recall", "f1"}


@dataclass(eq=False)
class EvaluationSums:
    """Sums of the measures of all samples or of those of one group.

    place: the results of the file's entry evaluate. scores: None until the first batch is compared.
    """

    place: Place
    rows: int = 0
    scores: OutputScores | None = None


@dataclass(frozen=True, eq=False)
class _Batch:
    """Samples on their way to a part. outputs: those of the model, where metrics compare them."""

    feeds: Mapping[str, Array]
    targets: Sequence[Array]
    outputs: Mapping[str, Array] = field(default_factory=dict)

    def rows_of(self, rows: Array) -> _Batch:
        """Return the samples with these numbers."""
        feeds, outputs = ({k: a[rows] for k, a in m.items()} for m in (self.feeds, self.outputs))
        return _Batch(feeds, [y[rows] for y in self.targets], outputs)


class Evaluation:
    """The measures of one model over one dataset; options: those of `triplane evaluate`."""

    def __init__(self, model: FileModel, dataset: Dataset, options: dict[str, Any]) -> None:
        from triplane.unified_ir.data.choosing import class_places
        from triplane.unified_ir.train.history import Place

        self.model, self.dataset, self.options = model, dataset, options
        self.places = class_places(dataset, model.labels)
        self.entry = _evaluate_entry(model, options["ignore_index"])
        own = model.ignored if options["ignore_index"] is None else options["ignore_index"]
        self.ignored: int | None = own
        self.total = EvaluationSums(Place())
        self.groups: dict[Any, EvaluationSums] = {}
        self.kind = self.output = ""

    def notes(self) -> Iterator[str]:
        """Yield what is not measured, and why."""
        if self.ignored != self.model.ignored and _has_entry(self.model):
            yield f"the loss of training counts the label {self.ignored}, so it is not measured"

    def run(self) -> None:
        """Read all samples."""
        group = self.options["group"]
        for arrays, keys in models.batches(self.dataset, self.options["batch_size"], group or ""):
            feeds = models.feeds_of(self.dataset, arrays, self.model, self.options["x"])
            targets = [self._target(y) for y in arrays[len(self.dataset.inputs) :]]
            batch = _Batch(feeds, targets, self._outputs(feeds, targets))
            self._check_classes(batch)
            self._add(self.total, batch)
            for key, rows in _rows_by_key(keys):
                self._add(self._group(key), batch.rows_of(rows))
        if not self.total.rows:
            raise InvalidInput("there is no data to evaluate on")

    def measures(self) -> dict[str, float]:
        """Return loss and metrics of all samples."""
        return self._measures(self.total)

    def by_group(self) -> list[dict[str, Any]]:
        """Return group, samples and measures of each group, from the worst by the first metric."""
        rows = [
            {"group": key, "samples": part.rows, "measures": self._measures_or_none(part)}
            for key, part in self.groups.items()
        ]
        name = self.ranked_by()
        sign = -1.0 if name in LOWER_IS_BETTER else 1.0

        def rank(row: dict[str, Any]) -> tuple[bool, float, str]:
            x = row["measures"].get(name, math.nan)
            value = -math.inf if math.isnan(x) else sign * x
            return name not in row["measures"], value, str(row["group"])

        return sorted(rows, key=rank)

    def ranked_by(self) -> str:
        """Return the measure by which groups are compared: the first metric, or else the loss."""
        names = list(self.measures())
        return next((name for name in names if name != "loss"), names[0])

    def classes(self) -> dict[str, Any]:
        """Return what is known of each class; nothing where targets are no classes."""
        scores = self.total.scores
        if scores is None or CONFUSION not in scores.metrics:
            return {}
        from triplane.unified_ir.train.scoring import by_class

        counts = scores.counts(CONFUSION)
        names = self.model.labels or self.dataset.labels
        names = (*names, *map(str, range(len(names), len(counts))))[: len(counts)]
        return {
            "classes": list(names),
            "confusion": counts.astype(int).tolist(),
            "per_class": by_class(counts),
        }

    def _measures(self, part: EvaluationSums) -> dict[str, float]:
        means = part.place.measures({})
        scores = {} if part.scores is None else part.scores.measures()
        scores.pop(CONFUSION, None)
        wanted = self.options["metrics"]
        own = {k: x for k, x in means.items() if not wanted or k == "loss" or k in wanted}
        return {**own, **scores}

    def _measures_or_none(self, part: EvaluationSums) -> dict[str, float]:
        """Return the measures of a group; none where no label of it counts."""
        nothing = part.scores is not None and not part.scores.place.rows
        return {} if nothing or part.place.uncounted() else self._measures(part)

    def _group(self, key: Any) -> EvaluationSums:
        from triplane.unified_ir.train.history import Place

        if key not in self.groups:
            scores = self.total.scores
            own = None if scores is None else scores.empty()
            self.groups[key] = EvaluationSums(Place(), scores=own)
            self._check_groups()
        return self.groups[key]

    def _check_groups(self) -> None:
        n, column = len(self.groups), self.options["group"]
        if n > MAX_GROUPS:
            raise InvalidInput(
                f"{column} has more than {MAX_GROUPS} different values; --group names a column "
                "that several samples share"
            )
        scores = self.total.scores
        counts = () if scores is None else scores.place.counts.values()
        if n * sum(c.nbytes for c in counts) > MAX_COUNTS_BYTES:
            raise InvalidInput(
                f"the counts of {n} groups take more than {MAX_COUNTS_BYTES >> 20} MiB, since "
                "precision, recall and f1 have one for each pair of classes; choose --metric "
                "accuracy"
            )

    def _target(self, y: Array) -> Array:
        import numpy as np

        if self.places is None or y.dtype.kind not in "iu":
            return y
        if self.ignored is None:
            return self.places[y]
        counts = y != self.ignored
        return np.where(counts, self.places[np.where(counts, y, 0)], y)

    def _outputs(self, feeds: Mapping[str, Array], targets: Sequence[Array]) -> Mapping[str, Array]:
        """Return what the model answers, where a metric by name compares it with the target."""
        # Several targets have no metrics by name; the file's own entry compares them.
        if self.kind == OTHER or (len(targets) != 1 and self.entry is not None):
            return {}
        if len(targets) != 1:
            raise InvalidInput(
                f"the data has the targets {', '.join(self.dataset.targets)}; the model has no "
                "entry evaluate, so it is compared with one: --y"
            )
        outputs = self.model.run(feeds)
        if not self.kind:
            self._start(outputs, targets[0])
        return {} if self.kind == OTHER else {self.output: outputs[self.output]}

    def _add(self, part: EvaluationSums, batch: _Batch) -> None:
        if part.scores is not None and batch.outputs:
            part.scores.add(batch.outputs[self.output], batch.targets[0])
        if self.entry is not None:
            self._add_entry(self.entry, part.place, batch)
        part.rows += len(batch.targets[0])

    def _add_entry(self, entry: EntryProgram, place: Place, batch: _Batch) -> None:
        from triplane.unified_ir.train.history import split
        from triplane.unified_ir.train.step import taken_counts

        names = [p.name for p in entry.inputs if p.name not in batch.feeds]
        if len(names) != len(batch.targets):
            raise InvalidInput(
                f"the model compares with {', '.join(names)}, but the data has the targets "
                f"{', '.join(self.dataset.targets)}; choose columns: one --y for each"
            )
        for p, y in zip((p for p in entry.inputs if p.name in names), batch.targets, strict=True):
            if y.ndim != p.type.rank:
                hint = data_options.shape_hint(self.dataset, y=self.options["y"])
                raise InvalidInput(f"the model compares with {p.name}: {p.type}, but {hint}")
        results = entry.run({**batch.feeds, **dict(zip(names, batch.targets, strict=True))})
        counted = taken_counts(results)
        place.advance(split(results)[0], len(batch.targets[0]), {}, counted)

    def _check_classes(self, batch: _Batch) -> None:
        """Refuse a label out of range; a graph would too, but cannot name the sample."""
        from triplane.unified_ir.files.samples import check_classes

        if self.kind != "classes" or not batch.outputs:
            return
        y, count, at = batch.targets[0], batch.outputs[self.output].shape[-1], self.total.rows
        try:
            check_classes(
                y, count, f"the model gives {count} scores", "sample {} of the data",
                numbers=range(at, at + len(y)), ignored=self.ignored,
            )  # fmt: skip
        except InvalidInput as error:
            raise InvalidInput(f"{error}; --ignore-index leaves one label out") from error

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
        count = {"classes": y.shape[-1], "shares": 2}.get(self.kind)
        names = self._metric_names(count or 0)
        what = f"as {self.dataset.targets[0]} does of this model"
        metrics = training.metrics_of(names, self.kind, what)
        if count is not None and count <= MAX_CLASSES:
            metrics[CONFUSION] = Confusion()
        ignored = self.ignored if self.kind == "classes" else None
        self.total.scores = OutputScores(metrics, ignored)

    def _metric_names(self, count: int) -> tuple[str, ...]:
        stated: tuple[str, ...] = self.options["metrics"]
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
        hint = data_options.shape_hint(self.dataset, y=self.options["y"])
        return (
            f"the output {self.output!r} is {y.dtype}{list(y.shape)} for a target of "
            f"{target.dtype}{list(target.shape)}; whole numbers are compared with one score for "
            f"each class in the last axis, numbers with an output of their own shape; {hint}"
        )


def _rows_by_key(keys: Any) -> Iterator[tuple[Any, Array]]:
    """Yield each value of a column of groups with the numbers of its rows."""
    import numpy as np

    if keys is None:
        return
    values, places = np.unique(keys, return_inverse=True)
    order = np.argsort(places, kind="stable")
    ends = np.cumsum(np.bincount(places, minlength=len(values)))
    yield from zip(values.tolist(), np.split(order, ends[:-1]), strict=True)


def _evaluate_entry(model: FileModel, ignored: int | None) -> EntryProgram | None:
    from triplane.unified_ir.engines.modules import program_of

    # The loss of the file counts a label that only the caller leaves out.
    if not _has_entry(model) or ignored not in {None, model.ignored}:
        return None
    assert model.module is not None
    return program_of(model.module, ENTRY)


def _has_entry(model: FileModel) -> bool:
    # An entry of a fixed batch size has no mean over a last, smaller batch.
    return model.module is not None and ENTRY in model.module.entries and model.batch is None


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
