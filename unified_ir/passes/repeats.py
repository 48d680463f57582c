"""Repeated structure of a graph: blocks of nodes that occur several times with the same wiring.

Two occurrences of a block are equal if their nodes have the same labels in the same order and every
operand comes from the same place: an output of the same node of the block, or the same one of the
values that the block reads from outside. Types do not matter, as in an ONNX function. The search is
close to linear in the number of nodes: frequent neighbours become one symbol, round after round
(byte pair encoding, Gage 1994), which proposes blocks, and then each block is compared wire by
wire. A block is a run of nodes in the given order, and no node is in two blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

LEAST_NODES: Final = 4
"""Smaller blocks are not worth a name."""

# Runs of labels are candidates if length and hash are equal, so the modulus should make collisions
# rare among millions of runs; 2^61 - 1 is a Mersenne prime.
_PRIME: Final = (1 << 61) - 1
_BASE: Final = 0x1F3D5B79F1E3D5B7 % _PRIME
_NEVER: Final = np.iinfo(np.int64).max

Indices = NDArray[np.int64]
V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True)
class Listing:
    """The nodes of any graph in an order in which they can run; values are numbers from 0.

    labels: the operation of a node, whatever its operands; None if it may not become part of a
    block.  inputs: values, -1 for an absent optional operand.  results: values the graph returns.
    """

    labels: Sequence[Hashable]
    inputs: Sequence[Sequence[int]]
    outputs: Sequence[Sequence[int]]
    results: frozenset[int]

    @classmethod
    def of(
        cls,
        labels: Sequence[Hashable],
        inputs: Iterable[Iterable[V | None]],
        outputs: Iterable[Iterable[V]],
        results: Iterable[V],
    ) -> tuple[Self, list[V]]:
        """Number any hashable values (None is an absent one); return the listing and the values."""
        numbers: dict[V, int] = {}

        def number(value: V | None) -> int:
            return -1 if value is None else numbers.setdefault(value, len(numbers))

        read = [list(map(number, row)) for row in inputs]
        produced = [list(map(number, row)) for row in outputs]
        return cls(labels, read, produced, frozenset(map(number, results))), list(numbers)

    @cached_property
    def first_output(self) -> list[int]:
        """Place of each node's first output among all outputs, and of the end."""
        return [0, *accumulate(map(len, self.outputs))]

    @cached_property
    def place(self) -> dict[int, int]:
        """Value -> its place among all outputs; values from outside the graph have none."""
        return {value: i for i, value in enumerate(chain.from_iterable(self.outputs))}

    @cached_property
    def last_use(self) -> dict[int, int]:
        """Value -> the last node that reads it; past the end for a result."""
        last = {v: i for i, taken in enumerate(self.inputs) for v in taken}
        return last | dict.fromkeys(self.results, len(self.labels))


@dataclass(frozen=True, slots=True)
class Block:
    """A repeated block: `length` nodes from each of `starts` on.

    arguments: for each occurrence, the values it reads from outside, in order of their first use.
    outputs: (node of the block, output of the node) that some occurrence's outside reads.
    """

    length: int
    starts: tuple[int, ...]
    arguments: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, int], ...]

    @property
    def saved_nodes(self) -> int:
        """Nodes saved when each occurrence becomes one call of one function."""
        return (len(self.starts) - 1) * self.length - len(self.starts)


def repeats(listing: Listing, least_nodes: int = LEAST_NODES) -> tuple[Block, ...]:
    """Return the blocks of at least `least_nodes` nodes that repeat, in the graph's order."""
    taken = np.zeros(len(listing.labels), dtype=bool)
    sums = _sums(taken)
    blocks = []
    for length, starts in _by_gain(_symbols(listing), least_nodes):
        # sums[b] - sums[a] is the number of taken nodes in [a, b), so this keeps the starts whose
        # nodes are all free.
        free = starts[sums[starts + length] == sums[starts]]
        for block in _alike(listing, length, free.tolist()):
            blocks.append(block)
            for start in block.starts:
                taken[start : start + length] = True
            sums = _sums(taken)
    return tuple(sorted(blocks, key=lambda block: block.starts))


def _by_gain(symbols: dict[int, _Symbol], least_nodes: int) -> Iterator[tuple[int, Indices]]:
    """Return (length, starts) of candidates for blocks, the largest gain first."""
    rows = []
    for symbol in symbols.values():
        if symbol.length < least_nodes:
            continue
        starts = np.unique(np.concatenate(symbol.starts))
        # As `Block.saved_nodes`, before occurrences overlap or turn out to be wired differently.
        gain = (len(starts) - 1) * symbol.length - len(starts)
        if gain > 0:
            rows.append((-gain, int(starts[0]), symbol.length, starts))
    rows.sort(key=lambda row: row[:3])
    return ((length, starts) for _, _, length, starts in rows)


