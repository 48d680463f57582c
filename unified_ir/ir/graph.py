"""The graph: values, nodes, functions, state. Immutable once built.

Invariants: a `Function` is in static single assignment form and closed (regions take what they use
as operands); the symbols in its types are implicit size parameters, each defined by the first value
in scope that has the bare symbol as a dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files.html_table import html_table
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.types import DType, TensorType, type_of

Array = np.ndarray[Any, Any]
Attr = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | Array | DType
"""An attribute; a tuple of `Dim` (with symbols) is allowed where a row declares it."""
AttrValue = Attr | tuple[Dim, ...] | TensorType
Split = tuple[tuple[int, ...], ...]
"""For each operand of a node, into how many equal slices each of its axes is cut."""


@dataclass(frozen=True, slots=True)
class OpId:
    """The definition of an operator: `name` in `domain`, as defined since version `since`."""

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
    """Where a node comes from; this never changes what the node computes."""

    location: Location | None = None
    scope: str = ""


NO_META: Final = Meta()
SHOWN: Final = 8
"""Number of parameters, and of results, in the `repr` of a function."""


# Identity, not fields, makes a value: two operands of equal type are different values, and hashing
# by identity keeps lookups fast.
@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One SSA value, equal only to itself; only the names of parameters mean anything."""

    type: TensorType
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One application of an operator; an absent optional operand is None.

    strategy: how the node is split over devices; () where nobody decided. It changes no result: a
    pass that keeps a node keeps it, and one that replaces the node leaves it out.
    """

    op: OpId
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    regions: tuple[Function, ...] = ()
    meta: Meta = NO_META
    strategy: Split = ()


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A closed graph with named parameters and named results."""

    name: str
    params: tuple[Value, ...]
    results: tuple[Value, ...]
    result_names: tuple[str, ...]
    nodes: tuple[Node, ...]
    param_names: tuple[str, ...] = field(init=False, repr=False)
    """Names of the parameters, in order."""
    _param_places: Mapping[str, int] = field(init=False, repr=False)
    _result_places: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Indexed once here, because passes and engines look parameters up by name for every call.
        names = tuple(p.name for p in self.params)
        object.__setattr__(self, "param_names", names)
        object.__setattr__(self, "_param_places", _places(self.name, "parameter", names))
        object.__setattr__(self, "_result_places", _places(self.name, "result", self.result_names))
        if len(self.results) != len(self.result_names):
            raise InvalidInput(
                f"function {self.name!r} has {len(self.results)} results and "
                f"{len(self.result_names)} result names; give one name each"
            )

    def __repr__(self) -> str:
        """Return the signature; `ir.text` has the whole graph."""
        params = [f"{p.name}: {p.type}" for p in self.params]
        results = [f"{n}: {v.type}" for n, v in zip(self.result_names, self.results, strict=True)]
        nodes = sum(1 for _ in self.walk())
        return f"{self.name}({_listed(params)}) -> ({_listed(results)}), {nodes} nodes"

    def _repr_html_(self) -> str:
        takes = [("takes", p.name, str(p.type)) for p in self.params[:SHOWN]]
        named = zip(self.result_names, self.results, strict=True)
        gives = [("gives", name, str(value.type)) for name, value in islice(named, SHOWN)]
        nodes = sum(1 for _ in self.walk())
        title = f"{self.name}: {nodes:,} nodes"
        count = len(self.params) + len(self.results)
        return html_table(title, ("", "name", "type"), [*takes, *gives], count=count)

    def param_index(self, name: str) -> int:
        """Return the index of the parameter called `name`."""
        return self._place("parameter", name, self._param_places)

    def param(self, name: str) -> Value:
        """Return the parameter called `name`."""
        return self.params[self.param_index(name)]

    def result(self, name: str) -> Value:
        """Return the result called `name`."""
        return self.results[self._place("result", name, self._result_places)]

    def _place(self, kind: str, name: str, places: Mapping[str, int]) -> int:
        if name not in places:
            raise InvalidInput(
                f"function {self.name!r} has no {kind} {name!r}; it has {', '.join(places)}"
            )
        return places[name]

    def with_(
        self,
        *,
        params: Iterable[Value] | None = None,
        results: Iterable[Value] | None = None,
        result_names: Iterable[str] | None = None,
        nodes: Iterable[Node] | None = None,
    ) -> Function:
        """Return the function with some parts replaced."""
        return Function(
            self.name,
            self.params if params is None else tuple(params),
            self.results if results is None else tuple(results),
            self.result_names if result_names is None else tuple(result_names),
            self.nodes if nodes is None else tuple(nodes),
        )

    def producers(self) -> dict[Value, Node]:
        """Return the node that produces each value."""
        return {v: node for node in self.nodes for v in node.outputs}

    def needed_for(self, results: Iterable[Value]) -> set[Value | None]:
        """Return the values that `results` are computed from, `results` among them."""
        needed: set[Value | None] = {*results}
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.inputs)
        return needed

    def reads(self) -> Counter[Value]:
        """Count how often each value is read, by nodes and as a result."""
        counted = Counter(v for node in self.nodes for v in node.inputs if v is not None)
        counted.update(self.results)
        return counted

    def walk(self) -> Iterator[Node]:
        """Yield every node; those of regions come after the node that holds them."""
        for node in self.nodes:
            yield node
            for region in node.regions:
                yield from region.walk()


class Role(StrEnum):
    """The purpose of a state tensor. No wire message has a field for a personal one."""

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

    def __repr__(self) -> str:
        return f"StateTensor({self.type}, role={self.role})"


@dataclass(frozen=True, slots=True, eq=False)
class ModuleContents:
    """The contents of `module.pb`; `ir.module.Module` also checks that its parts fit together.

    `entries` maps an entry (`predict`, `train_step`, ...) to a function name; `meta` is free text
    by key (class names, preprocessing, origin of the model).
    """

    functions: Mapping[str, Function]
    entries: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, StateTensor] = field(default_factory=dict)
    meta: Mapping[str, str] = field(default_factory=dict)


def _listed(texts: list[str]) -> str:
    """Return the first texts, and how many more there are."""
    more = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f", and {more} more" if more > 0 else "")


def _places(function: str, kind: str, names: tuple[str, ...]) -> dict[str, int]:
    """Return the index of each name; refuse names that are empty or repeat."""
    places: dict[str, int] = {}
    for i, name in enumerate(names):
        if not name or name in places:
            raise InvalidInput(
                f"each {kind} of function {function!r} needs a unique name, got {name!r} "
                f"{'twice' if name else 'empty'}"
            )
        places[name] = i
    return places
