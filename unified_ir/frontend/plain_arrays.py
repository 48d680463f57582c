"""Warn of plain arrays of a cell that `construct` reads: a weight there would never be trained."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from triplane.unified_ir.frontend.binding import StateTree
from triplane.unified_ir.frontend.source import belongs_to_user

_warned: Final[WeakKeyDictionary[type, set[str]]] = WeakKeyDictionary()


def warn_of_plain_arrays(cells: Iterable[Any]) -> None:
    """Warn, once for each class and attribute, of arrays that become constants of the graph.

    A read-only array (`a.flags.writeable = False`) is a constant on purpose, and so are integers.
    """
    for cell in cells:
        names = [n for n, v in vars(cell).items() if _may_be_a_weight(v)]
        construct = getattr(type(cell), "construct", None)
        if not names or not isinstance(construct, FunctionType) or not belongs_to_user(construct):
            continue
        own = _warned.setdefault(type(cell), set())
        read = set(_names_read(type(cell), construct))
        for name in sorted(read.intersection(names) - own):
            own.add(name)
            _warn(cell, name, construct.__code__)


def _may_be_a_weight(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype.kind == "f"
        and value.ndim > 0
        and value.flags.writeable
    )


def _names_read(cls: type, construct: FunctionType) -> Iterator[str]:
    """Yield the names in `construct`, and in the methods of the class that it names."""
    seen: set[CodeType] = set()
    todo = [construct.__code__]
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        todo += [c for c in code.co_consts if isinstance(c, CodeType)]
        for name in code.co_names:
            yield name
            method = getattr(cls, name, None)
            if isinstance(method, FunctionType):
                todo.append(method.__code__)


def _warn(cell: StateTree, name: str, code: CodeType) -> None:
    owner = f"{type(cell).__name__}.{name}"
    warnings.warn_explicit(
        f"{owner} is a plain array, so it is a constant of the graph: it is not trained, and it is "
        f"not part of the state. Make it nn.Parameter(...) to train it or nn.Buffer(...) to store "
        f"it; self.{name}.flags.writeable = False states that it is a constant",
        UserWarning,
        code.co_filename,
        code.co_firstlineno,
    )