def _alike(listing: Listing, length: int, starts: list[int]) -> Iterator[Block]:
    """Yield the runs of equal labels and wiring as blocks.

    Labels are compared, too: a model can be made such that hashes of unequal runs are equal.
    """
    classes: dict[Hashable, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for start in starts:
        wiring, arguments = _wiring(listing, start, length)
        classes[(*listing.labels[start : start + length], wiring)].append((start, arguments))
    for members in classes.values():
        own = tuple(start for start, _ in members)
        block = Block(length, own, tuple(a for _, a in members), _outputs(listing, length, own))
        if block.saved_nodes > 0:
            yield block


def _wiring(listing: Listing, start: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the source of each operand, and the values from outside.

    2 p stands for output p of the block, 2 k + 1 for the k-th value from outside, -1 for none.
    """
    base, place = listing.first_output[start], listing.place
    outside: dict[int, int] = {}
    wires = []
    for taken in listing.inputs[start : start + length]:
        for value in taken:
            at = place.get(value, -1) - base
            # Order matters: `place` has no -1, so an absent operand would pass for a value from
            # outside.
            if value < 0:
                wires.append(-1)
            elif at >= 0:
                wires.append(2 * at)
            else:
                wires.append(2 * outside.setdefault(value, len(outside)) + 1)
    return tuple(wires), tuple(outside)


def _outputs(listing: Listing, length: int, starts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    last = listing.last_use
    return tuple(
        (node, k)
        for node in range(length)
        for k in range(len(listing.outputs[starts[0] + node]))
        if any(last.get(listing.outputs[s + node][k], -1) >= s + length for s in starts)
    )


def _sums(taken: NDArray[np.bool_]) -> Indices:
    return np.concatenate([[0], np.cumsum(taken)]).astype(np.int64)


@dataclass(slots=True)
class _Symbol:
    """A run of labels: its content by hash and length, and the places where it starts."""

    hash: int
    length: int
    starts: list[Indices]


def _symbols(listing: Listing) -> dict[int, _Symbol]:
    """Return every symbol that rounds of joining frequent neighbours produce."""
    tokens = _tokens(listing)
    starts = np.arange(len(tokens), dtype=np.int64)
    by_number: dict[int, _Symbol] = {}
    for token in np.unique(tokens).tolist():
        by_number[token] = _Symbol(pow(_BASE, token + 2, _PRIME), 1, [])
    known = {(s.hash, s.length): token for token, s in by_number.items()}
    while len(tokens) > 1:
        joined = _joined(tokens)
        if not joined.size:
            break
        pairs, inverse = np.unique(
            np.stack([tokens[joined], tokens[joined + 1]]), axis=1, return_inverse=True
        )
        names = []
        for a, b in pairs.T.tolist():
            left, right = by_number[a], by_number[b]
            length = left.length + right.length
            # H(ab) = H(a) B^len(b) + H(b): equal runs get equal hashes however they were joined, so
            # the same labels parsed in two ways become one symbol.
            content = (left.hash * pow(_BASE, right.length, _PRIME) + right.hash) % _PRIME
            token = known.setdefault((content, length), len(by_number))
            by_number.setdefault(token, _Symbol(content, length, []))
            names.append(token)
        tokens[joined] = np.array(names, dtype=np.int64)[inverse.reshape(-1)]
        order = np.argsort(tokens[joined], kind="stable")
        cuts = np.flatnonzero(np.diff(tokens[joined][order])) + 1
        # Occurrences are recorded in the round that joins them; later rounds swallow them into
        # longer symbols, but both remain candidates.
        for part in np.split(joined[order], cuts):
            by_number[int(tokens[part[0]])].starts.append(starts[part])
        tokens, starts = np.delete(tokens, joined + 1), np.delete(starts, joined + 1)
    return {token: symbol for token, symbol in by_number.items() if symbol.starts}


def _tokens(listing: Listing) -> Indices:
    """Return one number for each kind of node, and a unique one for each node without a label."""
    kinds: dict[Any, int] = {}
    tokens = np.empty(len(listing.labels), dtype=np.int64)
    for i, label in enumerate(listing.labels):
        shape = (len(listing.inputs[i]), len(listing.outputs[i]))
        key = (i,) if label is None else (label, shape)
        tokens[i] = kinds.setdefault(key, len(kinds))
    return tokens


def _joined(tokens: Indices) -> Indices:
    """Return the places whose token joins the next one: the most frequent of neighbouring pairs.

    The choice depends only on the neighbourhood, so equal runs are parsed alike except at the ends.
    """
    # One number per pair of neighbours: a (max + 1) + b is unique for 0 <= b <= max.
    codes = tokens[:-1] * (int(tokens.max()) + 1) + tokens[1:]
    _, first, inverse, counts = np.unique(
        codes, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.lexsort((first, -counts))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    # A pair wins if its rank is strictly below those of the pairs that overlap it, so no token
    # joins twice. Doubling leaves room for the parity, which breaks the tie within runs of one
    # pair.
    ranks = np.where(counts[inverse] > 1, 2 * rank[inverse], _NEVER)
    ranks = ranks + np.where(ranks < _NEVER, _parity(codes), 0)
    before = np.concatenate([[_NEVER], ranks[:-1]])
    after = np.concatenate([ranks[1:], [_NEVER]])
    won: Indices = np.flatnonzero((ranks < _NEVER) & (ranks < before) & (ranks < after))
    return won


def _parity(codes: Indices) -> Indices:
    """Return the parity of places in runs of equal pairs such as `aaaa`: every other one joins."""
    places = np.arange(len(codes))
    begins = np.concatenate([[True], codes[1:] != codes[:-1]])
    parity: Indices = (places - np.maximum.accumulate(np.where(begins, places, 0))) % 2
    return parity
