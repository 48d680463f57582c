"""Robust means: what takes the mean's place where some devices lie.

A rule is of one of two kinds. A rule of *entries* maps the values of one entry over all updates to
one value. A rule of *weights* looks only at the inner products of the updates and returns a weight
for each; distances between updates and to any weighted mean of them follow from those, so Krum and
centred clipping need no second pass over the updates. *Bucketing* lets either see means of a few
updates in place of the updates.

Each update counts the same: a number of examples is a claim. Updates are opened one at a time and
kept in one matrix for each tensor, beyond `MAX_BYTES` in a temporary file; rules read blocks of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from typing import IO, Final

import numpy as np

from triplane.proto.disk import refusal
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.limits import RoundUpdate, check_fits, lower_median

MAX_BYTES: Final = 1 << 28
"""Bytes of a round's updates that are kept in memory."""
BLOCK_BYTES: Final = 1 << 23
"""Bytes of a block in float64; at least one entry of every update."""
ROUNDING: Final = 1e-9

Entries = Callable[[Array], Array]
"""(n, c) float64, c entries of n updates -> (c,)."""
Weights = Callable[[Array], Array]
"""(n, n) float64, the inner products of n updates -> (n,), their weights in the result."""


def median(block: Array) -> Array:
    """Return the median of each entry; the mean of the two middle ones of an even number."""
    middle: Array = np.median(block, axis=0)
    return middle


