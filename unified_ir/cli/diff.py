"""`triplane diff`: show what changed between two model files, in graphs and numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.importing import SUFFIX
from triplane.unified_ir.cli.shell import json_option, open_output

if TYPE_CHECKING:
    from triplane.unified_ir.ir import Function, Module
    from triplane.unified_ir.ir.graph import Array

EPILOG = """\b
Examples:
  triplane diff digits.tpm digits_next.tpm
  triplane diff a.tpm b.tpm --json

\b
Exit status: 0 if entries, graphs and state are the same, 1 if they differ, more for errors.
The numbering of values and the lines of source do not count as changes. The relative change of a
tensor is its largest absolute change divided by its largest value before.
"""
DIFFERENT: Final = 1
MAX_LINES: Final = 20_000
"""Functions with more lines than this are compared line by line, without finding moved lines."""
MAX_SHOWN: Final = 40
_Block = tuple[str, int, int, int, int]
"""(kind, a1, a2, b1, b2): turns lines a1:a2 of one text into b1:b2 of the other, as in difflib."""
_NUMBER: Final = re.compile(r"%\d+")
"""The number of a value in the text form, such as %12."""
_PLACE: Final = re.compile(r"(?<=[){}])  # [^\"]*$")
"""The source location at the end of a node's line: a comment after `)`, `{` or `}`."""


@click.command("diff", epilog=EPILOG)
@click.argument("a", type=click.Path(path_type=Path), metavar="A.tpm")
@click.argument("b", type=click.Path(path_type=Path), metavar="B.tpm")
@json_option
@click.pass_context
def command(ctx: click.Context, *, a: Path, b: Path, as_json: bool) -> None:
    """Show what changed from model file A to model file B.

    Lists entries added and removed, the nodes of each function that differ, and every state tensor
    whose type, role or contents changed, and by how much. Both files are verified.
    """
    from triplane.unified_ir.ops.check import load

    output = open_output(as_json)
    for path in (a, b):
        if path.suffix == SUFFIX:
            raise InvalidInput(f"{path} is an ONNX model; import it first (triplane import)")
    record = _compared(load(a), load(b))
    record = {"a": str(a), "b": str(b), "same": not any(record.values()), **record}
    output.result(record, "\n".join(_lines(record)))
    ctx.exit(0 if record["same"] else DIFFERENT)


def _compared(a: Module, b: Module) -> dict[str, Any]:
    return {
        "meta": _mapping(a.meta, b.meta),
        "entries": _mapping(a.entries, b.entries),
        "functions": _mapping(
            {k: None for k in a.functions if k not in b.functions},
            {k: None for k in b.functions if k not in a.functions},
        ),
        "nodes": {
            name: changed
            for name, function in a.functions.items()
            if name in b.functions and (changed := _nodes(function, b.functions[name]))
        },
        "state": _state(a, b),
    }


