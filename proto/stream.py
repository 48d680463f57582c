"""The one long-lived stream of a node or device: numbered frames that are acknowledged or resent.

`StreamState` is the pure core, one per peer: which frames were sent and not acknowledged, and which
were handled. The rest is I/O. A message is handled once per pair of epochs, in order. After a peer
has restarted (a new epoch), messages that it had not acknowledged are handled again, so handlers
must tolerate repetition. `send` returns when the other peer's handler has returned; a handler that
must not lose a message makes it durable first. See `session.proto`.

Timeouts use `asyncio.timeout`, never `wait_for`: before Python 3.12 `wait_for` loses a cancellation
that arrives together with its result, and the surrounding loop never ends.
"""

import asyncio
import logging
import math
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

from triplane.proto import session_pb2 as pb
from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.proto.session_pb2_grpc import SessionStub
from triplane.proto.unreachable import unreachable_cause

logger = logging.getLogger(__name__)

EPOCH_BYTES: Final = 16
MAX_UNACKNOWLEDGED: Final = 256
HEARTBEAT_S: Final = 10.0
MIN_HEARTBEAT_S: Final = 0.01
MAX_HEARTBEAT_S: Final = 60.0
MAX_RETRY_AFTER_S: Final = 600.0
"""Longest delay before a retry that a peer may ask for: a peer is not trusted."""
HELLO_S: Final = 10.0
"""Limit for a caller's greeting, and first limit of its wait for the welcome."""
MAX_PATIENCE_S: Final = 120.0
"""Longest wait of a caller for a welcome. The wait doubles after each failed attempt: when a caller
gives up, a cloud that is overloaded by a whole fleet has already done most of the work for its
stream and has to do it again."""
SILENT_BEATS: Final = 3
"""Heartbeats without a frame after which a peer counts as dead."""
LINGER_S: Final = 0.005
"""How long the cloud's acknowledgement waits for a message that can carry it."""
CALLER_LINGER_S: Final = 0.05
"""The same of a caller, which has no sender that waits: it acknowledges documents."""
LAST_WRITE_S: Final = 5.0
"""Longest wait of an ending stream for the frame being written and the goodbye."""
FIRST_WAIT_S: Final = 0.5
MAX_WAIT_S: Final = 30.0
REFUSALS: Final = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
"""Errors with which the cloud ends a stream because of a message; a retry would end likewise."""
BODIES: Final = ("desired", "report", "offer", "work", "contribution")
"""Fields of `Frame.body` that are messages; the others belong to the stream itself."""

Message = Any
Handler = Callable[[Message], Awaitable[None]]


def new_epoch() -> bytes:
    """Return a random name for this run of a process."""
    return secrets.token_bytes(EPOCH_BYTES)


@dataclass(slots=True)
class StreamState:
    """One side of a session, without any I/O.

    unacknowledged: frames in order of their numbers. received: highest number of the peer's epoch
    whose handler returned.
    """

    epoch: bytes
    peer_epoch: bytes = b""
    next_number: int = 1
    received: int = 0
    unacknowledged: list[pb.Frame] = field(default_factory=list)

    def add(self, field_name: str, message: Message) -> pb.Frame:
        """Number and queue a message. Conflict if too many wait for an acknowledgement."""
        if field_name not in BODIES:
            raise InvalidInput(f"{field_name!r} is not a message; there are {', '.join(BODIES)}")
        if len(self.unacknowledged) >= MAX_UNACKNOWLEDGED:
            raise Conflict(f"{MAX_UNACKNOWLEDGED} messages are not acknowledged yet; send later")
        frame = pb.Frame(number=self.next_number)
        # Copied, because the sender may change its message while the frame waits to be resent.
        getattr(frame, field_name).CopyFrom(message)
        self.next_number += 1
        self.unacknowledged.append(frame)
        return frame

    def replace(self, field_name: str, message: Message) -> pb.Frame:
        """Number and queue a message in place of queued ones of its kind."""
        self.unacknowledged = [
            frame for frame in self.unacknowledged if frame.WhichOneof("body") != field_name
        ]
        return self.add(field_name, message)

    def meet(self, peer_epoch: bytes) -> None:
        """Begin a stream with a peer: the count starts again with a new epoch."""
        if peer_epoch != self.peer_epoch:
            self.peer_epoch, self.received = peer_epoch, 0

    def acknowledge(self, number: int) -> int:
        """Drop frames up to `number`, which the peer has handled; return how many there were."""
        before = len(self.unacknowledged)
        self.unacknowledged = [f for f in self.unacknowledged if f.number > number]
        return before - len(self.unacknowledged)

    def is_new(self, frame: pb.Frame) -> bool:
        """Return whether the message of the frame was not handled yet."""
        return frame.number > self.received

    def handled(self, frame: pb.Frame) -> None:
        """Note that the handler of the frame has returned."""
        self.received = max(self.received, frame.number)

    def stamped(self, frame: pb.Frame) -> pb.Frame:
        """Return a copy of the frame that acknowledges what was received so far."""
        out = pb.Frame()
        # A copy, because the queued frame may be resent later with a higher acknowledgement.
        out.CopyFrom(frame)
        out.acknowledged = self.received
        return out

    def beat(self) -> pb.Frame:
        """Return a frame that only acknowledges."""
        return pb.Frame(acknowledged=self.received)


