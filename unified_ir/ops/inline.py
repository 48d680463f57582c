"""Replay a function's nodes into the graph being recorded.

Types are inferred again. Symbols of the function's parameters take the dimensions of the arguments;
symbols that loops introduce get new names, so one function can be inlined twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, is_symbol, substitute, symbol
from triplane.unified_ir.ir.graph import AttrValue, Function, Node, Value
from triplane.unified_ir.ir.types import ShapeError, fits, is_plain
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import OPEN, Op
from triplane.unified_ir.ops.tensor import Tensor


def inline(function: Function, args: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of `function` on tensors of the graph being recorded."""
    replay = Replay(function, args)
    for node in function.nodes:
        replay.run(node)
    return replay.results()


class Replay:
    """Record the nodes of one function again, on the tensors that stand for its values."""

    def __init__(self, function: Function, args: Sequence[Tensor]) -> None:
        if len(args) != len(function.params):
            raise InvalidInput(
                f"function {function.name!r} takes {', '.join(function.param_names) or 'nothing'}; "
                f"got {len(args)} arguments"
            )
        self.function = function
        self.build = recorder()
        self.values: dict[Value, Tensor] = {}
        self.sizes: dict[str, Dim] = {}
        self.size_vectors: set[Value] = set()
        """Values of the function whose contents are sizes."""
        for param, arg in zip(function.params, args, strict=True):
            _bind(self.sizes, param, arg)
            self.values[param] = arg

    def run(self, node: Node) -> tuple[Tensor, ...]:
        """Record the node again; its outputs stand for the node's from now on."""
        outputs = self._record(node)
        self.define(node, outputs)
        return outputs

    def define(self, node: Node, outputs: Sequence[Tensor]) -> None:
        """Let `outputs` stand for the node's outputs."""
        self.values.update(zip(node.outputs, outputs, strict=True))

    def _record(self, node: Node) -> tuple[Tensor, ...]:
        # Through the build, which shares equal small constants and knows their contents.
        if node.op.name == "Constant":
            return (self.build.as_operand(node.attrs["value"]),)
        attrs = self.attrs(node)
        if node.op.name == "Dims":
            self.size_vectors.update(node.outputs)
            return (self.build.dims(attrs["dims"]),)  # type: ignore[arg-type]
        row = self.build.table[node.op.domain, node.op.name]
        with self.build.at(node.meta):
            number = self._number(row, node)
            if number is not None:
                return (number,)
            return self.build.apply(
                row,
                self.inputs(node),
                attrs,
                regions=self.regions(node),
                outputs=len(node.outputs),
                strategy=node.strategy,
            )

    def _number(self, row: Op, node: Node) -> Tensor | None:
        """Return the constant for a node that rearranges sizes, if all are numbers here, or None.

        Inference knew these sizes in the function; it does not look through a node on constants.
        """
        if not row.preserves_elements or node.inputs[0] not in self.size_vectors:
            return None
        self.size_vectors.update(node.outputs)
        known = [None if x is None else self.build.known(x) for x in self.inputs(node)]
        if not all(isinstance(contents, np.ndarray) for contents in known):
            return None
        assert row.reference is not None
        return self.build.as_operand(row.reference(*known, **row.full_attrs(node.attrs)))

    def inputs(self, node: Node) -> list[Tensor | None]:
        """Return the tensors that stand for a node's operands."""
        return [None if v is None else self.values[v] for v in node.inputs]

    def attrs(self, node: Node) -> Mapping[str, AttrValue]:
        """Return attributes with sizes substituted and new names for sizes the node introduces."""
        changed: dict[str, Any] = {}
        dims = node.attrs.get("dims")
        if isinstance(dims, tuple) and self.sizes:
            changed["dims"] = tuple(substitute(d, self.sizes) for d in dims)  # type: ignore[arg-type]
        trips = node.attrs.get("trips")
        if isinstance(trips, str) and trips:
            changed["trips"] = "trips_" + "_".join(map(str, self.build.position()))
            self.sizes[trips] = symbol(changed["trips"])
        opened = node.attrs.get(OPEN, ())
        if opened:
            changed[OPEN] = self.build.open_names(len(opened))  # type: ignore[arg-type]
            self.sizes.update(zip(opened, map(symbol, changed[OPEN]), strict=True))  # type: ignore[arg-type]
        return {**node.attrs, **changed}

    def regions(self, node: Node) -> tuple[Function, ...]:
        """Return regions with sizes substituted; call after `attrs`."""
        if not self.sizes:
            return node.regions
        return tuple(with_sizes(r, self.sizes) for r in node.regions)

    def results(self) -> list[Tensor]:
        """Return the tensors that stand for the function's results."""
        return [self.build.as_operand(self.values[r]) for r in self.function.results]


