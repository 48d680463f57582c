"""The cache of programs compiled from a callable.

Programs are stored on the cell or function itself and live as long as it does. A program is looked
up by the signature of the arguments and used while its guard holds. If a trace changes something
that it reads (it counts calls, fills a list, or draws from a random generator), its program is not
cached: such code is traced at every call and behaves as in Python.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import FunctionType, MethodType
from typing import Any, Final, TypeVar

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import Program
from triplane.unified_ir.frontend.binding import Parameter, StateTree
from triplane.unified_ir.frontend.guards import TraceGuard
from triplane.unified_ir.frontend.trace import Traceable, Traced, name_of
from triplane.unified_ir.frontend.traced_call import at_users_line

CACHE_SIZE: Final = 64
"""Number of programs cached per cell or function; beyond it the oldest ones are dropped."""

MANY_TRACES: Final = 20
"""Number of traces, each because something changed that the last one read, before a warning; and
number of shapes, or of objects, of one argument."""

MANY_VALUES: Final = 8
"""Number of values of one argument, a Python number, before a warning."""

_KEY: Final = "_triplane_programs"
_DERIVED: Final = "_triplane_derived"
Transform = TypeVar("Transform", bound=Callable[..., Any])

_lock: Final = Lock()
_others: Final[weakref.WeakKeyDictionary[Any, dict[Any, Programs]]] = weakref.WeakKeyDictionary()
"""Programs of methods, and of callables that are neither functions nor cells."""


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A traced function ready to run."""

    traced: Traced
    program: Program
    guard: TraceGuard
    state: tuple[Parameter, ...]
    """State whose arrays are passed after the arguments."""
    assigned: tuple[tuple[int, Parameter], ...]
    """The results that are new values of buffers: (index of the result, buffer)."""
    single: bool
    """Whether the function returns the first result itself rather than a tree."""


class ObjectIdentity:
    """A key for an object, by identity: equal to another only while the same object is alive."""

    def __init__(self, value: Any) -> None:
        # An id alone is not a key: Python reuses it once the object is gone. The weak reference
        # tells the two objects apart and does not keep the first one alive.
        self._hash = id(value)
        try:
            self._get: Any = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def is_gone(self) -> bool:
        """Return whether the object is no longer alive."""
        return self._get() is None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectIdentity):
            return False
        mine = self._get()
        return mine is not None and mine is other._get()


@dataclass(frozen=True, slots=True)
class _Varying:
    """How an argument may cause a compilation at each call: what is said after `limit` of them."""

    limit: int
    text: str


_NUMBERS: Final = {int: "int64", float: "float32", complex: "complex64"}
_VARYING: Final = {
    "number": _Varying(
        MANY_VALUES,
        "values of its argument {name!r}, a Python number, now {value}. Each new value is "
        "compiled: pass np.{dtype}({name}), unless shapes or the course of the code depend on it",
    ),
    "object": _Varying(
        MANY_TRACES,
        "objects that its argument {name!r} was. Each new object is compiled: construct it once, "
        "before the loop",
    ),
    "shape": _Varying(
        MANY_TRACES,
        "shapes of its argument {name!r}, now {value}. Each new shape is compiled: pad arrays to a "
        "few shapes, or let a Trainer run, whose batch axis may have any size",
    ),
}


def _varying(part: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str, Hashable]]:
    """Yield (path, kind of `_VARYING`, value) of each leaf of a part of a signature."""
    if isinstance(part, ObjectIdentity):
        yield path, "object", part
    elif isinstance(part, tuple) and part:
        if isinstance(part[0], np.dtype):
            yield path, "shape", part[1]
        elif part[0] in _NUMBERS:
            yield path, "number", part
        else:
            for i, inner in enumerate(part):
                yield from _varying(inner, (*path, i))


def _is_unused(part: Any) -> bool:
    """Return whether a part of a signature has an object that is no longer alive."""
    if isinstance(part, ObjectIdentity):
        return part.is_gone()
    return isinstance(part, tuple) and any(map(_is_unused, part))


