"""Batches of one launch, stacked in host memory that launches use in turn.

XLA on a CPU reads an argument where it lies if it is aligned, and copies it otherwise; memory that
is allocated for each launch costs page faults as well. For an MLP of 32 hidden units both together
took twice the time of the steps themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.xla.door import exact, explained, jax
from triplane.unified_ir.ir.graph import Array

Check = Callable[[Mapping[str, Array]], Mapping[str, Array]]
TURNS: Final = 2
"""Blocks of memory: one that the device reads, one that is filled meanwhile."""
_ALIGNMENT: Final = 64
"""Bytes; what XLA asks of memory on a CPU that it does not copy."""


class Staging:
    """Memory of a loop for the batches of its launches, in `TURNS` blocks."""

    def __init__(self) -> None:
        self._blocks = [np.zeros(0, np.uint8)] * TURNS
        self._turn = 0

    def arrays(self, kinds: Sequence[tuple[tuple[int, ...], Any]]) -> list[Array]:
        """Return arrays of these shapes and types in the block whose turn it is.

        InvalidInput: they do not fit in memory.
        """
        self._turn = (self._turn + 1) % TURNS
        sizes = [-(-_bytes(kind) // _ALIGNMENT) * _ALIGNMENT for kind in kinds]
        if self._blocks[self._turn].size < sum(sizes):
            self._blocks[self._turn] = _aligned(sum(sizes))
        block, at, arrays = self._blocks[self._turn], 0, []
        for (shape, dtype), size in zip(kinds, sizes, strict=True):
            own = block[at : at + _bytes((shape, dtype))]
            arrays.append(own.view(dtype).reshape(shape))
            at += size
        return arrays


class StagedBatches:
    """The batches of one launch, at most `room` of them, all of the same shapes.

    check: returns a batch's arrays by name, or raises InvalidInput. ahead: `finish` copies to the
    device. Arrays are copied, so the caller may use their memory again.
    """

    def __init__(
        self, names: Sequence[str], check: Check, staging: Staging, *, room: int, ahead: bool
    ) -> None:
        self._names, self._check, self._staging = tuple(names), check, staging
        self._room, self._ahead = room, ahead
        self._stacked: list[Any] = []
        self._on_device: list[Any] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, batch: Mapping[str, Array]) -> None:
        """See `LaunchBatches.add`."""
        named = self._check(batch)
        arrays = [named[n] for n in self._names]
        if not self._count:
            kinds = [((self._room, *x.shape), x.dtype) for x in arrays]
            self._stacked = self._staging.arrays(kinds)
        for name, stack, x in zip(self._names, self._stacked, arrays, strict=True):
            if x.shape != stack.shape[1:]:
                raise InvalidInput(
                    f"the batches of a launch have one shape; {name!r} has {list(x.shape)} after "
                    f"{list(stack.shape[1:])}"
                )
            stack[self._count] = x
        self._count += 1

    def batch(self, i: int) -> dict[str, Array]:
        """See `LaunchBatches.batch`."""
        return {n: x[i] for n, x in zip(self._names, self._stacked, strict=True)}

    def finish(self) -> None:
        """See `LaunchBatches.finish`."""
        if self._ahead:
            with exact(), explained("the batches of a launch"):
                arrays = [jax.device_put(x) for x in self.arrays()]
                self._on_device = [x.block_until_ready() for x in arrays]

    def arrays(self) -> list[Any]:
        """Return the stacked batches, from the device if they are there."""
        return self._on_device or [x[: self._count] for x in self._stacked]


def _bytes(kind: tuple[tuple[int, ...], Any]) -> int:
    shape, dtype = kind
    size: int = np.dtype(dtype).itemsize
    return prod(shape) * size


def _aligned(size: int) -> Array:
    try:
        raw = np.empty(size + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address reaches
        raise InvalidInput(
            f"the batches of a launch take {size:,} bytes, which the host does not have; use fewer "
            "steps per launch, or smaller batches"
        ) from error
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]
