"""Which part of a training step a node belongs to, and the path of scopes within that part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from triplane.unified_ir.ir.graph import Function, Node, Role, StateTensor, Value

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
UPDATE: Final = "update"
PHASES: Final = (FORWARD, BACKWARD, UPDATE)
GRADIENT: Final = "grad"
"""First part of the scope of nodes that a gradient rule records."""
MAX_DEPTH: Final = 16
"""Groups within groups that a scope asks for; the rest of a longer name stays in one piece."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the nodes of a function stand.

    nodes: those that depend on a parameter; the others are constants and sizes.  updated: for each
    node the common path of the new state that it leads to.  apart: whether phases are groups.
    """

    nodes: Sequence[Node]
    phases: Mapping[Node, str]
    updated: Mapping[Node, Path]
    apart: bool

    @classmethod
    def of(cls, function: Function, state: Mapping[str, StateTensor], kind: str = "") -> Self:
        """Sort the nodes of `function`; in a body, all are of the phase `kind` of its node."""
        nodes = _below(function.nodes, (), function.params)
        if kind:
            return cls(nodes, dict.fromkeys(nodes, kind), {}, apart=False)
        phases = _phases(nodes, [p for p in function.params if p.name not in state])
        results = zip(function.result_names, function.results, strict=True)
        updated = _updated(nodes, [(_owner(n, state), v) for n, v in results if n in state])
        return cls(nodes, phases, updated, apart=BACKWARD in phases.values())

    def top_of(self, phase: str) -> Path:
        """Return the path of a phase."""
        return (phase,) if self.apart else ()

    def top(self, node: Node) -> Path:
        """Return the path of the node's phase."""
        return self.top_of(self.phases[node])

    def path(self, node: Node) -> Path:
        """Return the node's phase and scopes; an optimizer's nodes are named by their state."""
        scope, phase = node.meta.scope, self.phases[node]
        # torch names an ONNX node by its place: /layer1/layer1.0/conv1/Conv.
        path = _joined(scope.split("/" if "/" in scope else "."))
        if phase == BACKWARD and path[:1] == (GRADIENT,):
            path = path[1:]
        if phase == UPDATE and not path:
            path = self.updated[node]
        if len(path) > MAX_DEPTH:
            path = (*path[:MAX_DEPTH], ".".join(path[MAX_DEPTH:]))
        return (*self.top(node), *path)


def _phases(nodes: Sequence[Node], data: Iterable[Value]) -> dict[Node, str]:
    """Return the phase of each node; `data` are the parameters that are not state.

    A node is backward if a gradient rule recorded it, or if it lies between two such nodes. What
    else follows the gradients is the update, and so is what only the update reads and only state
    decides, such as the schedule of a learning rate.
    """
    recorded = {node for node in nodes if node.meta.scope.split(".")[0] == GRADIENT}
    after = {*_below(nodes, recorded, ())} - recorded
    phases = dict.fromkeys(nodes, FORWARD) | dict.fromkeys(after, UPDATE)
    phases |= dict.fromkeys(recorded | (after & _above(nodes, recorded)), BACKWARD)
    of_data = {*_below(nodes, (), data)}
    readers: dict[Value | None, set[str]] = {}
    for node in reversed(nodes):
        read = {phase for v in node.outputs for phase in readers.get(v, ())}
        if read == {UPDATE} and node not in of_data:
            phases[node] = UPDATE
        for value in node.inputs:
            readers.setdefault(value, set()).add(phases[node])
    return phases


def _below(nodes: Iterable[Node], chosen: Collection[Node], values: Iterable[Value]) -> list[Node]:
    """Return `chosen` and the nodes that depend on them or on `values`, in order."""
    known: set[Value | None] = {*values}
    below = []
    for node in nodes:
        if node in chosen or not known.isdisjoint(node.inputs):
            known.update(node.outputs)
            below.append(node)
    return below


def _above(nodes: Sequence[Node], chosen: Collection[Node]) -> set[Node]:
    """Return `chosen` and the nodes that they depend on."""
    needed: set[Value | None] = set()
    above = set()
    for node in reversed(nodes):
        if node in chosen or not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            above.add(node)
    return above


def _owner(name: str, state: Mapping[str, StateTensor]) -> Path:
    """Return the path of a state tensor, of an optimizer's that of its parameter."""
    path = tuple(name.split("."))
    ends = (path[i:] for i in range(len(path)))
    return next((end for end in ends if is_learned(".".join(end), state)), path)


def is_learned(name: str, state: Mapping[str, StateTensor]) -> bool:
    """Return whether `name` is a parameter of the model."""
    return name in state and state[name].role in {Role.PARAMETER, Role.PERSONAL}


def _updated(nodes: Sequence[Node], results: Iterable[tuple[Path, Value]]) -> dict[Node, Path]:
    paths: dict[Value | None, Path] = {}
    for path, value in results:
        _narrow(paths, value, _joined(path))
    updated: dict[Node, Path] = {}
    for node in reversed(nodes):
        led: dict[Value | None, Path] = {}
        for value in node.outputs:
            if value in paths:
                _narrow(led, None, paths[value])
        updated[node] = led.get(None, ())
        if led:
            for operand in node.inputs:
                _narrow(paths, operand, led[None])
    return updated


def _joined(names: Iterable[str]) -> Path:
    """Return names without empty ones, the index of an item of a list after the list's name.

    What a cell does between two items of a list then stands between them, not beside the list.
    """
    path: list[str] = []
    for name in filter(None, names):
        if name.isdigit() and path and "." not in path[-1]:
            path[-1] = f"{path[-1]}.{name}"
        else:
            path.append(name)
    return tuple(path)


def _narrow(paths: dict[Value | None, Path], key: Value | None, path: Path) -> None:
    """Keep what `path` and the path at `key` begin with, in `paths`."""
    old = paths.get(key, path)
    pairs = zip(old, path, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old), len(path)))
    paths[key] = path[:same]
