"""A persistent sorted map, and records that can be found by several keys.

A change returns a new map that shares its unchanged parts with the old one, which stays as it was.
Changes and lookups take steps that grow with the logarithm of the size. It is a B+ tree that frees
a node when it is empty and merges none (Johnson and Shasha 1989, "B-trees with inserts and deletes:
why free-at-empty is better than merge-at-half").
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from operator import itemgetter
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")

WIDTH: Final = 32
"""Largest number of entries of a node."""


class _Leaf:
    """Entries in the order of their keys."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.keys, self.values = keys, values

    @property
    def first(self) -> Any:
        return self.keys[0]

    @property
    def size(self) -> int:
        return len(self.keys)

    def get(self, key: Any) -> Any:
        at = bisect_left(self.keys, key)
        return self.values[at] if at < len(self.keys) and self.keys[at] == key else None

    def set(self, key: Any, value: Any) -> tuple[_Node, ...]:
        at = bisect_left(self.keys, key)
        # As an integer, `known` skips the old value: at + 1 where the key exists.
        known = at < len(self.keys) and self.keys[at] == key
        values = (*self.values[:at], value, *self.values[at + known :])
        keys = self.keys if known else (*self.keys[:at], key, *self.keys[at:])
        if len(keys) <= WIDTH:
            return (_Leaf(keys, values),)
        half = len(keys) // 2
        return _Leaf(keys[:half], values[:half]), _Leaf(keys[half:], values[half:])

    def without(self, key: Any) -> tuple[_Node, ...]:
        at = bisect_left(self.keys, key)
        if at == len(self.keys) or self.keys[at] != key:
            return (self,)
        keys, values = (x[:at] + x[at + 1 :] for x in (self.keys, self.values))
        return (_Leaf(keys, values),) if keys else ()

    def count_until(self, holds: Callable[[Any], bool]) -> int:
        # `holds` is false for the first keys and true for the others, so it is itself a sorted key.
        return bisect_left(self.keys, True, key=holds)

    def leaves(self) -> Iterator[_Leaf]:
        yield self


class _Inner:
    """Nodes in the order of their keys."""

    __slots__ = ("children", "firsts", "size")

    def __init__(self, children: tuple[_Node, ...], firsts: tuple[Any, ...], size: int) -> None:
        self.children, self.firsts, self.size = children, firsts, size

    @classmethod
    def of(cls, children: Sequence[_Node]) -> _Inner:
        firsts = tuple([child.first for child in children])
        return cls(tuple(children), firsts, sum([child.size for child in children]))

    @property
    def first(self) -> Any:
        return self.firsts[0]

    def get(self, key: Any) -> Any:
        return self.children[max(0, bisect_right(self.firsts, key) - 1)].get(key)

    def set(self, key: Any, value: Any) -> tuple[_Node, ...]:
        at = max(0, bisect_right(self.firsts, key) - 1)
        return self._with(at, self.children[at].set(key, value))

    def without(self, key: Any) -> tuple[_Node, ...]:
        at = max(0, bisect_right(self.firsts, key) - 1)
        return self._with(at, self.children[at].without(key))

    def _with(self, at: int, nodes: tuple[_Node, ...]) -> tuple[_Node, ...]:
        children = (*self.children[:at], *nodes, *self.children[at + 1 :])
        if not children:
            return ()
        if len(children) > WIDTH:
            half = len(children) // 2
            return _Inner.of(children[:half]), _Inner.of(children[half:])
        # O(WIDTH) from the old node, where `of` would visit every child.
        firsts = (*self.firsts[:at], *[node.first for node in nodes], *self.firsts[at + 1 :])
        size = self.size - self.children[at].size + sum([node.size for node in nodes])
        return (_Inner(children, firsts, size),)

    def count_until(self, holds: Callable[[Any], bool]) -> int:
        at = max(0, bisect_left(self.firsts, True, key=holds) - 1)
        return sum([c.size for c in self.children[:at]]) + self.children[at].count_until(holds)

    def leaves(self) -> Iterator[_Leaf]:
        for child in self.children:
            yield from child.leaves()


_Node = _Leaf | _Inner
_EMPTY: Final = _Leaf((), ())


