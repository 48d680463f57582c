"""N-way episodes: a few classes of a device's samples, drawn and numbered anew each time.

The tasks of few-shot learning (Vinyals et al. 2016, arXiv 1606.04080): a model with N outputs
learns to tell any N classes apart, so the number of a class means nothing beyond its episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array, Draws

Samples = Mapping[str, Array]
Episode = tuple[Samples, Samples]
"""Support and query; the classes of both have the numbers 0 to N - 1."""


def check_ways(ways: int, support: int, query: int) -> None:
    """Raise InvalidInput unless support and query hold the same number of samples of each class."""
    if ways < 2 or min(support, query) < ways or support % ways or query % ways:
        raise InvalidInput(
            f"an episode of N classes takes the same number of samples of each: N is at least 2 "
            f"and divides support and query; got {ways} classes, {support} and {query} samples"
        )


class Episodes:
    """Draws episodes of one device, whose samples come in two parts, as in `learn.Shard`.

    label: the column of classes (N,), whole numbers of any size. ways: classes of an episode.
    support, query: its samples, all classes together. InvalidInput: a sample has several labels.
    """

    def __init__(
        self, train: Samples, held_out: Samples, label: str, *, ways: int, support: int, query: int
    ) -> None:
        check_ways(ways, support, query)
        if train[label].ndim != 1:
            raise InvalidInput(
                "an episode of N classes needs one class for each sample; labels "
                f"{label!r} have the shape {list(train[label].shape[1:])} each"
            )
        self._train, self._held_out, self._label = train, held_out, label
        self._ways, self._support, self._query = ways, support // ways, query // ways
        self._train_rows = _rows_by_class(train[label])
        self._held_out_rows = _rows_by_class(held_out[label]) if label in held_out else {}

    def to_learn(self, draws: Draws) -> Episode:
        """Return disjoint support and query of the samples to learn from.

        InvalidInput: too few classes have enough samples.
        """
        needed = self._support + self._query
        fit = [c for c, rows in self._train_rows.items() if len(rows) >= needed]
        rows = [_some(draws, self._train_rows[c], needed) for c in self._chosen(draws, fit)]
        support = [some[: self._support] for some in rows]
        query = [some[self._support :] for some in rows]
        return self._part(self._train, support), self._part(self._train, query)

    def to_score(self, draws: Draws) -> Episode:
        """Return support of the samples to learn from, and query of those held out.

        A class with fewer held-out samples than asked for gives those that it has.
        """
        fit = [
            c
            for c, rows in self._train_rows.items()
            if len(rows) >= self._support and c in self._held_out_rows
        ]
        chosen = self._chosen(draws, fit)
        support = [_some(draws, self._train_rows[c], self._support) for c in chosen]
        query = [_some(draws, self._held_out_rows[c], self._query) for c in chosen]
        return self._part(self._train, support), self._part(self._held_out, query)

    def _chosen(self, draws: Draws, fit: Sequence[int]) -> list[int]:
        if len(fit) < self._ways:
            raise InvalidInput(
                f"an episode takes {self._ways} classes with {self._support} samples to adapt to "
                f"and {self._query} others each; {len(fit)} of this device's "
                f"{len(self._train_rows)} classes have them. Take fewer classes or samples, "
                "or larger groups"
            )
        return [fit[k] for k in draws.permutation(len(fit))[: self._ways]]

    def _part(self, samples: Samples, rows: Sequence[Array]) -> Samples:
        """Return the samples of these rows; those of the k-th class have the label k."""
        every = np.concatenate(rows)
        numbers = np.repeat(np.arange(len(rows)), [len(some) for some in rows])
        part = {name: x[every] for name, x in samples.items()}
        return {**part, self._label: numbers.astype(samples[self._label].dtype)}


def _some(draws: Draws, rows: Array, count: int) -> Array:
    return rows[draws.permutation(len(rows))[:count]]


def _rows_by_class(y: Array) -> dict[int, Array]:
    order = np.argsort(y, kind="stable")
    classes, starts = np.unique(y[order], return_index=True)
    return dict(zip(classes.tolist(), np.split(order, starts[1:]), strict=True))
