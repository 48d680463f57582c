"""A function as a self-contained SVG: layers from inputs down to results, no script, no font.

Constants and sizes are left out, and a parameter is drawn again beside each use that is far from
the last, so that lines stay short. Every box has a tooltip with types, attributes and location.
Layout: longest paths give the layers, four sweeps of medians the order (Sugiyama et al. 1981).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Final

from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.text import attributes_text

# fmt: off
STYLE: Final = {  # kind: fill, line, label in the legend
    "input":    ("#ffffff", "#444444", "input"),
    "state":    ("#eceff4", "#7b8794", "state"),
    "forward":  ("#dbeafe", "#3b6fb5", "forward"),
    "backward": ("#ffe4c7", "#c4701a", "backward"),
    "update":   ("#dcf3dc", "#3d8b4f", "after the gradient"),
    "result":   ("#ffffff", "#222222", "result"),
}
# fmt: on
MAX_DRAWN: Final = 3_000
_NEAR: Final = 2
"""Layers that a parameter's line may span before the parameter is drawn again."""
_ROW, _HEIGHT, _GAP, _LANE, _MARGIN, _TOP = 64, 36, 14, 10, 24, 56
_LETTER: Final = 6.6
_SWEEPS: Final = 4


@dataclass(eq=False, slots=True)
class _Box:
    """A box, or with `kind` "lane" a bend of a line that crosses the layer."""

    kind: str
    label: str = ""
    detail: str = ""
    tip: str = ""
    layer: int = 0
    of_state: bool = False
    x: float = 0.0
    above: list[_Box] = field(default_factory=list)
    below: list[_Box] = field(default_factory=list)

    @property
    def width(self) -> float:
        if self.kind == "lane":
            return 2
        # 0.85: the second line of a box is set in 9 px instead of 11.
        return max(len(self.label) * _LETTER, len(self.detail) * _LETTER * 0.85) + 18


def function_svg(function: Function, state: Collection[str] = ()) -> str:
    """Draw the function; `state` names the parameters and results that outlive a call."""
    boxes = _boxes(function, state)
    if len(boxes) > MAX_DRAWN:
        return _svg([], f"{function.name}: {len(boxes)} boxes, at most {MAX_DRAWN} are drawn")
    layers = _layered(boxes)
    _order(layers)
    _place(layers)
    return _svg(layers, f"{function.name}: {len(list(function.walk()))} nodes")


def _boxes(function: Function, state: Collection[str]) -> list[_Box]:
    """Return boxes of nodes and results, with layers, then of parameters beside their uses."""
    by_value: dict[Value, _Box] = {}
    uses: dict[Value, list[_Box]] = {p: [] for p in function.params}
    boxes = []
    for i, node in enumerate(function.nodes):
        operands = [v for v in node.inputs if v is not None and (v in by_value or v in uses)]
        if not operands:
            continue
        sources = [by_value[v] for v in operands if v in by_value]
        box = _node_box(node, i, _phase(node, sources))
        box.of_state = all(s.of_state for s in sources) and all(
            v.name in state for v in operands if v in uses
        )
        boxes.append(box)
        _link(box, operands, by_value, uses)
        by_value.update(dict.fromkeys(node.outputs, box))
    for name, value in zip(function.result_names, function.results, strict=True):
        tip = f"result {name}: {value.type}" + (" (new state)" if name in state else "")
        box = _Box("result", name, str(value.type), tip)
        boxes.append(box)
        _link(box, [value] if value in by_value or value in uses else [], by_value, uses)
    _sink(boxes)
    return [*boxes, *_param_boxes(uses, state)]


def _sink(boxes: Sequence[_Box]) -> None:
    """Move boxes that are computed from state alone down to where they are used."""
    users: dict[_Box, list[_Box]] = {b: [] for b in boxes}
    for box in reversed(boxes):
        if box.of_state and users[box]:
            # Sources are visited after their users, so the layers of users are final.
            box.layer = min(u.layer for u in users[box]) - 1
            if all(u.kind == "update" for u in users[box]):
                box.kind = "update"
        for source in box.above:
            users[source].append(box)


