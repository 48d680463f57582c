"""The cache of programs compiled from a callable.

Programs are stored on the cell or function itself and live as long as it does. A program is looked
up by the signature of the arguments and used while its guard holds. If a trace changes something
that it reads (it counts calls, or fills a list), its program is not cached: such code is traced at
every call and behaves as in Python.
"""

from __future__ import annotations

import inspect
import warnings
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
"""Number of programs cached per cell or function; beyond it the oldest ones are dropped."""

MANY_TRACES: Final = 20
"""Number of traces, each because something changed that the last one read, before a warning."""

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

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectIdentity):
            return False
        mine = self._get()
        return mine is not None and mine is other._get()


class Programs:
    """The cached programs of one callable."""

    def __init__(self, target: Traceable) -> None:
        self._of = ObjectIdentity(target)
        self._target = name_of(target)
        function = target.construct if isinstance(target, StateTree) else target
        self._signature = inspect.signature(function)
        self._by_key: dict[Any, tuple[Compiled, ...]] = {}
        self._retraced = 0

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
        last = self._by_key.get(key, ())[:1]
        change = compiled.guard.changed()
        self._count(change or (last[0].guard.changed() if last else None))
        if change is not None:
            return
        with _lock:
            # Popped and inserted again, so the dict is ordered by the last compilation of each key.
            older = self._by_key.pop(key, ())
            self._by_key[key] = (compiled, *older)[:CACHE_SIZE]
            while sum(map(len, self._by_key.values())) > CACHE_SIZE:
                first = next(iter(self._by_key))
                self._by_key[first] = self._by_key[first][:-1]
                if not self._by_key[first]:
                    del self._by_key[first]

    def _count(self, change: str | None) -> None:
        """Warn, once, of a function that is compiled again and again, and of what changes."""
        self._retraced += change is not None
        if change is not None and self._retraced == MANY_TRACES:
            warnings.warn(
                f"{self._target} was compiled {MANY_TRACES} times because what it reads changes "
                f"between calls, this time {change}; keep that outside of what the function "
                "reaches, or pass it as an array",
                UserWarning,
                stacklevel=5,
            )


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
