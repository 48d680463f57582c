"""Batches of columns in memory are those that the views of the pipeline give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from triplane.unified_ir import data
from triplane.unified_ir.data.columns import Ragged
from triplane.unified_ir.data.dataset import Dataset
from triplane.unified_ir.data.views import rows_in_memory

N = 23
ARRAYS = data.arrays(np.arange(3.0 * N).reshape(N, 3), np.arange(N) % 2)
PIPELINES = {
    "arrays": ARRAYS,
    "cached": ARRAYS.map(lambda row: {**row, "x": 2 * row["x"]}).cache(),
    "split": ARRAYS.split(0.3)[0],
    "selected twice": ARRAYS.select(np.array([9, 2, 2, 7, 5])).skip(1),
    "balanced": ARRAYS.balanced("y"),
    "digits": data.digits().split()[1].take(40),
}


@pytest.mark.parametrize("dataset", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_those_of_the_views(dataset: Dataset, drop_last: bool):
    view: Any = dataset.shuffle().batch(4, drop_last=drop_last).view(seed=5, epoch=2)
    rows = [view.rows_of(k) for k in range(len(view))]
    assert len(view) == (len(dataset) // 4 if drop_last else -(-len(dataset) // 4))
    for k, numbers in enumerate(rows):
        expected = view.table.take(numbers)
        batch = view.batch(k)
        assert batch.keys() == expected.keys()
        assert all(np.array_equal(batch[name], expected[name]) for name in batch)


def test_ragged_columns_in_memory_are_batched():
    lengths = [np.arange(n) for n in (1, 3, 0, 2)]
    view: Any = data.arrays({"x": Ragged.of(lengths)}).shuffle().batch(3).view(seed=1)
    samples = [batch["x"][k] for batch in map(view.batch, range(2)) for k in range(len(batch["x"]))]
    assert sorted(map(len, samples)) == [0, 1, 2, 3]


def test_a_batch_of_arrays_is_a_copy():
    x = np.zeros((6, 2))
    view: Any = data.arrays(x).shuffle().batch(3).view()
    assert rows_in_memory(view.table) is not None
    view.batch(0)["x"][:] = 1
    assert not x.any()


def test_what_a_step_computes_is_not_in_memory():
    view: Any = ARRAYS.map(lambda row: row).shuffle().batch(4).view()
    assert rows_in_memory(view.table) is None
