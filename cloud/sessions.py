"""The live streams of nodes and devices: documents out, messages in.

A stream belongs to the name in its certificate; a newer stream of the same name ends the older. A
caller gets a whole document when its stream opens and whenever it changed; its messages are
acknowledged after their commit. A `SessionPeer` decides what the documents say and handles the
messages: one for nodes (`fleet/node_peer.py`), one for devices (`federation`). No state that must
survive the process is kept here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol

from triplane.proto import session_pb2
from triplane.proto.errors import InvalidInput, Unavailable
from triplane.proto.session_pb2_grpc import SessionServicer as Wire
from triplane.proto.status import status_of_aio
from triplane.proto.stream import HELLO_S, Message, ServerSession, new_epoch

logger = logging.getLogger(__name__)

SHUTDOWN_WAIT_S: Final = 1.0
"""Shortest time that callers of a stopping cloud wait before they reconnect."""


class SessionPeer(Protocol):
    """The part of the cloud that one kind of caller talks to."""

    def greeting(self, name: str) -> Message:
        """Return the document that a new stream begins with. NotFound: unknown name."""

    async def take(self, name: str, message: Message) -> None:
        """Handle a message; it is acknowledged when this returns."""

    def left(self, name: str) -> None:
        """Handle that the last open stream of the name has ended."""


class Sessions:
    """Every open stream, by name.

    clock: seconds since 1970, for `last_seen_s`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sessions: dict[str, ServerSession] = {}
        self._seen_s: dict[str, float] = {}
        self._open = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._stopping = False

    def is_connected(self, name: str) -> bool:
        """Return whether a stream of this name is open."""
        session = self._sessions.get(name)
        return session is not None and session.connected

    def last_seen_s(self, name: str) -> float:
        """Return when a stream of this name was last open; 0 if none was since the start."""
        return self._clock() if self.is_connected(name) else self._seen_s.get(name, 0.0)

    def revoke(self, name: str) -> None:
        """End the stream of a revoked name."""
        session = self._sessions.pop(name, None)
        if session is not None:
            session.close(session_pb2.Goodbye.REVOKED)

    async def stop(self, deadline_s: float) -> None:
        """Send every caller a goodbye and wait until the streams have ended."""
        self._stopping = True
        for session in self._sessions.values():
            session.close(session_pb2.Goodbye.SHUTTING_DOWN, SHUTDOWN_WAIT_S)
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            logger.warning("streams did not end", extra={"streams": self._open})

    async def serve(
        self,
        name: str,
        frames: AsyncIterator[session_pb2.Frame],
        write: Callable[[session_pb2.Frame], Awaitable[None]],
        peer: SessionPeer,
    ) -> None:
        """Serve a stream until it ends.

        `SessionPeer.left` is called before this returns, however the stream ended.
        """
        if self._stopping:
            why = session_pb2.Goodbye.SHUTTING_DOWN
            goodbye = session_pb2.Goodbye(why=why, retry_after_s=SHUTDOWN_WAIT_S)
            await write(session_pb2.Frame(goodbye=goodbye))
            return
        first = await _first_of(frames)
        session = self._session(name, peer)
        # Queued before the stream counts as connected: the greeting is the newest document, and
        # later changes replace it in the queue.
        session.send(peer.greeting(name))
        self._enter(name)
        try:
            await session.serve(first, frames, write)
        finally:
            self._leave(name)
            # A newer stream of the same name may have replaced this one; then the peer has not
            # left.
            if not session.connected:
                peer.left(name)

    def _session(self, name: str, peer: SessionPeer) -> ServerSession:
        if name not in self._sessions:
            # Kept after the stream ends, so that numbers and unacknowledged messages survive a
            # reconnect.
            self._sessions[name] = ServerSession(new_epoch(), partial(peer.take, name))
        return self._sessions[name]

    def send(self, name: str, message: Message) -> None:
        """Send a newer document; without a stream it is dropped, since a stream begins with one."""
        session = self._sessions.get(name)
        if session is not None and session.connected:
            session.send(message)

    def _enter(self, name: str) -> None:
        self._open += 1
        self._empty.clear()
        logger.info("stream opened", extra={"node": name, "streams": self._open})

    def _leave(self, name: str) -> None:
        self._open -= 1
        self._seen_s[name] = self._clock()
        if not self._open:
            self._empty.set()
        logger.info("stream ended", extra={"node": name, "streams": self._open})


class SessionServicer(Wire):
    """`triplane.session.v1.Session`. caller: the name that makes the current call, and its peer."""

    def __init__(self, sessions: Sessions, caller: Callable[[], tuple[str, SessionPeer]]) -> None:
        self._sessions, self._caller = sessions, caller

    async def Open(  # type: ignore[override]  # the stub knows generators only
        self, request_iterator: AsyncIterator[session_pb2.Frame], context: Any
    ) -> None:
        """See session.proto."""
        async with status_of_aio(context):
            name, peer = self._caller()
            await self._sessions.serve(name, request_iterator, context.write, peer)


async def _first_of(frames: AsyncIterator[session_pb2.Frame]) -> session_pb2.Frame:
    try:
        # An authenticated caller that sends nothing would otherwise occupy a stream for ever.
        async with asyncio.timeout(HELLO_S):
            first = await anext(frames, None)
    except TimeoutError as error:
        raise Unavailable(
            f"no hello came within {HELLO_S:g} s of the stream's opening; open it again"
        ) from error
    if first is None:
        raise InvalidInput("a session begins with a hello")
    return first
