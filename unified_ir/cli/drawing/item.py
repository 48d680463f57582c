"""The boxes of a picture of a graph: nodes, inputs and results, and groups of boxes that fold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

IN: Final = -2
"""Where values enter a group, in `Layers.rows`."""
OUT: Final = -3
"""Where values leave a group."""
LANE: Final = -1
"""A bend of a line that crosses a row."""


@dataclass(frozen=True, slots=True)
class Layers:
    """A group's boxes in rows, from what is computed first down.

    rows: numbers of the group's boxes (`Item.number`), or LANE, IN, OUT.  links: pairs of places;
    the places of all rows are counted on, and each link goes from one row to the next.  back: pairs
    of places of links against that direction.
    """

    rows: list[list[int]]
    links: list[tuple[int, int]]
    back: list[tuple[int, int]]


NO_LAYERS: Final = Layers([], [], [])


@dataclass(eq=False, slots=True, repr=False)
class Item:
    """A box; one with children is a group.

    name: of its scope; label: what it computes; detail: the type of its result; tip: everything
    that is known about it, line by line.  sources: boxes whose values it reads; those of what lies
    inside a scope belong to its children.  weights: number of parameters that it reads.  times:
    number of equal boxes in a repeat.  named: whether `name` is that of a scope.
    """

    kind: str
    label: str
    detail: str = ""
    name: str = ""
    tip: tuple[str, ...] = ()
    weights: int = 0
    nodes: int = 1
    times: int = 1
    is_node: bool = True
    is_phase: bool = False
    is_scope: bool = False
    named: bool = False
    opened: bool = False
    upward: bool = False
    number: int = 0
    signature: int = 0
    parent: Item | None = None
    sources: list[Item] = field(default_factory=list)
    children: list[Item] = field(default_factory=list)
    layers: Layers = NO_LAYERS

    def atoms(self) -> Iterator[Item]:
        """Yield the boxes of nodes, inputs and results in it; bodies of nodes stay closed."""
        if self.is_node:
            yield self
            return
        for child in self.children:
            yield from child.atoms()

    def walk(self) -> Iterator[Item]:
        """Yield the box and all boxes in it, the outer ones first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def adopt(self, children: list[Item]) -> None:
        """Make `children` the boxes in this group."""
        self.children = children
        for child in children:
            child.parent = self
