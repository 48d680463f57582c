"""The contents of a module on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from triplane.unified_ir.files.html_table import html_table
from triplane.unified_ir.ir.graph import Function, ModuleContents, Role
from triplane.unified_ir.ir.meta import labels_if_any

SHOWN: Final = 12
"""Number of entries, or of names in a line."""
WIDTH: Final = 120
"""Characters of a line; a longer one is cut."""


def summary_lines(module: ModuleContents) -> Iterator[str]:
    """Yield the lines of `Module.summary`: at most 20 of `WIDTH` characters."""
    yield _title(module)
    for entry, name in list(module.entries.items())[:SHOWN]:
        inputs, results, changes = _signature(module.functions[name], module.state)
        changed = f", changes {changes} tensors of state" if changes else ""
        yield cut(f"  {entry}({inputs}) -> ({results}){changed}")
    if len(module.entries) > SHOWN:
        yield f"  and {len(module.entries) - SHOWN} more entries"
    yield from (cut(f"  {line}") for line in _facts(module))


def summary_html(module: ModuleContents) -> str:
    """Return `Module.summary` as HTML."""
    rows = (
        (entry, inputs, results, f"{changes}" if changes else "")
        for entry, name in module.entries.items()
        for inputs, results, changes in [_signature(module.functions[name], module.state)]
    )
    heads = ("entry", "takes", "gives", "tensors of state it changes")
    count = len(module.entries)
    return html_table(_title(module), heads, rows, count=count, notes=list(_facts(module)))


def _title(module: ModuleContents) -> str:
    parameters = sum(t.array.size for t in module.state.values() if t.role is Role.PARAMETER)
    entries = _counted(len(module.entries), "entry", "entries")
    return f"module of {entries}, {parameters:,} parameters"


def _facts(module: ModuleContents) -> Iterator[str]:
    """Yield state by role, classes and origin."""
    roles = Counter(str(t.role) for t in module.state.values())
    if roles:
        yield f"state: {', '.join(f'{n} {role}' for role, n in roles.items())} tensors"
    if labels := labels_if_any(module.meta):
        yield f"{_counted(len(labels), 'class', 'classes')}: {', '.join(labels)}"
    if origin := _origin(module.meta):
        yield origin


def cut(text: str, width: int = WIDTH) -> str:
    """Return one line of at most `width` characters."""
    text = " ".join(text.split("\n"))
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _counted(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _signature(function: Function, state: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return inputs and results in words, and how many tensors of state a call changes."""
    inputs = ", ".join(f"{p.name}: {p.type}" for p in function.params if p.name not in state)
    named = zip(function.result_names, function.results, strict=True)
    results = [f"{name}: {value.type}" for name, value in named if name not in state]
    return inputs, ", ".join(results), len(function.results) - len(results)


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
