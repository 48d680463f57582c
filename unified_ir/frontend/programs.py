"""Programs compiled from a callable, and when one may be used again.

They belong to the cell or function itself and live as long as it does. A program is looked up by
the signature of the arguments and used while its guard holds. A trace that changes what it reads
(it counts something, it fills a list) is not kept: such code is traced at every call, and behaves
as in Python.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from types import FunctionType, MethodType
from typing import Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import Program
from triplane.unified_ir.frontend.binding import Parameter, StateTree
from triplane.unified_ir.frontend.guards import TraceGuard
from triplane.unified_ir.frontend.trace import Traceable, Traced, name_of

CACHE_SIZE: Final = 64
"""Programs kept per cell or function; the least recently used one is dropped first."""

_KEY: Final = "_triplane_programs"
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
    """State whose arrays follow the arguments."""
    assigned: tuple[tuple[int, Parameter], ...]
    """Results that are new values of buffers, by index."""
    single: bool
    """The function returns the first result itself."""


class ObjectIdentity:
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
        if not isinstance(other, ObjectIdentity):
            return False
        mine = self._get()
        return mine is not None and mine is other._get()


class Programs:
    """The programs of one callable."""

    def __init__(self, target: Traceable) -> None:
        self._of = ObjectIdentity(target)
        self._target = name_of(target)
        function = target.construct if isinstance(target, StateTree) else target
        self._signature = inspect.signature(function)
        self._by_key: dict[Any, tuple[Compiled, ...]] = {}

    def belongs_to(self, owner: Any) -> bool:
        """Return whether they belong to this very object; function attributes get copied."""
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
        return next((c for c in self._by_key.get(key, ()) if c.guard.holds()), None)

    def keep(self, key: Any, compiled: Compiled) -> None:
        """Keep a program for `find`, unless recording it changed what it reads."""
        if not compiled.guard.holds():
            return
        with _lock:
            older = self._by_key.pop(key, ())
            self._by_key[key] = (compiled, *older)[:CACHE_SIZE]
            while sum(map(len, self._by_key.values())) > CACHE_SIZE:
                first = next(iter(self._by_key))
                self._by_key[first] = self._by_key[first][:-1]
                if not self._by_key[first]:
                    del self._by_key[first]


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
