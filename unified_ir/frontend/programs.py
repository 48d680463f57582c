"""Programs compiled of a callable, and when one may be used again.

They belong to the cell or function itself and go with it. A program is found by what the arguments
are, and used while its watch holds. A trace that changes what is watched (it counts something, it
fills a list) is not kept: such code runs at every call, as it would in Python.
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
from triplane.unified_ir.frontend.binding import Parameter
from triplane.unified_ir.frontend.guards import TraceGuard
from triplane.unified_ir.frontend.state_tree import StateTree
from triplane.unified_ir.frontend.trace import Traceable, Traced, name_of

CACHE_SIZE: Final = 64
"""Programs kept per cell or function; the one not used for longest goes first."""

_KEY: Final = "_triplane_programs"
_lock: Final = Lock()
_others: Final[weakref.WeakKeyDictionary[Any, dict[Any, Programs]]] = weakref.WeakKeyDictionary()
"""Programs of methods, and of callables that are neither functions nor cells."""


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A traced function ready to run."""

    done: Traced
    program: Program
    watch: TraceGuard
    state: tuple[Parameter, ...]
    """Whose arrays follow the arguments."""
    assigned: tuple[tuple[int, Parameter], ...]
    """Which results are new values of buffers."""
    single: bool
    """The first result is what the function gives."""


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
        self._found: dict[Any, tuple[Compiled, ...]] = {}

    def belongs_to(self, owner: Any) -> bool:
        """Whether they were compiled of this very object; function attributes get copied."""
        return self._of == ObjectIdentity(owner)

    def ordered(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """One form for all ways to pass the same arguments: by position where that is possible."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInput(f"{self._target}: {error}") from None
        return bound.args, bound.kwargs

    def find(self, key: Any) -> Compiled | None:
        """A program for such arguments whose watch holds."""
        for found in self._found.get(key, ()):
            if found.watch.holds():
                return found
        return None

    def keep(self, key: Any, made: Compiled) -> None:
        """Lets `find` find it, unless recording it changed what it watches."""
        if not made.watch.holds():
            return
        with _lock:
            older = self._found.pop(key, ())
            self._found[key] = (made, *older)[:CACHE_SIZE]
            while sum(map(len, self._found.values())) > CACHE_SIZE:
                first = next(iter(self._found))
                self._found[first] = self._found[first][:-1]
                if not self._found[first]:
                    del self._found[first]


def programs_of(target: Traceable) -> Programs:
    """The programs of a cell, a function, or a method of some object."""
    if isinstance(target, StateTree):
        try:
            found: Programs = target._programs_
        except AttributeError:
            found = Programs(target)
            object.__setattr__(target, "_programs_", found)
        return found
    if isinstance(target, FunctionType):
        known = target.__dict__.get(_KEY)
        if known is None or not known.belongs_to(target):
            known = target.__dict__[_KEY] = Programs(target)
        return known
    return _of_other(target)


def _of_other(target: Any) -> Programs:
    """A method is a new object each time it is read; its object and its function stay."""
    owner, function = target, None
    if isinstance(target, MethodType):
        owner, function = target.__self__, target.__func__
    found = _others.setdefault(owner, {})
    if function not in found:
        found[function] = Programs(target)
    return found[function]
