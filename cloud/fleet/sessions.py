"""The live streams of nodes and devices: whole documents out, what they have to say in.

Nothing that matters lives here. A stream belongs to the name in its certificate; a newer stream of
the same name ends the older. A node gets its document when its stream opens and when its number
changed; a report is acknowledged after its commit. What a device is told and what becomes of what
it says is decided by another part, through `SessionPeer`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

from triplane.cloud.fleet.fleet import LiveFleet
from triplane.cloud.fleet.messages import desired_message
from triplane.cloud.fleet.state import FleetNode
from triplane.proto import fleet_pb2, session_pb2
from triplane.proto.errors import InvalidInput, Unavailable
from triplane.proto.session_pb2_grpc import SessionServicer as Wire
from triplane.proto.status import status_of_aio
from triplane.proto.stream import HELLO_S, Message, ServerSession, new_epoch

logger = logging.getLogger(__name__)

SHUTDOWN_WAIT_S: Final = 1.0
"""Nodes of a cloud that stops wait at least this long before they try again."""


class SessionPeer(Protocol):
    """Whoever a kind of caller speaks with."""

    def greeting(self, name: str) -> Message:
        """The document a stream begins with. NotFound: the name is nobody's."""

    async def take(self, name: str, message: Message) -> None:
        """Handle a message; it is acknowledged when this returns."""

    def left(self, name: str) -> None:
        """No stream of the name is open any more."""


class Nodes:
    """The nodes of a fleet: desired documents out, reports in."""

    def __init__(self, fleet: LiveFleet) -> None:
        self._fleet = fleet

    def greeting(self, name: str) -> Message:
        """See `SessionPeer`."""
        return desired_message(self._fleet.node(name))

    async def take(self, name: str, message: Message) -> None:
        """See `SessionPeer`."""
        if not isinstance(message, fleet_pb2.Report):
            raise InvalidInput("a node sends reports; other messages are the cloud's")
        await self._fleet.report(name, message)

    def left(self, name: str) -> None:
        """See `SessionPeer`."""


class Sessions:
    """Every open stream, by name.

    clock: seconds since 1970, for when a node was last seen.
    """

    def __init__(self, fleet: LiveFleet, *, clock: Callable[[], float] = time.time) -> None:
        self._nodes, self._clock = Nodes(fleet), clock
        self._sessions: dict[str, ServerSession] = {}
        self._seen_s: dict[str, float] = {}
        self._open = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._stopping = False
        fleet.on_desired(self._send)

    def is_connected(self, name: str) -> bool:
        """Whether a stream of this name is open."""
        found = self._sessions.get(name)
        return found is not None and found.connected

    def last_seen_s(self, node: FleetNode) -> float:
        """When the node's stream was last known to be open, or it last reported."""
        if self.is_connected(node.name):
            return self._clock()
        return max(node.last_seen_s, self._seen_s.get(node.name, 0.0))

    def revoke(self, name: str) -> None:
        """End the stream of a name that may not call any more."""
        found = self._sessions.pop(name, None)
        if found is not None:
            found.close(session_pb2.Goodbye.REVOKED)

    async def stop(self, deadline_s: float) -> None:
        """Tell every node that the cloud stops, and wait until the streams ended."""
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
        side: SessionPeer | None = None,
    ) -> None:
        """Answer a stream until it ends; a node's, where no other side is given.

        `SessionPeer.left` is called before this returns, however the stream ended.
        """
        if self._stopping:
            await write(_goodbye(session_pb2.Goodbye.SHUTTING_DOWN, SHUTDOWN_WAIT_S))
            return
        first = await _first_of(frames)
        side = side or self._nodes
        session = self._session(name, side)
        session.send(side.greeting(name))
        self._enter(name)
        try:
            await session.serve(first, frames, write)
        finally:
            self._leave(name)
            if not session.connected:
                side.left(name)

    def _session(self, name: str, side: SessionPeer) -> ServerSession:
        found = self._sessions.get(name)
        if found is None:

            async def take(message: Message) -> None:
                await side.take(name, message)

            found = self._sessions[name] = ServerSession(new_epoch(), take)
        return found

    def send(self, name: str, message: Message) -> None:
        """A newer document for a name; dropped where no stream is open, which begins with one."""
        session = self._sessions.get(name)
        if session is not None and session.connected:
            session.send(message)

    def _send(self, node: FleetNode) -> None:
        self.send(node.name, desired_message(node))

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
    """`triplane.session.v1.Session`. caller: name of the call at hand, and its side if no node."""

    def __init__(
        self, sessions: Sessions, caller: Callable[[], tuple[str, SessionPeer | None]]
    ) -> None:
        self._sessions, self._caller = sessions, caller

    async def Open(  # type: ignore[override]  # the stub knows generators only
        self, request_iterator: AsyncIterator[session_pb2.Frame], context: Any
    ) -> None:
        """See session.proto."""
        async with status_of_aio(context):
            name, side = self._caller()
            await self._sessions.serve(name, request_iterator, context.write, side)


async def _first_of(frames: AsyncIterator[session_pb2.Frame]) -> session_pb2.Frame:
    try:
        async with asyncio.timeout(HELLO_S):
            first = await anext(frames, None)
    except TimeoutError as error:
        raise Unavailable(
            f"no hello came within {HELLO_S:g} s of the stream's opening; open it again"
        ) from error
    if first is None:
        raise InvalidInput("a session begins with a hello")
    return first


def _goodbye(why: session_pb2.Goodbye.Why.ValueType, retry_after_s: float) -> session_pb2.Frame:
    return session_pb2.Frame(goodbye=session_pb2.Goodbye(why=why, retry_after_s=retry_after_s))
