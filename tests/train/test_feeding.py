"""Reading ahead on a thread: order, how far, errors, and who touches the data."""

import threading
from contextlib import closing

import numpy as np
import pytest

from triplane.unified_ir.train.feeding import ThreadFeed


def feed(items):
    return closing(ThreadFeed(items, threading.Lock()))


def test_items_come_in_order_and_then_no_more():
    with feed(i for i in range(5)) as items:
        assert list(items) == [0, 1, 2, 3, 4]
        assert list(items) == []


def test_it_is_one_item_ahead_and_no_further():
    begun, started = [], [threading.Event() for _ in range(9)]

    def source():
        for i, event in enumerate(started):
            begun.append(i)
            event.set()
            yield i

    with feed(source()) as items:
        for i in range(3):
            assert next(items) == i
            assert started[i + 1].wait(60)
            assert begun == list(range(i + 2))
    assert begun == [0, 1, 2, 3]


def test_an_error_comes_after_the_items_before_it():
    def source():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    with feed(source()) as items:
        assert [next(items), next(items)] == [1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            next(items)
        assert list(items) == []


def test_an_error_while_the_source_closes_is_raised_and_does_not_hang():
    class Closing:
        def __next__(self):
            raise StopIteration

        def close(self):
            raise OSError("the disk is gone")

    with feed(Closing()) as items, pytest.raises(OSError, match="the disk is gone"):
        next(items)


def test_one_thread_alone_runs_and_closes_the_source():
    threads = []

    def source():
        try:
            while True:
                threads.append(threading.current_thread())
                yield len(threads)
        finally:
            threads.append(threading.current_thread())

    with feed(source()) as items:
        assert next(items) == 1
    assert len(threads) >= 2
    assert len(set(threads)) == 1
    assert not threads[0].is_alive()
    assert threads[0] is not threading.current_thread()


def test_the_lock_is_held_while_the_source_runs():
    lock, seen = threading.Lock(), []

    def source():
        seen.append(lock.locked())
        yield 1

    with closing(ThreadFeed(source(), lock)) as items:
        assert next(items) == 1
    assert seen == [True]
    assert not lock.locked()


def test_the_callers_context_holds_on_the_thread():
    def source():
        yield np.float32(1) / np.float32(0)

    with np.errstate(divide="ignore"), feed(source()) as items:
        assert next(items) == np.inf
    with np.errstate(divide="raise"), feed(source()) as items, pytest.raises(FloatingPointError):
        next(items)