class SortedMap(Generic[K, V]):
    """Values by key, in the order of the keys. Keys are of one ordered type."""

    __slots__ = ("_root",)

    def __init__(self, root: _Node = _EMPTY) -> None:
        self._root = root

    @classmethod
    def from_items(cls, items: Iterable[tuple[K, V]]) -> SortedMap[K, V]:
        """Build the map from (key, value) pairs in any order, with distinct keys."""
        entries = sorted(items, key=itemgetter(0))
        nodes: list[_Node] = [
            _Leaf(tuple([k for k, _ in part]), tuple([v for _, v in part]))
            for part in _parts(entries)
        ]
        while len(nodes) > 1:
            nodes = [_Inner.of(part) for part in _parts(nodes)]
        return cls(*nodes)

    def __len__(self) -> int:
        return self._root.size

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        value: V | None = self._root.get(key)
        return value

    def set(self, key: K, value: V) -> SortedMap[K, V]:
        """Return the map with this value."""
        return SortedMap(_rooted(self._root.set(key, value)))

    def without(self, key: K) -> SortedMap[K, V]:
        """Return the map without that key."""
        return SortedMap(_rooted(self._root.without(key)))

    def __iter__(self) -> Iterator[K]:
        for leaf in self._root.leaves():
            yield from leaf.keys

    def values(self) -> Iterator[V]:
        """Yield the values in the order of their keys."""
        for leaf in self._root.leaves():
            yield from leaf.values

    def count_until(self, holds: Callable[[K], bool]) -> int:
        """Count, by bisection, the keys before the first one for which the predicate holds."""
        return self._root.count_until(holds)

    def first(self, holds: Callable[[K], bool]) -> K | None:
        """Return the first key for which the predicate holds, by bisection."""
        node, later = self._root, None
        while isinstance(node, _Inner):
            at = bisect_left(node.firsts, True, key=holds)
            # The answer lies in the child before the first key that holds, or is that key itself if
            # the whole child fails.
            later = node.firsts[at] if at < len(node.firsts) else later
            node = node.children[max(0, at - 1)]
        at = bisect_left(node.keys, True, key=holds)
        return node.keys[at] if at < len(node.keys) else later


def _rooted(nodes: tuple[_Node, ...]) -> _Node:
    if len(nodes) == 1:
        return nodes[0]
    return _Inner.of(nodes) if nodes else _EMPTY


def _parts(entries: list[Any]) -> Iterator[list[Any]]:
    """Split into the entries of nodes, each with room to grow."""
    # Full nodes would all be split by the first insertions.
    size = 3 * WIDTH // 4
    return (entries[at : at + size] for at in range(0, len(entries), size))


Index = Callable[[Any], Any]
"""The key of a record, or None where the index leaves it out."""


class Records(Mapping[str, V]):
    """Records by name, in the order in which names were added, with indexes by other keys.

    indexes: for each index, the function that returns a record's key; keys of two records differ.
    """

    indexes: ClassVar[Mapping[str, Index]] = {}

    __slots__ = ("_by_name", "_indexed")

    def __init__(
        self, by_name: SortedMap[str, tuple[int, V]], indexed: Mapping[str, SortedMap[Any, str]]
    ) -> None:
        self._by_name, self._indexed = by_name, indexed

    @classmethod
    def from_mapping(cls, records: Mapping[str, V]) -> Self:
        """Build the records from a mapping by name."""
        items = list(records.items())
        by_name = SortedMap.from_items(
            [(name, (at, record)) for at, (name, record) in enumerate(items)]
        )
        indexed: dict[str, SortedMap[Any, str]] = {
            index: SortedMap.from_items(
                [(k, name) for name, record in items if (k := key(record)) is not None]
            )
            for index, key in cls.indexes.items()
        }
        return cls(by_name, indexed)

    def __getitem__(self, name: str) -> V:
        slot = self._by_name.get(name)
        if slot is None:
            raise KeyError(name)
        return slot[1]

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain())

    def values(self) -> ValuesView[V]:
        """Return the records in the order in which names were added."""
        return self._plain().values()

    def items(self) -> ItemsView[str, V]:
        """See `values`."""
        return self._plain().items()

    def _plain(self) -> dict[str, V]:
        entries = zip(self._by_name, self._by_name.values(), strict=True)
        ordered = sorted(entries, key=lambda entry: entry[1][0])
        return {name: record for name, (_, record) in ordered}

    def indexed(self, index: str) -> SortedMap[Any, str]:
        """Return the names by the keys of an index."""
        return self._indexed[index]

    def with_(self, name: str, record: V) -> Self:
        """Return the records with this one in place of that of its name, or at the end."""
        slot = self._by_name.get(name)
        # The position is stored with the record: names are sorted in the map, and iteration needs
        # the order in which they were added. Records are never removed, so the length is the next
        # position.
        at, old = (len(self._by_name), None) if slot is None else slot
        # The same object, so that callers can tell by `is` that nothing changed.
        if old == record:
            return self
        indexed = self._indexed
        for index, key in self.indexes.items():
            before, after = None if old is None else key(old), key(record)
            if before != after:
                indexed = {**indexed, index: _moved(indexed[index], before, after, name)}
        return type(self)(self._by_name.set(name, (at, record)), indexed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._plain()!r})"


def _moved(index: SortedMap[Any, str], before: Any, after: Any, name: str) -> SortedMap[Any, str]:
    if before is not None:
        index = index.without(before)
    return index if after is None else index.set(after, name)