def _link(
    box: _Box,
    operands: Sequence[Value],
    boxes: Mapping[Value, _Box],
    uses: Mapping[Value, list[_Box]],
) -> None:
    sources = dict.fromkeys(boxes[v] for v in operands if v in boxes)
    box.layer = max((s.layer for s in sources), default=0) + 1
    box.above.extend(sources)
    for value in dict.fromkeys(operands):
        if value in uses:
            uses[value].append(box)


def _phase(node: Node, sources: Sequence[_Box]) -> str:
    if node.meta.scope.split(".")[0] == "grad":
        return "backward"
    return "update" if any(s.kind in {"backward", "update"} for s in sources) else "forward"


def _node_box(node: Node, i: int, phase: str) -> _Box:
    inner = sum(len(list(r.walk())) for r in node.regions)
    label = node.op.name + (f" ({inner} nodes)" if inner else "")
    lines = [f"node {i}: {node.op}"]
    lines += [f"operand {v.type}" for v in node.inputs if v is not None]
    lines += [f"gives {v.type}" for v in node.outputs]
    lines += [attributes_text(node.attrs)] if node.attrs else []
    lines += [str(node.meta.location)] if node.meta.location else []
    lines += [f"in {node.meta.scope}"] if node.meta.scope else []
    return _Box(phase, label, str(node.outputs[0].type), "\n".join(lines))


def _param_boxes(uses: Mapping[Value, list[_Box]], state: Collection[str]) -> Iterator[_Box]:
    for param, users in uses.items():
        kind = "state" if param.name in state else "input"
        box: _Box | None = None
        for user in sorted(users, key=lambda b: b.layer):
            if box is None or user.layer - box.layer > _NEAR:
                tip = f"{kind} {param.name}: {param.type}"
                box = _Box(kind, param.name, str(param.type), tip, max(user.layer - 1, 0))
                yield box
            user.above.append(box)


def _layered(boxes: Sequence[_Box]) -> list[list[_Box]]:
    """Return boxes by layer; lines across layers become lanes, one per source and layer."""
    layers: list[list[_Box]] = [[] for _ in range(max((b.layer for b in boxes), default=0) + 1)]
    for box in boxes:
        layers[box.layer].append(box)
    for box in boxes:
        box.above = [_lane(layers, source, box.layer) for source in box.above]
    return layers


def _lane(layers: list[list[_Box]], source: _Box, layer: int) -> _Box:
    """Return the box just above `layer` that represents `source`: itself, or its last lane."""
    at = source
    while at.layer < layer - 1:
        # All lines from one source share a lane in each layer, which saves most of the crossings of
        # a value with many uses.
        lane = next((b for b in at.below if b.kind == "lane"), None)
        if lane is None:
            lane = _Box("lane", layer=at.layer + 1, above=[at])
            at.below.append(lane)
            layers[lane.layer].append(lane)
        at = lane
    return at


def _order(layers: list[list[_Box]]) -> None:
    """Order each layer by the median position of the boxes that its boxes connect to."""
    for boxes in layers:
        for box in boxes:
            for source in box.above:
                if box not in source.below:
                    source.below.append(box)
    for boxes in layers:
        _number(boxes)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for boxes in layers if down else layers[::-1]:
            # Boxes without neighbours keep their place, and the sort is stable, so equal functions
            # give equal drawings.
            boxes.sort(key=lambda b, down=down: _median(b.above if down else b.below, b.x))  # type: ignore[misc]
            _number(boxes)


def _number(boxes: Sequence[_Box]) -> None:
    for i, box in enumerate(boxes):
        box.x = (i + 0.5) / len(boxes)


