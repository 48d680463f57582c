"""Who shares secrets with whom: a Harary graph on a circle that a hash permutes.

Every device stands next to k / 2 neighbours on each side. The survivors stay connected unless k / 2
in a row are missing on two sides, which the threshold rules out (`parameters.py`). The order
follows from the digest of all signed round keys, so nobody chooses it.
"""

from __future__ import annotations

from triplane.unified_ir.federated.core.draws import Draws


class NeighbourGraph:
    """The k-regular graph on positions 0 to n - 1; complete for k = n - 1, else k is even."""

    def __init__(self, n: int, k: int, digest: bytes) -> None:
        seed = int.from_bytes(digest, "big")
        self._n, self._k = n, k
        self._circle = [int(i) for i in Draws(seed, 0, "", "masking graph").permutation(n)]
        self._place = {position: place for place, position in enumerate(self._circle)}

    def neighbours(self, position: int) -> tuple[int, ...]:
        """Return the neighbours of a position, in rising order."""
        if self._k == self._n - 1:
            return tuple(i for i in range(self._n) if i != position)
        place = self._place[position]
        steps = range(1, self._k // 2 + 1)
        around = [self._circle[(place + s * side) % self._n] for s in steps for side in (1, -1)]
        return tuple(sorted(around))
