"""The persistent map against a dict, and that what was derived from leaves what it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.unified_ir.federated.core.sorted_map import WIDTH, Index, Records, SortedMap

KEYS = st.integers(0, 300)
CHANGES = st.lists(st.tuples(KEYS, st.booleans()), max_size=400)


def changed(found, known, changes):
    for key, stays in changes:
        if stays:
            found, known = found.set(key, -key), {**known, key: -key}
        else:
            found, known = found.without(key), {k: v for k, v in known.items() if k != key}
    return found, known


def entries(found):
    return list(zip(found, found.values(), strict=True))


@given(st.sets(KEYS), CHANGES)
def test_map_holds_what_a_dict_would_hold_in_the_order_of_keys(first, changes):
    begun: Any = SortedMap.from_items([(key, key) for key in first])
    found, known = changed(begun, {key: key for key in first}, changes)
    assert entries(found) == sorted(known.items())
    assert len(found) == len(known)
    assert all(found.get(key) == known.get(key) for key in range(301))
    assert entries(begun) == sorted((key, key) for key in first)


@given(st.sets(KEYS), CHANGES, st.integers(-1, 301))
def test_place_in_the_order_is_found_without_looking_at_each_key(first, changes, least):
    begun: Any = SortedMap.from_items([(key, key) for key in first])
    found, known = changed(begun, {key: key for key in first}, changes)
    assert found.count_until(lambda key: key >= least) == sum(key < least for key in known)
    expected = min((key for key in known if key >= least), default=None)
    assert found.first(lambda key: key >= least) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_map_that_was_emptied_key_by_key_takes_keys_again(order):
    keys = list(range(3 * WIDTH * WIDTH))[::order]
    found: Any = SortedMap()
    for key in keys:
        found = found.set(key, key)
    assert list(found) == sorted(keys)
    for key in keys:
        found = found.without(key)
    assert (len(found), list(found), found.first(lambda _: True)) == (0, [], None)
    assert list(found.set(7, 7)) == [7]


@dataclass(frozen=True)
class Row:
    name: str
    rank: int | None


class Rows(Records[Row]):
    __slots__ = ()
    indexes: ClassVar[Mapping[str, Index]] = {
        "rank": lambda r: None if r.rank is None else (r.rank, r.name)
    }


ROWS = st.lists(st.tuples(st.sampled_from("edcba"), st.none() | st.integers(0, 3)), max_size=40)


@given(ROWS, ROWS)
def test_records_keep_the_order_of_names_and_their_indexes(first, then):
    known = {name: Row(name, rank) for name, rank in first}
    begun = Rows.from_mapping(known)
    found, after = begun, dict(known)
    for name, rank in then:
        found, after[name] = found.with_(name, Row(name, rank)), Row(name, rank)
    assert (list(found.items()), list(found.values())) == (
        list(after.items()),
        list(after.values()),
    )
    assert found == after
    ranked = sorted((r.rank, r.name) for r in after.values() if r.rank is not None)
    assert list(found.indexed("rank")) == ranked
    assert begun == known


def test_record_that_is_there_already_gives_the_same_records():
    rows = Rows.from_mapping({"a": Row("a", 1)})
    assert rows.with_("a", Row("a", 1)) is rows
