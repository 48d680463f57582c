"""Reading ahead on a thread: the next item is being made while the caller uses the last one."""

from __future__ import annotations

from collections.abc import Generator
from contextvars import copy_context
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, Generic, Self, TypeVar

T = TypeVar("T")

JOIN_S: Final = 5.0
"""Seconds that `close` waits for data that do not come."""
_END: Final = object()


class ThreadFeed(Generic[T]):
    """The items of a generator, which runs on a thread of its own, one item ahead.

    Only that thread runs the generator, and closes it. It starts on an item when the caller takes
    the one before: by then the caller is done with the item before that. An exception of the
    generator is raised after the items before it. `reading` is held while the generator runs. Close
    the feed, or read it to its end.
    """

    def __init__(self, items: Generator[T], reading: Lock) -> None:
        self._items, self._reading = items, reading
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        # The caller's context variables hold there too, such as numpy's handling of errors. A
        # daemon, because a generator of the user's may never come back.
        self._thread = Thread(
            target=copy_context().run, args=(self._run,), name="triplane-feed", daemon=True
        )
        self._thread.start()
        self._wanted.put(True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Return the next item and let the thread start on the one after."""
        item, error = self._ready.get()
        if item is _END:
            self._ready.put((_END, None))  # for a caller that asks again
            if error is not None:
                raise error
            raise StopIteration
        self._wanted.put(True)
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread after the item that it is making."""
        self._wanted.put(False)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        error = None
        try:
            try:
                while self._wanted.get():
                    with self._reading:
                        item = next(self._items)
                    self._ready.put((item, None))
            finally:
                self._items.close()
        except StopIteration:
            pass
        except BaseException as raised:  # noqa: BLE001 - raised again in the caller's thread
            error = raised
        self._ready.put((_END, error))
