"""Strategies of a node on a mesh and layouts of tensors, and what they cost.

A layout says for each mesh axis which axis of the tensor is cut along it, or -1: every device along
that mesh axis has a copy. A strategy picks a factor of the node for each mesh axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final, NamedTuple

from triplane.unified_ir.ops.factors import WHOLE, Axes, Factors, Shape
from triplane.unified_ir.passes.sharding.topology import Mesh, Topology

COPIES: Final = -1
MAX_CUT_AXES: Final = 8
"""Axes of a tensor, and factors of a node, that are tried: costs grow with the square of these."""
Layout = tuple[int, ...]
"""For each mesh axis the tensor axis that is cut along it, or `COPIES`."""


class Transfer(NamedTuple):
    """Time of collectives, and the bytes that each device sends in them."""

    seconds: float
    sent_bytes: float


NOTHING: Final = Transfer(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a node is split: a factor for each mesh axis, and the layouts that follow.

    compute_s: time of one device's share. transfer: what adding up partial results costs.
    """

    picks: Axes
    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    compute_s: float = 0.0
    transfer: Transfer = NOTHING
    collectives: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the time of the node, without what its operands' layouts cost."""
        return self.compute_s + self.transfer.seconds


def slices(layout: Layout, rank: int, mesh: Mesh) -> tuple[int, ...]:
    """Return into how many slices each axis of a tensor is cut."""
    return tuple(
        math.prod(n for n, cut in zip(mesh, layout, strict=True) if cut == axis)
        for axis in range(rank)
    )


def local_shape(shape: Shape, layout: Layout, mesh: Mesh) -> Shape:
    """Return the shape of one device's part."""
    return tuple(s // n for s, n in zip(shape, slices(layout, len(shape), mesh), strict=True))


def share_of(layout: Layout, mesh: Mesh) -> int:
    """Return into how many parts a tensor of this layout is cut."""
    return math.prod(n for n, cut in zip(mesh, layout, strict=True) if cut != COPIES)


def divides(shape: Shape, layout: Layout, mesh: Mesh) -> bool:
    """Return whether the slices of a tensor are equal."""
    return all(s % n == 0 for s, n in zip(shape, slices(layout, len(shape), mesh), strict=True))


@lru_cache(maxsize=65536)
def layouts(shape: Shape, mesh: Mesh) -> tuple[Layout, ...]:
    """Return every layout of a tensor; copies on every device come first."""
    places = [_places(shape)] * len(mesh)
    return tuple(choice for choice in product(*places) if divides(shape, choice, mesh))


def _places(shape: Shape) -> tuple[int, ...]:
    return (COPIES, *range(min(len(shape), MAX_CUT_AXES)))


@lru_cache(maxsize=262144)
def reshard(
    source: Layout, target: Layout, size_bytes: int, mesh: Mesh, topology: Topology
) -> Transfer:
    """Return what it costs to change the layout of a tensor of so many bytes in all.

    Slices come first, then all-to-alls, then all-gathers: the order in which tensors are small.
    """
    if source == target:
        return NOTHING
    size = size_bytes / share_of(source, mesh)
    seconds = sent = 0.0
    moves = [i for i in range(len(mesh)) if source[i] != target[i]]
    for i in [i for i in moves if source[i] == COPIES]:
        size /= mesh[i]
        # Where a later mesh axis cuts the same tensor axis, the slice lies on another device.
        if any(source[j] == target[i] for j in range(i + 1, len(mesh))):
            seconds += topology.link(mesh, i).seconds(2, size)
            sent += size
    for i in [i for i in moves if COPIES not in {source[i], target[i]}]:
        part = size * (mesh[i] - 1) / mesh[i]
        seconds += topology.link(mesh, i).seconds(mesh[i], part)
        sent += part
    for i in [i for i in moves if target[i] == COPIES]:
        part = size * (mesh[i] - 1)
        seconds += topology.link(mesh, i).seconds(mesh[i], part)
        sent += part
        size *= mesh[i]
    return Transfer(seconds, sent)


@dataclass(frozen=True, slots=True)
class NodeSize:
    """What a node costs as a whole: its arithmetic, and the shapes and element bytes it moves."""

    flops: float
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    is_view: bool = False


def strategies(
    factors: Factors, size: NodeSize, mesh: Mesh, topology: Topology
) -> tuple[Strategy, ...]:
    """Return the strategies of a node, the whole node on every device first; none is dominated."""
    best: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Strategy] = {}
    for picks in product(*[_picks(factors)] * len(mesh)):
        for strategy in _of_picks(picks, factors, size, mesh, topology):
            key = (strategy.operands, strategy.outputs)
            if key not in best or strategy.seconds < best[key].seconds:
                best[key] = strategy
    return tuple(best.values())


