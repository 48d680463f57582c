"""Guards of a trace: everything it reads besides its arguments, and whether any of it has changed.

A trace bakes in the values that Python holds at that moment: attributes of cells and of other
objects, items of lists and dicts, closures, globals, defaults, class attributes, methods. A
`TraceGuard` records them all before the trace by following references; a program is reused only
while none of them has changed. Values are compared by identity, plain values also by value, and
writeable arrays by a checksum of their bytes. A read-only array cannot change and is not compared,
so make a large table read-only: `table.flags.writeable = False`.

Objects of the standard library, of this package's own layers and of installed packages are not
followed but compared by identity, except cells and dataclasses.
"""

from __future__ import annotations

import dis
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache, partial
from importlib.util import resolve_name
from operator import is_
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import Parameter, StateTree
from triplane.unified_ir.frontend.source import (
    MISSING,
    belongs_to_user,
    contents,
    is_installed,
    is_users_file,
)
from triplane.unified_ir.ir.dims import Expr
from triplane.unified_ir.ir.types import DType, TensorType

MAX_GUARDS: Final = 100_000
"""Number of containers that one callable may reach; each is compared at every call."""

PLAIN: Final = (
    bool, int, float, complex, str, bytes, Enum, DType, Expr, TensorType, type(None), np.generic,
    np.dtype,
)  # fmt: skip
"""Immutable types; two values are equal if their types and their `repr` are."""

_IMPORT: Final = "import "
"""Prefix of the first part of a path that stands for an `import` inside a function."""


class Guard(Protocol):
    """Remembers one value or container, and finds out whether it has changed."""

    def changed(self) -> str | None:
        """Return what has changed, by name; None while nothing has."""
        ...


class TraceGuard:
    """Guards of everything that the given callables and objects reach."""

    def __init__(self, targets: Iterable[Any], named: Iterable[tuple[Any, str]] = ()) -> None:
        self._guards: list[Guard] = []
        self._draws = [_draws_of(module, name) for module, name in _OF_MODULES]
        self._seen: dict[int, Any] = {}
        todo: list[tuple[Any, str]] = [*((target, _name(target)) for target in targets), *named]
        while todo:
            value, label = todo.pop()
            if _is_fixed(value) or id(value) in self._seen:
                continue
            # Holds the value, not only its id: an object made on the way (a bound method) could
            # die, and another one would get its id.
            self._seen[id(value)] = value
            if isinstance(value, _GENERATORS):
                self._draws.append(_draws_of(value, label))
            todo.extend(_follow(value, label, self._guards.append))
            if len(self._guards) > MAX_GUARDS:
                raise InvalidInput(
                    f"a trace must guard all that it reads, but {_name(value)} ({label}) leads to "
                    f"more than {MAX_GUARDS:,} lists, dicts and objects; pass what it needs instead"
                )
        self._seen.clear()

    def changed(self) -> str | None:
        """Return the first thing that has changed, by name; None while nothing has."""
        for guard in self._guards:  # a plain loop: it runs at every call
            change = guard.changed()
            if change is not None:
                return change
        return None

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        return self.changed() is None

    def drawn(self) -> str | None:
        """Return the random generator that has drawn numbers, by name; None if none has.

        This is asked right after a trace and not at each call, because others may draw from a
        generator too, and what a trace did not draw does not concern it.
        """
        return next(filter(None, (guard.changed() for guard in self._draws)), None)


