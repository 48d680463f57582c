"""Compute how many nodes have the new version after each wave.

Sizes are cumulative. A percentage of n nodes is rounded up, so that it is at least one node; a
count is cut to n. If the last size is below n, the rollout is for so many nodes only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput

MAX_WAVES: Final = 100
_SLACK: Final = 1e-9  # a share such as 0.07 * 100 is 7, not 8


@dataclass(frozen=True, slots=True)
class Percent:
    """A share of the selected nodes, above 0 to 100."""

    value: float


@dataclass(frozen=True, slots=True)
class Count:
    """A wave of that many nodes, at least one."""

    value: int


Size = Percent | Count


def cumulative(sizes: Sequence[Size], nodes: int) -> tuple[int, ...]:
    """Return the nodes that have the version after each wave. InvalidInput: sizes shrink."""
    if len(sizes) > MAX_WAVES:
        raise InvalidInput(f"a rollout has at most {MAX_WAVES} waves, got {len(sizes)}")
    counts = tuple(_count(size, nodes) for size in sizes or (Percent(100.0),))
    for i in range(1, len(counts)):
        if counts[i] < counts[i - 1]:
            raise InvalidInput(
                f"waves are cumulative and never shrink, but wave {i + 1} is {counts[i]} of "
                f"{nodes} nodes after {counts[i - 1]}; write them as 5%,25%,100%"
            )
    return counts


def wave_of(index: int, sizes: Sequence[int]) -> int | None:
    """Return the first wave that includes the node at `index` in name order, or None."""
    return next((wave for wave, size in enumerate(sizes) if index < size), None)


def least(share: float, nodes: int) -> int:
    """Return the smallest number of nodes that is at least `share` of them."""
    return max(0, math.ceil(share * nodes - _SLACK))


def exceeds(count: int, share: float, nodes: int) -> bool:
    """Return whether `count` is more than `share` of `nodes`."""
    return count > share * nodes + _SLACK


def _count(size: Size, nodes: int) -> int:
    if isinstance(size, Count):
        if size.value < 1:
            raise InvalidInput(f"a wave has at least one node, got {size.value}")
        return min(size.value, nodes)
    if not 0 < size.value <= 100:
        raise InvalidInput(f"a wave is above 0% and at most 100%, got {size.value:g}%")
    return min(nodes, max(1, least(size.value / 100, nodes)))
