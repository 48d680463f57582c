"""Cells a callable reaches, and a key that changes when what it would record does.

A function reaches the cells among its arguments, in its closure, in the globals it names, and those
of the user's functions found on the way. Plain values found there are part of the key, so that a
changed number or flag is a new trace; arrays and other objects count by identity.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType
from typing import Any, Final

from triplane.unified_ir.frontend.binding import Parameter
from triplane.unified_ir.frontend.owner import Owner
from triplane.unified_ir.frontend.source import belongs_to_user
from triplane.unified_ir.ir.dims import Expr
from triplane.unified_ir.ir.types import DType, TensorType
from triplane.unified_ir.ops.trees import leaves

_BY_VALUE: Final = (bool, int, float, complex, str, bytes, Enum, DType, Expr, type(None))
_OWN: Final = frozenset({"_parameters", "_cells", "training"})


class Identity:
    """Equal to another only while both stand for the same living object."""

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._get: Any = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return False
        mine = self._get()
        return mine is not None and mine is other._get()


def value_key(x: Any) -> Any:
    """A hashable stand-in for a value that a trace bakes in."""
    if isinstance(x, TensorType):
        return x
    if isinstance(x, _BY_VALUE):
        return type(x), repr(x)
    if isinstance(x, Owner):
        return state_key(x)
    if isinstance(x, (tuple, list)):
        return type(x), tuple(value_key(v) for v in x)
    if isinstance(x, dict):
        return dict, tuple((value_key(k), value_key(v)) for k, v in x.items())
    return Identity(x)


def state_key(owner: Owner) -> Any:
    """What about a cell changes its graph besides its inputs: modes, attributes, state."""
    modes = tuple((path, cell.training, *(_attribute_keys(cell))) for path, cell in owner.cells())
    state = tuple((k, Identity(p), p.type) for k, p in owner.parameters().items())
    return Identity(owner), modes, state


def _attribute_keys(cell: Owner) -> Iterator[Any]:
    for name, value in cell.__dict__.items():
        if name not in _OWN:
            yield name, Identity(value) if isinstance(value, Owner) else value_key(value)


def held_key(target: Any) -> Any:
    """A key of what a callable holds besides its arguments."""
    if isinstance(target, Owner):
        return state_key(target)
    return tuple((k, value_key(v)) for k, v in _held(target) if not callable(v) or _is_cell(v))


def _is_cell(x: Any) -> bool:
    return isinstance(x, Owner)


def state_of(target: Any, arguments: Mapping[str, Any]) -> dict[str, Parameter]:
    """State by path of the cells that a call of `target` may use."""
    if isinstance(target, Owner):
        return target.parameters()
    found: dict[str, Parameter] = {}
    seen: set[Parameter] = set()
    for label, cell in owners_of(target, arguments):
        for path, parameter in cell.parameters().items():
            if parameter in seen:
                continue
            seen.add(parameter)
            name = f"{label}.{path}" if label else path
            found[name if name not in found else f"{name}_{len(found)}"] = parameter
    return found


def owners_of(target: Any, arguments: Mapping[str, Any]) -> list[tuple[str, Owner]]:
    """The cells that a callable reaches, with the names it knows them by."""
    if isinstance(target, Owner):
        return [("", target)]
    found: list[tuple[str, Owner]] = []
    for name, tree in arguments.items():
        cells = [x for x in leaves(tree) if isinstance(x, Owner)]
        for i, cell in enumerate(cells):
            label = "" if name == "self" else name
            found.append((f"{label}.{i}" if len(cells) > 1 else label, cell))
    return found + [(k, v) for k, v in _held(target) if isinstance(v, Owner)]


def _held(target: Any) -> Iterator[tuple[str, Any]]:
    """Values in the closure and named globals of a callable, and of functions among them."""
    seen: set[int] = set()
    todo = [target]
    while todo:
        f = todo.pop()
        if isinstance(f, MethodType):
            yield "", f.__self__
            f = f.__func__
        while hasattr(f, "__wrapped__"):
            f = f.__wrapped__
        if isinstance(f, Owner):
            yield "", f
        if not isinstance(f, FunctionType) or id(f) in seen or not belongs_to_user(f):
            continue
        seen.add(id(f))
        for name, value in _named(f):
            if isinstance(value, (FunctionType, MethodType)):
                todo.append(value)
            yield name, value


def _named(f: FunctionType) -> Iterator[tuple[str, Any]]:
    code = f.__code__
    for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    for name in code.co_names:
        value = f.__globals__.get(name)
        if isinstance(value, (*_BY_VALUE[:-1], Owner, FunctionType)):
            yield name, value