def _picks(factors: Factors) -> list[str]:
    names = [f for axes in (*factors.operands, *factors.outputs) for f in axes if f != WHOLE]
    return [WHOLE, *list(dict.fromkeys(names))[:MAX_CUT_AXES]]


def _of_picks(
    picks: Axes, factors: Factors, size: NodeSize, mesh: Mesh, topology: Topology
) -> Iterator[Strategy]:
    """Yield the strategies of one factor for each mesh axis; none where sizes do not divide."""
    operands = tuple(tuple(_cut(axes, pick) for pick in picks) for axes in factors.operands)
    outputs = tuple(tuple(_cut(axes, pick) for pick in picks) for axes in factors.outputs)
    shapes = zip((*size.inputs, *size.outputs), (*operands, *outputs), strict=True)
    if not all(divides(shape, layout, mesh) for shape, layout in shapes):
        return
    compute_s = _compute_seconds(picks, operands, outputs, size, mesh, topology)
    partial = [
        tuple(
            pick not in {WHOLE, *axes} and any(pick in o for o in factors.operands)
            for pick in picks
        )
        for axes in factors.outputs
    ]
    for chosen in _scattered(outputs[0], partial[0], size.outputs[0], mesh):
        final = (chosen, *outputs[1:])
        seconds = sent = 0.0
        names: list[str] = []
        for k, (begin, end) in enumerate(zip(outputs, final, strict=True)):
            cost = _sums(partial[k], begin, end, size.output_bytes[k], mesh, topology)
            seconds, sent = seconds + cost[0].seconds, sent + cost[0].sent_bytes
            names += cost[1]
        yield Strategy(picks, operands, final, compute_s, Transfer(seconds, sent), tuple(names))


def _cut(axes: Axes, pick: str) -> int:
    return axes.index(pick) if pick != WHOLE and pick in axes else COPIES


def _scattered(
    layout: Layout, partial: tuple[bool, ...], shape: Shape, mesh: Mesh
) -> Iterator[Layout]:
    """Yield where the sum of partial results may go: to every device, or cut along an axis."""
    choices = [
        _places(shape) if sums else (cut,) for cut, sums in zip(layout, partial, strict=True)
    ]
    return (chosen for chosen in product(*choices) if divides(shape, chosen, mesh))


def _sums(
    partial: tuple[bool, ...], begin: Layout, end: Layout, size_bytes: int, mesh: Mesh,
    topology: Topology,
) -> tuple[Transfer, list[str]]:  # fmt: skip
    """Return the cost of adding partial results: an all-reduce, or half where they stay cut."""
    size = size_bytes / share_of(begin, mesh)
    seconds = sent = 0.0
    names = []
    order = sorted((i for i, sums in enumerate(partial) if sums), key=lambda i: end[i] == COPIES)
    for i in order:
        part = size * (mesh[i] - 1) / mesh[i]
        rounds = 2 if end[i] == COPIES else 1
        seconds += rounds * topology.link(mesh, i).seconds(mesh[i], part)
        sent += rounds * part
        names.append("all-reduce" if end[i] == COPIES else "reduce-scatter")
        size /= 1 if end[i] == COPIES else mesh[i]
    return Transfer(seconds, sent), names


def _compute_seconds(
    picks: Axes, operands: tuple[Layout, ...], outputs: tuple[Layout, ...], size: NodeSize,
    mesh: Mesh, topology: Topology,
) -> float:  # fmt: skip
    if size.is_view:
        return 0.0
    shares = math.prod(n for n, pick in zip(mesh, picks, strict=True) if pick != WHOLE)
    moved = sum(
        n / share_of(layout, mesh)
        for n, layout in zip(
            (*size.input_bytes, *size.output_bytes), (*operands, *outputs), strict=True
        )
    )
    arithmetic = size.flops / shares / topology.flops_per_s
    return max(arithmetic, moved / topology.memory_bytes_per_s)
