"""A function as boxes within boxes: phases of a training step, scopes of cells, bodies of nodes.

Constants, and sizes computed from them, are left out. State is told in the tips of the nodes that
read or change it, so that lines show data and gradients alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.drawing.folding import OPEN_BOXES, fold, open_first
from triplane.unified_ir.cli.drawing.item import Item
from triplane.unified_ir.cli.drawing.nodes import cut, node_item
from triplane.unified_ir.cli.drawing.phases import FORWARD, PHASES, Path, Paths, is_learned
from triplane.unified_ir.cli.drawing.rows import lay_out
from triplane.unified_ir.ir.graph import Function, StateTensor, Value

MAX_NODES: Final = 500_000
FEW: Final = 12
"""Inputs, and results, that stand in their phase; if there are more, each is beside its node."""


def outline(function: Function, state: Mapping[str, StateTensor] = MappingProxyType({})) -> Item:
    """Return the function as a group; `state` names parameters and results that outlive a call."""
    nodes = sum(1 for _ in function.walk())
    if nodes > MAX_NODES:
        raise InvalidInput(
            f"function {function.name!r} has {nodes:,} nodes, and a picture shows at most "
            f"{MAX_NODES:,}; use --text"
        )
    root = Item(FORWARD, "", name=cut(function.name), is_node=False)
    _fill(root, function, state)
    fold(root, large=nodes > OPEN_BOXES)
    open_first(root)
    for number, item in enumerate(root.walk()):
        item.number = number
        if item.parent is not None:
            item.upward = item.upward or item.parent.upward
    lay_out(root)
    return root


@dataclass(slots=True)
class _Filling:
    """One function's boxes on their way into the group `root`."""

    root: Item
    apart: bool
    makers: dict[Value, Item] = field(default_factory=dict)
    groups: dict[Path, Item] = field(default_factory=dict)

    def add(self, item: Item, path: Path) -> None:
        item.parent = self.group(path, item.kind if item.kind in PHASES else FORWARD)
        item.parent.children.append(item)

    def group(self, path: Path, kind: str) -> Item:
        if not path:
            return self.root
        if path not in self.groups:
            group = Item(kind, "", name=cut(path[-1]), is_node=False, is_scope=True, named=True)
            group.is_phase = len(path) == 1 and self.apart
            self.groups[path] = group
            self.add(group, path[:-1])
        return self.groups[path]


def _fill(root: Item, function: Function, state: Mapping[str, StateTensor], kind: str = "") -> None:
    """Put the function's boxes into `root`, all of kind `kind` if there is one."""
    paths = Paths.of(function, state, kind)
    read = {p: p.name for p in function.params if p.name in state}
    changed = {v: n for n, v in _results(function) if n in state}
    inputs = {
        p: Item("input", cut(p.name), cut(str(p.type)), nodes=0)
        for p in function.params
        if p not in read
    }
    filling = _Filling(root, paths.apart)
    places = {node: i for i, node in enumerate(function.nodes)}
    for node in paths.nodes:
        operands = [v for v in dict.fromkeys(node.inputs) if v is not None]
        path = paths.path(node)
        for value in operands:
            if value in inputs and value not in filling.makers:
                filling.makers[value] = inputs[value]
                beside = path if len(inputs) > FEW else paths.top(node)
                filling.add(inputs[value], beside)
        item = node_item(node, paths.phases[node], f"node {places[node]}", read, changed)
        item.weights = sum(v in read and is_learned(read[v], state) for v in operands)
        item.sources = [filling.makers[v] for v in operands if v in filling.makers]
        filling.makers.update(dict.fromkeys(node.outputs, item))
        filling.add(item, path)
        for region in node.regions:
            body = Item(item.kind, "", name=cut(region.name), is_node=False)
            _fill(body, region, {}, item.kind)
            item.nodes += sum(1 for _ in region.walk())
            item.adopt([*item.children, body])
    _add_results(filling, function, state, paths)


def _add_results(
    filling: _Filling, function: Function, state: Mapping[str, StateTensor], paths: Paths
) -> None:
    results = [(n, v) for n, v in _results(function) if n not in state]
    for name, value in results:
        maker = filling.makers.get(value)
        item = Item("result", cut(name), cut(str(value.type)), nodes=0)
        item.sources = [] if maker is None else [maker]
        if maker is not None and maker.parent is not None and len(results) > FEW:
            item.parent = maker.parent
            maker.parent.children.append(item)
        else:
            filling.add(item, paths.top_of(FORWARD if maker is None else maker.kind))


def _results(function: Function) -> list[tuple[str, Value]]:
    return [*zip(function.result_names, function.results, strict=True)]
