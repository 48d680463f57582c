"""Layers of each group: rows from longest paths, lanes for long links, order by medians.

Rows and order follow from the links alone, not from the sizes of boxes, so they hold for every way
to fold and unfold (Sugiyama et al. 1981, group by group). Links across the border of a group meet
the border in one point, IN or OUT. Those between phases are drawn between the phases alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

from triplane.unified_ir.cli.drawing.item import IN, LANE, OUT, Item, Layers

SWEEPS: Final = 8
COLUMNS: Final = 2
"""Boxes without links in a row."""

Link = tuple[int, int]


def lay_out(root: Item) -> None:
    """Set the layers of every group in `root`, and the type that it passes on."""
    links: dict[Item, dict[Link, None]] = {g: {} for g in root.walk() if g.children}
    passed: dict[Item, dict[str, None]] = {}
    for reader in root.walk():
        for source in reader.sources:
            _connect(source, reader, links, passed)
    for group, details in passed.items():
        group.detail = next(iter(details)) if len(details) == 1 else f"{len(details)} types"
    for group, between in links.items():
        group.layers = _layers([c.number for c in group.children], between, apart=_apart(group))


def _apart(group: Item) -> bool:
    return any(child.is_phase for child in group.children[:1])


def _connect(
    source: Item,
    reader: Item,
    links: dict[Item, dict[Link, None]],
    passed: dict[Item, dict[str, None]],
) -> None:
    """Add one link to each group that it passes: within, into or out of it."""
    above, below = _path(source), _path(reader)
    shared = 0
    while above[shared] is below[shared]:
        shared += 1
    links[above[shared - 1]][above[shared].number, below[shared].number] = None
    if _apart(above[shared - 1]):
        return
    for group, child in zip(above[shared:], above[shared + 1 :], strict=False):
        links[group][child.number, OUT] = None
        passed.setdefault(group, {})[source.detail] = None
    for group, child in zip(below[shared:], below[shared + 1 :], strict=False):
        links[group][IN, child.number] = None


def _path(item: Item) -> list[Item]:
    path = [item]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _layers(children: Sequence[int], links: Iterable[Link], *, apart: bool) -> Layers:
    place = {child: i for i, child in enumerate(children)} | {IN: -1, OUT: len(children)}
    down = [link for link in links if place[link[0]] < place[link[1]]]
    back = [link for link in links if place[link[0]] > place[link[1]]]
    if apart:
        # Phases stand side by side, so that the picture is as wide as it is high.
        at = {child: i for i, child in enumerate(children)}
        return Layers([[*children]], [], [(at[a], at[b]) for a, b in (*down, *back)])
    ranks = _ranks(children, down)
    grid = _Grid([[] for _ in range(max(ranks.values(), default=-1) + 1)])
    for child, rank in ranks.items():
        grid.add(child, rank)
    for source, reader in down:
        grid.connect(source, reader, ranks[source], ranks[reader])
    grid.order()
    return grid.layers(back)


def _ranks(children: Sequence[int], links: Sequence[Link]) -> dict[int, int]:
    """Return the row of each child that has links, and of IN and OUT; then those without links."""
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for source, reader in links:
        above.setdefault(reader, []).append(source)
        below.setdefault(source, []).append(reader)
    linked = [c for c in children if c in above or c in below]
    top = int(IN in below)  # the first row of boxes, under that of IN
    ranks = {IN: 0} if top else {}
    for child in linked:
        ranks[child] = max((ranks[s] + 1 for s in above.get(child, ())), default=top)
    for child in reversed(linked):
        readers = [ranks[r] for r in below.get(child, ()) if r != OUT]
        # Without a source a box stands just above its first reader.
        if child not in above and readers:
            ranks[child] = min(readers) - 1
    if OUT in above:
        ranks[OUT] = max(ranks.values()) + 1
    first = max(ranks.values(), default=-1) + 1
    alone = [c for c in children if c not in ranks]
    return ranks | {child: first + i // COLUMNS for i, child in enumerate(alone)}


@dataclass(eq=False, slots=True, repr=False)
class _Spot:
    """A box, a border point or a bend in a row."""

    what: int
    rank: int
    at: float = 0.0
    above: list[_Spot] = field(default_factory=list)
    below: list[_Spot] = field(default_factory=list)


@dataclass(slots=True)
class _Grid:
    rows: list[list[_Spot]]
    spots: dict[int, _Spot] = field(default_factory=dict)
    lanes: dict[Link, _Spot] = field(default_factory=dict)

    def add(self, what: int, rank: int) -> _Spot:
        spot = _Spot(what, rank)
        self.rows[rank].append(spot)
        if what != LANE:
            self.spots[what] = spot
        return spot

    def connect(self, source: int, reader: int, first: int, last: int) -> None:
        """Add a link with a bend in each row between; links of one source share their bends."""
        # Links to OUT share theirs at the other end. This saves most of the crossings.
        key = reader if reader == OUT else source
        chain = [self.spots[source]]
        for rank in range(first + 1, last):
            if (key, rank) not in self.lanes:
                self.lanes[key, rank] = self.add(LANE, rank)
            chain.append(self.lanes[key, rank])
        chain.append(self.spots[reader])
        for upper, lower in pairwise(chain):
            if lower not in upper.below:
                upper.below.append(lower)
                lower.above.append(upper)

    def order(self) -> None:
        """Order each row by the medians of the places that its spots are linked to."""
        for row in self.rows:
            _number(row)
        for sweep in range(SWEEPS):
            down = sweep % 2 == 0
            for row in self.rows if down else self.rows[::-1]:
                # Spots without neighbours keep their place, and the sort is stable, so equal
                # functions give equal pictures.
                row.sort(key=lambda s, down=down: _median(s.above if down else s.below, s.at))  # type: ignore[misc]
                _number(row)

    def layers(self, back: Sequence[Link]) -> Layers:
        starts = [0, *accumulate(map(len, self.rows))]
        at = {s: starts[i] + j for i, row in enumerate(self.rows) for j, s in enumerate(row)}
        links = [(at[s], at[lower]) for s in at for lower in s.below]
        rows = [[s.what for s in row] for row in self.rows]
        return Layers(rows, links, [(at[self.spots[a]], at[self.spots[b]]) for a, b in back])


def _number(row: Sequence[_Spot]) -> None:
    for i, spot in enumerate(row):
        spot.at = (i + 0.5) / len(row)


def _median(tied: Sequence[_Spot], default: float) -> float:
    if not tied:
        return default
    # The mean of the two middle ones, which are the same one if the number is odd.
    ats = sorted(spot.at for spot in tied)
    return (ats[(len(ats) - 1) // 2] + ats[len(ats) // 2]) / 2
