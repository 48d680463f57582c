"""The contents of a module on one screen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from triplane.unified_ir.ir.graph import Function, ModuleContents, Role

SHOWN: Final = 12
"""Number of entries, or of names in a line."""
WIDTH: Final = 120
"""Characters of a line; a longer one is cut."""


def summary_lines(module: ModuleContents) -> Iterator[str]:
    """Yield the lines of `Module.summary`: at most 20 of `WIDTH` characters."""
    parameters = sum(t.array.size for t in module.state.values() if t.role is Role.PARAMETER)
    entries = _counted(len(module.entries), "entry", "entries")
    yield f"module of {entries}, {parameters:,} parameters"
    for entry, name in list(module.entries.items())[:SHOWN]:
        yield cut(f"  {entry}{_signature(module.functions[name], module.state)}")
    if len(module.entries) > SHOWN:
        yield f"  and {len(module.entries) - SHOWN} more entries"
    roles = Counter(str(t.role) for t in module.state.values())
    if roles:
        yield f"  state: {', '.join(f'{n} {role}' for role, n in roles.items())} tensors"
    if labels := _labels(module.meta):
        yield cut(f"  {_counted(len(labels), 'class', 'classes')}: {', '.join(labels)}")
    if origin := _origin(module.meta):
        yield cut(f"  {origin}")


def cut(text: str, width: int = WIDTH) -> str:
    """Return one line of at most `width` characters."""
    text = " ".join(text.split("\n"))
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _counted(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _signature(function: Function, state: Mapping[str, Any]) -> str:
    inputs = ", ".join(f"{p.name}: {p.type}" for p in function.params if p.name not in state)
    named = zip(function.result_names, function.results, strict=True)
    results = [f"{name}: {value.type}" for name, value in named if name not in state]
    assigned = len(function.results) - len(results)
    changes = f", changes {assigned} tensors of state" if assigned else ""
    return f"({inputs}) -> ({', '.join(results)}){changes}"


def _labels(meta: Mapping[str, str]) -> list[str]:
    try:
        labels = json.loads(meta.get("labels", "[]"))
    except (ValueError, RecursionError):  # a summary of any file is shown, also of an odd one
        return []
    return [str(x) for x in labels] if isinstance(labels, list) else []


def _origin(meta: Mapping[str, str]) -> str:
    if "cell" in meta:
        trained = [f"trained with {meta['loss']}"] if "loss" in meta else []
        by = [f"by {meta['optimizer']}"] if "optimizer" in meta else []
        return " ".join([f"cell {meta['cell']},", *trained, *by]).rstrip(",")
    producer = meta.get("onnx.producer")
    return (
        f"imported from ONNX, written by {producer or 'an unnamed tool'}"
        if producer is not None
        else ""
    )