def _mapping(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys added and removed, and values changed; empty if nothing differs."""
    kinds = {
        "added": [k for k in b if k not in a],
        "removed": [k for k in a if k not in b],
        "changed": {k: [a[k], b[k]] for k in a if k in b and a[k] != b[k]},
    }
    return {k: v for k, v in kinds.items() if v}


def _nodes(a: Function, b: Function) -> dict[str, list[str]]:
    """Return lines of the text form that only one of the functions has."""
    import difflib

    from triplane.unified_ir.ir.text import function_text

    texts = [function_text(function).splitlines() for function in (a, b)]
    unplaced = [[_PLACE.sub("", line) for line in text] for text in texts]
    plain = [[_NUMBER.sub("%_", line) for line in lines] for lines in unplaced]
    if unplaced[0] == unplaced[1]:
        return {}
    blocks: Iterable[_Block]
    # SequenceMatcher takes quadratic time; and if the texts differ only in numbers of values, it
    # would find no difference.
    if plain[0] == plain[1] or max(map(len, texts)) > MAX_LINES:
        blocks = _by_position(*unplaced)
    else:
        # Without value numbers: one inserted node renumbers all that follow it. `autojunk` would
        # ignore lines that occur often.
        blocks = difflib.SequenceMatcher(None, plain[0], plain[1], autojunk=False).get_opcodes()
    removed, added = [], []
    for kind, a1, a2, b1, b2 in blocks:
        if kind != "equal":
            removed += [line.strip() for line in texts[0][a1:a2]]
            added += [line.strip() for line in texts[1][b1:b2]]
    return {"removed": removed, "added": added}


def _by_position(ours: Sequence[str], theirs: Sequence[str]) -> Iterator[_Block]:
    """Yield changed lines at the same position, in linear time."""
    n = min(len(ours), len(theirs))
    for i in range(n):
        if ours[i] != theirs[i]:
            yield "replace", i, i + 1, i, i + 1
    yield "replace", n, len(ours), n, len(theirs)


def _state(a: Module, b: Module) -> dict[str, Any]:
    changes = _mapping(
        {k: f"{t.type} {t.role}" for k, t in a.state.items()},
        {k: f"{t.type} {t.role}" for k, t in b.state.items()},
    )
    moved = {
        name: _change(tensor.array, b.state[name].array)
        for name, tensor in a.state.items()
        if name in b.state
        and tensor.type == b.state[name].type
        # Bytes, so that NaN equals itself and 0.0 differs from -0.0.
        and tensor.array.tobytes() != b.state[name].array.tobytes()
    }
    return changes | ({"moved": moved} if moved else {})


def _change(a: Array, b: Array) -> dict[str, Any]:
    """Return the largest absolute and relative change, and how many elements changed."""
    import numpy as np

    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        gap, scale = np.abs(y - x), np.abs(x).max(initial=0.0)
    largest = float(gap.max(initial=0.0))
    return {
        "max_abs": _finite(largest),
        "max_rel": _finite(largest / scale) if scale else None,
        "elements": int(np.count_nonzero(a != b)),
        "of": a.size,
    }


def _finite(x: float) -> float | str:
    """Replace infinity and NaN, which JSON does not have."""
    # inf - inf and NaN - NaN are NaN.
    return x if x - x == 0 else str(x)


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    if record["same"]:
        yield "the models are the same: entries, graphs and state"
        return
    for title, what in (("entries", "entry"), ("functions", "function"), ("meta", "property")):
        yield from _mapping_lines(what, record[title])
    for name, changed in record["nodes"].items():
        yield f"function {name}: {len(changed['removed'])} lines out, {len(changed['added'])} in"
        yield from _shortened("  - ", changed["removed"])
        yield from _shortened("  + ", changed["added"])
    state = record["state"]
    yield from _mapping_lines("state", {k: v for k, v in state.items() if k != "moved"})
    moved = state.get("moved", {})
    width = max(map(len, moved), default=0)
    for name, change in moved.items():
        yield f"state {name.ljust(width)}  {_change_text(change)}"


def _mapping_lines(what: str, changes: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("removed", "added"):
        for name in changes.get(kind, ()):
            yield f"{what} {name!r} {kind}"
    for name, (a, b) in changes.get("changed", {}).items():
        yield f"{what} {name!r}: {a!r} -> {b!r}"


def _shortened(mark: str, lines: Sequence[str]) -> Iterator[str]:
    for line in lines[:MAX_SHOWN]:
        yield mark + line
    if len(lines) > MAX_SHOWN:
        yield f"{mark}... {len(lines) - MAX_SHOWN} more (--json lists all)"


def _change_text(change: Mapping[str, Any]) -> str:
    relative = change["max_rel"]
    shown = f", {relative:.3g} of the largest" if isinstance(relative, float) else ""
    largest = change["max_abs"]
    size = f"{largest:.6g}" if isinstance(largest, float) else largest
    return f"changed by at most {size}{shown}; {change['elements']:,} of {change['of']:,} elements"
