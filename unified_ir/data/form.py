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
from triplane.unified_ir.data.dataset import Dataset, of_source
from triplane.unified_ir.data.functions import PythonFunction
from triplane.unified_ir.data.registry import FORMAT, SOURCES, STEPS, ZIP, short
from triplane.unified_ir.data.step import Step
from triplane.unified_ir.data.zipping import ZipSource

MAX_TEXT: Final = 64 << 20
MAX_STEPS: Final = 1000
MAX_DEPTH: Final = 16
"""Limit for pipelines within pipelines (zip)."""

Functions = Mapping[str, Callable[..., Any]]


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
            f"{short(record)}"
        )
    if depth > MAX_DEPTH:
        raise InvalidInput(f"pipelines are at most {MAX_DEPTH} deep within each other")
    steps = record.get("steps", [])
    if not isinstance(steps, list) or len(steps) > MAX_STEPS:
        raise InvalidInput(f"the steps of a pipeline are a list of at most {MAX_STEPS}")
    dataset = _of_source(record.get("source"), known, folder, depth)
    for number, step in enumerate(steps, 1):
        dataset = dataset.then(_step(step, known, number))
    keys = [key for key in ("inputs", "targets", "labels") if key in record]
    names = {key: _names(record[key], key) for key in keys}
    if "inputs" in names or "targets" in names:
        inputs = names.get("inputs", dataset.inputs)
        dataset = dataset.roles(inputs, names.get("targets", dataset.targets))
    return dataset.named(names.get("labels", dataset.labels))


def _of_source(record: Any, known: Functions, folder: Path | None, depth: int) -> Dataset:
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise InvalidInput(
            f"the source of a pipeline is an object with a kind, got {short(record)}"
        )
    kind = record["kind"]
    if kind == ZIP:
        parts = record.get("parts")
        if not isinstance(parts, list) or len(record) != 2:
            raise InvalidInput("the source zip has a list of parts, each a pipeline, and no more")
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
    name = record.get("step") if isinstance(record, dict) else record
    if not isinstance(record, dict) or not isinstance(name, str) or name not in STEPS:
        raise InvalidInput(
            f"step {number} of the pipeline is {short(name)}; there are {', '.join(STEPS)}"
        )
    values = {k: v for k, v in record.items() if k != "step"}
    step: Step = _constructed(STEPS[name], values, f"step {number}, {name}", known)
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
    raise InvalidInput(f"{what} is of type {shown}, got {short(value)}")


def _function(value: Any, what: str, known: Functions) -> PythonFunction:
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is the name of a Python function, got {short(value)}")
    if value not in known:
        raise NotFound(
            f"{what} is the Python function {value!r}, which is not part of the JSON form; pass "
            f"functions={{{value!r}: ...}} to from_json"
        )
    return PythonFunction(known[value])


def _names(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InvalidInput(f"{key} of a pipeline are a list of names, got {short(value)}")
    return tuple(value)
