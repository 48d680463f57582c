"""Connectionist temporal classification (Graves et al. 2006): labels without positions.

A path emits a class or the blank in each step. It stands for the labels that remain when repeats
are merged and blanks dropped. The loss is -log of the probability of all paths that stand for the
labels, summed by the forward recursion over the labels with a blank before, between and after them.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

import numpy as np

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.types import ShapeError, int64
from triplane.unified_ir.ops.rows.arithmetic.elementwise import (
    exp,
    log,
    logical_and,
    logical_not,
    maximum,
)
from triplane.unified_ir.ops.rows.arithmetic.likelihood import NO_LABEL
from triplane.unified_ir.ops.rows.control.scanning import scan
from triplane.unified_ir.ops.rows.movement.indexing import arange, gather_elements
from triplane.unified_ir.ops.rows.movement.structure import (
    concat,
    expand,
    full,
    stack,
    unsqueeze,
    where,
)
from triplane.unified_ir.ops.tensor import Tensor

NEVER: Final = -1e30
"""The logarithm of probability 0; minus infinity would give NaN in the gradient."""

State = tuple[Tensor, ...]


def ctc(
    log_p: Tensor,
    labels: Tensor,
    label_lengths: Tensor,
    *,
    input_lengths: Tensor | None = None,
    blank: int = 0,
) -> Tensor:
    """Return the loss per sample; log_p: (N, T, C) log probabilities, labels: (N, L) ints -> (N,).

    label_lengths: (N,), how many of the labels are valid; the rest is not read. input_lengths:
    (N,), how many steps are valid, by default all. The loss is infinite, without gradient, if there
    are too few steps for the labels. A run refuses labels outside 0..C-1 and the blank as a label.
    """
    if log_p.rank != 3 or labels.rank != 2 or labels.dtype.is_float or labels.shape[1] == 0:
        raise ShapeError(
            f"ctc takes log_p (N, T, C) and labels (N, L), L >= 1, got {log_p.type}, {labels.type}"
        )
    n, steps, _ = log_p.shape
    count = unsqueeze(label_lengths.cast(int64), 1)
    states = _with_blanks(labels.cast(int64), count, blank)
    emitted = gather_elements(
        log_p, expand(unsqueeze(states, 1), (n, steps, states.shape[1])), axis=2
    ).transpose(1, 0, 2)
    # A path begins with the first blank or the first label.
    start = where(arange(states.shape[1]) < 2, emitted[0], NEVER)
    counted = None if input_lengths is None else _counted(input_lengths, steps)
    skips = _skips(states, blank)

    def step(before: State, xs: tuple[Tensor, Tensor | None]) -> tuple[State, State]:
        (alpha,), (now, counts) = before, xs
        # alpha_t(s) = (alpha_{t-1}(s) + alpha_{t-1}(s - 1) + [skip at s] alpha_{t-1}(s - 2))
        # p_t(s), in logarithms.
        two_back = where(skips, _shifted(alpha, 2), NEVER)
        after = _log_sum(alpha, _shifted(alpha, 1), two_back) + now
        return (after if counts is None else where(counts, after, alpha),), ()

    alpha = start
    if steps != 1:
        (alpha,), _ = scan(step, (start,), (emitted[1:], counted))
    # State 2 L is the blank after the last of L labels, state 2 L - 1 the label itself.
    last = gather_elements(alpha, count * 2, axis=1)
    behind = gather_elements(alpha, maximum(count * 2 - 1, 0), axis=1)
    total = _log_sum(last, where(count > 0, behind, NEVER)).reshape((n,))
    # NEVER plus any sum of log probabilities stays far below half of it.
    return where(total > 0.5 * NEVER, -total, full((n,), np.inf, log_p.dtype))


def _with_blanks(labels: Tensor, count: Tensor, blank: int) -> Tensor:
    """Return (N, 2 L + 1) labels with a blank before, between and after them."""
    n, length = labels.shape
    counts = arange(length) < count
    wrong = logical_and(counts, (labels < 0) | (labels == blank))
    # The index NO_LABEL makes the run fail with a message instead of training on a wrong label.
    used = where(wrong, NO_LABEL, where(counts, labels, blank))
    pairs = stack([full((n, length), blank, int64), used], axis=2)
    return concat([pairs.reshape((n, length * 2)), full((n, 1), blank, int64)], axis=1)


def _skips(states: Tensor, blank: int) -> Tensor:
    """Return where a path may skip the blank: before a label that differs from the previous one."""
    before = concat([full((states.shape[0], 2), blank, int64), states[:, :-2]], axis=1)
    return logical_and(logical_not(states == blank), logical_not(states == before))


def _counted(input_lengths: Tensor, steps: Dim) -> Tensor:
    """Return bool (T - 1, N, 1): whether the second and later steps are valid."""
    return unsqueeze(arange(steps)[1:], 1, 2) < unsqueeze(input_lengths.cast(int64), 0, 2)


def _shifted(alpha: Tensor, by: int) -> Tensor:
    """Return alpha of the states `by` positions before."""
    front = full((alpha.shape[0], by), NEVER, alpha.dtype)
    return concat([front, alpha[:, :-by]], axis=1)


def _log_sum(first: Tensor, *others: Tensor) -> Tensor:
    """log(e^a + e^b + ...)."""
    # At least NEVER, hence finite: the differences below are never infinity minus infinity.
    top = reduce(maximum, others, first)
    terms = [exp(x - top) for x in (first, *others)]
    return top + log(sum(terms[1:], terms[0]))