def introduced_sizes(node: Node) -> tuple[str, ...]:
    """Return names of the sizes a node introduces: a loop's trips, sizes that its data decide."""
    trips = node.attrs.get("trips")
    opened: Any = node.attrs.get(OPEN, ())
    return (*opened, trips) if isinstance(trips, str) and trips else opened


def with_new_sizes(function: Function, tag: str) -> Function:
    """Rename each size that nodes introduce after `tag`, so the function can be used twice."""
    names = [name for node in function.nodes for name in introduced_sizes(node)]
    if not names:
        return function
    sizes: dict[str, Dim] = {name: symbol(f"{tag}_{k}") for k, name in enumerate(names)}
    return with_sizes(function, sizes)


def _bind(sizes: dict[str, Dim], param: Value, arg: Tensor) -> None:
    """Match an argument's shape with a parameter's, giving symbols their dimensions."""
    unfit = not is_plain(param.type) and not fits(arg.type, param.type)
    if unfit or arg.dtype != param.type.dtype or arg.rank != param.type.rank:
        raise ShapeError(f"parameter {param.name!r} is {param.type}, got {arg.type}")
    for wanted, size in zip(param.type.shape, arg.shape, strict=True):
        # A symbol that stays itself is not recorded: with an empty mapping nothing needs
        # substitution.
        if is_symbol(wanted) and (str(wanted) in sizes or wanted != size):
            known = sizes.setdefault(str(wanted), size)
            if known != size:
                raise ShapeError(f"symbol {wanted} of {param.name!r} is both {known} and {size}")
        elif isinstance(wanted, int) and wanted != size:
            raise ShapeError(f"parameter {param.name!r} is {param.type}, got {arg.type}")


def with_sizes(function: Function, sizes: Mapping[str, Dim]) -> Function:
    """Return a copy with symbols replaced in all types, sizes and regions."""
    env: dict[Value, Value] = {}

    def renew(value: Value) -> Value:
        env[value] = Value(value.type.with_sizes(sizes), value.name)
        return env[value]

    params = tuple(renew(p) for p in function.params)
    nodes = []
    for node in function.nodes:
        inputs = tuple(None if v is None else env[v] for v in node.inputs)
        attrs = dict(node.attrs)
        if isinstance(attrs.get("dims"), tuple):
            attrs["dims"] = tuple(substitute(d, sizes) for d in attrs["dims"])  # type: ignore[union-attr,arg-type]
        if introduced_sizes(node):
            attrs.update(_renamed_sizes(node, sizes))
        regions = tuple(with_sizes(r, sizes) for r in node.regions)
        outputs = tuple(renew(v) for v in node.outputs)
        nodes.append(Node(node.op, inputs, outputs, attrs, regions, node.meta, node.strategy))
    results = tuple(env[r] for r in function.results)
    return function.with_(params=params, results=results, nodes=nodes)


def _renamed_sizes(node: Node, sizes: Mapping[str, Dim]) -> Mapping[str, Any]:
    """Return the attributes that name introduced sizes, with their new names."""
    trips, opened = node.attrs.get("trips"), node.attrs.get(OPEN)
    changed: dict[str, Any] = {}
    if isinstance(trips, str) and trips:
        changed["trips"] = str(sizes.get(trips, trips))
    if isinstance(opened, tuple):
        changed[OPEN] = tuple(str(sizes.get(str(n), n)) for n in opened)
    return changed
