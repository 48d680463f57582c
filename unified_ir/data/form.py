"""The JSON form of a pipeline: the source, the steps, the roles of columns; read back strictly.

    {"format": 1, "source": {"kind": "npz", "path": "train.npz"}, "steps": [{"step": "shuffle"},
     {"step": "batch", "size": 32}], "inputs": ["x"], "targets": ["y"]}

A Python function stands there by its name, and is never imported from it: who reads the form gives
the functions.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data import functions, grouping, ordering
from triplane.unified_ir.data.dataset import Dataset, of_source
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

FORMAT: Final = 1
MAX_TEXT: Final = 64 << 20
MAX_STEPS: Final = 1000
MAX_DEPTH: Final = 16
"""Limit for pipelines within pipelines (zip)."""
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
STEPS: Final[Mapping[str, type[Step]]] = {**STRUCTURE, **TRANSFORMS}
_STEP_NAMES: Final = {kind: name for name, kind in STEPS.items()}
_SOURCE_NAMES: Final = {kind: name for name, kind in SOURCES.items()}

Functions = Mapping[str, Callable[..., Any]]


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
        f"{f.name}={_short(getattr(step, f.name))}"
        for f in fields(step)
        if f.default is MISSING or getattr(step, f.name) != f.default
    ]
    return f"{_STEP_NAMES[type(step)]}({', '.join(shown)})"


def from_json(
    text: str, *, functions: Functions | None = None, folder: Path | None = None
) -> Dataset:
    """Return the pipeline that `Dataset.json` wrote.

    functions: the Python functions of its steps by name, as MODULE:NAME. folder: where relative
    paths of its sources begin, by default the working directory. InvalidInput names what is wrong
    in the text; NotFound a function that is not given.
    """
    if len(text) > MAX_TEXT:
        raise InvalidInput(f"a pipeline has at most {MAX_TEXT} characters, got {len(text)}")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the pipeline is not JSON: {error}") from error
    return _dataset(record, functions or {}, folder, 0)


def _dataset(record: Any, known: Functions, folder: Path | None, depth: int) -> Dataset:
    wanted = {"format", "source", "steps", "inputs", "targets", "labels"}
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.keys() - wanted:
        raise InvalidInput(
            f"a pipeline is an object of format {FORMAT} with {', '.join(sorted(wanted))}; got "
            f"{_short(record)}"
        )
    if depth > MAX_DEPTH:
        raise InvalidInput(f"pipelines are at most {MAX_DEPTH} deep within each other")
    steps = record.get("steps", [])
    if not isinstance(steps, list) or len(steps) > MAX_STEPS:
        raise InvalidInput(f"the steps of a pipeline are a list of at most {MAX_STEPS}")
    dataset = _of_source(record.get("source"), known, folder, depth)
    for number, step in enumerate(steps, 1):
        dataset = dataset.then(_step(step, known, number))
    names = {key: _names(record.get(key, []), key) for key in ("inputs", "targets", "labels")}
    if names["inputs"] or names["targets"]:
        dataset = dataset.roles(names["inputs"], names["targets"])
    return dataset.named(names["labels"]) if names["labels"] else dataset


def _of_source(record: Any, known: Functions, folder: Path | None, depth: int) -> Dataset:
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise InvalidInput(
            f"the source of a pipeline is an object with a kind, got {_short(record)}"
        )
    kind = record["kind"]
    if kind == ZIP:
        parts = record.get("parts")
        if not isinstance(parts, list):
            raise InvalidInput("the source zip has a list of parts, each a pipeline")
        zipped = tuple(_dataset(part, known, folder, depth + 1) for part in parts)
        return of_source(ZipSource(zipped), ZIP)
    if kind not in SOURCES:
        raise InvalidInput(f"there is no source {kind!r}; there are {', '.join((*SOURCES, ZIP))}")
    values = {k: v for k, v in record.items() if k != "kind"}
    if folder is not None and isinstance(values.get("path"), str):
        values["path"] = str(folder / values["path"])
    source = _constructed(SOURCES[kind], values, f"source {kind}", known)
    return of_source(source, f"{kind} {values.get('path', '')}".strip())


def _step(record: Any, known: Functions, number: int) -> Step:
    if not isinstance(record, dict) or record.get("step") not in STEPS:
        name = record.get("step") if isinstance(record, dict) else record
        raise InvalidInput(
            f"step {number} of the pipeline is {_short(name)}; there are {', '.join(STEPS)}"
        )
    values = {k: v for k, v in record.items() if k != "step"}
    step: Step = _constructed(
        STEPS[record["step"]], values, f"step {number}, {record['step']}", known
    )
    return step


def _constructed(kind: type[Any], values: dict[str, Any], what: str, known: Functions) -> Any:
    """Return kind(**values), after checking names and types of the values."""
    hints = typing.get_type_hints(kind)
    own = {f.name: f for f in fields(kind)}
    unknown = values.keys() - own.keys()
    missing = [
        n for n, f in own.items()
        if n not in values and f.default is MISSING and f.default_factory is MISSING
    ]  # fmt: skip
    if unknown or missing:
        wrong = f"has no field {min(unknown)!r}" if unknown else f"needs the field {missing[0]!r}"
        raise InvalidInput(f"{what} {wrong}; its fields are {', '.join(own)}")
    return kind(**{k: _typed(v, hints[k], f"{what}: {k}", known) for k, v in values.items()})


def _typed(value: Any, hint: Any, what: str, known: Functions) -> Any:
    """Return the JSON value as the field's type; InvalidInput if it is of another."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is PythonFunction:
        return _function(value, what, known)
    if origin in {types.UnionType, typing.Union}:
        for one in inner:
            try:
                return _typed(value, one, what, known)
            except InvalidInput:
                continue
    elif origin is typing.Literal:
        if value in inner:
            return value
    elif origin is tuple and isinstance(value, list):
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_typed(v, inner[0], what, known) for v in value)
        if len(inner) == len(value):
            return tuple(_typed(v, h, what, known) for v, h in zip(value, inner, strict=True))
    elif hint is type(None):
        if value is None:
            return None
    elif (hint is float and isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(hint, type) and type(value) is hint
    ):
        return value
    shown = getattr(hint, "__name__", None) if origin is None else str(hint)
    raise InvalidInput(f"{what} is of type {shown}, got {_short(value)}")


def _function(value: Any, what: str, known: Functions) -> PythonFunction:
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is the name of a Python function, got {_short(value)}")
    if value not in known:
        raise NotFound(
            f"{what} is the Python function {value!r}, which is not part of the JSON form; pass "
            f"functions={{{value!r}: ...}} to from_json"
        )
    return PythonFunction(known[value])


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


def _names(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InvalidInput(f"{key} of a pipeline are a list of names, got {_short(value)}")
    return tuple(value)


def _short(value: Any) -> str:
    if isinstance(value, PythonFunction):
        return value.name
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
