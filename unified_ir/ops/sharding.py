"""Strategies written in code: `ops.matmul.shard((4, 1), (1, 1))(a, b)`, `cell.shard((4, 1))(x)`.

A strategy says for each tensor of a call into how many equal slices each of its axes is cut. It
becomes the strategy of the one node that reads these tensors, and is checked where it is written:
axes that the operator cuts together (its factors) have the same number of slices. Several devices
carry it out (`docs/parallel.md`); it changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import evaluate
from triplane.unified_ir.ir.graph import Node, Split, Value
from triplane.unified_ir.ir.split import check_divides, check_slices, checked_split
from triplane.unified_ir.ir.text import strategy_text
from triplane.unified_ir.ir.types import float32
from triplane.unified_ir.ops.factors import WHOLE, Factors, Shape, ShapedNode, factors_of
from triplane.unified_ir.ops.tensor import Tensor, taken

if TYPE_CHECKING:
    from triplane.unified_ir.ops.build import Build
    from triplane.unified_ir.ops.row import Known, Op, Table

STAND_IN: Final = 1_000_003
"""Size that stands for the first symbol where a factor rule asks for numbers, then every other."""

Slices = tuple[int, ...]


def sharded_call(
    build: Build, function: Callable[..., Any], name: str, strategy: Sequence[Slices],
    args: Sequence[Any], kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Call an operator, and give the node that reads all its tensors the strategy."""
    present = _as_tensors(build, [*args, *kwargs.values()])
    operands = [*_tensors(present)]
    start = len(build.nodes)
    result = function(*present[: len(args)], **dict(zip(kwargs, present[len(args) :], strict=True)))
    attach(build, start, operands, strategy, name)
    return result


def attach(
    build: Build, start: int, operands: Sequence[Tensor], strategy: Sequence[Slices], name: str
) -> None:
    """Give the first node from `start` that reads all these tensors a strategy for them.

    InvalidInput: there is none, or it cannot be split so.
    """
    check_count(strategy, operands, name)
    values = [x.value for x in operands]
    place = _reader(build, start, values, name)
    node = build.nodes[place]
    known = [build.known(Tensor(build, v)) if v is not None else None for v in node.inputs]
    split = checked_split(_aligned(node, values, strategy), node.inputs)
    row = build.table[node.op.domain, node.op.name]
    cuts_of(row, factors_of_node(build.table, node, known), split)
    build.nodes[place] = replace(node, strategy=split)


def checked_strategy(strategy: Sequence[Any], name: str) -> tuple[Slices, ...]:
    """Return a strategy as a caller gives it, in tuples; InvalidInput if it is none."""
    is_one = all(
        isinstance(s, (tuple, list)) and all(type(n) is int and n >= 1 for n in s) for s in strategy
    )
    if not strategy or not is_one:
        raise InvalidInput(
            f"{name}.shard takes for each tensor of the call the slices of each axis, whole "
            f"numbers >= 1, as in {name}.shard((4, 1), (1, 1)); got "
            f"{', '.join(map(repr, strategy))[:200]}"
        )
    return tuple(tuple(s) for s in strategy)


def check_count(strategy: Sequence[Any], operands: Sequence[Tensor], name: str) -> None:
    """Refuse a strategy for another number of tensors."""
    if len(strategy) != len(operands):
        types = ", ".join(str(x.type) for x in operands)
        raise InvalidInput(
            f"{name}.shard has slices for {len(strategy)} tensors, and the call has "
            f"{len(operands)} ({types}); give one tuple for each, ones for a tensor that stays "
            "whole"
        )
    for k, (slices, x) in enumerate(zip(strategy, operands, strict=True)):
        if slices is not None:
            check_slices(slices, x.value, f"tensor {k} of {name}")
            check_divides(slices, x.value, f"tensor {k} of {name}")


def factors_of_node(table: Table, node: Node, known: Sequence[Known | None]) -> Factors:
    """Return the factors of a node whose sizes may be symbols; known: what is known of operands."""
    row = table[node.op.domain, node.op.name]
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    symbols = sorted(set().union(*(v.type.symbols for v in values)))
    # Rules ask which sizes are equal, so each symbol is a number of its own.
    sizes = {s: STAND_IN + 2 * i for i, s in enumerate(symbols)}

    def shape(value: Value | None) -> Shape:
        return () if value is None else tuple(evaluate(d, sizes) for d in value.type.shape)

    shapes = tuple(map(shape, node.inputs)), tuple(map(shape, node.outputs))
    arrays = tuple(k if isinstance(k, np.ndarray) else None for k in known)
    return factors_of(ShapedNode(node, row, *shapes, arrays))


def cuts_of(row: Op, factors: Factors, split: Split) -> dict[str, int]:
    """Return the slices of each factor that is cut; InvalidInput if axes of one factor differ."""
    cuts: dict[str, int] = {}
    first: dict[str, str] = {}
    for k, (axes, slices) in enumerate(zip(factors.operands, split, strict=True)):
        for axis, (factor, n) in enumerate(zip(axes, slices, strict=True)):
            at = f"axis {axis} of operand {k}"
            if factor == WHOLE and n > 1:
                raise InvalidInput(
                    f"{row} cannot be split as {strategy_text(split)}: {at} stays whole "
                    f"({factors.rule}), and is cut into {n}; write 1 there"
                )
            if factor == WHOLE:
                continue
            where = first.setdefault(factor, at)
            if cuts.setdefault(factor, n) != n:
                raise InvalidInput(
                    f"{row} cannot be split as {strategy_text(split)}: {where} and {at} are cut "
                    f"together ({factors.rule}), and get {cuts[factor]} and {n} slices; give both "
                    "the same number"
                )
    return {factor: n for factor, n in cuts.items() if n > 1}


def _reader(build: Build, start: int, values: Sequence[Value], name: str) -> int:
    """Return the index of the first node from `start` that reads all these values."""
    wanted, fresh = set(values), build.nodes[start:]
    for i, node in enumerate(fresh, start):
        if wanted and wanted <= set(node.inputs):
            return i
    parts = ", ".join(dict.fromkeys(str(n.op) for n in fresh)) or "no node"
    raise InvalidInput(
        f"{name} has no node of its own that reads all its tensors, so it takes no strategy: it "
        f"records {parts[:200]}; call these operators, each with a strategy"
    )


def _aligned(node: Node, values: Sequence[Value], strategy: Sequence[Slices]) -> list[Slices]:
    """Return slices for each operand of the node; operands that are not the caller's stay whole."""
    rest = list(zip(values, strategy, strict=True))
    aligned = []
    for operand in node.inputs:
        mine = next((pair for pair in rest if pair[0] is operand), None)
        if mine is not None:
            rest.remove(mine)
        elif operand is not None:
            mine = operand, (1,) * operand.type.rank
        aligned.append(mine[1] if mine else ())
    return aligned


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)


def _as_tensors(build: Build, args: Sequence[Any]) -> list[Any]:
    """Return arrays and parameters as tensors of the graph, so that they are known in the node."""
    present = [build.as_operand(x) if hasattr(x, "__tensor__") else x for x in args]
    floats = {x.dtype for x in _tensors(present) if x.dtype.is_float}
    return [_tensor(build, x, narrow=floats == {float32}) for x in present]


def _tensor(build: Build, x: Any, *, narrow: bool) -> Any:
    if isinstance(x, (tuple, list)) and any(isinstance(y, Tensor) for y in x):
        return [_tensor(build, y, narrow=narrow) for y in x]
    x = taken(x, narrow=narrow)
    return build.as_operand(x) if isinstance(x, Tensor) else x
