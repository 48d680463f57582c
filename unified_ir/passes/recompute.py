"""Recomputation: less memory alive at once, for some work done twice (Chen et al. 2016).

A tensor that is made before the peak and taken after it need not be kept across: the nodes that
make it, from tensors that are alive there anyway, run again right before it is taken. Barriers keep
a runtime from running them early or finding that it has their values already. The numbers are those
of the function without the plan; a runtime that joins nodes may round some otherwise.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.rows.movement.barrier import barrier
from triplane.unified_ir.ops.table import row_of
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.fuse import fuse
from triplane.unified_ir.passes.memory import (
    CONSTANT,
    VIEWS,
    Live,
    least_bytes,
    live,
    type_bytes,
)

LONGEST_CHAIN: Final = 16
"""Nodes that run again for one tensor, at most."""
TRIED: Final = 24
"""Tensors looked at for one step of the plan, the largest gain for the work first."""


@dataclass(frozen=True, slots=True)
class RecomputationPlan:
    """What recomputation found, in bytes of tensors alive at once."""

    budget_bytes: int
    before_bytes: int
    peak_bytes: int
    least_bytes: int
    """No plan goes below."""
    again: tuple[str, ...]
    """Operators that run a second time, in order."""

    @property
    def fits(self) -> bool:
        """Whether the peak keeps within the budget."""
        return self.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        gap = self.peak_bytes - self.least_bytes
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"{verdict} a budget of {self.budget_bytes:,} bytes: peak {self.peak_bytes:,}, without "
            f"recomputation {self.before_bytes:,}; no plan goes below {self.least_bytes:,}, gap "
            f"{gap:,}; {len(self.again)} nodes run again"
        )


def recompute(
    function: Function, budget_bytes: int, sizes: Mapping[str, int]
) -> tuple[Function, RecomputationPlan]:
    """The function with as much recomputation as the budget asks for, and the plan.

    sizes: of each symbol, such as {"N": 32}.  The plan says where the budget is not reached.
    InvalidInput: the budget is below what any plan needs.
    """
    function = fuse(clean(function))
    least = least_bytes(function, sizes)
    if budget_bytes < least:
        raise InvalidInput(
            f"{function.name!r} needs {least:,} bytes of tensors alive at once whatever is "
            f"computed again, and the budget is {budget_bytes:,}; give more, or a smaller batch"
        )
    before = live(function.nodes, function.results, sizes)
    nodes, now, again = list(function.nodes), before, []
    while now.peak_bytes > budget_bytes:
        for chain, use in _candidates(nodes, now, sizes):
            tried = _inserted(nodes, chain, use)
            after = live(tried, function.results, sizes)
            if _better(after, now):
                nodes, now = tried, after
                again += [str(node.op) for node in chain]
                break
        else:
            break
    recomputed = function.with_(nodes=nodes)
    return recomputed, RecomputationPlan(
        budget_bytes, before.peak_bytes, now.peak_bytes, least, tuple(again)
    )


def _better(after: Live[Value], before: Live[Value]) -> bool:
    """A lower peak, or as high a one during fewer nodes."""
    peak = before.peak_bytes
    if after.peak_bytes != peak:
        return after.peak_bytes < peak
    return after.bytes_at.count(peak) < before.bytes_at.count(peak)


def _candidates(
    nodes: Sequence[Node], now: Live[Value], sizes: Mapping[str, int]
) -> Iterator[tuple[list[Node], int]]:
    """(nodes to run again, the use they run before), the most bytes for the work first."""
    peak = now.peak_at
    rows = []
    for value, born in now.born.items():
        uses = now.uses.get(value, ())
        place = bisect.bisect_right(uses, peak)
        across = born < peak and place < len(uses) and uses[-1] < len(nodes)
        if not across or (place and uses[place - 1] == peak):
            continue
        held = type_bytes(value.type, sizes)
        chain = _chain(nodes, now, value, uses[place]) if held else None
        if chain:
            work = sum(_work(node, sizes) for node in chain)
            rows.append((-held / work, born, chain, uses[place]))
    rows.sort(key=lambda row: row[:2])
    yield from ((chain, use) for _, _, chain, use in rows[:TRIED])


def _work(node: Node, sizes: Mapping[str, int]) -> int:
    return 1 + row_of(node).cost_of(node, lambda value: type_bytes(value.type, sizes)).flops


def _chain(nodes: Sequence[Node], now: Live[Value], value: Value, use: int) -> list[Node] | None:
    """The nodes that make the value from what is alive at its use; None where it takes too many."""
    places: set[int] = set()
    wanted = [value]
    while wanted:
        producer = now.made_by.get(wanted.pop())
        if producer is None or producer in places or nodes[producer].op.name == CONSTANT:
            continue
        places.add(producer)
        if len(places) > LONGEST_CHAIN or not _repeats(nodes[producer]):
            return None
        for taken in nodes[producer].inputs:
            if taken is None:
                continue
            root = now.roots.get(taken, taken)
            if root is not taken or (root in now.born and max(now.uses[root]) < use):
                wanted.append(taken)
    return [nodes[i] for i in sorted(places)]


def _repeats(node: Node) -> bool:
    """Whether a second run gives the same values, under types that are known."""
    row = row_of(node)
    inside = all(_repeats(inner) for region in node.regions for inner in region.nodes)
    return not row.nondeterministic and not row.data_dependent_dims and inside


def _inserted(nodes: Sequence[Node], chain: Sequence[Node], use: int) -> list[Node]:
    """The nodes with the chain run again before node `use`; from there on its values are taken."""
    inside = {v for node in chain for v in node.outputs}
    after = _latest_float(nodes, use)
    inserted: list[Node] = []
    renamed: dict[Value, Value] = {}
    if after is None:
        return list(nodes)
    for node in chain:
        behind = not any(v in inside for v in node.inputs)
        operands = []
        for k, v in enumerate(node.inputs):
            if v is None or v in renamed:
                operands.append(v if v is None else renamed[v])
            elif behind and k == 0:
                held = Value(v.type)
                inserted.append(Node(barrier.id, (v, after), (held,), {}, (), node.meta))
                operands.append(held)
            else:
                operands.append(v)
        outputs = tuple(Value(v.type) for v in node.outputs)
        renamed.update(zip(node.outputs, outputs, strict=True))
        inserted.append(replace(node, inputs=tuple(operands), outputs=outputs))
    later = [
        replace(n, inputs=tuple(renamed.get(v, v) if v is not None else None for v in n.inputs))
        for n in nodes[use:]
    ]
    return [*nodes[:use], *inserted, *later]


def _latest_float(nodes: Sequence[Node], use: int) -> Value | None:
    """The float that was made last before node `use`."""
    for node in reversed(nodes[:use]):
        if node.op.name == CONSTANT or node.op.name in VIEWS:
            continue
        for value in node.outputs:
            if value.type.dtype.is_float and value.type.dtype.bits >= 32:
                return value
    return None
