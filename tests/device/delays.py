"""Delays at chosen suspension points of a program: a search for races that needs no luck.

Every task of the loop is stepped through a shim that counts its suspension points and can hold a
task back after any of them, while everything else goes on. An uncontended `asyncio.Lock` and a job
of a thread, which have no suspension point of their own, get one. A point is named by the lines of
this project that wait there, so the same point is found again in the next run.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OURS = "/triplane/"


class Delays:
    """Installed on the running loop by `install`. delayed: called with a point and its number.

    Returns the seconds to hold back; the number counts from 1 for each point since `restart`.
    """

    def __init__(self):
        self.seen: Counter[str] = Counter()
        self.taken = 0
        self.restart(lambda _point, _number: 0.0)

    def restart(self, delayed):
        self.seen.clear()
        self.taken, self._delayed = 0, delayed

    def seconds(self, point):
        """How long this pass through the point is held back."""
        self.seen[point] += 1
        found = self._delayed(point, self.seen[point])
        self.taken += found > 0
        return found

    def install(self, monkeypatch):
        loop = asyncio.get_running_loop()
        loop.set_task_factory(
            lambda loop, coro, **options: asyncio.Task(Held(coro, self), loop=loop, **options)
        )
        loop.set_default_executor(Threads(self))
        acquire = asyncio.Lock.acquire

        async def suspended(lock):
            await asyncio.sleep(0)
            return await acquire(lock)

        monkeypatch.setattr(asyncio.Lock, "acquire", suspended)


class Held(Coroutine):
    """A coroutine that may be held back after each of its suspension points."""

    def __init__(self, inner, delays):
        self._inner, self._delays = inner, delays
        self._point = self._holding = None

    def send(self, value):
        if self._holding is not None:
            self._holding = None
        elif self._point and (seconds := self._delays.seconds(self._point)):
            loop = asyncio.get_running_loop()
            self._holding = loop.create_future()
            loop.call_later(seconds, _set, self._holding)
            return next(iter(self._holding))
        return self._suspended(self._inner.send(value))

    def throw(self, *error):
        self._holding = None
        return self._suspended(self._inner.throw(*error))

    def close(self):
        self._inner.close()

    def __await__(self):
        return self._inner.__await__()

    def _suspended(self, yielded):
        self._point = point_of(self._inner)
        return yielded


class Threads(ThreadPoolExecutor):
    """Jobs that may be held back before they begin and before they are over."""

    def __init__(self, delays):
        super().__init__(4)
        self._delays = delays

    def submit(self, job, /, *args, **options):
        name = getattr(getattr(job, "args", (job,))[0], "__qualname__", "job")

        def held():
            time.sleep(self._delays.seconds(f"{name} begins"))
            try:
                return job(*args, **options)
            finally:
                time.sleep(self._delays.seconds(f"{name} ends"))

        return super().submit(held)


def point_of(coroutine):
    """The lines of ours that a coroutine waits at, outermost first; "" where it is none of ours."""
    lines = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None and OURS in frame.f_code.co_filename:
            name = Path(frame.f_code.co_filename).stem
            lines.append(f"{name}.{frame.f_code.co_name}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return " > ".join(lines)


def _set(future):
    if not future.done():
        future.set_result(None)
