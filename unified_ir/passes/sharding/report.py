"""A plan as a record for programs, as a table for a terminal of 80 columns, and as an SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Split
from triplane.unified_ir.passes.sharding.planner import (
    MARGIN,
    Alternative,
    ParallelPlan,
    PlannedNode,
)

NAME: Final = 26
SPLIT: Final = 24
CHOICE: Final = 40
SHOWN_ALTERNATIVES: Final = 12
SHOWN_PINNED: Final = 6
WIDTH: Final = 80
GRADIENT: Final = "grad"
REST: Final = "(loss and update)"


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The nodes of one layer, forward and backward: the split of the one with the most time."""

    name: str
    operator: str
    split: Split
    seconds: float
    compute_s: float
    sent_bytes: float
    output_bytes: int


def layer_plans(plan: ParallelPlan) -> list[LayerPlan]:
    """Return the plan by layer, in the order of the graph."""
    groups: dict[str, list[PlannedNode]] = {}
    for node in plan.nodes:
        groups.setdefault(_layer(node.scope), []).append(node)
    rest = groups.pop(REST, None)
    if rest is not None:
        groups[REST] = rest
    return [_layer_plan(name, nodes) for name, nodes in groups.items()]


def _layer(scope: str) -> str:
    name = scope.removeprefix(GRADIENT).removeprefix(".")
    return name or REST


def _layer_plan(name: str, nodes: Sequence[PlannedNode]) -> LayerPlan:
    # By its whole work: a node that is split well would otherwise lose to one that is not.
    main = max(nodes, key=lambda n: (n.whole_s, -n.index))
    return LayerPlan(
        name,
        main.operator,
        main.split,
        sum(n.seconds for n in nodes),
        sum(n.compute_s for n in nodes),
        sum(n.sent_bytes for n in nodes),
        sum(n.output_bytes for n in nodes),
    )


def split_text(split: Split) -> str:
    """Format a split as MindSpore writes it: ((4,1),(1,1)); vectors of whole operands are short."""
    operands = ["(" + ",".join(map(str, axes)) + ("," if len(axes) == 1 else "") + ")"
                for axes in split]  # fmt: skip
    return "(" + ",".join(operands) + ("," if len(operands) == 1 else "") + ")"


def time_text(seconds: float) -> str:
    """Format a time in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us"


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.2g}" if x < 1 else f"{x:.3g}"


def bytes_text(n: float) -> str:
    """Format bytes with a binary unit."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= scale:
            return f"{_three_digits(n / scale)} {unit}"
    return f"{n:.0f} B"


def record(plan: ParallelPlan) -> dict[str, Any]:
    """Return the plan as a record ready for JSON."""
    memory, topology = plan.memory, plan.problem.topology
    return {
        "function": plan.function.name,
        "devices": math.prod(plan.mesh),
        "mesh": list(plan.mesh),
        "sizes": dict(plan.problem.sizes),
        "topology": {"source": topology.source, **topology.json()},
        "seconds": plan.seconds,
        "compute_seconds": plan.compute_s,
        "sent_bytes": plan.sent_bytes,
        "memory": {
            "argument_bytes": memory.arguments,
            "result_bytes": memory.results,
            "reused_bytes": memory.reused,
            "temporary_bytes": memory.temporaries,
            "total_bytes": memory.total,
            "margin": MARGIN,
        },
        "search": {"method": plan.choices.method, "gap": plan.choices.gap},
        "other_plans": [
            {"what": o.what, "mesh": list(o.mesh), "seconds": o.seconds,
             "total_bytes": o.total_bytes}
            for o in plan.others
        ],
        "parameters": {name: list(layout) for name, layout in plan.layouts().items()},
        "nodes": [_node_record(n) for n in plan.nodes],
    }  # fmt: skip


def _node_record(node: PlannedNode) -> dict[str, Any]:
    return {
        "node": node.index,
        "operator": node.operator,
        "scope": node.scope,
        "line": node.line,
        "split": [list(axes) for axes in node.split],
        "output_split": [list(axes) for axes in node.output_split],
        "rule": node.rule,
        "pinned": node.is_pinned,
        "collectives": list(node.collectives),
        "seconds": node.seconds,
        "compute_seconds": node.compute_s,
        "sent_bytes": node.sent_bytes,
        "output_bytes": node.output_bytes,
    }


