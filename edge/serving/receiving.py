"""Waiting for a caller, with an end: one that stalls cannot hold a thread, or an answer for ever.

A call that must send, or take its answer, is cancelled after its timeout. A stream may rest
between its messages, and is cancelled when the server goes.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc

from triplane.proto.errors import InvalidInput

logger = logging.getLogger(__name__)

WATCH_PERIOD_S: Final = 1.0  # how often stalled senders are looked for
REST: Final = float("inf")  # a timeout: the caller may take its time


@dataclass(frozen=True, slots=True)
class _Wait:
    context: grpc.ServicerContext
    deadline_s: float
    rests: bool


class Receiving:
    """The calls whose callers are waited for, and the thread that watches them."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Wait] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._rests_end = False
        self._watch = threading.Thread(target=self._run, name="receiving", daemon=True)
        self._watch.start()

    def only(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, timeout_s: float
    ) -> bytes | None:
        """The message of a single-message call, None when the caller sends none."""
        with self._lock:
            self._waiting[id(context)] = _Wait(context, time.monotonic() + timeout_s, rests=False)
        return self._next(messages, context)

    def following(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, timeout_s: float
    ) -> bytes | None:
        """The next message of a stream, None when it ends or the server goes."""
        with self._lock:
            if self._rests_end:
                return None
            self._waiting[id(context)] = _Wait(context, time.monotonic() + timeout_s, rests=True)
        return self._next(messages, context)

    def until_over(self, context: grpc.ServicerContext, timeout_s: float) -> None:
        """Cancel the call unless it is over in time: its answer is on the way."""
        wait = self._watched(context, timeout_s)
        if not context.add_callback(lambda: self._forget(wait)):
            self._forget(wait)

    @contextlib.contextmanager
    def within(self, context: grpc.ServicerContext, timeout_s: float) -> Iterator[None]:
        """Cancel the call unless the body ends in time."""
        wait = self._watched(context, timeout_s)
        try:
            yield
        finally:
            self._forget(wait)

    def end_rests(self) -> None:
        """Cancel every stream that waits for its caller, and let none wait from now on."""
        with self._lock:
            self._rests_end = True
            for wait in self._waiting.values():
                if wait.rests:
                    wait.context.cancel()

    def close(self) -> None:
        """Stop the watching thread."""
        self._ended.set()
        self._watch.join()

    def _watched(self, context: grpc.ServicerContext, timeout_s: float) -> _Wait:
        wait = _Wait(context, time.monotonic() + timeout_s, rests=False)
        with self._lock:
            self._waiting[id(context)] = wait
        return wait

    def _forget(self, wait: _Wait) -> None:
        with self._lock:
            self._waiting.pop(id(wait.context), None)

    def _next(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
        try:
            return next(messages, None)
        finally:
            with self._lock:
                del self._waiting[id(context)]

    def _run(self) -> None:
        while not self._ended.wait(WATCH_PERIOD_S):
            now = time.monotonic()
            with self._lock:
                late = [wait for wait in self._waiting.values() if wait.deadline_s < now]
                for wait in late:
                    wait.context.cancel()
            if late:
                logger.warning("stalled calls cancelled", extra={"calls": len(late)})


def one(message: bytes | None) -> bytes:
    """The single message of a call that must bring one. Raises InvalidInput."""
    if message is None:
        raise InvalidInput("the call brought no message; send exactly one")
    return message
