"""Turn the data that a user passes into batches in a reproducible order.

Data is a `data.Dataset` (anything with `batches(size, seed=, epoch=)`), a tuple of arrays whose
last is the target, or an iterable of batches that is iterated again in each epoch (a batch without
rows is skipped). The order of the first two depends on (seed, epoch) alone, so a run can resume in
the middle of an epoch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import Dataset
from triplane.unified_ir.ir.graph import Array

Batch = tuple[Array, ...]
"""The arrays of one batch, the target last; all with the same first axis."""

_NUMBERS: Final = "biufV"
"""Kinds of element types; V are those that numpy itself lacks, such as bfloat16."""
FORMS: Final = "a Dataset, a tuple of arrays (x, y), or an iterable of batches (x, y)"


@runtime_checkable
class BatchedData(Protocol):
    """Data that orders its own batches, as `data.Dataset` does."""

    def batches(self, size: int, *, seed: int, epoch: int) -> Iterator[Batch]:
        """Return the batches of one epoch, in the order that (seed, epoch) determines."""
        ...

    def __len__(self) -> int: ...


class BatchSource:
    """Batches of any accepted data, epoch by epoch.

    count: batches in an epoch, None if that is unknown before iterating. samples: rows in an
    epoch, None if unknown.
    """

    def __init__(self, data: Any, size: int, seed: int) -> None:
        if not is_count(size, 1):
            raise InvalidInput(f"a batch must hold at least 1 sample, got batch_size={size!r}")
        if not 0 <= seed < 2**64:
            raise InvalidInput(f"a seed must be in 0..2^64-1, got {seed}")
        self.data, self.size, self.seed = _accepted(data), size, seed
        self.samples: int | None = None
        if _is_arrays(self.data):
            self.samples = len(self.data[0])
        elif isinstance(self.data, BatchedData):
            self.samples = len(self.data)
        self.count = None if self.samples is None else math.ceil(self.samples / size)
        if self.samples is None and isinstance(data, (list, tuple)):
            self.count = len(data)

    def peek(self) -> Batch:
        """Return a batch without consuming it."""
        first = next(self._all(0), None)
        if first is None:
            raise InvalidInput(f"the data is empty; pass {FORMS}")
        if isinstance(self.data, Iterator):
            # An iterator cannot be read twice, so the batch is put back in front of the others.
            self.data = itertools.chain([first], self.data)
        return first

    def epoch(self, number: int, *, first: int = 0) -> Iterator[Batch]:
        """Return the batches of one epoch, starting at batch `first`."""
        batches = self._all(number)
        for _ in range(first):
            if next(batches, None) is None:
                raise InvalidInput(
                    f"the run stopped after {first} batches of epoch {number}, but the data has "
                    "fewer; resume with the data that it was trained on"
                )
        return batches

    def _all(self, number: int) -> Iterator[Batch]:
        if isinstance(self.data, BatchedData):
            batches = self.data.batches(self.size, seed=self.seed, epoch=number)
            return (as_batch(b) for b in batches)
        if _is_arrays(self.data):
            return self._slices(number)
        return (as_batch(b) for b in self.data if not _is_empty(b))

    def _slices(self, number: int) -> Iterator[Batch]:
        assert self.samples is not None
        key = np.array([self.seed, number], np.uint64)
        # A permutation from raw words: numpy may change the stream of `Generator.permutation`, but
        # a checkpoint must find the same order with a later version. Equal words keep the order of
        # the rows.
        words = np.random.Philox(key=key).random_raw(self.samples)
        order = np.argsort(words, kind="stable")
        for start in range(0, self.samples, self.size):
            chosen = order[start : start + self.size]
            yield as_batch(tuple(a[chosen] for a in self.data))

    def targets(self) -> Array | None:
        """Return all targets in the data's own order; None if only batches have them."""
        if isinstance(self.data, Dataset):  # another class may yield other labels than it stores
            return self.data.y
        return np.asarray(self.data[-1]) if _is_arrays(self.data) else None

    def repeats(self) -> bool:
        """Return whether an epoch can be iterated again."""
        return not isinstance(self.data, Iterator)


def is_count(x: Any, least: int) -> bool:
    """Return whether `x` is an integer of at least `least`."""
    return isinstance(x, Integral) and bool(x >= least)  # type: ignore[operator]


def with_last(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield each batch, and whether it is the last one."""
    # Reads one batch ahead.
    for batch, following in itertools.pairwise(itertools.chain(batches, [None])):
        assert batch is not None
        yield batch, following is None


def in_order(data: Any, size: int) -> Iterator[Batch]:
    """Return batches of at most `size` in the data's own order, for evaluation."""
    accepted = _accepted(data)
    if isinstance(accepted, BatchedData) and hasattr(data, "x") and hasattr(data, "y"):
        accepted = (np.asarray(data.x), np.asarray(data.y))
    if not _is_arrays(accepted):
        return BatchSource(accepted, size, seed=0).epoch(0)
    starts = range(0, len(accepted[0]), size)
    return (as_batch(tuple(a[at : at + size] for a in accepted)) for at in starts)


def _is_empty(batch: Any) -> bool:
    """Return whether a batch has no rows at all, as the remainder of an epoch may have."""
    return (
        isinstance(batch, (tuple, list))
        and bool(batch)
        and all(isinstance(a, np.ndarray) and a.ndim > 0 and not len(a) for a in batch)
    )


def as_batch(batch: Any) -> Batch:
    """Return arrays of one length; float64 becomes float32."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise InvalidInput(f"a batch is a tuple of arrays (x, y), got {type(batch).__name__}")
    arrays = tuple(map(np.asarray, batch))
    arrays = tuple(a.astype(np.float32) if a.dtype == np.float64 else a for a in arrays)
    for a in arrays:
        if a.dtype.kind not in _NUMBERS:
            raise InvalidInput(
                f"the arrays of a batch hold numbers or booleans, got {a.dtype}; turn names of "
                "classes into numbers: np.unique(y, return_inverse=True)"
            )
    lengths = [a.shape[0] if a.ndim else 0 for a in arrays]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise InvalidInput(
            f"the arrays of a batch have the same number of rows, at least 1; got "
            f"{[list(a.shape) for a in arrays]}"
        )
    return arrays


def _accepted(data: Any) -> Any:
    if _is_arrays(data):
        return as_batch(data)
    if isinstance(data, (BatchedData, Iterable)) and not isinstance(data, (str, bytes, Mapping)):
        return data
    raise InvalidInput(f"data must be {FORMS}, got {type(data).__name__}")


def _is_arrays(data: Any) -> bool:
    return isinstance(data, tuple) and all(isinstance(a, np.ndarray) for a in data)
