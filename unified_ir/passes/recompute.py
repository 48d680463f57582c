"""Recomputation: less memory alive at once, for some work done twice (Chen et al. 2016).

A tensor that is computed before the peak and read after it need not be kept across the peak: the
nodes that compute it, from tensors that are alive there anyway, run again right before it is read.
Barriers keep a runtime from running them early or from reusing the values it already has. Results
are those of the function without the plan; a runtime that fuses nodes may round some differently.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.rows.movement.structure import barrier
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
"""The most nodes that run again for one tensor."""
TRIED: Final = 24
"""Tensors considered for one step of the plan, the largest gain for the work first."""


@dataclass(frozen=True, slots=True)
class RecomputationPlan:
    """The outcome of recomputation, in bytes of tensors alive at once."""

    budget_bytes: int
    before_bytes: int
    peak_bytes: int
    least_bytes: int
    """A bound that no plan goes below."""
    again: tuple[str, ...]
    """Operators that run a second time, in order."""

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the budget."""
        return self.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"{verdict} a budget of {self.budget_bytes:,} bytes: peak {self.peak_bytes:,}, without "
            f"recomputation {self.before_bytes:,}; no plan goes below {self.least_bytes:,}, gap "
            f"{self.peak_bytes - self.least_bytes:,}; {len(self.again)} nodes run again"
        )


def recompute(
    function: Function, budget_bytes: int, sizes: Mapping[str, int]
) -> tuple[Function, RecomputationPlan]:
    """Return the function with as much recomputation as the budget requires, and the plan.

    sizes: the size of each symbol, such as {"N": 32}.  The plan may miss the budget, see `fits`.
    Raise InvalidInput if the budget is below what any plan needs.
    """
    function = fuse(clean(function))
    least = least_bytes(function, sizes)
    if budget_bytes < least:
        raise InvalidInput(
            f"{function.name!r} needs {least:,} bytes of tensors alive at once, whatever is "
            f"computed again, and the budget is {budget_bytes:,}; raise it, or reduce the batch"
        )
    before = live(function.nodes, function.results, sizes)
    nodes, now, again = list(function.nodes), before, []
    # Greedy: each step takes the first candidate that lowers the peak. The best plan is a search
    # over exponentially many; the gap to the bound is reported instead.
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
    plan = RecomputationPlan(budget_bytes, before.peak_bytes, now.peak_bytes, least, tuple(again))
    return function.with_(nodes=nodes), plan


def _better(after: Live[Value], before: Live[Value]) -> bool:
    """Return whether the peak is lower, or equal but reached during fewer nodes."""
    peak = before.peak_bytes
    if after.peak_bytes != peak:
        return after.peak_bytes < peak
    return after.bytes_at.count(peak) < before.bytes_at.count(peak)


def _candidates(
    nodes: Sequence[Node], now: Live[Value], sizes: Mapping[str, int]
) -> Iterator[tuple[list[Node], int]]:
    """Yield (nodes to run again, the use they run before), the most bytes for the work first."""
    peak = now.peak_at
    rows = []
    for value, born in now.born.items():
        uses = now.uses.get(value, ())
        # The first use after the peak. A value that the peak's node reads must be alive there, and
        # a result until the end, so neither can be dropped.
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
    # At least 1, so that nodes without arithmetic, such as views, do not divide by zero.
    return 1 + row_of(node).cost_of(node, lambda value: type_bytes(value.type, sizes)).flops


def _chain(nodes: Sequence[Node], now: Live[Value], value: Value, use: int) -> list[Node] | None:
    """Return the nodes that compute the value from what is alive at its use; None if too many."""
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
            # An operand is computed again if it is a view, which costs nothing, or if its memory is
            # free by then.
            if root is not taken or (root in now.born and max(now.uses[root]) < use):
                wanted.append(taken)
    return [nodes[i] for i in sorted(places)]


def _repeats(node: Node) -> bool:
    """Return whether a second run gives the same values, under types that are known."""
    row = row_of(node)
    inside = all(_repeats(inner) for region in node.regions for inner in region.nodes)
    return not row.nondeterministic and not row.data_dependent_dims and inside


def _inserted(nodes: Sequence[Node], chain: Sequence[Node], use: int) -> list[Node]:
    """Run the chain again before node `use`, and let the nodes from there on read its values."""
    inside = {v for node in chain for v in node.outputs}
    after = _latest_float(nodes[:use])
    inserted: list[Node] = []
    renamed: dict[Value | None, Value] = {}
    if after is None:
        return list(nodes)
    for node in chain:
        operands = [renamed.get(v, v) for v in node.inputs]
        # Nodes that read another node of the chain wait for it anyway; only the beginnings of the
        # chain need a barrier. `after` is computed just before the use, so a barrier on it cannot
        # run earlier.
        first = operands[0] if operands and inside.isdisjoint(node.inputs) else None
        if first is not None:
            held = operands[0] = Value(first.type)
            inserted.append(Node(barrier.id, (first, after), (held,), {}, (), node.meta))
        outputs = tuple(Value(v.type) for v in node.outputs)
        renamed.update(zip(node.outputs, outputs, strict=True))
        inserted.append(replace(node, inputs=tuple(operands), outputs=outputs))
    later = [replace(n, inputs=tuple(renamed.get(v, v) for v in n.inputs)) for n in nodes[use:]]
    return [*nodes[:use], *inserted, *later]


def _latest_float(nodes: Sequence[Node]) -> Value | None:
    """Return the last float of at least 32 bits that the nodes compute; views do not count."""
    computed = (n for n in reversed(nodes) if n.op.name != CONSTANT and n.op.name not in VIEWS)
    values = (v for node in computed for v in node.outputs)
    return next((v for v in values if v.type.dtype.is_float and v.type.dtype.bits >= 32), None)
