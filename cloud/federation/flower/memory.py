"""A strategy's memory between rounds as one file: the plain data among its attributes.

The file holds numbers, text, arrays, Flower's array records, and lists, tuples and dictionaries of
these, of the strategy and of one that it wraps (`strategy.strategy`). Flower's own strategies keep
nothing else (moments, a clipping norm, the newest arrays). Other attributes of an operator's
strategy are lost when a new process starts. The file is a container of tensors and their structure,
and not a pickle, so reading it never runs code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.errors import Corrupt
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container

KIND: Final = "checkpoint"
TENSORS: Final = "memory.safetensors"
STRUCTURE: Final = "memory.json"
MAX_DEPTH: Final = 8
WRAPPED: Final = "strategy"
_SKIP: Final = object()

Arrays = dict[str, np.ndarray[Any, Any]]


def remember(strategy: Any, path: Path) -> None:
    """Write the attributes of a strategy to a file."""
    arrays: Arrays = {}
    facts = _facts(strategy, arrays, 0)
    parts = [
        container.part(STRUCTURE, json.dumps(facts).encode()),
        container.tensor_part(TENSORS, arrays),
    ]
    container.write(path, KIND, parts)


def recall(strategy: Any, path: Path) -> None:
    """Restore the attributes of an earlier strategy. Corrupt: the file is damaged."""
    from triplane.cloud.federation.flower.adapter import record_of

    file = Container(path, kind=KIND)
    file.verify()
    # Copied, because the strategy may change its arrays, and the file is mapped read-only.
    arrays = {name: tensor.data.copy() for name, tensor in file.tensors(TENSORS).items()}
    try:
        _give(strategy, json.loads(bytes(file.part(STRUCTURE))), arrays, record_of)
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"the strategy's memory cannot be read: {error!r:.200}") from error


def _facts(strategy: Any, arrays: Arrays, depth: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        # Flower's privacy strategies wrap another one under this name.
        if name == WRAPPED and hasattr(value, "aggregate_train") and depth < MAX_DEPTH:
            facts[name] = {"wrapped": _facts(value, arrays, depth + 1)}
        elif (plain := _plain(value, arrays, depth)) is not _SKIP:
            facts[name] = plain
    return facts


def _plain(value: Any, arrays: Arrays, depth: int) -> Any:
    """Return the value as JSON and add its arrays to `arrays`; `_SKIP` if a part is neither."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        name = str(len(arrays))
        arrays[name] = np.array(value)
        return {"scalar" if isinstance(value, np.generic) else "array": name}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if depth >= MAX_DEPTH:
        return _SKIP
    if hasattr(value, "to_numpy_ndarrays"):
        named = {key: array.numpy() for key, array in value.items()}
        return _items("record", list(named.items()), arrays, depth)
    if isinstance(value, dict):
        return _items("dict", list(value.items()), arrays, depth)
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return _items(kind, list(enumerate(value)), arrays, depth)
    return _SKIP


def _items(kind: str, items: list[tuple[Any, Any]], arrays: Arrays, depth: int) -> Any:
    if not all(isinstance(key, str | int) for key, _ in items):
        return _SKIP
    pairs = [[key, _plain(value, arrays, depth + 1)] for key, value in items]
    # All or nothing: half a list could be worse for the strategy than an initial one.
    return _SKIP if any(value is _SKIP for _, value in pairs) else {kind: pairs}


def _give(strategy: Any, facts: dict[str, Any], arrays: Arrays, record: Callable[..., Any]) -> None:
    for name, fact in facts.items():
        if "wrapped" in fact:
            _give(getattr(strategy, name), fact["wrapped"], arrays, record)
        else:
            setattr(strategy, name, _value(fact, arrays, record))


def _value(fact: dict[str, Any], arrays: Arrays, record: Callable[..., Any]) -> Any:
    (kind, held), *_ = fact.items()
    if kind == "value":
        return held
    if kind in ("array", "scalar"):
        return arrays[held] if kind == "array" else arrays[held][()]
    items = {key: _value(value, arrays, record) for key, value in held}
    if kind == "record":
        return record(items)
    if kind == "dict":
        return items
    return list(items.values()) if kind == "list" else tuple(items.values())
