"""Leave out states that no least assignment needs (Goldstein 1994, dead-end elimination).

State s of a variable is dominated by t if t costs no more than s whatever the other variables are:
u(t) - u(s) + sum over tables of max over the neighbour's states of (c(t, .) - c(s, .)) <= 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Kept = NDArray[np.intp]
Pairs = Mapping[tuple[int, ...], Costs]
MAX_ROUNDS: Final = 20


def undominated(counts: Sequence[int], tables: Pairs) -> list[Kept]:
    """Return the states of each variable that remain; tables: costs of one or two variables."""
    kept: list[Kept] = [np.arange(n) for n in counts]
    near: list[list[tuple[int, Costs]]] = [[] for _ in counts]
    unary: list[Costs] = [np.zeros(n) for n in counts]
    for scope, costs in tables.items():
        if len(scope) == 1:
            unary[scope[0]] = costs
            continue
        a, b = scope
        near[a].append((b, costs))
        near[b].append((a, costs.T))
    worst: dict[Any, Costs] = {}
    pending = set(range(len(counts)))
    for _ in range(MAX_ROUNDS):
        changed = set()
        for v in sorted(pending):
            if len(kept[v]) == 1:
                continue
            rest = _rest(unary[v], near[v], kept, kept[v], worst)
            if len(rest) < len(kept[v]):
                kept[v] = rest
                changed |= {v, *(u for u, _ in near[v])}
        pending = changed
        if not pending:
            break
    return kept


def _rest(
    unary: Costs,
    near: list[tuple[int, Costs]],
    kept: list[Kept],
    own: Kept,
    worst: dict[Any, Costs],
) -> Kept:  # fmt: skip
    excess = unary[own][:, None] - unary[own][None, :]  # [t, s]: what t costs more than s
    for u, costs in near:
        # `costs` stays alive in the network, so its address and shape identify it; equal blocks
        # share their tables.
        key = (costs.__array_interface__["data"][0], costs.strides, costs.shape, own.tobytes(),
               kept[u].tobytes())  # fmt: skip
        if key not in worst:
            part = costs[np.ix_(own, kept[u])]
            worst[key] = (part[:, None, :] - part[None, :, :]).max(2)
        excess = excess + worst[key]
    # The order breaks ties, so that of two equal states one remains; a chain of dominations ends at
    # a state that is kept, because domination is transitive.
    before = np.arange(len(own))[:, None] < np.arange(len(own))[None, :]
    dominates = (excess < 0) | ((excess == 0) & before)
    np.fill_diagonal(dominates, val=False)
    rest: Kept = own[~dominates.any(0)]
    return rest
