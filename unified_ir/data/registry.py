"""The names of sources and steps in JSON, and a pipeline as JSON text.

A Python function stands there by its name; see `form`, which reads the text back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import functions, grouping, ordering
from triplane.unified_ir.data.functions import PythonFunction
from triplane.unified_ir.data.opened import Origin
from triplane.unified_ir.data.records import RecordSource
from triplane.unified_ir.data.sources.arrow import ArrowSource
from triplane.unified_ir.data.sources.csv_files import CsvSource
from triplane.unified_ir.data.sources.digits import DigitsSource
from triplane.unified_ir.data.sources.folder import ImageFolderSource
from triplane.unified_ir.data.sources.idx import IdxSource
from triplane.unified_ir.data.sources.npy import NpySource
from triplane.unified_ir.data.sources.npz import NpzSource
from triplane.unified_ir.data.sources.sqlite import SqliteSource
from triplane.unified_ir.data.sources.text import TextSource
from triplane.unified_ir.data.step import Step
from triplane.unified_ir.data.transforms import TRANSFORMS
from triplane.unified_ir.data.zipping import ZipSource

if TYPE_CHECKING:
    from triplane.unified_ir.data.dataset import Dataset

FORMAT: Final = 1
ZIP: Final = "zip"

STRUCTURE: Final[Mapping[str, type[Step]]] = {
    "shuffle": ordering.Shuffle,
    "take": ordering.Take,
    "skip": ordering.Skip,
    "pick": ordering.Pick,
    "repeat": ordering.Repeat,
    "shard": ordering.Sharded,
    "weighted": ordering.Weighted,
    "balanced": ordering.Balanced,
    "split": ordering.Split,
    "batch": grouping.Batched,
    "padded_batch": grouping.PaddedBatch,
    "window": grouping.Windowed,
    "map": functions.Map,
    "filter": functions.Filter,
    "where": functions.Where,
    "cache": functions.Cache,
}
SOURCES: Final[Mapping[str, type[Any]]] = {
    "digits": DigitsSource,
    "npz": NpzSource,
    "npy": NpySource,
    "csv": CsvSource,
    "arrow": ArrowSource,
    "sqlite": SqliteSource,
    "text": TextSource,
    "idx": IdxSource,
    "images": ImageFolderSource,
    "records": RecordSource,
}
CHOOSING: Final[tuple[type[Step], ...]] = (
    ordering.Shuffle, ordering.Take, ordering.Skip, ordering.Pick, ordering.Repeat,
    ordering.Sharded, ordering.Weighted, ordering.Balanced, ordering.Split,
    functions.Filter, functions.Where, functions.Cache,
)  # fmt: skip
"""Steps that choose, order or keep samples, and change none."""
STEPS: Final[Mapping[str, type[Step]]] = {**STRUCTURE, **TRANSFORMS}
_STEP_NAMES: Final = {kind: name for name, kind in STEPS.items()}
_SOURCE_NAMES: Final = {kind: name for name, kind in SOURCES.items()}


def text_of(dataset: Dataset) -> str:
    """Return the pipeline as JSON text."""
    return json.dumps(record_of(dataset), indent=1)


def record_of(dataset: Dataset) -> dict[str, Any]:
    """Return the pipeline as plain values; InvalidInput if its source has no such form."""
    record: dict[str, Any] = {
        "format": FORMAT,
        "source": _source_record(dataset.origin),
        "steps": [{"step": _STEP_NAMES[type(step)], **_values(step)} for step in dataset.steps],
        "inputs": list(dataset.inputs),
        "targets": list(dataset.targets),
    }
    if dataset.labels:
        record["labels"] = list(dataset.labels)
    return record


def step_text(step: Step) -> str:
    """Return a step as people see it: its name and the fields that differ from defaults."""
    shown = [
        f"{f.name}={short(getattr(step, f.name))}"
        for f in fields(step)
        if f.default is MISSING or getattr(step, f.name) != f.default
    ]
    return f"{_STEP_NAMES[type(step)]}({', '.join(shown)})"


def _source_record(origin: Origin) -> dict[str, Any]:
    source = origin.source
    if isinstance(source, ZipSource):
        return {"kind": ZIP, "parts": [record_of(part) for part in source.parts]}
    if type(source) not in _SOURCE_NAMES:
        raise InvalidInput(
            f"{origin.name} cannot be written as JSON; write the samples to a file, as "
            "data.write_records does, and read that"
        )
    return {"kind": _SOURCE_NAMES[type(source)], **_values(source)}


def _values(value: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as JSON has them."""
    return {
        f.name: _plain(getattr(value, f.name))
        for f in fields(value)
        if f.default is MISSING or getattr(value, f.name) != f.default
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value.name if isinstance(value, PythonFunction) else value


def short(value: Any) -> str:
    """Return a value for a message, at most 60 characters of it."""
    if isinstance(value, PythonFunction):
        return value.name
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
