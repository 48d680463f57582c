"""Find the cells that a callable reaches; its trace may read their state by name.

A function reaches the cells among its arguments, in its closure and in the globals that it names,
in lists, dicts and attributes of the user's objects among these, and the cells that the user's
functions among these reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from triplane.unified_ir.frontend.binding import MAX_NESTING, Parameter, StateTree
from triplane.unified_ir.frontend.guards import is_users
from triplane.unified_ir.frontend.source import belongs_to_user, contents
from triplane.unified_ir.ops.trees import leaves


def state_of(target: Any, arguments: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the state, by path, of the cells that a call of `target` may use."""
    if isinstance(target, StateTree):
        return target.parameters()
    state: dict[str, Parameter] = {}
    seen: set[Parameter] = set()
    for label, cell in state_trees_of(target, arguments):
        for path, parameter in cell.parameters().items():
            if parameter in seen:
                continue
            seen.add(parameter)
            # Different cells can be reached under the same name, from different functions; a number
            # keeps their paths apart.
            name = f"{label}.{path}" if label else path
            state[name if name not in state else f"{name}_{len(state)}"] = parameter
    return state


def state_trees_of(target: Any, arguments: Mapping[str, Any]) -> list[tuple[str, StateTree]]:
    """Return the cells that a callable reaches, with the names by which it refers to them."""
    if isinstance(target, StateTree):
        return [("", target)]
    owners: list[tuple[str, StateTree]] = []
    others: list[tuple[str, Any]] = []
    for name, tree in arguments.items():
        flat, label = leaves(tree), "" if name == "self" else name
        cells = [x for x in flat if isinstance(x, StateTree)]
        for i, cell in enumerate(cells):
            owners.append((f"{label}.{i}" if len(cells) > 1 else label, cell))
        others += [(label, x) for x in flat if not isinstance(x, StateTree)]
    seen: set[int] = set()
    for name, value in (*others, *_reached_values(target)):
        owners += _cells_within(name, value, seen)
    return owners


def _cells_within(
    label: str, value: Any, seen: set[int], depth: int = 0
) -> Iterator[tuple[str, StateTree]]:
    """Yield a cell itself, or the cells in a container or an object of the user's."""
    if isinstance(value, StateTree):
        yield label, value
        return
    items: Mapping[Any, Any] = {}
    kind: type = type(value)
    if isinstance(value, dict):
        items = value
    elif isinstance(value, (list, tuple)):
        items = dict(enumerate(value))
    elif isinstance(value, SimpleNamespace) or is_users(kind):
        items = getattr(value, "__dict__", {})
    if not items or id(value) in seen or depth == MAX_NESTING:
        return
    seen.add(id(value))
    for key, item in list(items.items()):
        yield from _cells_within(f"{label}.{key}".lstrip("."), item, seen, depth + 1)


def _reached_values(target: Any) -> Iterator[tuple[str, Any]]:
    """Yield values in the closure and named globals of a callable and of functions among them."""
    seen: set[int] = set()
    todo = [target]
    while todo:
        f = todo.pop()
        while isinstance(f, MethodType) or hasattr(f, "__wrapped__"):
            if isinstance(f, MethodType):
                yield "", f.__self__
            f = f.__func__ if isinstance(f, MethodType) else f.__wrapped__
        if isinstance(f, StateTree):
            yield "", f
        if isinstance(f, partial):
            todo += [f.func, *f.args, *f.keywords.values()]
        if not isinstance(f, FunctionType) or id(f) in seen:
            continue
        seen.add(id(f))
        for name, value in _named(f):
            if isinstance(value, (FunctionType, MethodType, partial)):
                todo.append(value)
            yield name, value


def _named(f: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield names and values; of this package's wrappers (transforms) only the closure."""
    code, own = f.__code__, belongs_to_user(f)
    for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
        yield name if own else "", contents(cell)
    for name in dict.fromkeys(_names(code)) if own else ():
        value = f.__globals__.get(name)
        if not isinstance(value, (type, ModuleType)):
            yield name, value


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes in a function and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
