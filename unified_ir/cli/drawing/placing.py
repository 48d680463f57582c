"""Where the boxes of an outline stand, for one choice of what is folded.

page.html does the same for the reader's choices, line by line; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from triplane.unified_ir.cli.drawing.item import IN, LANE, OUT, Item

GAP: Final = 18
"""Pixels between boxes of a row."""
LANE_GAP: Final = 12
ROW_GAP: Final = 18
PAD: Final = 14
HEAD: Final = 24
"""Height of the title of an open group."""
LINE: Final = 14
BACK: Final = 28
"""Room at the right of a group for links that run back."""
SWEEPS: Final = 8


def lines_of(item: Item) -> list[str]:
    """Return the lines of a box: its name, what it computes, the type that it passes on."""
    times = f" \N{MULTIPLICATION SIGN} {item.times}" if item.times > 1 else ""
    lines = [item.name + times, item.label if item.label != item.name else "", item.detail]
    if item.children:
        count = f"{item.nodes:,} nodes"
        lines[2] = " \N{MIDDLE DOT} ".join(filter(None, (item.detail, count)))
    return [line for line in lines if line]


def size_of(item: Item) -> tuple[float, float]:
    """Return width and height of a folded box, for letters of usual width."""
    first, *more = lines_of(item)
    # A group has a triangle before its name.
    letters = max(8 * (len(first) + 2 * bool(item.children)), *(6.3 * len(m) for m in (*more, "")))
    return round(letters + 18), 10 + LINE * (1 + len(more))


@dataclass(eq=False, slots=True, repr=False)
class Placed:
    """A box at (x, y) within its group, its row from `top` to `bottom`; what: see `Layers`."""

    what: int
    width: float
    height: float
    item: Item | None = None
    x: float = 0.0
    y: float = 0.0
    top: float = 0.0
    bottom: float = 0.0
    inner: list[Placed] = field(default_factory=list)
    above: list[Placed] = field(default_factory=list)
    below: list[Placed] = field(default_factory=list)

    @property
    def middle(self) -> float:
        """The x of the links that begin or end here."""
        return self.x + self.width / 2


def placed(item: Item) -> Placed:
    """Return the box with everything that is visible in it."""
    width, height = size_of(item)
    box = Placed(item.number, width, height, item)
    if item.opened and item.children:
        _fill(box, item)
    return box


def _fill(box: Placed, item: Item) -> None:
    children = {child.number: placed(child) for child in item.children}
    rows = [[children.get(what) or Placed(what, 0, 0) for what in row] for row in item.layers.rows]
    box.inner = [spot for row in rows for spot in row]
    for a, b in item.layers.links:
        box.inner[a].below.append(box.inner[b])
        box.inner[b].above.append(box.inner[a])
    _place_rows(rows)
    left = min(spot.x for spot in box.inner)
    wide = max(spot.x + spot.width for spot in box.inner) - left
    wide += BACK if item.layers.back else 0
    box.width = max(box.width, wide + 2 * PAD)
    for spot in box.inner:
        spot.x += (box.width - wide) / 2 - left
        if spot.what in {IN, OUT}:
            spot.x = box.width / 2
    _place_down(box, rows, upward=item.upward)


def _place_rows(rows: Sequence[Sequence[Placed]]) -> None:
    """Give each spot an x near the median of its neighbours, keeping order and gaps."""
    for row in rows:
        _spread(row, [0.0] * len(row))
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else rows[::-1]:
            _spread(row, [_median(s.above if down else s.below, s.middle) for s in row])


def _median(tied: Sequence[Placed], default: float) -> float:
    if not tied:
        return default
    xs = sorted(spot.middle for spot in tied)
    return (xs[(len(xs) - 1) // 2] + xs[len(xs) // 2]) / 2


def _spread(row: Sequence[Placed], wanted: Sequence[float]) -> None:
    """Move spots to the wanted places, pushed apart evenly to both sides where they overlap."""
    room = [
        (a.width + b.width) / 2 + (LANE_GAP if LANE in {a.what, b.what} else GAP)
        for a, b in pairwise(row)
    ]
    # Each pass keeps x[i+1] - x[i] >= room[i], one by moving spots to the right only, the other to
    # the left only; so does their mean, which favours neither side.
    right, left = list(wanted), list(wanted)
    for i in range(1, len(right)):
        right[i] = max(right[i], right[i - 1] + room[i - 1])
    for i in range(len(left) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - room[i])
    for spot, a, b in zip(row, right, left, strict=True):
        spot.x = (a + b) / 2 - spot.width / 2


def _place_down(box: Placed, rows: Sequence[Sequence[Placed]], *, upward: bool) -> None:
    top = 0.0
    for row in rows:
        height = max(spot.height for spot in row)
        for spot in row:
            spot.top, spot.bottom, spot.y = top, top + height, top + (height - spot.height) / 2
        top += height + ROW_GAP
    total = top - ROW_GAP
    for spot in box.inner:
        if upward:
            spot.top, spot.bottom = total - spot.bottom, total - spot.top
            spot.y = total - spot.y - spot.height
        spot.top, spot.bottom, spot.y = spot.top + HEAD, spot.bottom + HEAD, spot.y + HEAD
    box.height = HEAD + total + PAD


@dataclass(frozen=True, slots=True)
class DrawnLink:
    """A drawn link: an SVG path, and where its arrow points, downwards (1), upwards or nowhere."""

    path: str
    x: float
    y: float
    arrow: int = 0
    back: bool = False


def lines(box: Placed, *, upward: bool) -> Iterator[DrawnLink]:
    """Yield the links within an open group, which runs downwards or `upward`."""
    for spot in box.inner:
        for reader in spot.below:
            yield _line(box, spot, reader, upward=upward)
    for a, b in box.item.layers.back if box.item else ():
        source, reader = box.inner[a], box.inner[b]
        same_row = source.top == reader.top
        yield _beside(source, reader) if same_row else _back(box, source, reader, upward=upward)


def _line(box: Placed, source: Placed, reader: Placed, *, upward: bool) -> DrawnLink:
    start, leave = (source.y, source.top) if upward else (source.y + source.height, source.bottom)
    enter, far = (reader.bottom, reader.top) if upward else (reader.top, reader.bottom)
    end = reader.y + reader.height if upward else reader.y
    # Lines cross a row to its other side, and the border of the group to the border itself.
    start = leave if source.what == LANE else start
    end = far if reader.what == LANE else end
    start = (box.height if upward else 0) if source.what == IN else start
    end = (0 if upward else box.height) if reader.what == OUT else end
    x, to, bend = source.middle, reader.middle, (leave + enter) / 2
    path = (
        f"M{x:.1f} {start:.1f}V{leave:.1f}C{x:.1f} {bend:.1f} {to:.1f} {bend:.1f} "
        f"{to:.1f} {enter:.1f}V{end:.1f}"
    )
    return DrawnLink(path, to, end, (-1 if upward else 1) if reader.item else 0)


def _back(box: Placed, source: Placed, reader: Placed, *, upward: bool) -> DrawnLink:
    """Return a line around the right of the boxes between."""
    sign = -1 if upward else 1
    start = source.y if upward else source.y + source.height
    end = reader.y + reader.height if upward else reader.y
    x, to, side = source.middle, reader.middle, box.width - PAD
    bend = sign * 20
    path = (
        f"M{x:.1f} {start:.1f}C{x:.1f} {start + bend:.1f} {side:.1f} {start + bend:.1f} "
        f"{side:.1f} {start - bend:.1f}V{end + bend:.1f}C{side:.1f} {end - bend:.1f} "
        f"{to:.1f} {end - bend:.1f} {to:.1f} {end:.1f}"
    )
    return DrawnLink(path, to, end, sign, back=True)


def _beside(source: Placed, reader: Placed) -> DrawnLink:
    """Return a line below or above a row, from where values leave the source."""
    below = not (source.item and source.item.upward)
    sign = 1 if below else -1
    start, end = (s.y + s.height if below else s.y for s in (source, reader))
    level = max(source.bottom, reader.bottom) if below else min(source.top, reader.top)
    level += sign * 30
    x, to = source.middle, reader.middle
    path = f"M{x:.1f} {start:.1f}C{x:.1f} {level:.1f} {to:.1f} {level:.1f} {to:.1f} {end:.1f}"
    return DrawnLink(path, to, end, -sign)
