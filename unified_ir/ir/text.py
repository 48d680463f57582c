"""Functions and modules as text to read and to compare: the same text on every run.

    ops Relu@14
    function predict(
      %x: float32[N,10]
    ) -> (y: float32[N,10]) {
      %1: float32[N,10] = Relu(%x)  # digits.py:12 head
      return %1
    }

A parameter is written by its name, any other value by its number: parameters count first, then
outputs in order, as in `module.pb`. `shard((4, 1), (1, 1))` after the
attributes is a strategy. The text after `#` is the location in the user's source; file
and scope are quoted where they would be ambiguous. Constants of more than eight elements, and those
with a NaN that `nan` does not reproduce, appear as type and the first digits of the SHA-256 of
their bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from triplane.unified_ir.ir.arrays import raw
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import (
    NO_META,
    Array,
    AttrValue,
    Function,
    Location,
    Meta,
    Node,
    Split,
    Value,
)
from triplane.unified_ir.ir.module import Module
from triplane.unified_ir.ir.types import type_of

MAX_SHOWN_ELEMENTS: Final = 8
DIGEST_DIGITS: Final = 8
_BARE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./*-]*", re.ASCII)
_INDENT: Final = "  "
_PLACE: Final = re.compile(r"(?:(\S.*?):(\d+)(?: (.*))?|(.*))", re.DOTALL)
_STRING: Final = r'"(?:[^"\\]|\\.)*"'
_QUOTED_PLACE: Final = re.compile(rf"(?:({_STRING}):(\d+) )?({_STRING})")
_WORDS_OF_FLOATS: Final = {"inf": "1*inf", "-inf": "-1*inf", "nan": "1*nan"}
"""Symbols that would read as floats in a tuple, and how they are written there."""


def module_text(module: Module) -> str:
    """Return properties, entries, state with roles, then every function."""
    lines = ["module"]
    lines += [f"  meta {_name(k)} = {_quoted(v)}" for k, v in sorted(module.meta.items())]
    lines += [f"  entry {_name(e)} = {_name(f)}" for e, f in module.entries.items()]
    lines += [f"  state {_name(n)}: {t.type} {t.role}" for n, t in module.state.items()]
    texts = [function_text(f, name=key) for key, f in module.functions.items()]
    return "\n\n".join(["\n".join(lines), *texts])


def function_text(function: Function, *, name: str | None = None) -> str:
    """Return one function as text; `name` is the name in its module, if that differs."""
    ops = sorted({(str(n.op), n.op.since) for n in function.walk()})
    header = [f"ops {' '.join(f'{op}@{since}' for op, since in ops)}"] if ops else []
    return "\n".join([*header, *_lines(function, f"function {_name(name or function.name)}")])


def _lines(function: Function, head: str) -> Iterator[str]:
    names = {p: f"%{_name(p.name)}" for p in function.params}
    for value in (v for node in function.nodes for v in node.outputs):
        names[value] = f"%{len(names)}"
    named = zip(function.result_names, function.results, strict=True)
    results = ", ".join(f"{_name(n)}: {v.type}" for n, v in named)
    params = [f"{_INDENT}{names[p]}: {p.type}" for p in function.params]
    if params:
        yield f"{head}("
        yield from (f"{param}," for param in params[:-1])
        yield params[-1]
    yield f"{')' if params else f'{head}()'} -> ({results}) {{"
    for node in function.nodes:
        for line in _node_lines(node, names):
            yield _INDENT + line
    yield f"{_INDENT}return {', '.join(names[r] for r in function.results)}".rstrip()
    yield "}"


def _node_lines(node: Node, names: Mapping[Value, str]) -> Iterator[str]:
    outputs = ", ".join(f"{names[v]}: {v.type}" for v in node.outputs)
    inputs = ", ".join("none" if v is None else names[v] for v in node.inputs)
    attrs = attributes_text(node.attrs)
    line = f"{outputs} = {node.op}({inputs}){f' {attrs}' if attrs else ''}"
    line += f" shard{strategy_text(node.strategy)}" if node.strategy else ""
    yield line + (" {" if node.regions else "") + _place(node.meta)
    for region in node.regions:
        for inner in _lines(region, f"region {_name(region.name)}"):
            yield _INDENT + inner
    if node.regions:
        yield "}"


def attributes_text(attrs: Mapping[str, AttrValue]) -> str:
    """Return attributes by name in braces; "" if there are none."""
    if not attrs:
        return ""
    return "{" + ", ".join(f"{_name(k)}={_attr(attrs[k])}" for k in sorted(attrs)) + "}"


def strategy_text(split: Split) -> str:
    """Return a strategy as `shard` takes it: ((4, 1), (1, 1))."""
    return "(" + ", ".join(f"({', '.join(map(str, slices))})" for slices in split) + ")"


def _attr(value: AttrValue) -> str:
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, tuple):
        inner = ", ".join(_item(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return _quoted(value) if isinstance(value, str) else str(value)


def _item(value: str | float | Dim) -> str:
    """Return one item of a tuple, so that floats, texts and sizes are distinguishable."""
    # The order matters: a bool is also an int, and reads back as 0 or 1.
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return str(int(value))
    text = str(value)
    return text if isinstance(value, (int, float)) else _WORDS_OF_FLOATS.get(text, text)


def _array(array: Array) -> str:
    type_ = type_of(array)
    if array.size <= MAX_SHOWN_ELEMENTS and _is_shown(array):
        return f"{type_} {{{', '.join(_elements(array))}}}"
    return f"{type_} #{digest_of(array)}"


def _is_shown(array: Array) -> bool:
    """Return whether the elements' text reproduces every bit; the text of a NaN has no payload."""
    # Integers, bools and strings print exactly. The shortest text of a float reproduces its bits,
    # except the sign and payload of a NaN.
    if not type_of(array).dtype.is_float:
        return True
    read = np.empty(array.size, array.dtype)
    read[:] = [float(text) for text in _elements(array)]
    return raw(read) == raw(array)


def digest_of(array: Array) -> str:
    """Return the digits that identify the contents of a constant too long to show."""
    return hashlib.sha256(raw(array)).hexdigest()[:DIGEST_DIGITS]


def _elements(array: Array) -> Sequence[str]:
    """Return each element in the fewest digits that read back as the same number."""
    if array.dtype.kind == "O":
        return [_quoted(v) for v in array.reshape(-1)]
    if array.dtype.kind == "b":
        return [str(bool(v)).lower() for v in array.reshape(-1)]
    return [str(v) for v in array.reshape(-1)]


def _place(meta: Meta) -> str:
    if meta == NO_META:
        return ""
    text = " ".join(str(part) for part in (meta.location, meta.scope) if part)
    # A scope such as "a.py:3" or a file name with spaces would be split differently when read back.
    if place_of(text) != meta:
        file = f"{_quoted(meta.location.file)}:{meta.location.line} " if meta.location else ""
        text = file + _quoted(meta.scope)
    return f"  # {text}"


def place_of(text: str) -> Meta:
    """Return the location and scope in the text after `#`."""
    quoted = _QUOTED_PLACE.fullmatch(text)
    if quoted is not None:
        where = Location(json.loads(quoted[1]), int(quoted[2])) if quoted[1] else None
        return Meta(where, json.loads(quoted[3]))
    match = _PLACE.fullmatch(text)
    assert match is not None  # its last alternative takes any text
    if match[1] is None:
        return Meta(None, match[4])
    return Meta(Location(match[1], int(match[2])), match[3] or "")


def _name(text: str) -> str:
    return text if _BARE.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
