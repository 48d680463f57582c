import queue
import threading
import time

import pytest

from triplane.edge.serving.callers import Caller
from triplane.edge.serving.turns import Turns
from triplane.proto.errors import Unavailable
from triplane.proto.status import DeadlineExceeded, facts_of

LIGHT, HEAVY = Caller("light", "light:1"), Caller("heavy", "heavy:1")


def later():
    return time.monotonic() + 60


class Calls:
    """Calls in threads of their own; each notes when it has its turn, or why it has none."""

    def __init__(self, turns):
        self.turns = turns
        self.seen: queue.Queue[str] = queue.Queue()
        self.threads: list[threading.Thread] = []

    def start(self, name, caller):
        """Returns when the call waits."""
        waiting = self.turns.waiting
        self.threads.append(threading.Thread(target=self._run, args=(name, caller)))
        self.threads[-1].start()
        while self.turns.waiting == waiting and self.seen.empty():
            time.sleep(0)

    def ended(self):
        for thread in self.threads:
            thread.join(60)
        return [self.seen.get_nowait() for _ in range(self.seen.qsize())]

    def _run(self, name, caller):
        try:
            with self.turns.turn(caller, later()):
                self.seen.put(name)
        except Unavailable as error:
            self.seen.put(f"{name}: {error}")


def test_one_call_of_a_light_caller_waits_for_one_turn_and_not_for_the_heavy_callers_queue():
    turns = Turns(1, 10, lambda: None)
    calls = Calls(turns)
    with turns.turn(HEAVY, later()):
        for number in range(6):
            calls.start(f"heavy {number}", HEAVY)
        calls.start("light", LIGHT)
    assert calls.ended().index("light") == 1


def test_a_light_caller_enters_a_queue_that_a_heavy_one_has_filled():
    refused: list[None] = []
    turns = Turns(1, 3, lambda: refused.append(None))
    calls = Calls(turns)
    with turns.turn(HEAVY, later()):
        for number in range(3):
            calls.start(f"heavy {number}", HEAVY)
        with pytest.raises(Unavailable, match="3 calls wait for a thread already") as raised:
            turns.turn(HEAVY, later()).__enter__()
        calls.start("light", LIGHT)
        displaced = calls.seen.get(timeout=60)
        assert displaced.startswith("heavy 2: all queues are full")
    assert facts_of(raised.value) == {"retry_after_ms": "500"}
    assert sorted(calls.ended()) == ["heavy 0", "heavy 1", "light"]
    assert len(refused) == 2


def test_a_call_whose_deadline_passes_in_the_queue_leaves_its_place():
    turns = Turns(1, 1, lambda: None)
    with turns.turn(HEAVY, later()):
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="nothing was computed"):
                turns.turn(LIGHT, time.monotonic() + 0.01).__enter__()
    with turns.turn(LIGHT, later()):
        pass


def test_every_turn_comes_back_whatever_happens_in_it():
    turns = Turns(2, 1, lambda: None)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), turns.turn(LIGHT, later()):
            raise ZeroDivisionError
    with turns.turn(LIGHT, later()), turns.turn(LIGHT, later()):
        pass
