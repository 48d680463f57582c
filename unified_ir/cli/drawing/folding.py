"""What is one box at first: repeats of a group, blocks of nodes without scopes, long sequences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from triplane.unified_ir.cli.drawing.item import Item
from triplane.unified_ir.cli.drawing.nodes import MAX_LINE, cut
from triplane.unified_ir.cli.drawing.phases import BACKWARD, PHASES, UPDATE
from triplane.unified_ir.passes.repeats import Listing, repeats

MAX_CHILDREN: Final = 32
"""Boxes in a group; more are divided into sections of as many."""
OPEN_BOXES: Final = 72
"""Boxes that a picture shows when it is opened."""
ENDS: Final = {"input": -1, "result": 1}
_LEAST_BLOCK: Final = 4
_LEAST_LOOSE: Final = 4
_DIGITS: Final = re.compile(r"\d+")


def fold(group: Item, *, large: bool) -> None:
    """Fold what is in `group`, from the inside outwards, and describe it."""
    for child in group.children:
        if child.children:
            fold(child, large=large)
    if not group.is_node:
        children = [*map(_alone, group.children)]
        children.sort(key=lambda c: ENDS.get(c.kind, 0))
        children = [*_merged(children)]
        if large and any(c.children for c in children):
            children = [*_loose(children)]
        if len(children) > _LEAST_BLOCK:
            children = [*_blocks(children)]
        while len(children) > MAX_CHILDREN:
            children = [*_sections(children)]
        group.adopt(children)
        _describe(group)


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
    inside = item.kind == UPDATE and item.parent is not None and item.parent.name != UPDATE
    return item.name in PHASES or (
        item.times == 1 and not inside and 2 * inner > len(item.children) > 0
    )


def _alone(item: Item) -> Item:
    """Return the only box of a group in its place, under the group's name."""
    if item.is_node or len(item.children) != 1 or item.name in PHASES:
        return item
    child = item.children[0]
    # Of blocks, blocks.0 the second name says it all.
    inner = child.name.startswith(item.name)
    child.name = cut(child.name if inner else ".".join(filter(None, (item.name, child.name))))
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
        if times == 1 and not many:
            continue
        yield from children[at:start]
        at = start + length * times
        blocks = [
            _gathered("", children[i : i + length]) for i in range(start, at, length)
        ]
        yield blocks[0] if times == 1 else _repeat(blocks, blocks)
    yield from children[at:]


def _spans(children: Sequence[Item]) -> list[tuple[int, int, int]]:
    """Return (start, length, times) of blocks of boxes that are computed alike."""
    owner = {atom: child for child in children for atom in child.atoms()}
    labels = [None if c.kind in ENDS else c.signature for c in children]
    inputs = [
        list(dict.fromkeys(
            owner.get(s, s) for atom in child.atoms() for s in atom.sources if owner.get(s) is not child
        ))
        for child in children
    ]  # fmt: skip
    listing, _ = Listing.of(labels, inputs, [[c] for c in children], ())
    spans = []
    for block in repeats(listing, _LEAST_BLOCK):
        for start in block.starts:
            if spans and spans[-1][3] is block and spans[-1][0] + spans[-1][1] * spans[-1][2] == start:
                spans[-1] = (*spans[-1][:2], spans[-1][2] + 1, block)
            else:
                spans.append((start, block.length, 1, block))
    return sorted(span[:3] for span in spans)


def _sections(children: Sequence[Item]) -> Iterator[Item]:
    for i in range(0, len(children), MAX_CHILDREN):
        part = children[i : i + MAX_CHILDREN]
        yield part[0] if len(part) == 1 else _gathered("", part)


def _repeat(occurrences: Sequence[Item], children: Sequence[Item]) -> Item:
    first, last = occurrences[0], occurrences[-1]
    name = f"{first.name} \N{HORIZONTAL ELLIPSIS} {last.name}" if first.name else ""
    group = _gathered(name, children)
    group.times = len(occurrences)
    group.label, group.detail = first.label, first.detail
    return group


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
    group.upward = group.name == BACKWARD
    computing = [a for a in atoms if a.nodes]
    # An update reads every weight; elsewhere the nodes with weights tell most.
    weighty = [a for a in computing if a.weights and a.kind != UPDATE]
    group.label = _summary(weighty or computing)
    if not group.name:
        ends = (_summary([atom]) for atom in (atoms[0], atoms[-1]))
        group.name = cut(" \N{HORIZONTAL ELLIPSIS} ".join(dict.fromkeys(ends)))
    for atom in atoms:
        if not atom.signature:
            atom.signature = hash((atom.kind, atom.label, atom.detail, atom.nodes))
    wired = (
        (a.signature, *(i - places.get(s, i) for s in a.sources)) for i, a in enumerate(atoms)
    )
    group.signature = hash(tuple(wired))


def _summary(atoms: Sequence[Item]) -> str:
    """Return operators in their order, each once; with windows, without other settings."""
    windowed = (a.label.partition(",")[0] for a in atoms)
    short = (x if "\N{MULTIPLICATION SIGN}" in x else x.split(" ")[0] for x in windowed)
    return cut(", ".join(dict.fromkeys(short)))
