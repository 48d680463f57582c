"""The syntax tree of a function, read from its file; None where there is no source."""

from __future__ import annotations

import ast
import linecache
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

import numpy as np

from triplane.unified_ir.frontend.names import FUNCTIONS, Function
from triplane.unified_ir.ops.source import is_internal

_STDLIB: Final = Path(sysconfig.get_paths()["stdlib"]).resolve()
_NUMPY: Final = Path(np.__file__).resolve().parent
_INSTALLED: Final = {"site-packages", "dist-packages"}
MISSING: Final = object()
"""Marks a variable without a value."""


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A function's syntax, the class around it (for private names), and its file."""

    node: Function
    class_name: str | None
    filename: str


def source_of(function: FunctionType) -> FunctionSource | None:
    """Return the syntax of a Python function or lambda; None when its file cannot be read."""
    code = function.__code__
    # The file may have changed since it was cached, for example in a notebook or an editor session.
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    if not text:
        return None
    try:
        places = _functions(text)
    except (SyntaxError, ValueError):
        return None
    matching = [p for p in places if _is(p[0], code)]
    if len(matching) > 1:
        # Several lambdas on one line differ only in their columns. Two functions that begin on one
        # line cannot be told apart, and then nothing is rewritten.
        matching = _innermost([p for p in matching if isinstance(p[0], ast.Lambda)], code)
    if len(matching) != 1:
        return None
    return FunctionSource(matching[0][0], matching[0][1], code.co_filename)


def contents(cell: Any) -> Any:
    """Return the value of a variable in a closure; MISSING if it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def belongs_to_user(function: FunctionType) -> bool:
    """Return False for the standard library, numpy and this package's own layers."""
    return is_users_file(function.__code__.co_filename)


@lru_cache(maxsize=4096)
def is_users_file(filename: str) -> bool:
    """Return False for files of the standard library, numpy and this package's own layers."""
    if filename.startswith("<"):
        return True
    path = Path(filename).resolve()
    if is_internal(str(path)) or path.is_relative_to(_NUMPY):
        return False
    return not path.is_relative_to(_STDLIB) or bool(_INSTALLED & set(path.parts))


def is_installed(filename: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return bool(_INSTALLED & set(Path(filename).parts))


@lru_cache(maxsize=64)
def _functions(text: str) -> list[tuple[Function, str | None]]:
    """Return every function of a file with the name of the innermost class around it."""
    functions: list[tuple[Function, str | None]] = []

    def walk(node: ast.AST, class_name: str | None) -> None:
        if isinstance(node, FUNCTIONS):
            functions.append((node, class_name))
        if isinstance(node, ast.ClassDef):
            class_name = node.name
        for child in ast.iter_child_nodes(node):
            walk(child, class_name)

    walk(ast.parse(text), None)
    return functions


def _is(node: Function, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return node.name == code.co_name and first == code.co_firstlineno


def _innermost(
    candidates: list[tuple[Function, str | None]], code: CodeType
) -> list[tuple[Function, str | None]]:
    """Return the smallest of the lambdas on one line that encloses all positions of the code."""
    places: list[Any] = [p for p in code.co_positions() if None not in p and p[2:] != (0, 0)]
    around = []
    for candidate in candidates:
        body: Any = candidate[0].body
        first, last = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
        if all(first <= (a, c) and (b, d) <= last for a, b, c, d in places):
            around.append((last[0] - first[0], last[1] - first[1], candidate))
    return [candidate for *_, candidate in sorted(around, key=lambda row: row[:2])[:1]]