class Link:
    """One stream of either side, once both have greeted: pumps frames until it ends."""

    def __init__(
        self,
        state: StreamState,
        on_message: Handler,
        heartbeat_s: float,
        linger_s: float = LINGER_S,
    ) -> None:
        self.state = state
        self._on_message = on_message
        self._heartbeat_s, self._linger_s = heartbeat_s, min(linger_s, heartbeat_s)
        self._sent = 0  # highest number written to this stream
        self._acknowledged = state.received  # highest acknowledgement written to it
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self.freed = asyncio.Event()  # set at each acknowledgement

    def wake(self) -> None:
        """Wake the writer, because there is something to write."""
        self._wake.set()

    def end(self) -> None:
        """End the writer."""
        self._over.set()
        self._wake.set()

    async def write_all(self, write: Callable[[pb.Frame], Awaitable[None]]) -> None:
        """Write queued frames and heartbeats until `end`."""
        clock = asyncio.get_running_loop().time
        beat_s, ack_s = clock() + self._heartbeat_s, math.inf  # when either is due
        while not self._over.is_set():
            # Clear before reading the queue: a message that is added later sets the event again.
            self._wake.clear()
            due = [f for f in self.state.unacknowledged if f.number > self._sent]
            for frame in due:
                if self._over.is_set():
                    return
                # Noted before the await: what arrives during the write must not count as
                # acknowledged by it.
                self._sent, self._acknowledged = frame.number, self.state.received
                await write(self.state.stamped(frame))
            if due:
                beat_s, ack_s = clock() + self._heartbeat_s, math.inf
                continue
            # An acknowledgement that is owed waits a moment for a message that can carry it.
            if self._acknowledged != self.state.received:
                ack_s = min(ack_s, clock() + self._linger_s)
            try:
                async with asyncio.timeout_at(min(beat_s, ack_s)):
                    await self._wake.wait()
                    # Lets a handler return that has queued the message, as a commit of the cloud
                    # does: the message then carries the acknowledgement for which its peer waits.
                    await asyncio.sleep(0)
            except TimeoutError:
                if self._over.is_set():
                    return
                self._acknowledged = self.state.received
                await write(self.state.beat())
                beat_s, ack_s = clock() + self._heartbeat_s, math.inf

    async def incoming(self, read: Callable[[], Awaitable[pb.Frame | None]]) -> pb.Goodbye | None:
        """Handle frames until a goodbye or the end of the stream. Unavailable after silence."""
        while True:
            try:
                async with asyncio.timeout(SILENT_BEATS * self._heartbeat_s):
                    frame = await read()
            except TimeoutError as error:
                raise Unavailable(
                    f"no frame for {SILENT_BEATS * self._heartbeat_s:.0f} s; the link is dead"
                ) from error
            if frame is None:
                return None
            # Acknowledgements come with every frame, also one whose message was handled already.
            if self.state.acknowledge(frame.acknowledged):
                self.freed.set()
            body = frame.WhichOneof("body")
            if body == "goodbye":
                return frame.goodbye
            # Handle, then acknowledge: a crash in between repeats the message instead of losing it.
            if body in BODIES and frame.number and self.state.is_new(frame):
                await self._on_message(getattr(frame, body))
                self.state.handled(frame)
                self.wake()


