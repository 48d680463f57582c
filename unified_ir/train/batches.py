"""Turn the data that a user passes into batches in a reproducible order.

Data is a `data.Dataset`, an object with `batches(size, seed=, epoch=)`, a tuple of arrays whose
last is the target, or an iterable of batches that is iterated again in each epoch (a batch without
rows is skipped). The order of all but the last depends on (seed, epoch) alone, so a run can resume
in the middle of an epoch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from numbers import Integral, Real
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import Dataset, Loading
from triplane.unified_ir.data.columns import Rows
from triplane.unified_ir.data.kinds import is_batches, is_table
from triplane.unified_ir.data.loader import Loader
from triplane.unified_ir.data.randomness import permutation
from triplane.unified_ir.data.registry import step_text
from triplane.unified_ir.data.views import source_rows
from triplane.unified_ir.ir.graph import Array

Batch = tuple[Array, ...]
"""The arrays of one batch, the target last; all with the same first axis."""

_NUMBERS: Final = "biufV"
"""Kinds of element types; V are those that numpy itself lacks, such as bfloat16."""
_DOUBLE: Final = np.dtype(np.float64)
MAX_NAMED_LABELS: Final = 1 << 24
"""Limit for the labels that are read again to name the wrong one."""
FORMS: Final = "a Dataset, a tuple of arrays (x, y), or an iterable of batches (x, y)"


@runtime_checkable
class BatchedData(Protocol):
    """Data that orders its own batches."""

    def batches(self, size: int, *, seed: int, epoch: int) -> Iterator[Batch]:
        """Return the batches of one epoch, in the order that (seed, epoch) determines."""
        ...

    def __len__(self) -> int: ...


class BatchSource:
    """Batches of any accepted data, epoch by epoch.

    count: batches in an epoch, None if that is unknown before iterating. samples: rows in an
    epoch, None if unknown. labels: names of the classes, if the data has them. loading: how a
    `Dataset` is read ahead; close the source to end its workers.
    """

    def __init__(self, data: Any, size: int, seed: int, loading: Loading | None = None) -> None:
        if not is_count(size, 1):
            raise InvalidInput(f"a batch must hold at least 1 sample, got batch_size={size!r}")
        if not 0 <= seed < 2**64:
            raise InvalidInput(f"a seed must be in 0..2^64-1, got {seed}")
        self.data, self.size, self.seed = _accepted(data), size, seed
        self.n_targets = n_targets(data)
        self.own: Any = data
        self.labels = tuple(getattr(data, "labels", ()))
        self.name = data.origin.name if isinstance(data, Dataset) else type(data).__name__
        self.samples: int | None = None
        self.loader: Loader | None = None
        if isinstance(self.data, Dataset):
            self._prepare(self.data, loading)
            return
        if loading is not None and loading.workers:
            raise InvalidInput(
                f"workers read a data.Dataset ahead, got {type(data).__name__}; data.arrays(x, y) "
                "makes one of arrays, data.generated(factory) one of a generator"
            )
        if _is_arrays(self.data):
            self.samples = len(self.data[0])
        elif isinstance(self.data, BatchedData):
            self.samples = len(self.data)
        self.count = None if self.samples is None else math.ceil(self.samples / size)
        if self.samples is None and isinstance(data, (list, tuple)):
            self.count = len(data)

    def _prepare(self, data: Dataset, loading: Loading | None) -> None:
        for name in (*data.inputs, *data.targets):
            if not (field := data.schema[name]).is_number:
                raise InvalidInput(
                    f"column {name!r} holds {field}, but a model takes numbers; encode it first, "
                    "for instance with the step Lookup (names) or Tokenize (sentences)"
                )
        data = data.for_training(self.size)
        if getattr(data.origin.table, "once", False):
            # One iterator for the run: `peek` takes a batch from it and puts the batch back.
            self.count = None
            self.data = map(data.arrays_of, data.opened(self.seed).batches(0))
            return
        view = data.view(self.seed)
        self.data, self.samples = data, data.samples
        self.count = len(view) if is_batches(view) else None
        self.loader = Loader(data, self.seed, data.loading if loading is None else loading)

    def peek(self) -> Batch:
        """Return a batch without consuming it."""
        first = next(self._all(0, 0), None)
        if first is None:
            raise InvalidInput(f"the data is empty; pass {FORMS}")
        if isinstance(self.data, Iterator):
            # An iterator cannot be read twice, so the batch is put back in front of the others.
            self.data = itertools.chain([first], self.data)
        return first

    def epoch(self, number: int, *, first: int = 0) -> Iterator[Batch]:
        """Return the batches of one epoch, starting at batch `first`."""
        if self.loader is not None and (self.count is None or first <= self.count):
            return self._all(number, first)
        batches = self._all(number, 0)
        for _ in range(first):
            if next(batches, None) is None:
                raise InvalidInput(
                    f"the run stopped after {first} batches of epoch {number}, but the data has "
                    "fewer; resume with the data that it was trained on"
                )
        return batches

    def close(self) -> None:
        """End the workers that read ahead."""
        if self.loader is not None:
            self.loader.close()

    def _all(self, number: int, first: int) -> Iterator[Batch]:
        if self.loader is not None:
            return self._loaded(number, first)
        if isinstance(self.data, BatchedData):
            batches = self.data.batches(self.size, seed=self.seed, epoch=number)
            return (as_batch(b) for b in batches)
        if _is_arrays(self.data):
            return self._slices(number)
        return (as_batch(b) for b in self.data if not _is_empty(b))

    def _loaded(self, number: int, first: int) -> Iterator[Batch]:
        assert self.loader is not None
        # Closed with this generator, so that its threads end when the epoch does.
        with closing(self.loader.batches(number, first)) as batches:
            for batch in batches:
                yield as_batch(self.data.arrays_of(batch))

    def _slices(self, number: int) -> Iterator[Batch]:
        assert self.samples is not None
        order = permutation(self.samples, self.seed, number)
        for start in range(0, self.samples, self.size):
            chosen = order[start : start + self.size]
            yield as_batch(tuple(a[chosen] for a in self.data))

    def targets(self) -> Array | None:
        """Return all targets in the data's own order; None if only batches have them."""
        if isinstance(self.data, Dataset):  # another class may yield other labels than it stores
            return self.data.target_in_memory()
        return np.asarray(self.data[-1]) if _is_arrays(self.data) else None

    def arrays(self) -> tuple[Array, ...] | None:
        """Return inputs and targets of all samples if they are in memory and always the same."""
        if isinstance(self.data, Dataset):
            held: tuple[Array, ...] | None = self.own.arrays_in_memory()
            return held
        if _is_arrays(self.data):
            return tuple(self.data)
        arrays = [getattr(self.data, k, None) for k in ("x", "y")]
        own = tuple(a for a in arrays if isinstance(a, np.ndarray))
        return own if len(own) == len(arrays) else None

    def steps(self) -> str:
        """Return the steps of a pipeline for the identity of the run, "" if it has none."""
        steps = map(step_text, self.data.steps) if isinstance(self.data, Dataset) else ()
        return "".join(f", {text}" for text in steps)

    def varying(self) -> tuple[int, ...]:
        """Return the numbers of the arrays whose second axis differs between batches."""
        if not isinstance(self.data, Dataset):
            return ()
        schema = self.data.schema
        names = (*self.data.inputs, *self.data.targets)
        return tuple(k for k, name in enumerate(names) if schema[name].is_ragged)

    def refuse_once(self) -> None:
        """Refuse data that ends after one pass, which a resumed run could not read again."""
        if not self.repeats():
            raise InvalidInput(
                "a run with checkpoints needs data that can be read again, and "
                f"{self.name} can be read once only; pass arrays, a Dataset, or "
                "data.generated(factory), where factory() returns a new iterator for each epoch"
            )

    def repeats(self) -> bool:
        """Return whether an epoch can be iterated again."""
        return not isinstance(self.data, Iterator)


