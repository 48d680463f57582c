"""Named tensors in one vector for each element type, so that different stages hold equal shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

Fields = Mapping[str, tuple[tuple[int, ...], Any]]
"""Shape and element type of each tensor."""
Lengths = Mapping[str, int]
"""Number of elements of each vector, by element type."""


class Packing:
    """Where each tensor is within the vectors."""

    def __init__(self, fields: Fields) -> None:
        self.lengths: dict[str, int] = {}
        self._places: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        for name, (shape, dtype) in fields.items():
            kind = np.dtype(dtype).name
            start = self.lengths.get(kind, 0)
            self._places[name] = kind, start, shape
            self.lengths[kind] = start + prod(shape)

    def tensor(self, vectors: Mapping[str, Any], name: str) -> Any:
        """Return one tensor."""
        kind, start, shape = self._places[name]
        return vectors[kind][start : start + prod(shape)].reshape(shape)

    def unpacked(self, vectors: Mapping[str, Any]) -> dict[str, Any]:
        """Return all tensors by name."""
        return {name: self.tensor(vectors, name) for name in self._places}

    def packed(self, arrays: Mapping[str, Any], lengths: Lengths, xp: Any) -> dict[str, Any]:
        """Return the vectors, filled up to these lengths with zeros; zeros for absent tensors too.

        xp: numpy, or its namesake of JAX.
        """
        pieces: dict[str, list[Any]] = {kind: [] for kind in lengths}
        for name, (kind, _, shape) in self._places.items():
            dtype = np.dtype(xp.dtype(kind))
            x = xp.asarray(arrays[name], dtype) if name in arrays else xp.zeros(shape, dtype)
            pieces[kind].append(x.reshape(-1))
        for kind, length in lengths.items():
            rest = length - self.lengths.get(kind, 0)
            pieces[kind].append(xp.zeros(rest, xp.dtype(kind)))
        return {kind: xp.concatenate(vectors) for kind, vectors in pieces.items()}

    def written(
        self, vectors: Mapping[str, Any], arrays: Mapping[str, Any], *, add: bool = False
    ) -> dict[str, Any]:
        """Return vectors of JAX with some tensors replaced, or added to those that are there."""
        written = dict(vectors)
        for name, (kind, start, shape) in self._places.items():
            if name in arrays:
                place = written[kind].at[start : start + prod(shape)]
                x = arrays[name].reshape(-1)
                written[kind] = place.add(x) if add else place.set(x)
        return written


def common_lengths(packings: Iterable[Packing]) -> dict[str, int]:
    """Return lengths that hold any of these."""
    lengths: dict[str, int] = {}
    for packing in packings:
        for kind, n in packing.lengths.items():
            lengths[kind] = max(n, lengths.get(kind, 0))
    return lengths
