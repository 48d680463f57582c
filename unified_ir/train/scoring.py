"""Metrics of outputs that are at hand, whatever model computed them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import Engine, Program, engine
from triplane.unified_ir.frontend.trace import traced
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.nn.losses import Metric
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.train.history import Place, Row, split
from triplane.unified_ir.train.metrics import F1, Precision, Recall, Tally
from triplane.unified_ir.train.step import batch_type


class OutputScores:
    """Sums metrics over batches of (output, target); the memory is that of one batch.

    metrics: means and tallies by name, as for `Trainer`. ignored: a label that does not count.
    """

    def __init__(self, metrics: Mapping[str, Metric | Tally], ignored: int | None = None) -> None:
        self.metrics = dict(metrics)
        self.ignored = ignored
        self.place = Place()
        self._programs: dict[tuple[TensorType, TensorType], Program] = {}

    def empty(self) -> OutputScores:
        """Return the sums of no batch, by the same graphs, which are compiled once for all."""
        other = OutputScores(self.metrics, self.ignored)
        other._programs = self._programs
        return other

    def add(self, output: Array, target: Array) -> None:
        """Add a batch; ShapeError if a metric does not take such arrays."""
        if self.ignored is not None and output.shape[:-1] == target.shape:
            counts = target != self.ignored
            output, target = output[counts], target[counts]
            if not len(target):
                return
        if output.dtype.kind == "f":
            output = output.astype(np.float32, copy=False)
        program = self._program(batch_type(output), batch_type(target))
        names = program.function.result_names
        results = dict(zip(names, program(output, target), strict=True))
        counts = {name: results.pop(name) for name in self.tallies}
        self.place.advance(split(results)[0], len(target), counts, {})

    def measures(self) -> Row:
        """Return the metrics over all batches; InvalidInput if nothing counts in them."""
        if not self.place.rows and self.ignored is not None:
            raise InvalidInput(
                f"every label of this data is {self.ignored}, which does not count; give data with "
                "labels that count"
            )
        if not self.place.rows:
            raise InvalidInput("there is no data to evaluate on")
        measured = self.place.measures(self.tallies)
        return {name: measured[name] for name in self.metrics}

    def counts(self, name: str) -> Array:
        """Return the summed counts of a tally."""
        return self.place.counts[name]

    @cached_property
    def tallies(self) -> dict[str, Tally]:
        """Metrics that are not means."""
        return {k: m for k, m in self.metrics.items() if isinstance(m, Tally)}

    def _program(self, output: TensorType, target: TensorType) -> Program:
        if (output, target) not in self._programs:

            def measures(output: Tensor, target: Tensor) -> dict[str, Any]:
                return {
                    name: metric.count(output, target)
                    if isinstance(metric, Tally)
                    else metric(output, target)
                    for name, metric in self.metrics.items()
                }

            function = traced(measures, (output, target), {}, name="measures").function
            self._programs[output, target] = self._engine.compile(function)
        return self._programs[output, target]

    @cached_property
    def _engine(self) -> Engine:
        return engine("onnx")


def by_class(confusion: Array) -> list[Row]:
    """Return precision, recall, f1 and samples of each class, from counts (true, predicted)."""
    hits, predicted, true = np.diag(confusion), confusion.sum(0), confusion.sum(1)
    ratios = {"precision": Precision(), "recall": Recall(), "f1": F1()}
    return [
        {name: r.ratio(*row) for name, r in ratios.items()} | {"samples": int(row[2])}
        for row in zip(hits, predicted, true, strict=True)
    ]
