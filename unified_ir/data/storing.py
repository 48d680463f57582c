"""Datasets in record sets: the samples, and what is known about their columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.columns import MAX_COLUMNS
from triplane.unified_ir.data.kinds import is_batch_feed, is_batches
from triplane.unified_ir.data.records import RecordTable, RecordWriter
from triplane.unified_ir.data.registry import CHOOSING
from triplane.unified_ir.data.step import keeps
from triplane.unified_ir.data.views import blocks_of
from triplane.unified_ir.files.samples import MAX_CLASSES

if TYPE_CHECKING:
    from triplane.unified_ir.data.dataset import Dataset

FACTS: Final = "dataset"
"""The name of the text in a record set's metadata that holds its `ColumnFacts`."""


@dataclass(frozen=True)
class ColumnFacts:
    """What is known about the columns of stored samples, beside their types.

    inputs, targets: their roles. labels: names of the classes of the target. pixels: by column of
    bytes, the byte that means 1.0.
    """

    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    pixels: Mapping[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """Return the facts as JSON."""
        return json.dumps({k: v if isinstance(v, dict) else list(v) for k, v in vars(self).items()})


def write(dataset: Dataset, path: Path, progress: Callable[[int], None] | None = None) -> int:
    """Write all samples of epoch 0 as a new record set; return their number.

    progress: called with the number of samples written so far. Conflict: the path exists.
    """
    view = dataset.view()
    if is_batches(view) or is_batch_feed(view):
        raise InvalidInput("records hold samples, not batches; write the dataset without .batch")
    # The bytes of a column are still pixels only if no step has changed them.
    tops: Mapping[str, int] = getattr(dataset.origin.table, "pixels", {})
    pixels = {
        name: top
        for name, top in tops.items()
        if all(isinstance(step, CHOOSING) or keeps(step, name) for step in dataset.steps)
    }
    facts = ColumnFacts(dataset.inputs, dataset.targets, dataset.labels, pixels)
    n = 0
    with RecordWriter.create(path, view.schema, metadata={FACTS: facts.text()}) as writer:
        for block in blocks_of(view):
            writer.append(block)
            n += columns.count(block)
            if progress is not None:
                progress(n)
        return writer.commit()


def restored(dataset: Dataset) -> Dataset:
    """Return the dataset of a record set with the roles and labels that were stored with it."""
    table = dataset.origin.table
    if not isinstance(table, RecordTable):
        return dataset
    facts = facts_of(table)
    known = dataset.schema
    return replace(
        dataset,
        inputs=tuple(n for n in facts.inputs if n in known) or dataset.inputs,
        targets=tuple(n for n in facts.targets if n in known) or dataset.targets,
        labels=facts.labels,
    )


def facts_of(table: RecordTable) -> ColumnFacts:
    """Return the facts stored with a record set; Corrupt if they are not of their form."""
    text = table.metadata.get(FACTS)
    if text is None:
        return ColumnFacts()
    try:
        record = json.loads(text)
        names = {k: _names(record.get(k, [])) for k in ("inputs", "targets", "labels")}
        pixels = {str(k): _byte(v) for k, v in dict(record.get("pixels", {})).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{table.path}: its facts about columns are damaged: {error}") from error
    return ColumnFacts(**names, pixels=pixels)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > max(MAX_CLASSES, MAX_COLUMNS):
        raise ValueError("not a list of names")
    if not all(isinstance(name, str) for name in value):
        raise ValueError("not a list of names")
    return tuple(value)


def _byte(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 255:
        raise ValueError(f"no byte that means 1.0: {value!r}")
    return value