def table(plan: ParallelPlan) -> Iterator[str]:
    """Yield the lines of the summary, at most 80 columns wide."""
    mesh = " x ".join(map(str, plan.mesh))
    yield f"{plan.function.name} on {math.prod(plan.mesh)} devices, mesh {mesh}"
    yield f"{plan.problem.topology.source}"
    yield ""
    head = f"{'layer':{NAME}}  {'split of its largest node':{SPLIT + 1}}"
    yield f"{head}{'sent':>8}{'held':>9}{'time':>9}"
    for layer in layer_plans(plan):
        split = split_text(layer.split)
        text = split if len(split) <= SPLIT else split[: SPLIT - 3] + "..."
        sent, held = bytes_text(layer.sent_bytes), bytes_text(layer.output_bytes)
        name = layer.name if len(layer.name) <= NAME else "..." + layer.name[3 - NAME :]
        row = f"{name:{NAME}}  {text:{SPLIT}}{sent:>9}{held:>9}{time_text(layer.seconds):>9}"
        yield row.rstrip()
    yield ""
    yield from _totals(plan)


def _totals(plan: ParallelPlan) -> Iterator[str]:
    memory = plan.memory
    communication = max(0.0, plan.seconds - plan.compute_s)  # sums are rounded
    yield (
        f"predicted time   {time_text(plan.seconds)}: {time_text(plan.compute_s)} of work, "
        f"{time_text(communication)} of communication"
    )
    yield f"sent per device  {bytes_text(plan.sent_bytes)}"
    yield (
        f"memory           {bytes_text(memory.total)}: {bytes_text(memory.arguments)} of "
        f"arguments, {bytes_text(memory.temporaries)} alive at"
    )
    yield f"                 the peak, node {memory.at}; checked with a margin of {MARGIN - 1:.0%}"
    pinned = [f"{n.operator} {n.line}".strip() for n in plan.nodes if n.is_pinned]
    for k, text in enumerate(pinned[:SHOWN_PINNED]):
        yield f"{'' if k else 'as written':15}  {text}"[:WIDTH]
    if (rest := len(pinned) - SHOWN_PINNED) > 0:
        yield f"{'':15}  and {rest} more nodes (--json has all)"
    gap = plan.choices.gap
    exact = "exact" if gap < 1e-9 else f"at most {gap:.1%} above the least"
    yield f"search           {plan.choices.method}, {exact}"
    for i, other in enumerate(plan.others):
        head = "next best" if i == 0 else "compared"
        more = f"{other.seconds / plan.seconds - 1:+.1%}" if plan.seconds else "same"
        yield f"{head:15}  {time_text(other.seconds)} ({more}): {other.what}"


def find_node(plan: ParallelPlan, name: str) -> int:
    """Return the node with this index, or the largest one whose scope or operator has the name.

    InvalidInput: there is none; the message lists scopes.
    """
    if name.isdecimal() and int(name) < len(plan.function.nodes):
        return int(name)
    # No name is that of the nodes outside of all layers; an unset variable of a shell gives it.
    near = [n for n in plan.nodes if name and name in {n.scope, n.operator}]
    near = near or [n for n in plan.nodes if name and _layer(n.scope) == name]
    if not near:
        layers = ", ".join(layer.name for layer in layer_plans(plan)[:12])
        raise InvalidInput(
            f"no node is called {name!r}; give the number of a node, an operator or a layer "
            f"such as {layers}"
        )
    return max(near, key=lambda n: (n.whole_s, -n.index)).index


