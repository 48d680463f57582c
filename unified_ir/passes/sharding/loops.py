"""Factors of a scan: the axes that its region cuts in every step.

Axes of values in the region that range over one index form a class. A class can be cut if no node
needs it whole and none sums over it, because sums inside a loop would communicate in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from triplane.unified_ir.ir.graph import Array, Function, Node, Value
from triplane.unified_ir.ops.factors import (
    WHOLE,
    Axes,
    Factors,
    Shape,
    ShapedNode,
    constant,
    factors_of,
)
from triplane.unified_ir.ops.row import OpKind
from triplane.unified_ir.ops.table import TABLE

ShapeOf = Callable[[Value | None], Shape]
Axis = tuple[Value, int]


@dataclass(slots=True)
class AxisClasses:
    """Classes of axes that are cut together (union-find), and those that stay whole."""

    _parents: dict[Axis, Axis] = field(default_factory=dict)
    _whole: set[Axis] = field(default_factory=set)

    def root(self, axis: Axis) -> Axis:
        """Return the representative of an axis."""
        while (parent := self._parents.get(axis, axis)) != axis:
            axis = parent
        return axis

    def join(self, a: Axis, b: Axis) -> None:
        """Put two axes into one class."""
        a, b = self.root(a), self.root(b)
        if a != b:
            self._parents[b] = a
            if b in self._whole:
                self._whole.add(a)

    def keep_whole(self, axis: Axis) -> None:
        """State that the class of an axis is not cut."""
        self._whole.add(self.root(axis))

    def keep_doubles_whole(self, value: Value, rank: int) -> None:
        """Keep a class whole that has two axes of one value: one cut cannot cut both."""
        roots = [self.root((value, i)) for i in range(rank)]
        self._whole.update(r for r in roots if roots.count(r) > 1)

    def names(self, value: Value, rank: int, numbers: dict[Axis, int]) -> Axes:
        """Return the factor of each axis; numbers: those of the classes so far."""
        roots = [self.root((value, i)) for i in range(rank)]
        return tuple(
            WHOLE if r in self._whole else f"s{numbers.setdefault(r, len(numbers))}" for r in roots
        )


def scan_factors(node: Node, shape: ShapeOf) -> Factors:
    """Return the factors of a Scan, whose steps are along the first axis of what it scans."""
    region, carries = node.regions[0], int(str(node.attrs["num_carry"]))
    scanned = int(str(node.attrs["num_scanned"]))
    classes = AxisClasses()
    flops = _visit(region, classes, shape)
    for p, r in zip(region.params[:carries], region.results[:carries], strict=True):
        for i in range(len(shape(p))):
            classes.join((p, i), (r, i))
    for value in (*region.params, *(v for n in region.nodes for v in n.outputs)):
        classes.keep_doubles_whole(value, len(shape(value)))
    numbers: dict[Axis, int] = {}

    def inner(value: Value) -> Axes:
        return classes.names(value, len(shape(value)), numbers)

    operands = [
        (WHOLE, *inner(p)) if carries <= k < carries + scanned else inner(p)
        for k, p in enumerate(region.params)
    ]
    outputs = [inner(r) if k < carries else (WHOLE, *inner(r))
               for k, r in enumerate(region.results)]  # fmt: skip
    steps = shape(node.inputs[carries])[0] if scanned else 1
    return Factors(tuple(operands), tuple(outputs), "scan: axes that every step cuts",
                   steps * flops)  # fmt: skip


def _visit(region: Function, classes: AxisClasses, shape: ShapeOf) -> int:
    """Join the axes of every node of a region; return its arithmetic."""
    constants: dict[Value | None, Array | None] = {}
    flops = 0
    for node in region.nodes:
        row = TABLE.get((node.op.domain, node.op.name))
        constants[node.outputs[0]] = constant(node)
        if row is None or row.kind is OpKind.SOURCE:
            continue
        shapes = tuple(map(shape, node.inputs)), tuple(map(shape, node.outputs))
        factors = factors_of(ShapedNode(node, row, *shapes, tuple(map(constants.get, node.inputs))))
        flops += factors.flops
        _join(node, factors, classes)
    return flops


def _join(node: Node, factors: Factors, classes: AxisClasses) -> None:
    first: dict[str, Axis] = {}
    named = [*zip(node.inputs, factors.operands, strict=True),
             *zip(node.outputs, factors.outputs, strict=True)]  # fmt: skip
    for value, axes in named:
        for i, factor in enumerate(axes):
            if value is None:
                continue
            if factor == WHOLE:
                classes.keep_whole((value, i))
            else:
                classes.join(first.setdefault(factor, (value, i)), (value, i))
    for factor, axis in first.items():
        if any(factor not in axes for axes in factors.outputs):
            classes.keep_whole(axis)


LOOPS: Final[Mapping[str, Callable[[Node, ShapeOf], Factors]]] = {"Scan": scan_factors}
"""Rows whose factors are those of their region."""
