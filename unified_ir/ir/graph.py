"""The graph: values, nodes, functions, modules. Immutable once built.

Invariants: a `Function` is in static single assignment form and closed (regions take what they use
as operands); the symbols in its types are implicit size parameters, each defined by the first value
in scope that has the bare symbol as a dimension. In a `Module` a parameter named like a state
tensor *is* that state, and a result of that name is its new value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.types import DType, TensorType, type_of

Array = np.ndarray[Any, Any]
Attr = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | Array | DType
"""An attribute; a tuple of `Dim` (with symbols) is allowed where a row declares it."""
AttrValue = Attr | tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class OpId:
    """What an operator means: the definition of `name` in `domain` that holds since `since`."""

    domain: str
    name: str
    since: int

    def __str__(self) -> str:
        return f"{self.domain}.{self.name}" if self.domain else self.name


@dataclass(frozen=True, slots=True)
class Location:
    """A line of the user's source; `file` is relative to its import root, never absolute."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Meta:
    """Where a node comes from. It never changes what the node computes."""

    location: Location | None = None
    scope: str = ""


NO_META: Final = Meta()


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One SSA value, equal only to itself; `name` matters for parameters, elsewhere it is a hint."""

    type: TensorType
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One application of an operator; an absent optional operand is None."""

    op: OpId
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    regions: tuple[Function, ...] = ()
    meta: Meta = NO_META


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A closed graph with named parameters and named results."""

    name: str
    params: tuple[Value, ...]
    results: tuple[Value, ...]
    result_names: tuple[str, ...]
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        _check_names(self.name, "parameter", [p.name for p in self.params])
        _check_names(self.name, "result", self.result_names)
        if len(self.results) != len(self.result_names):
            raise InvalidInput(
                f"function {self.name!r} has {len(self.results)} results and "
                f"{len(self.result_names)} result names; give one name each"
            )

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(p.name for p in self.params)

    def param(self, name: str) -> Value:
        """The parameter called `name`."""
        for p in self.params:
            if p.name == name:
                return p
        raise InvalidInput(
            f"function {self.name!r} has no parameter {name!r}; it has {', '.join(self.param_names)}"
        )

    def result(self, name: str) -> Value:
        """The result called `name`."""
        if name not in self.result_names:
            raise InvalidInput(
                f"function {self.name!r} has no result {name!r}; "
                f"it has {', '.join(self.result_names)}"
            )
        return self.results[self.result_names.index(name)]

    def walk(self) -> Iterator[Node]:
        """Every node, those of regions after the node that holds them."""
        for node in self.nodes:
            yield node
            for region in node.regions:
                yield from region.walk()


class Role(StrEnum):
    """What a state tensor is for. No wire has a field for a personal one."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    KEY = "key"
    PERSONAL = "personal"


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A named tensor that outlives a call."""

    role: Role
    array: Array

    @property
    def type(self) -> TensorType:
        """Element type and static shape."""
        return type_of(self.array)


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """Functions, the entries that name them, and the state they share.

    `entries` maps an entry (`predict`, `train_step`, ...) to a function name; `meta` is free text
    by key (class names, preprocessing, how it was made).
    """

    functions: Mapping[str, Function]
    entries: Mapping[str, str]
    state: Mapping[str, StateTensor]
    meta: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry, name in self.entries.items():
            if name not in self.functions:
                raise InvalidInput(
                    f"entry {entry!r} names function {name!r}; the module has "
                    f"{', '.join(self.functions) or 'none'}"
                )
        for function in self.functions.values():
            _check_state(function, self.state)

    def entry(self, name: str) -> Function:
        """The function of an entry."""
        if name not in self.entries:
            raise InvalidInput(f"no entry {name!r}; the module has {', '.join(self.entries)}")
        return self.functions[self.entries[name]]

    def inputs(self, entry: str) -> tuple[Value, ...]:
        """Parameters of an entry that the caller supplies (all but state)."""
        return tuple(p for p in self.entry(entry).params if p.name not in self.state)

    def assigned(self, entry: str) -> tuple[str, ...]:
        """State that one call of the entry replaces."""
        return tuple(r for r in self.entry(entry).result_names if r in self.state)


def _check_names(function: str, kind: str, names: list[str] | tuple[str, ...]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name or name in seen:
            raise InvalidInput(
                f"each {kind} of function {function!r} needs a name of its own, got {name!r} "
                f"{'twice' if name else 'empty'}"
            )
        seen.add(name)


def _check_state(function: Function, state: Mapping[str, StateTensor]) -> None:
    named = [(p.name, p.type) for p in function.params]
    named += [(n, v.type) for n, v in zip(function.result_names, function.results, strict=True)]
    for name, type_ in named:
        if name in state and type_ != state[name].type:
            raise InvalidInput(
                f"function {function.name!r} uses state {name!r} as {type_}, "
                f"but the state tensor is {state[name].type}"
            )
