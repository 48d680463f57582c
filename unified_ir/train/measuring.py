"""Evaluation and prediction: batches in the data's own order, through a graph without state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import Program
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.train.batches import Batch
from triplane.unified_ir.train.history import Place, split
from triplane.unified_ir.train.step import TrainingModel, taken_counts

State = Mapping[str, Array]


def measured(
    batches: Iterable[Batch],
    state: State,
    graph_of: Callable[[Batch], tuple[TrainingModel, Program]],
) -> Place:
    """Sum the measures of all batches; InvalidInput if there are none."""
    place = Place()
    for batch in batches:
        model, program = graph_of(batch)
        model.check_types(batch)
        # A graph refuses a wrong label only when it runs, without naming the sample.
        numbers = range(place.rows, place.rows + len(batch[-1]))
        model.check_labels(batch[-1], "sample {} of the data", numbers)
        values_by_name = {**state, **dict(zip(model.batch_names(), batch, strict=True))}
        values = program(*(values_by_name[n] for n in program.function.param_names))
        named = dict(zip(program.function.result_names, values, strict=True))
        counts = {k: named.pop(k) for k in model.tallies}
        counted = taken_counts(named)
        place.advance(split(named)[0], len(batch[-1]), counts, counted)
    if not place.rows:
        raise InvalidInput("there is no data to evaluate on")
    return place


def predicted(program: Program, state: State, arrays: Batch, size: int) -> Any:
    """Return results for all rows, `size` at a time: one array, or a dict by name."""
    function = program.function
    names = [n for n in function.param_names if n not in state]
    parts = []
    for start in range(0, len(arrays[0]), size):
        rows = [a[start : start + size] for a in arrays]
        values = {**state, **dict(zip(names, rows, strict=True))}
        parts.append(program(*(values[n] for n in function.param_names)))
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return joined[0] if len(joined) == 1 else dict(zip(function.result_names, joined, strict=True))