def trimmed_mean(block: Array, *, trim: float) -> Array:
    """Return the mean of each entry without the floor(trim n) smallest and as many largest."""
    n = len(block)
    # The share is rounded, too: 1/49 of 49 would be 0.99..., and nothing would be cut.
    cut = min(int(trim * n + ROUNDING), (n - 1) // 2)
    kept: Array = np.sort(block, axis=0)[cut : n - cut].mean(axis=0)
    return kept


def krum(products: Array, *, byzantine: int, kept: int) -> Array:
    """Return 1 / kept for the `kept` updates with the lowest scores, 0 for the others.

    The score of an update is the sum of its squared distances to the n - byzantine - 2 nearest
    others (Blanchard et al. 2017, section 4). Of equal scores the earlier one counts as lower.
    """
    n = len(products)
    near = max(1, n - byzantine - 2)
    distances = squared_distances(products)
    np.fill_diagonal(distances, np.inf)  # an update is no neighbour of itself
    scores = np.sort(distances, axis=1)[:, :near].sum(axis=1)
    weights = np.zeros(n)
    weights[np.argsort(scores, kind="stable")[:kept]] = 1 / kept
    return weights


def centred_clip(products: Array, *, radius: float, iterations: int) -> Array:
    """Return the weights of v after v <- v + mean_i (x_i - v) min(1, radius / |x_i - v|).

    It begins at v = 0, no change of the state (Karimireddy et al. 2021, section 3, without its
    momentum). radius 0: the lower median of the updates' norms.
    """
    n = len(products)
    weights = np.zeros(n)
    radius = radius or lower_median(list(np.sqrt(np.diagonal(products))))
    for _ in range(iterations):
        # |x_i - v|^2 = <x_i, x_i> - 2 <x_i, v> + <v, v> with v = sum_j weights_j x_j.
        to_centre = products @ weights
        squares = np.diagonal(products) - 2 * to_centre + weights @ to_centre
        distances = np.sqrt(np.maximum(squares, 0))
        shares = np.minimum(1, radius / np.maximum(distances, np.finfo(float).tiny)) / n
        weights = weights * (1 - shares.sum()) + shares
    return weights


def squared_distances(products: Array) -> Array:
    """Return |x_i - x_j|^2 of updates with these inner products."""
    own = np.diagonal(products)
    distances: Array = np.maximum(own[:, None] + own[None, :] - 2 * products, 0)
    return distances


def bucket_means(order: Sequence[int], size: int) -> Array:
    """Return the (buckets, n) matrix of means of `size` updates each, in that order.

    Karimireddy et al. 2022, algorithm 1. The last bucket may be smaller.
    """
    buckets = [order[at : at + size] for at in range(0, len(order), size)]
    means = np.zeros((len(buckets), len(order)))
    for row, members in zip(means, buckets, strict=True):
        row[list(members)] = 1 / len(members)
    return means


def aggregate(
    shapes: Mapping[str, tuple[int, ...]],
    updates: Sequence[RoundUpdate],
    *,
    entries: Entries | None = None,
    weights: Weights | None = None,
    buckets: Array | None = None,
    buffers: Collection[str] = (),
) -> dict[str, Array]:
    """Return the robust mean of the updates, in float64, by the one rule that is passed.

    shapes: of the tensors of a change. buckets: see `bucket_means`. buffers: tensors whose weights
    are computed without the others'. Unavailable: the temporary file cannot be written.
    """
    with _stacked(shapes, updates) as stack:
        if entries is not None:
            return {name: _by_entries(x, entries, buckets) for name, x in stack.items()}
        assert weights is not None
        means: dict[str, Array] = {}
        for group in ([n for n in stack if n not in buffers], [n for n in stack if n in buffers]):
            group_weights = _group_weights([stack[n] for n in group], weights, buckets)
            means |= {name: _weighted(stack[name], group_weights) for name in group}
        return {name: means[name].reshape(shapes[name]) for name in shapes}


def _by_entries(x: Array, rule: Entries, buckets: Array | None) -> Array:
    mean = np.empty(x.shape[1:])
    flat = mean.reshape(-1)
    for part, block in _blocks(x):
        flat[part] = rule(block if buckets is None else buckets @ block)
    return mean


def _group_weights(tensors: Sequence[Array], rule: Weights, buckets: Array | None) -> Array:
    """Return the weight of each update in the result of the rule on these tensors."""
    if not tensors:
        return np.zeros(0)
    products = _inner_products(tensors)
    means = np.eye(len(products)) if buckets is None else buckets
    # An update whose square float64 cannot hold lies farther away than any other, so it is left
    # out, with its bucket.
    excessive = ~np.isfinite(np.diagonal(products))
    products[excessive] = products[:, excessive] = 0
    means = means[~(means[:, excessive] > 0).any(axis=1)]
    return rule(means @ products @ means.T) @ means if len(means) else np.zeros(len(products))


def _inner_products(tensors: Sequence[Array]) -> Array:
    n = len(tensors[0])
    upper = np.zeros((n, n))
    for x in tensors:
        for _, block in _blocks(x):
            for i, row in enumerate(block):
                # Not by BLAS, whose sums may depend on the number of threads: a round that is
                # reduced again must give the same bits.
                with np.errstate(over="ignore", invalid="ignore"):
                    upper[i, i:] += np.einsum("jc,c->j", block[i:], row)
    return upper + np.triu(upper, 1).T


def _weighted(x: Array, weights: Array) -> Array:
    mean = np.zeros(x.shape[1:])
    flat = mean.reshape(-1)
    for part, block in _blocks(x):
        for weight, row in zip(weights, block, strict=True):
            if weight:  # an update without weight may be infinite in float64
                flat[part] += weight * row
    return mean


def _blocks(x: Array) -> Iterator[tuple[slice, Array]]:
    """Yield the entries of a matrix in float64, for as many columns at once as a block has."""
    flat = x.reshape(len(x), -1)
    columns = max(1, BLOCK_BYTES // (8 * len(x)))
    for at in range(0, flat.shape[1], columns):
        part = slice(at, at + columns)
        yield part, flat[:, part].astype(np.float64)


@contextmanager
def _stacked(
    shapes: Mapping[str, tuple[int, ...]], updates: Sequence[RoundUpdate]
) -> Iterator[dict[str, Array]]:
    """Yield a matrix for each tensor, with a row for each update."""
    with ExitStack() as exits:
        first = updates[0].open()
        forms = {n: (len(updates), *map(int, shape)) for n, shape in shapes.items()}
        types = {n: np.promote_types(first[n].dtype, np.float32) for n in shapes}
        total = sum(math.prod(forms[n]) * types[n].itemsize for n in shapes)
        file = None if total <= MAX_BYTES else exits.enter_context(_temporary_file(total))
        stack: dict[str, Array] = {}
        at = 0
        for name, form in forms.items():
            if file is None or not math.prod(form):  # a map is never empty
                stack[name] = np.empty(form, types[name])
            else:
                stack[name] = np.memmap(file, types[name], "r+", at, form)
                at += stack[name].nbytes
        for row, update in enumerate(updates):
            change = update.open()
            check_fits(shapes, change)
            for name, x in change.items():
                stack[name][row] = x
        yield stack


@contextmanager
def _temporary_file(size: int) -> Iterator[IO[bytes]]:
    """Yield a file of `size` bytes that exists until the block ends."""
    with ExitStack() as exits:
        try:
            file = exits.enter_context(TemporaryFile())
            # Reserved now: a write into a map of a file that the disk has no room for is a SIGBUS.
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise refusal(
                error,
                f"the updates of a round take {size >> 20} MiB, and a temporary file cannot take "
                f"them: {error}; set TMPDIR to a folder with room, or ask fewer devices in a round",
            ) from error
        yield file
