"""What is one box at first: repeats of a group, blocks of nodes without scopes, long sequences."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from triplane.unified_ir.cli.drawing.item import Item
from triplane.unified_ir.cli.drawing.nodes import cut
from triplane.unified_ir.cli.drawing.phases import BACKWARD, PHASES, UPDATE
from triplane.unified_ir.passes.repeats import Listing, repeats

MAX_CHILDREN: Final = 32
"""Boxes in a group; more are divided into sections of as many."""
OPEN_BOXES: Final = 72
"""Boxes that a picture shows when it is opened."""
ENDS: Final = {"input": -1, "result": 1}
ELLIPSIS: Final = " \N{HORIZONTAL ELLIPSIS} "
_LEAST_BLOCK: Final = 4
_LEAST_LOOSE: Final = 4
_DIGITS: Final = re.compile(r"\d+")


def fold(group: Item, *, large: bool) -> None:
    """Fold what is in `group`, from the inside outwards, and describe it."""
    if group.is_node:
        # The names of inputs and results do not change what is computed.
        label = "" if group.kind in ENDS else group.label
        group.signature = hash((group.kind, label, group.detail, group.nodes))
    for child in group.children:
        fold(child, large=large)
    if not group.is_node:
        children = [*map(_alone, group.children)]
        children.sort(key=_rank)
        children = [*_merged(children)]
        if large and any(c.children for c in children):
            children = [*_loose(children)]
        if len(children) >= _LEAST_BLOCK:
            children = [*_blocks(children)]
        group.adopt(_divided(children))
        _describe(group)


def _rank(item: Item) -> int:
    """Return the place of phases among each other, of inputs before and results after nodes."""
    return PHASES.index(item.kind) if item.is_phase else ENDS.get(item.kind, 0)


def open_first(root: Item) -> None:
    """Open groups from the outside inwards as far as the picture stays small.

    If there are too many boxes, groups that hold nodes rather than groups stay closed, and so do
    repeats.
    """
    root.opened = True
    groups = [item for item in root.walk() if item.children]
    if sum(len(g.children) for g in groups) <= OPEN_BOXES:
        for group in groups:
            group.opened = True
    shown = len(root.children)
    level = root.children if not all(g.opened for g in groups) else []
    while level:
        for item in level:
            if _holds_groups(item) and shown + len(item.children) <= OPEN_BOXES:
                item.opened = True
                shown += len(item.children)
        level = [child for item in level if item.opened for child in item.children]


def _holds_groups(item: Item) -> bool:
    inner = sum(bool(c.children) for c in item.children)
    # The update holds a group for each weight, which repeats what the other phases show.
    in_update = item.kind == UPDATE
    return item.is_phase or (item.is_scope and not in_update and 2 * inner > len(item.children) > 0)


def _alone(item: Item) -> Item:
    """Return the only box of a group in its place, under the group's name."""
    if item.is_node or len(item.children) != 1 or item.is_phase:
        return item
    child = item.children[0]
    child.name = cut(".".join(filter(None, (item.name, child.name if child.named else ""))))
    child.named = child.named or item.named
    return child


def _merged(children: Sequence[Item]) -> Iterator[Item]:
    """Yield each run of groups that compute the same as one group."""
    start = 0
    while start < len(children):
        first, end = children[start], start + 1
        while end < len(children) and first.children and _alike(first, children[end]):
            end += 1
        yield first if end == start + 1 else _repeat(children[start:end], [*children[start:end]])
        start = end


def _loose(children: Sequence[Item]) -> Iterator[Item]:
    """Yield each run of nodes of no scope, such as those of a loss, as one group."""
    for loose, run in groupby(children, key=lambda c: not c.name and c.kind not in ENDS):
        part = [*run]
        if loose and len(part) >= _LEAST_LOOSE:
            yield _gathered("", part)
        else:
            yield from part


def _alike(a: Item, b: Item) -> bool:
    return a.signature == b.signature and _DIGITS.sub("", a.name) == _DIGITS.sub("", b.name)


def _blocks(children: Sequence[Item]) -> Iterator[Item]:
    """Yield the boxes with each block that repeats as a group, runs of one block as one group.

    Few boxes are left as they are, except for blocks that follow one another.
    """
    many, at = len(children) > MAX_CHILDREN, 0
    for start, length, times in _spans(children):
        if times == 1 and (not many or length < _LEAST_BLOCK):
            continue
        yield from children[at:start]
        at = start + length * times
        blocks = [_gathered("", children[i : i + length]) for i in range(start, at, length)]
        yield blocks[0] if times == 1 else _repeat(blocks, blocks)
    yield from children[at:]