def _median(tied: Sequence[_Box], default: float) -> float:
    if not tied:
        return default
    # The mean of the two middle ones, which are the same one if the number is odd.
    xs = sorted(b.x for b in tied)
    return (xs[(len(xs) - 1) // 2] + xs[len(xs) // 2]) / 2


def _place(layers: list[list[_Box]]) -> None:
    """Give each box an x near the median of its neighbours, keeping order and gaps."""
    for boxes in layers:
        _spread(boxes, [0.0] * len(boxes))
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        for boxes in layers if down else layers[::-1]:
            _spread(boxes, [_median(b.above if down else b.below, b.x) for b in boxes])
    left = min((b.x - b.width / 2 for boxes in layers for b in boxes), default=0.0)
    for boxes in layers:
        for box in boxes:
            box.x += _MARGIN - left


def _spread(boxes: Sequence[_Box], wanted: Sequence[float]) -> None:
    """Move boxes to the wanted places, pushed apart evenly to both sides where they overlap."""
    room = [
        (a.width + b.width) / 2 + (_LANE if "lane" in {a.kind, b.kind} else _GAP)
        for a, b in pairwise(boxes)
    ]
    # Each pass keeps x[i+1] - x[i] >= room[i], one by moving boxes to the right only, the other to
    # the left only; so does their mean, which favours neither side.
    right, left = list(wanted), list(wanted)
    for i in range(1, len(right)):
        right[i] = max(right[i], right[i - 1] + room[i - 1])
    for i in range(len(left) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - room[i])
    for box, a, b in zip(boxes, right, left, strict=True):
        box.x = (a + b) / 2


def _y(box: _Box) -> float:
    return _TOP + box.layer * _ROW


def _svg(layers: Sequence[Sequence[_Box]], title: str) -> str:
    boxes = [b for layer in layers for b in layer]
    right = max((b.x + b.width / 2 for b in boxes), default=0.0)
    width = max(right + _MARGIN, 640.0)
    height = _TOP + len(layers) * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}"',
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height}" fill="#fdfdfd"/>',
        f'<text x="{_MARGIN}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_legend({b.kind for b in boxes}),
        '<g fill="none" stroke="#9aa5b1" stroke-width="1.1">',
        *(_line(source, box) for box in boxes for source in box.above),
        "</g>",
        *(_drawn(box) for box in boxes if box.kind != "lane"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(kinds: Collection[str]) -> Iterator[str]:
    x = float(_MARGIN)
    for kind, (fill, line, words) in STYLE.items():
        if kind not in kinds:
            continue
        yield f'<rect x="{x:.0f}" y="32" width="12" height="12" fill="{fill}" stroke="{line}"/>'
        yield f'<text x="{x + 17:.0f}" y="42">{words}</text>'
        x += 34 + len(words) * _LETTER


def _line(source: _Box, box: _Box) -> str:
    start = _y(source) + _HEIGHT
    end = _y(box) + (_HEIGHT if box.kind == "lane" else 0)
    near = _y(box)
    bend = (start + near) / 2
    path = f"M{source.x:.1f} {start:.1f}C{source.x:.1f} {bend:.1f} {box.x:.1f} {bend:.1f}"
    path += f" {box.x:.1f} {near:.1f}"
    return f'<path d="{path}{f"V{end:.1f}" if end != near else ""}"/>'


def _drawn(box: _Box) -> str:
    fill, line, _ = STYLE[box.kind]
    rounded = 4 if box.kind in {"forward", "backward", "update"} else _HEIGHT / 2
    x, y = box.x - box.width / 2, _y(box)
    weight = "2" if box.kind == "result" else "1"
    return (
        f'<g><title>{escape(box.tip)}</title><rect x="{x:.1f}" y="{y:.1f}" '
        f'width="{box.width:.1f}" height="{_HEIGHT}" rx="{rounded}" fill="{fill}" '
        f'stroke="{line}" stroke-width="{weight}"/>'
        f'<text x="{box.x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{escape(box.label)}</text>'
        f'<text x="{box.x:.1f}" y="{y + 28:.1f}" text-anchor="middle" font-size="9" '
        f'fill="#52606d">{escape(box.detail)}</text></g>'
    )