def named_values(functions: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return the values of the variables and globals that functions name, with those names."""
    values: list[tuple[Any, str]] = []
    for f in functions:
        inner = f
        while isinstance(inner, MethodType):
            inner = inner.__func__
        if isinstance(inner, FunctionType) and not belongs_to_user(inner):
            values += named_values(contents(c) for c in inner.__closure__ or ())
        elif isinstance(inner, FunctionType):
            free = inner.__code__.co_freevars
            cells = zip(free, inner.__closure__ or (), strict=True)
            values += [(contents(cell), name) for name, cell in cells]
            values += [
                (_outer(inner, path), path[0])
                for path in _named_paths(inner.__code__)
                if path[0] not in free
            ]
    return values


class _Attributes:
    """Values by name, in any order: attributes of an object or a class."""

    __slots__ = ("keys", "label", "space", "values")

    def __init__(self, space: Mapping[Any, Any], label: str) -> None:
        self.space, self.label = space, label
        self.keys, self.values = list(space), list(space.values())

    def changed(self) -> str | None:
        now = self.space
        # The common case, at every call: identity of all values, compared in C. `map` stops at the
        # shorter side, but then the keys differ too.
        if all(map(is_, now.values(), self.values)) and list(now) == self.keys:
            return None
        odd = self._odd_keys()
        if odd:
            return f"{self.label} ({', '.join(odd)})"
        for key, before in zip(self.keys, self.values, strict=True):
            if not _same(before, now[key]):
                return f"{self.label}.{key}"
        return None

    def _odd_keys(self) -> list[str]:
        return sorted(map(str, set(self.space) ^ set(self.keys)))


class _Dict(_Attributes):
    """A dict; its order matters."""

    __slots__ = ()

    def _odd_keys(self) -> list[str]:
        same = list(self.space) == self.keys
        return [] if same else super()._odd_keys() or ["the order of its keys"]


class _Items:
    """A list or set and its items."""

    __slots__ = ("items", "label", "values")

    def __init__(self, items: Any, label: str) -> None:
        self.items, self.values, self.label = items, list(items), label

    def changed(self) -> str | None:
        if len(self.items) == len(self.values) and all(map(is_, self.items, self.values)):
            return None
        now = list(self.items)
        same = len(now) == len(self.values) and all(map(_same, self.values, now))
        return None if same else self.label


class _Value:
    """A value that is read again and compared: an array's contents, an iterator's position."""

    __slots__ = ("label", "read", "value")

    def __init__(self, read: Callable[[], Any], label: str) -> None:
        self.read, self.label = read, label
        self.value = read()

    def changed(self) -> str | None:
        return None if self.read() == self.value else self.label


_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)
_OF_MODULES: Final = ((random, "of random"), (np.random, "of np.random"))


def _draws_of(generator: Any, name: str) -> _Value:
    """Return a guard of a random generator's state, or of the one that a module's functions use."""
    return _Value(partial(_state_of, generator), f"the random generator {name}")


def _state_of(generator: Any) -> int:
    if isinstance(generator, random.SystemRandom):
        return 0  # it has no state
    if isinstance(generator, np.random.Generator):
        state: Any = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState) or generator is np.random:
        state = generator.get_state()
    else:
        state = generator.getstate()
    return hash(repr(state))


def _position(iterator: Any) -> Any:
    """Return a value that changes on `next`, for generators and Python's own iterators."""
    if isinstance(iterator, GeneratorType):
        return None if iterator.gi_frame is None else iterator.gi_frame.f_lasti
    hint = getattr(iterator, "__length_hint__", None)
    if hint is not None:
        return hint()
    return [x for x in _parts(iterator) if isinstance(x, int)]


def _parts(iterator: Any) -> list[Any]:
    """Return the iterators and positions inside a built-in iterator (zip, enumerate, ...)."""
    if type(iterator).__module__ != "builtins":
        return []
    try:
        reduced = iterator.__reduce__()
    except TypeError:
        return []
    return [x for part in reduced[1:] if isinstance(part, tuple) for x in part]


def _iterator(iterator: Any, label: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    kind: type = type(iterator)
    if is_users(kind):
        return _object(iterator, label, add_guard)
    add_guard(_Value(partial(_position, iterator), f"the iterator {label}"))
    return [(x, label) for x in _parts(iterator) if isinstance(x, Iterator)]


class _Read:
    """Values read by calls: variables of a closure, globals, defaults, slots."""

    __slots__ = ("label", "reads", "values")

    def __init__(self, reads: list[tuple[str, Callable[[], Any]]], label: str) -> None:
        self.reads, self.label = reads, label
        self.values = [read() for _, read in reads]

    def changed(self) -> str | None:
        for (name, read), before in zip(self.reads, self.values, strict=True):
            after = read()
            if after is not before and not _same(before, after):
                return f"{name} of {self.label}"
        return None


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are the same object or equal plain values, also within tuples."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    # By text, because NaN must equal itself and 0.0 must differ from -0.0.
    return isinstance(a, PLAIN) and repr(a) == repr(b)


def _is_fixed(value: Any) -> bool:
    """Return whether nothing about a value can change."""
    if isinstance(value, PLAIN) or value is MISSING:
        return True
    return isinstance(value, np.ndarray) and not _writeable(value)


def _writeable(array: Any) -> bool:
    """Return whether the array's memory can be written through it or through a base of it."""
    # A read-only view still changes when somebody writes to the array that it was made from.
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return True
        array = array.base
    return False


def _contents_of(array: Any) -> Any:
    """Return the array's type, shape and checksum."""
    if array.dtype.hasobject:
        return array.dtype, array.shape, repr(array.tolist())
    # A checksum rather than a copy, which would double the memory of every array in reach.
    data = np.ascontiguousarray(array).view(np.uint8).data if array.size else b""
    return array.dtype, array.shape, zlib.crc32(data)


def _follow(value: Any, label: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    """Add guards for one value; return the values it leads to."""
    for kinds, rule in _RULES:
        if isinstance(value, kinds):
            reached: list[tuple[Any, str]] = rule(value, label, add_guard)
            return reached
    kind: type = type(value)
    return _object(value, label, add_guard) if is_users(kind) else []


AddGuard = Callable[[Guard], None]
Rule = Callable[[Any, str, AddGuard], list[tuple[Any, str]]]


def _function(f: FunctionType, label: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    """Code, defaults, closure and named globals; of this package's wrappers only the closure."""
    name = f.__qualname__.rsplit("<locals>.", 1)[-1]
    reads: list[tuple[str, Callable[[], Any]]] = []
    for variable, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        reads.append((variable, partial(contents, cell)))
    if belongs_to_user(f):
        # Code and defaults can be replaced in place, for example when a notebook reloads a module.
        reads += [(k, partial(getattr, f, k)) for k in ("__code__", "__defaults__")]
        reads.append(("__kwdefaults__", lambda: tuple((f.__kwdefaults__ or {}).items())))
        # `config.rate`, in a module `config` of the user, is guarded as the value of that
        # attribute.
        for path in _named_paths(f.__code__):
            reads.append((path[0], partial(_outer, f, path)))
    guard = _Read(reads, name)
    add_guard(guard)
    reached = [(v, k) for (k, _), v in zip(reads, guard.values, strict=True)]
    return [*reached, (getattr(f, "__wrapped__", None), label)]


def _outer(f: FunctionType, path: tuple[str, ...]) -> Any:
    """Return the current value of an outer name, or of attributes of a user's module behind one."""
    free = f.__code__.co_freevars
    if path[0].startswith(_IMPORT):
        value = _imported(f, path[0])
    elif path[0] in free:
        value = contents((f.__closure__ or ())[free.index(path[0])])
    else:
        value = f.__globals__.get(path[0], MISSING)
    for name in path[1:]:
        if not isinstance(value, ModuleType) or not _is_users_module(value):
            break
        value = getattr(value, name, MISSING)
    return value


def _imported(f: FunctionType, statement: str) -> Any:
    """Return the module that an `import` inside the function names, once it is loaded."""
    name = statement.removeprefix(_IMPORT)
    if name.startswith("."):
        name = resolve_name(name, str(f.__globals__.get("__package__") or ""))
    return sys.modules.get(name, MISSING)


@lru_cache(maxsize=4096)
def _named_paths(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the outer names that a function or a nested one reads, with attributes that follow."""
    paths: dict[tuple[str, ...], None] = {}
    path: tuple[str, ...] = ()
    levels: list[Any] = [0, 0]
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            # The compiler loads two constants before IMPORT_NAME: the level of a relative import,
            # then the tuple of names. Which attributes of the module are read later is not tracked,
            # so every name of the code counts as one of them.
            module = f"{_IMPORT}{'.' * int(levels[0] or 0)}{step.argval}"
            paths |= {(module, name): None for name in code.co_names if name != step.argval}
        levels = [levels[1], step.argval]
        if step.opname in {"LOAD_GLOBAL", "LOAD_DEREF"}:
            path = (str(step.argval),)
        elif path and step.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
            path = (*path, str(step.argval))
        elif step.opname != "CACHE":
            paths |= {path: None} if path else {}
            path = ()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            paths |= dict.fromkeys(_named_paths(inner))
    return tuple(paths)


def _attributes(*names: str) -> Rule:
    """Return the rule for values that lead to what these attributes hold."""
    return lambda value, label, _: [(getattr(value, name, None), label) for name in names]


def _cell(cell: StateTree, label: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    own, parts = vars(cell), (cell._parameters, cell._cells)  # noqa: SLF001 - what it is made of
    reached: list[tuple[Any, str]] = []
    for space in (own, *parts):
        add_guard((_Attributes if space is own else _Dict)(space, label))
        reached += [(v, f"{label}.{k}") for k, v in space.items() if not any(v is p for p in parts)]
    return [*reached, (type(cell), type(cell).__qualname__)]


def _class(cls: type, _: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    """Attributes and methods of a user's class and of its bases."""
    reached: list[tuple[Any, str]] = []
    for part in cls.__mro__:
        if not is_users(part):
            continue
        add_guard(_Attributes(vars(part), part.__qualname__))
        reached += [(v, f"{part.__qualname__}.{k}") for k, v in vars(part).items()]
    # Not followed: `__init__` ran before the trace, and the others are Python's own descriptors.
    return [x for x in reached if not x[1].endswith((".__init__", ".__dict__", ".__weakref__"))]


def _dict(d: dict[Any, Any], label: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    add_guard(_Dict(d, label))
    return [(v, f"{label}[{k!r}]") for k, v in d.items()]


def _list(items: Any, label: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    add_guard(_Items(items, label))
    return [(v, f"{label}[{i}]") for i, v in enumerate(items)]


def _tuple(items: Any, label: str, _: AddGuard) -> list[tuple[Any, str]]:
    return [(v, f"{label}[{i}]") for i, v in enumerate(items)]


def _array(array: Any, label: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    add_guard(_Value(partial(_contents_of, array), f"the array {label}"))
    return []


def _parameter(p: Parameter, label: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    """Guard element type, shape and whether it is trained; the numbers are an operand."""
    add_guard(_Value(lambda: (p.array.dtype, p.array.shape, p.trainable), label))
    return []


def _object(x: Any, label: str, add_guard: AddGuard) -> list[tuple[Any, str]]:
    """Any other object of the user's: its attributes and its class."""
    reached: list[tuple[Any, str]] = [] if isinstance(x, SimpleNamespace) else [(type(x), label)]
    if isinstance(getattr(x, "__dict__", None), dict):
        add_guard(_Attributes(vars(x), label))
        reached += [(v, f"{label}.{k}") for k, v in vars(x).items()]
    slots = [(s, vars(c)[s]) for c in type(x).__mro__ for s in _slots(c)]
    if slots:
        guard = _Read([(s, partial(_slot, d, x)) for s, d in slots], label)
        add_guard(guard)
        reached += [(v, f"{label}.{s}") for (s, _), v in zip(slots, guard.values, strict=True)]
    return reached


def _slot(descriptor: Any, x: Any) -> Any:
    try:
        return descriptor.__get__(x)
    except AttributeError:
        return MISSING


def _slots(cls: type) -> tuple[str, ...]:
    declared = vars(cls).get("__slots__", ())
    names = (declared,) if isinstance(declared, str) else tuple(declared)
    return tuple(n for n in names if n in vars(cls) and n not in {"__dict__", "__weakref__"})


_RULES: Final[tuple[tuple[Any, Rule], ...]] = (
    # In order of precedence: `_follow` uses the first row that matches.
    (StateTree, _cell),
    (Parameter, _parameter),
    (np.ndarray, _array),
    (dict, _dict),
    ((list, set, frozenset, deque, bytearray), _list),
    (tuple, _tuple),
    (FunctionType, _function),
    (MethodType, _attributes("__func__", "__self__")),
    (partial, _attributes("func", "args", "keywords")),
    (type, _class),
    ((property, staticmethod, classmethod), _attributes("fget", "__func__", "func")),
    (ModuleType, lambda *_: []),
    (SimpleNamespace, _object),
    (Iterator, _iterator),
)


@lru_cache(maxsize=4096)
def is_users(cls: type) -> bool:
    """Return whether a class is the user's own, or a dataclass of an installed package."""
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ == "builtins" or not _is_users_module(module):
        return False
    return is_dataclass(cls) or not is_installed(getattr(module, "__file__", None) or "")


def _is_users_module(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if file is None else is_users_file(file)


def _name(x: Any) -> str:
    if isinstance(x, StateTree):
        return type(x).__name__
    return str(getattr(x, "__qualname__", type(x).__name__))
