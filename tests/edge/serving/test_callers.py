from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.edge.serving.callers import Caller, FairQueue

CALLERS = [Caller(address, f"{address}:{port}") for address in "ABC" for port in range(2)]
A0, A1, B0 = CALLERS[0], CALLERS[1], CALLERS[2]


def queue_of(*callers):
    queue: FairQueue[tuple[Caller, int]] = FairQueue()
    for number, caller in enumerate(callers):
        queue.push(caller, (caller, number))
    return queue


def test_addresses_take_turns_and_so_do_connections_of_one_address():
    queue = queue_of(A0, A0, A0, A1, B0)
    order = [queue.pop()[0] for _ in range(5)]
    assert order == [A0, B0, A1, A0, A0]


def test_a_full_queue_displaces_the_newest_of_whoever_has_most():
    assert queue_of(A0, A0, A1, B0).displace(B0) == (A0, 1)


def test_connections_of_one_address_are_held_to_the_same_rule():
    queue = queue_of(A0, A0, A0)
    assert queue.displace(A1) == (A0, 2)
    assert queue.displace(A0) is None


@pytest.mark.parametrize("newcomer", [A0, B0])
def test_a_newcomer_that_would_hold_as_much_displaces_nobody(newcomer):
    assert queue_of(A0, B0).displace(newcomer) is None


@given(st.lists(st.sampled_from(CALLERS), max_size=40), st.randoms(use_true_random=False))
def test_nothing_is_lost_and_each_connection_keeps_its_order(callers, random):
    queue = queue_of(*callers)
    items = [(caller, number) for number, caller in enumerate(callers)]
    for item in random.sample(items, len(items) // 3):
        assert queue.remove(item[0], item)
        assert not queue.remove(item[0], item)
        items.remove(item)
    popped = []
    while queue:
        popped.append(queue.pop())
    assert Counter(popped) == Counter(items)
    for caller in CALLERS:
        numbers = [number for of, number in popped if of == caller]
        assert numbers == sorted(numbers)