class SessionClient:
    """The caller's side, which keeps a stream open until it is cancelled.

    connect: opens a channel for each attempt. on_message: called with each message of the cloud, in
    order. greeting: sent on every stream, because a restarted cloud does not know the caller.
    """

    def __init__(
        self,
        connect: Callable[[], grpc.aio.Channel],
        on_message: Handler,
        *,
        software: str = "",
        rng: Callable[[], float] = random.random,
        greeting: Callable[[], Message] | None = None,
    ) -> None:
        self._connect, self._on_message, self._greeting = connect, on_message, greeting
        self._software, self._rng = software, rng
        self._half = StreamState(new_epoch())
        self._link: Link | None = None
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._patience_s = HELLO_S
        self.connected = asyncio.Event()

    @property
    def peer_epoch(self) -> bytes:
        """Epoch of the cloud process; empty before the first welcome."""
        return self._half.peer_epoch

    async def send(self, message: Message) -> None:
        """Send a message, as often as it takes; return when the cloud has acknowledged it."""
        # No await until the future is in `_waiting`, so an acknowledgement cannot come before it.
        frame = self._half.add(_field_of(message), message)
        done = self._waiting[frame.number] = asyncio.get_running_loop().create_future()
        if self._link:
            self._link.wake()
        try:
            await done
        finally:
            # The frame stays queued if the caller was cancelled: it may be on the wire already.
            self._waiting.pop(frame.number, None)

    async def run(self) -> None:
        """Keep a stream open; reconnect with full jitter. It ends only by cancellation."""
        wait_s = FIRST_WAIT_S
        while True:
            least_s = 0.0
            try:
                least_s, greeted = await self._one_stream()
                wait_s = FIRST_WAIT_S if greeted else wait_s
            except (grpc.aio.AioRpcError, Unavailable, InvalidInput) as error:
                is_refusal = isinstance(error, grpc.aio.AioRpcError) and error.code() in REFUSALS
                if self.connected.is_set() and not is_refusal:
                    wait_s = FIRST_WAIT_S
                details = str(getattr(error, "details", lambda: "")() or error)[:200]
                reason = unreachable_cause(details) or details
                logger.info("session lost", extra={"reason": reason})
            finally:
                self.connected.clear()
                self._link = None
            # Full jitter spreads a fleet that lost its cloud at one instant.
            await asyncio.sleep(least_s + self._rng() * wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    async def _one_stream(self) -> tuple[float, bool]:
        """Run one stream from greeting to end; return the least wait, and whether to reset backoff.

        Backoff is reset after a welcome, unless another process has our identity: the two would
        replace each other's stream as fast as they can.
        """
        # A new channel for each attempt, which also picks up a renewed certificate.
        channel = self._connect()
        try:
            call = SessionStub(channel).Open()
            hello = pb.Hello(
                epoch=self._half.epoch, peer_epoch=self._half.peer_epoch, software=self._software
            )
            patience_s = self._patience_s
            async with asyncio.timeout(patience_s):
                await call.write(pb.Frame(hello=hello, acknowledged=self._half.received))
                first = await _read(call)
            self._patience_s = HELLO_S
            if first is None:
                raise await _end_of(call)
            if first.WhichOneof("body") == "goodbye":
                return _retry_after_s(first.goodbye), False
            if first.WhichOneof("body") != "welcome":
                raise InvalidInput("the cloud did not begin with a welcome")
            heartbeat_s = _heartbeat_s(first.welcome)
            self._half.meet(first.welcome.epoch)
            # The welcome says what the cloud handled in an earlier stream, so only the rest is
            # resent.
            self._acknowledged(first.acknowledged)
            if self._greeting:
                # Replace an older greeting that was not acknowledged; it may be out of date.
                self._half.replace(_field_of(message := self._greeting()), message)
            return await self._pump(call, heartbeat_s)
        except TimeoutError as error:
            self._patience_s = min(2 * patience_s, MAX_PATIENCE_S)
            raise Unavailable(f"no welcome within {patience_s:g} s") from error
        finally:
            await channel.close()

    async def _pump(self, call: Any, heartbeat_s: float) -> tuple[float, bool]:
        """Run a greeted stream to its end; see `_one_stream`."""
        link = self._link = Link(self._half, self._on_message, heartbeat_s, CALLER_LINGER_S)
        self.connected.set()
        logger.info("session open", extra={"heartbeat_s": heartbeat_s})
        writing = asyncio.create_task(link.write_all(call.write))
        settling = asyncio.create_task(self._settle(link))
        try:
            goodbye = await link.incoming(lambda: _read(call))
            if goodbye is None:
                raise await _end_of(call)
            replaced = goodbye.why == pb.Goodbye.REPLACED
            if replaced:
                logger.warning("session replaced by another process with our identity")
            return _retry_after_s(goodbye), not replaced
        finally:
            for task in (writing, settling):
                task.cancel()
            await asyncio.gather(writing, settling, return_exceptions=True)
            call.cancel()

    async def _settle(self, link: Link) -> None:
        """Wake the senders of acknowledged messages."""
        while True:
            await link.freed.wait()
            link.freed.clear()
            self._acknowledged(0)

    def _acknowledged(self, number: int) -> None:
        self._half.acknowledge(number)
        open_numbers = {frame.number for frame in self._half.unacknowledged}
        for waiting, done in self._waiting.items():
            if waiting not in open_numbers and not done.done():
                done.set_result(None)


class ServerSession:
    """The cloud's side for one caller. It outlives streams, of which one is open at a time.

    epoch: names this cloud process. on_message: must return only when the message is durable.
    """

    def __init__(
        self, epoch: bytes, on_message: Handler, *, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._epoch, self._on_message, self._heartbeat_s = epoch, on_message, heartbeat_s
        self._half = StreamState(epoch)
        self._link: Link | None = None
        self._goodbye: asyncio.Future[pb.Goodbye] | None = None

    @property
    def connected(self) -> bool:
        """Return whether a stream is open."""
        return self._link is not None

    def send(self, message: Message) -> None:
        """Queue a message, which is sent on each stream until it is acknowledged.

        It replaces an older message of its kind that still waits: documents are complete.
        """
        self._half.replace(_field_of(message), message)
        if self._link:
            self._link.wake()

    def close(self, why: "pb.Goodbye.Why.ValueType", retry_after_s: float = 0.0) -> None:
        """End the open stream with a reason."""
        if self._goodbye and not self._goodbye.done():
            self._goodbye.set_result(pb.Goodbye(why=why, retry_after_s=retry_after_s))

    async def serve(
        self,
        first: pb.Frame,
        frames: AsyncIterator[pb.Frame],
        write: Callable[[pb.Frame], Awaitable[None]],
    ) -> None:
        """Answer a stream, whose first frame (a hello) was read already, until it ends.

        An older open stream gets a goodbye, because it was replaced. `write` sends one frame. This
        is a coroutine and not a generator of frames because it must clean up at the moment the call
        is cancelled: grpc.aio cancels the task that writes, and a generator that is suspended at a
        `yield` would wait for the garbage collector. Unavailable: the caller has fallen silent, or
        does not read.
        """
        hello = check_hello(first)
        # The newest stream wins: an older one is usually a broken connection that the cloud has not
        # noticed yet.
        self.close(pb.Goodbye.REPLACED)
        # Numbers are comparable only if both processes are the ones that counted them.
        if hello.epoch != self._half.peer_epoch or hello.peer_epoch != self._epoch:
            self._restart(hello)
        else:
            self._half.acknowledge(first.acknowledged)
        link = self._link = Link(self._half, self._on_message, self._heartbeat_s)
        self._goodbye = asyncio.get_running_loop().create_future()
        try:
            await self._exchange(link, self._goodbye, frames, write)
        finally:
            # A newer stream may have replaced this one while it ended.
            if self._link is link:
                self._link = None

    async def _exchange(
        self,
        link: Link,
        goodbye: asyncio.Future[pb.Goodbye],
        frames: AsyncIterator[pb.Frame],
        write: Callable[[pb.Frame], Awaitable[None]],
    ) -> None:
        """Send the welcome, then frames both ways until the caller leaves or `close` was called."""
        welcome = pb.Welcome(epoch=self._epoch, heartbeat_s=self._heartbeat_s)
        await write(pb.Frame(welcome=welcome, acknowledged=self._half.received))
        reading = asyncio.create_task(link.incoming(lambda: anext(frames, None)))
        writing = asyncio.create_task(link.write_all(write))
        for ending in (reading, goodbye):
            ending.add_done_callback(lambda _: link.end())
        try:
            await asyncio.wait((reading, writing, goodbye), return_when=asyncio.FIRST_COMPLETED)
            if goodbye.done():
                reading.cancel()  # a revoked caller is not read while its last frames are sent
            async with asyncio.timeout(LAST_WRITE_S):
                await writing
                if goodbye.done():
                    await write(pb.Frame(goodbye=goodbye.result()))
            # Raises what ended the reading, such as an invalid frame or a silent caller.
            if reading.done() and not reading.cancelled():
                reading.result()
        except TimeoutError as error:
            raise Unavailable(
                f"a frame could not be written for {LAST_WRITE_S:g} s: the caller reads nothing"
            ) from error
        finally:
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    def _restart(self, hello: pb.Hello) -> None:
        """Renumber the newest message of each kind for a caller that does not know this state."""
        fresh = StreamState(self._epoch)
        latest = {frame.WhichOneof("body"): frame for frame in self._half.unacknowledged}
        for name, frame in latest.items():
            fresh.add(str(name), getattr(frame, str(name)))
        fresh.meet(hello.epoch)
        # The same caller, which does not know this cloud process: it resends what it has queued,
        # and what was handled here must not be handled again.
        if hello.epoch == self._half.peer_epoch:
            fresh.received = self._half.received
        self._half = fresh


def check_hello(frame: pb.Frame) -> pb.Hello:
    """Return the greeting in a first frame. InvalidInput if it is not one."""
    if frame.WhichOneof("body") != "hello" or len(frame.hello.epoch) != EPOCH_BYTES:
        raise InvalidInput(f"a session begins with a hello and an epoch of {EPOCH_BYTES} bytes")
    return frame.hello


def _heartbeat_s(welcome: pb.Welcome) -> float:
    seconds = welcome.heartbeat_s or HEARTBEAT_S
    return _in_range("heartbeat_s of a welcome", seconds, MIN_HEARTBEAT_S, MAX_HEARTBEAT_S)


def _retry_after_s(goodbye: pb.Goodbye) -> float:
    return _in_range("retry_after_s of a goodbye", goodbye.retry_after_s, 0.0, MAX_RETRY_AFTER_S)


def _in_range(what: str, seconds: float, least: float, most: float) -> float:
    if not least <= seconds <= most:  # NaN is out of range, too
        raise InvalidInput(f"{what} is {least} to {most}, got {seconds}")
    return seconds


async def _read(call: Any) -> pb.Frame | None:
    frame = await call.read()
    return None if frame is grpc.aio.EOF else frame


async def _end_of(call: Any) -> Exception:
    """Return an error that says why the stream ended."""
    code, text = await call.code(), await call.details()
    return Unavailable(f"the cloud ended the session: {text or code.name}")


def _field_of(message: Message) -> str:
    names = {pb.Frame.DESCRIPTOR.fields_by_name[n].message_type: n for n in BODIES}
    try:
        return names[message.DESCRIPTOR]
    except KeyError as error:
        raise InvalidInput(f"{message.DESCRIPTOR.full_name} is not a session message") from error