class Programs:
    """The cached programs of one callable."""

    def __init__(self, target: Traceable) -> None:
        self._of = ObjectIdentity(target)
        self._target = name_of(target)
        function = target.construct if isinstance(target, StateTree) else target
        self._signature = inspect.signature(function)
        self._by_key: dict[Any, tuple[Compiled, ...]] = {}
        self._retraced = 0
        self._seen: defaultdict[Any, set[Hashable]] = defaultdict(set)
        self._warned: set[str] = set()

    def belongs_to(self, owner: Any) -> bool:
        """Return whether these programs belong to this object.

        `functools.wraps` copies the attributes of a function, and so this cache, to its wrapper.
        """
        return self._of == ObjectIdentity(owner)

    def ordered(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return one form for all ways to pass the same arguments: by position where possible."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInput(f"{self._target}: {error}") from None
        return bound.args, bound.kwargs

    def find(self, key: Any) -> Compiled | None:
        """Return a program for such arguments whose guard holds; None if there is none."""
        # One signature can have several programs, one per set of values that the trace read:
        # `train()` and `eval()` alternate between two.
        return next((c for c in self._by_key.get(key, ()) if c.guard.holds()), None)

    def keep(self, key: Any, compiled: Compiled) -> None:
        """Keep a program for `find`, unless recording it changed what it reads."""
        if key not in self._by_key:
            self._count_values(key)
        last = self._by_key.get(key, ())[:1]
        change = compiled.guard.changed() or compiled.guard.drawn()
        self._count(change or (last[0].guard.changed() if last else None))
        if change is not None:
            return
        with _lock:
            # Popped and inserted again, so the dict is ordered by the last compilation of each key.
            older = self._by_key.pop(key, ())
            self._by_key[key] = (compiled, *older)[:CACHE_SIZE]
            # No call can use the programs of a cell that is gone, but they hold its parameters.
            for unused in list(filter(_is_unused, self._by_key)):
                del self._by_key[unused]
            while sum(map(len, self._by_key.values())) > CACHE_SIZE:
                first = next(iter(self._by_key))
                self._by_key[first] = self._by_key[first][:-1]
                if not self._by_key[first]:
                    del self._by_key[first]

    def _count(self, change: str | None) -> None:
        """Warn, once, of a function that is compiled again and again, and of what changes."""
        self._retraced += change is not None
        if change is not None and self._retraced == MANY_TRACES:
            self._warn(
                f"{MANY_TRACES} times because what it reads changes between calls, this time "
                f"{change}; keep that outside of what the function reaches, or pass it as an array"
            )

    def _count_values(self, key: Any) -> None:
        """Warn, once, of an argument with so many values that each call may be compiled."""
        for path, kind, value in self._leaves(key):
            known, row = self._seen[path, kind], _VARYING[kind]
            if kind in self._warned or value in known:
                continue
            known.add(value)
            if len(known) == row.limit:
                self._warned.add(kind)
                shown, dtype = value, ""
                if kind == "number":
                    dtype, shown = _NUMBERS[value[0]], value[1]  # type: ignore[index]
                said = row.text.format(name=path[0], value=shown, dtype=dtype)
                self._warn(f"for {row.limit} {said}")

    def _leaves(self, key: Any) -> Iterator[tuple[tuple[Any, ...], str, Hashable]]:
        """Yield what may vary in a signature; each path begins with the argument's name."""
        _, count, *parts = key
        names = list(self._signature.parameters) or ["args"]
        for i, part in enumerate(parts[:count]):
            yield from _varying(part, (names[min(i, len(names) - 1)], i))
        for name, part in parts[count:]:
            yield from _varying(part, (name,))

    def _warn(self, said: str) -> None:
        text = f"{self._target} was compiled {said}{at_users_line()}"
        warnings.warn(text, UserWarning, stacklevel=6)


def programs_of(target: Any) -> Programs:
    """Return the programs of a cell, a function, or a method of some object."""
    if isinstance(target, StateTree):
        try:
            programs: Programs = target._programs_
        except AttributeError:
            programs = Programs(target)
            object.__setattr__(target, "_programs_", programs)
        return programs
    if isinstance(target, FunctionType):
        known = target.__dict__.get(_KEY)
        if known is None or not known.belongs_to(target):
            known = target.__dict__[_KEY] = Programs(target)
        return known
    is_method = isinstance(target, MethodType)  # a new object at each access
    owner, function = (target.__self__, target.__func__) if is_method else (target, None)
    others = _others.setdefault(owner, {})
    if function not in others:
        others[function] = Programs(target)
    return others[function]


def derived_once(transform: Transform) -> Transform:
    """Decorator: transform a Python function once for each set of options.

    What `grad(f)` returns has programs of its own, which a second `grad(f)` would compile again.
    It is stored on `f` and lives as long.
    """

    @functools.wraps(transform)
    def once(f: Any, *args: Any, **kwargs: Any) -> Any:
        options = (transform.__name__, args, tuple(sorted(kwargs.items())))
        try:
            hash(options)
        except TypeError:  # a list, or a dict of axes
            return transform(f, *args, **kwargs)
        if not isinstance(f, FunctionType):
            return transform(f, *args, **kwargs)
        # `functools.wraps` copies attributes to a wrapper, hence the comparison.
        of, derived = f.__dict__.get(_DERIVED, (None, {}))
        if of is not f:
            of, derived = f.__dict__[_DERIVED] = f, {}
        if options not in derived:
            derived[options] = transform(f, *args, **kwargs)
        return derived[options]

    return once  # type: ignore[return-value]