def _spans(children: Sequence[Item]) -> list[tuple[int, int, int]]:
    """Return (start, length, times) of blocks of boxes that are computed alike."""
    owner = {atom: child for child in children for atom in child.atoms()}
    read = [
        [*dict.fromkeys(owner.get(s, s) for atom in c.atoms() for s in atom.sources)]
        for c in children
    ]
    inputs = [[s for s in row if s is not c] for c, row in zip(children, read, strict=True)]
    labels = [None if c.kind in ENDS else c.signature for c in children]
    listing, _ = Listing.of(labels, inputs, [[c] for c in children], ())
    wires = _Wires(children, inputs)
    spans = [(0, 0, 0)]
    for start, length in sorted((s, b.length) for b in repeats(listing, 2) for s in b.starts):
        end = spans[-1][0] + spans[-1][1] * spans[-1][2]
        if start >= end:
            spans.append(wires.longest(start, length))
    return spans[1:]


@dataclass(frozen=True, slots=True)
class _Wires:
    """The boxes of a group in order, and what each of them reads."""

    children: Sequence[Item]
    inputs: Sequence[Sequence[Item]]

    def longest(self, start: int, length: int) -> tuple[int, int, int]:
        """Return the block at `start`, cut to its period, as often as it follows itself."""
        for period in (p for p in range(1, length // 2 + 1) if length % p == 0):
            if len({self._of(i, period) for i in range(start, start + length, period)}) == 1:
                length = period
                break
        times, block = 1, self._of(start, length)
        while self._of(start + length * times, length) == block:
            times += 1
        return start, length, times

    def _of(self, start: int, length: int) -> Hashable:
        """Return what the boxes from `start` on compute, and from which of them or from outside."""
        block = self.children[start : start + length]
        places: dict[Item, int] = {child: i for i, child in enumerate(block)}
        for child in block:
            # Values from outside follow in the order in which they are read.
            for source in self.inputs[start + places[child]]:
                places.setdefault(source, len(places))
        return tuple(
            (
                child if child.kind in ENDS else child.signature,
                *(places[source] for source in self.inputs[start + i]),
            )
            for i, child in enumerate(block)
        )


def _divided(children: list[Item]) -> list[Item]:
    """Return the boxes, in sections of sections if there are many."""
    while len(children) > MAX_CHILDREN:
        size = min(MAX_CHILDREN, -(-len(children) // MAX_CHILDREN))
        parts = (children[i : i + size] for i in range(0, len(children), size))
        children = [part[0] if len(part) == 1 else _gathered("", part) for part in parts]
    return children


def _repeat(occurrences: Sequence[Item], children: list[Item]) -> Item:
    ends = (_head(occurrences[0]), _head(occurrences[-1]))
    group = _gathered(ELLIPSIS.join(dict.fromkeys(ends)), _divided(children))
    group.times, group.named = len(occurrences), occurrences[0].named
    group.label = occurrences[0].label
    return group


def _name(group: Item) -> None:
    """Name a group of no scope after the first and last scope in it, else by its operators."""
    scopes = [c for c in group.children if c.named]
    ends = scopes or group.children
    names = dict.fromkeys(_head(c) or _summary([c]) for c in (ends[0], ends[-1]))
    group.name = cut(ELLIPSIS.join(names))
    group.named = bool(scopes)


def _head(item: Item) -> str:
    return item.name.split(ELLIPSIS)[0]


def _gathered(name: str, children: Sequence[Item]) -> Item:
    kind = next((c.kind for c in children if c.kind in PHASES), children[0].kind)
    group = Item(kind, "", name=cut(name), is_node=False)
    group.adopt([*children])
    _describe(group)
    return group


def _describe(group: Item) -> None:
    """Give a group its number of nodes, its summary, the type of what it passes on, a signature."""
    atoms = [*group.atoms()]
    places = {atom: i for i, atom in enumerate(atoms)}
    group.nodes = sum(atom.nodes for atom in atoms)
    group.upward = group.is_phase and group.kind == BACKWARD
    computing = [a for a in atoms if a.nodes]
    # An update reads every weight; elsewhere the nodes with weights tell most.
    weighty = [a for a in computing if a.weights and a.kind != UPDATE]
    group.label = _summary(weighty or computing)
    if not group.name:
        _name(group)
    wired = ((a.signature, *(i - places.get(s, i) for s in a.sources)) for i, a in enumerate(atoms))
    group.signature = hash(tuple(wired))


def _summary(atoms: Sequence[Item]) -> str:
    """Return operators in their order, each once; with windows, without other settings."""
    windowed = (a.label.partition(",")[0] for a in atoms)
    short = (x if "\N{MULTIPLICATION SIGN}" in x else x.split(" ")[0] for x in windowed)
    return cut(", ".join(dict.fromkeys(short)))