def explanation(plan: ParallelPlan, index: int) -> Iterator[str]:
    """Yield the alternatives of a node as lines, the cheapest first."""
    alternatives = plan.alternatives(index)
    node = next(n for n in plan.nodes if n.index == index)
    where = f" in {node.scope}" if node.scope else ""
    yield f"node {index}: {node.operator}{where}  {node.line}".rstrip()
    yield f"rule: {node.rule}"
    if node.is_pinned:
        yield "as written: the strategy of this node leaves no other split"
    yield "each row: this node split otherwise, all others as planned"
    yield ""
    head = f"  {'split of operands -> result':{CHOICE}}{'work':>9}"
    yield f"{head}{'adding up':>11}{'layouts':>9}{'plan':>9}"
    for alternative in alternatives[:SHOWN_ALTERNATIVES]:
        yield _alternative(alternative)
    if (more := len(alternatives) - SHOWN_ALTERNATIVES) > 0:
        yield f"  {more} more (--json has all)"


def _alternative(a: Alternative) -> str:
    text = f"{split_text(a.split)} -> {split_text(a.output_split[:1])[1:-2]}"
    text = text if len(text) <= CHOICE else text[: CHOICE - 3] + "..."
    mark = "*" if a.is_chosen else " "
    times = (a.compute_s, a.own.seconds, a.moved.seconds, a.total_s)
    work, own, moved, total = map(time_text, times)
    return f"{mark} {text:{CHOICE}}{work:>9}{own:>11}{moved:>9}{total:>9}"


def alternatives_record(plan: ParallelPlan, index: int) -> dict[str, Any]:
    """Return the alternatives of a node as a record ready for JSON."""
    return {
        "node": index,
        "rule": plan.problem.factors[index].rule if index in plan.problem.factors else "",
        "alternatives": [
            {
                "split": [list(axes) for axes in a.split],
                "output_split": [list(axes) for axes in a.output_split],
                "chosen": a.is_chosen,
                "compute_seconds": a.compute_s,
                "sum_seconds": a.own.seconds,
                "layout_seconds": a.moved.seconds,
                "plan_seconds": a.total_s,
            }
            for a in plan.alternatives(index)
        ],
    }


_ROW, _TOP, _LEFT, _BAR, _WIDTH = 22, 76, 250, 300, 860
FONT: Final = 'font-family="system-ui, Helvetica, Arial, sans-serif"'
WORK, SENT = "#0072b2", "#d55e00"
"""Okabe and Ito's blue and vermilion, as in `files.chart`."""


def svg(plan: ParallelPlan) -> str:
    """Draw a bar for each layer: its work and its communication, beside its split."""
    layers = layer_plans(plan)
    longest = max((layer.seconds for layer in layers), default=0.0) or 1.0
    height = _TOP + _ROW * len(layers) + 24
    mesh = " x ".join(map(str, plan.mesh))
    title = f"{plan.function.name} on a mesh of {mesh}: {time_text(plan.seconds)}"
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} font-size="12">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="16" font-weight="600">{escape(title)}</text>',
        f'<rect x="16" y="42" width="12" height="12" fill="{WORK}"/>',
        '<text x="34" y="52">work</text>',
        f'<rect x="84" y="42" width="12" height="12" fill="{SENT}"/>',
        '<text x="102" y="52">communication</text>',
    ]
    for i, layer in enumerate(layers):
        parts += _bar(layer, _TOP + _ROW * i, longest)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(layer: LayerPlan, y: int, longest: float) -> Iterator[str]:
    work = _BAR * layer.compute_s / longest
    sent = _BAR * (layer.seconds - layer.compute_s) / longest
    name = layer.name if len(layer.name) <= 34 else "..." + layer.name[-31:]
    tip = f"{layer.name}: {time_text(layer.seconds)}, {bytes_text(layer.sent_bytes)} sent"
    yield f"<g><title>{escape(tip)}</title>"
    yield f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
    yield f'<rect x="{_LEFT}" y="{y + 2}" width="{work:.1f}" height="14" fill="{WORK}"/>'
    yield f'<rect x="{_LEFT + work:.1f}" y="{y + 2}" width="{sent:.1f}" height="14" fill="{SENT}"/>'
    text = f"{time_text(layer.seconds)}  {layer.operator} {split_text(layer.split)}"
    yield f'<text x="{_LEFT + work + sent + 8:.1f}" y="{y + 13}">{escape(text)}</text></g>'
