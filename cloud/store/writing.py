"""The one writer: units of work in the order of the calls, many to a commit.

Works that wait together share a transaction, each in its own savepoint; none of their calls returns
before the commit. A work that raises leaves nothing behind. If the database itself fails in a
shared transaction, each work runs again alone, so its only effects must be on the database.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from triplane.proto.errors import Unavailable

MAX_SHARED: Final = 64
"""Largest number of works in one transaction."""
CLOSED: Final = "the database is closed; the cloud is stopping"


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A work and the future of its caller."""

    work: Callable[[Connection], Any]
    answer: Future[Any] = field(default_factory=Future)


class Writer:
    """The thread that owns the writing connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Connection], Any]) -> Future[Any]:
        """Queue `work`; the future completes after its commit. Unavailable once closed."""
        asked = _Asked(work)
        # Together with `close`: no work may be queued after the end marker, where nobody would run
        # it.
        with self._closing:
            if self._closed:
                raise Unavailable(CLOSED)
            self._asked.put(asked)
        return asked.answer

    @property
    def is_current(self) -> bool:
        """Whether the caller is inside a work, where waiting for another would block forever."""
        return threading.current_thread() is self._thread

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Run the queued work, then stop."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            shared, is_last = self._next()
            # From here on the futures can no longer be cancelled: the work runs and commits.
            live = [asked for asked in shared if asked.answer.set_running_or_notify_cancel()]
            if live:
                self._do(live)
            # The loop waits next; it must not keep results and closures alive meanwhile.
            del shared, live
            if is_last:
                return

    def _next(self) -> tuple[list[_Asked], bool]:
        """Return the waiting work, at least one item, and whether the writer ends."""
        shared: list[_Asked] = []
        asked = self._asked.get()
        while asked is not None:
            shared.append(asked)
            if len(shared) == MAX_SHARED:
                return shared, False
            try:
                asked = self._asked.get_nowait()
            except queue.Empty:
                return shared, False
        return shared, True

    def _do(self, shared: list[_Asked]) -> None:
        if len(shared) > 1 and self._together(shared):
            return
        for asked in shared:
            self._alone(asked)

    def _together(self, shared: list[_Asked]) -> bool:
        """Run all in one transaction; return whether the futures of all are complete."""
        answers: list[Callable[[], None]] = []
        try:
            with self._engine.begin() as connection:
                answers.extend(_nested(connection, asked) for asked in shared)
        except Exception as error:  # noqa: BLE001 -- the askers get it, from here or one by one
            if not (isinstance(error, DBAPIError) and error.connection_invalidated):
                return False
            # The commit may have happened, with only its answer lost: never run them twice.
            answers = [partial(asked.answer.set_exception, error) for asked in shared]
        for answer in answers:
            answer()
        return True

    def _alone(self, asked: _Asked) -> None:
        try:
            with self._engine.begin() as connection:
                result = asked.work(connection)
        except BaseException as error:  # noqa: BLE001 -- the asker gets it
            asked.answer.set_exception(error)
        else:
            asked.answer.set_result(result)


def _nested(connection: Connection, asked: _Asked) -> Callable[[], None]:
    """Run the work in a savepoint; return a function that completes its future."""
    try:
        # A savepoint: an error of this work undoes only its own statements.
        with connection.begin_nested():
            result = asked.work(connection)
    # The transaction itself may be broken, so all works of it are run again, each alone.
    except DBAPIError:
        raise
    except BaseException as error:  # noqa: BLE001 -- the asker gets it
        return partial(asked.answer.set_exception, error)
    return partial(asked.answer.set_result, result)