def n_targets(data: Any) -> int:
    """Return how many arrays of a batch are targets: the last one, unless the data says more."""
    if isinstance(data, Dataset):
        return len(data.targets)
    return min(1, len(data) - 1) if _is_arrays(data) else 1


def is_count(x: Any, least: int) -> bool:
    """Return whether `x` is an integer of at least `least`."""
    return not isinstance(x, bool) and isinstance(x, Integral) and bool(x >= least)  # type: ignore[operator]


def is_number(x: Any) -> bool:
    """Return whether `x` is a real number."""
    return isinstance(x, Real) and not isinstance(x, bool)


def with_last(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield each batch, and whether it is the last one."""
    # Reads one batch ahead.
    for batch, following in itertools.pairwise(itertools.chain(batches, [None])):
        assert batch is not None
        yield batch, following is None


def in_order(data: Any, size: int) -> Iterator[Batch]:
    """Return batches of at most `size` in the data's own order, for evaluation."""
    accepted = _accepted(data)
    if isinstance(accepted, Dataset):
        own = accepted.in_batches(size)
        return (as_batch(own.arrays_of(batch)) for batch in own.opened().batches(0))
    if isinstance(accepted, BatchedData) and hasattr(data, "x") and hasattr(data, "y"):
        accepted = (np.asarray(data.x), np.asarray(data.y))
    if not _is_arrays(accepted):
        return BatchSource(accepted, size, seed=0).epoch(0)
    starts = range(0, len(accepted[0]), size)
    return (as_batch(tuple(a[at : at + size] for a in accepted)) for at in starts)


def labels_in_source(data: Any) -> tuple[Array, Rows] | None:
    """Return the single target of all samples of a dataset, and their numbers in its source.

    They tell a user which sample is wrong. Reads the whole column. None for more than
    `MAX_NAMED_LABELS` and for samples without a number, such as batches or windows of rows.
    """
    if not isinstance(data, Dataset) or len(data.targets) != 1:
        return None
    view = data.view()
    if not is_table(view) or len(view) > MAX_NAMED_LABELS:
        return None
    rows = source_rows(view, data.origin.table)
    return None if rows is None else (np.asarray(data.y), rows)


def _is_empty(batch: Any) -> bool:
    """Return whether a batch has no rows at all, as the remainder of an epoch may have."""
    return (
        isinstance(batch, (tuple, list))
        and bool(batch)
        and all(isinstance(a, np.ndarray) and a.ndim > 0 and not len(a) for a in batch)
    )


def as_batch(batch: Any) -> Batch:
    """Return arrays of one length; float64 becomes float32."""
    if not isinstance(batch, (tuple, list)) or not batch:
        raise InvalidInput(
            "a batch is a tuple of arrays (x, y), or (x,) without a target, got "
            f"{type(batch).__name__}{'; wrap it: (x,)' if isinstance(batch, np.ndarray) else ''}"
        )
    arrays = tuple(map(np.asarray, batch))
    for a in arrays:
        if a.dtype.kind not in _NUMBERS:
            raise InvalidInput(
                f"the arrays of a batch hold numbers or booleans, got {a.dtype}; turn names of "
                "classes into numbers: np.unique(y, return_inverse=True)"
            )
    rows = {a.shape[0] if a.ndim else 0 for a in arrays}
    if len(rows) != 1 or 0 in rows:
        raise InvalidInput(
            f"the arrays of a batch have the same number of rows, at least 1; got "
            f"{[list(a.shape) for a in arrays]}"
        )
    return tuple([_single(a) if a.dtype == _DOUBLE else a for a in arrays])


def _single(array: Array) -> Array:
    """Return float64 as float32; InvalidInput if a finite number becomes infinite."""
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
    if not np.isfinite(single).all() and np.isfinite(array).all():
        raise InvalidInput(
            f"float64 is trained as float32, which ends at 3.4e38; there is {np.abs(array).max():g}"
        )
    return single


def _accepted(data: Any) -> Any:
    if _is_arrays(data):
        return as_batch(data)
    if isinstance(data, (BatchedData, Iterable)) and not isinstance(data, (str, bytes, Mapping)):
        return data
    raise InvalidInput(f"data must be {FORMS}, got {type(data).__name__}")


def _is_arrays(data: Any) -> bool:
    return isinstance(data, tuple) and all(isinstance(a, np.ndarray) for a in data)
