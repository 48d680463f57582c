# mypy: disable-error-code="union-attr"
"""Datasets of numbers and the streams that they give."""

import numpy as np

from triplane.unified_ir import data
from triplane.unified_ir.data import Dataset


def numbers(n: int) -> Dataset:
    """Return the numbers 0..n-1 as samples x."""
    return data.arrays(np.arange(n))


def stream(dataset: Dataset, *, seed: int = 0, epoch: int = 0, start: int = 0) -> list[list[int]]:
    """Return the values of x by batch."""
    return [b["x"].tolist() for b in dataset.opened(seed).batches(epoch, start)]
