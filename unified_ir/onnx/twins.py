"""Weights of an imported model that are equal bit for bit, possibly transposed.

PyTorch lets two layers share one weight, and ONNX files often hold it twice: the table of an
embedding, and its transpose as the weight of the output. Without a tie, training changes the two
differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from triplane.unified_ir.ir.graph import Array, Role, StateTensor
from triplane.unified_ir.ir.types import type_of

LEAST_ELEMENTS: Final = 1_024
"""Weights up to this many elements may be equal by chance or by initialization."""
MAX_ALIKE: Final = 16
"""The most weights, of equal type, sizes and corners, that a weight is compared with."""
_ROW_BLOCK: Final = 1 << 20
"""Number of elements compared at a time."""


class Twins:
    """Weights by name, each compared with those before it."""

    def __init__(self) -> None:
        self._alike: dict[tuple[Any, ...], list[tuple[str, Array]]] = {}

    def first(
        self, name: str, array: Array, held: Mapping[str, StateTensor]
    ) -> tuple[str, bool] | None:
        """Return (name, whether it is the transpose) of the first equal weight still in `held`.

        None if there is none, and for arrays that are too small, constant, or not of floats.
        """
        if array.size <= LEAST_ELEMENTS or not type_of(array).dtype.is_float:
            return None
        # A cheap key: a transposition keeps the first and the last element, and a hash of all bytes
        # would read every weight.
        ends = (array[(0,) * array.ndim].tobytes(), array[(-1,) * array.ndim].tobytes())
        sizes = tuple(sorted(array.shape)) if array.ndim == 2 else array.shape
        alike = self._alike.setdefault((array.dtype.str, array.dtype.name, sizes, *ends), [])
        alike[:] = [(n, a) for n, a in alike if n in held and held[n].array is a]
        for other, before in alike:
            for is_transposed in (False, True) if array.ndim == 2 else (False,):
                turned = before.T if is_transposed else before
                # Constant arrays are equal by initialization, not because the network shares them.
                if _are_equal(array, turned) and not (array == array[(0,) * array.ndim]).all():
                    return other, is_transposed
        if len(alike) < MAX_ALIKE:
            alike.append((name, array))
        return None


def equal_weights(state: Mapping[str, StateTensor]) -> list[tuple[str, ...]]:
    """Return names of parameters that are equal bit for bit or transposed, a tuple per weight."""
    twins = Twins()
    groups: dict[str, list[str]] = {}
    for name, tensor in state.items():
        if tensor.role is Role.PARAMETER:
            first = twins.first(name, tensor.array, state)
            if first is not None:
                groups.setdefault(first[0], [first[0]]).append(name)
    return [tuple(group) for group in groups.values()]


def _are_equal(a: Array, b: Array) -> bool:
    """Return whether shapes and bits are the same."""
    if a.shape != b.shape:
        return False
    # Compared as bits: -0.0 differs from 0.0, and a NaN is equal to itself.
    bits = np.dtype(f"u{a.dtype.itemsize}")
    step = max(1, _ROW_BLOCK * len(a) // a.size)
    return all(
        np.array_equal(a[i : i + step].view(bits), b[i : i + step].view(bits))
        for i in range(0, len(a), step)
    )
