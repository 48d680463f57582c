"""Frozen dataclasses as JSON objects by field, and back, strictly.

Reading what was written gives an equal value. A field that is missing, unknown or of another type
is Corrupt, except that one with a default may be missing, since an earlier release may not have
written it. NaN is `null`: JSON has no number for it. The names of fields and the values of enums
are stored names and never change (`tests/golden/cloud_home` holds them).

No library is as strict: msgspec ignores unknown fields of dataclasses and reads no sequences of
other classes, cattrs converts scalars ("3" to 3) unless every type has a hook.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from triplane.proto.errors import Corrupt
from triplane.unified_ir.federated.core.run_plan import OMIT_DEFAULT

T = TypeVar("T")
Read = Callable[[Any], Any]
Write = Callable[[Any], Any]

MAX_SHOWN_CHARS: Final = 80


def to_json(value: Any) -> str:
    """Write the value's fields in their order, without spaces."""
    return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)


def from_json(kind: type[T], text: str) -> T:
    """Return the value that `to_json` wrote. Corrupt: it is anything else."""
    try:
        stored = json.loads(text)
    except ValueError as error:
        raise Corrupt(f"a stored {kind.__name__} is not JSON: {error}; restore a backup") from error
    wanted: Any = kind
    value: T = _reader(wanted)(stored)
    return value


def _plain(value: Any) -> Any:
    kind: Any = type(value)
    return _writer(kind)(value)


@cache
def _writer(kind: type) -> Write:
    """Return a function that makes plain values for JSON from values of `kind`."""
    if dataclasses.is_dataclass(kind):
        fields = [(f.name, OMIT_DEFAULT in f.metadata, f.default) for f in dataclasses.fields(kind)]
        return lambda value: {
            name: _plain(item)
            for name, omits, default in fields
            if (item := getattr(value, name)) != default or not omits
        }
    if issubclass(kind, Enum):
        return lambda value: value.value
    if issubclass(kind, float):
        return lambda value: None if math.isnan(value) else value
    if issubclass(kind, Mapping):
        return lambda value: {str(key): _plain(item) for key, item in value.items()}
    if issubclass(kind, Sequence) and not issubclass(kind, str):
        return lambda value: [_plain(item) for item in value]
    return lambda value: value


@cache
def _reader(kind: Any) -> Read:
    """Return a function that makes a value of `kind` from parsed JSON."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        assert arguments[1:] == (type(None),), "a union is of a type and None"
        read = _reader(arguments[0])
        return lambda stored: None if stored is None else read(stored)
    if origin is tuple and arguments[1:] != (...,):
        return _fixed([_reader(item) for item in arguments])
    if origin in (tuple, Sequence):
        read = _reader(arguments[0])
        return lambda stored: tuple(read(item) for item in _checked(list, stored))
    if origin is not None and issubclass(origin, Mapping):
        read = _reader(arguments[1])
        return lambda stored: {key: read(item) for key, item in _checked(dict, stored).items()}
    if dataclasses.is_dataclass(kind):
        return _fields(kind)
    if issubclass(kind, Enum):
        return lambda stored: _chosen(kind, stored)
    return lambda stored: _scalar(kind, stored)


def _fixed(reads: list[Read]) -> Read:
    def fixed(stored: Any) -> tuple[Any, ...]:
        if len(_checked(list, stored)) != len(reads):
            raise _corrupt(f"{len(reads)} entries", stored)
        return tuple(read(item) for read, item in zip(reads, stored, strict=True))

    return fixed


def _fields(kind: Any) -> Read:
    hints = get_type_hints(kind)
    reads = {f.name: _reader(hints[f.name]) for f in dataclasses.fields(kind)}
    needed = {f.name for f in dataclasses.fields(kind) if _is_needed(f)}

    def make(stored: Any) -> Any:
        # An unknown field is refused, too: a newer release may have written it, and dropping it
        # would change what the event means.
        if not needed <= _checked(dict, stored).keys() <= reads.keys():
            raise _corrupt(f"the fields {sorted(reads)} of {kind.__name__}", sorted(stored))
        return kind(**{name: reads[name](value) for name, value in stored.items()})

    return make


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _chosen(kind: type[Enum], stored: Any) -> Enum:
    try:
        return kind(stored)
    except ValueError as error:
        raise _corrupt(f"one of {[e.value for e in kind]}", stored) from error


def _scalar(kind: type, stored: Any) -> Any:
    if kind is float:
        if stored is None:
            return math.nan
        # A float without a fraction may be stored as 3 by another writer; a bool is never a number.
        if type(stored) not in (int, float) or math.isinf(stored):
            raise _corrupt("a finite number", stored)
        return float(stored)
    # Not isinstance: true would pass as an int.
    if type(stored) is not kind:
        raise _corrupt(kind.__name__, stored)
    return stored


def _checked(kind: type, stored: Any) -> Any:
    if not isinstance(stored, kind):
        raise _corrupt(f"a {kind.__name__}", stored)
    return stored


def _corrupt(wanted: str, stored: Any) -> Corrupt:
    shown = repr(stored)[:MAX_SHOWN_CHARS]
    return Corrupt(f"the journal of runs needs {wanted}, found {shown}; restore a backup")
