"""The end of a stream is noticed at once, whatever the server was doing when it came.

Garbage collection is off throughout: what only the collector would clean up counts as not noticed.
"""

import asyncio
import contextlib
import gc
import random
import subprocess
import sys

import grpc
import grpc.aio
import pytest

from triplane.cloud.sessions import Sessions, SessionServicer
from triplane.proto import federation_pb2 as fed
from triplane.proto import session_pb2 as pb
from triplane.proto.session_pb2_grpc import SessionStub, add_SessionServicer_to_server
from triplane.proto.status import status_of_aio
from triplane.proto.stream import ServerSession, new_epoch

NAME = "phone-1"
NOTICED_S = 60.0
UNREADABLE_BYTES = 3 << 20  # beyond every flow-control window
CALLER = """
import sys, grpc
from triplane.proto import session_pb2 as pb
from triplane.proto.session_pb2_grpc import SessionStub
from triplane.proto.stream import new_epoch
def frames():
    yield pb.Frame(hello=pb.Hello(epoch=new_epoch()))
    sys.stdin.read()
answers = SessionStub(grpc.insecure_channel(sys.argv[1])).Open(frames())
print(next(answers).WhichOneof("body"), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_collector():
    gc.disable()
    yield
    gc.enable()


class Devices:
    """A side that counts who left."""

    def __init__(self):
        self.gone = 0

    def greeting(self, _name):
        return fed.Work()

    async def take(self, _name, _message):
        await asyncio.sleep(0)

    def left(self, _name):
        self.gone += 1

    async def until_gone(self, sessions):
        await until(lambda: self.gone and not sessions._open)


def sized(payload_bytes):
    """A document of about so many bytes."""
    return fed.Work(tasks=[fed.Task(run="r", inline_state=bytes(payload_bytes))])


async def until(holds):
    async with asyncio.timeout(NOTICED_S):
        while not holds():  # noqa: ASYNC110 -- also of what grpc does on its own threads
            await asyncio.sleep(0.005)


async def blocked(session, payload_bytes):
    """Documents for a caller that does not read, until the write of one does not end."""
    sent, tries = 0, 0
    async with asyncio.timeout(NOTICED_S):
        while tries < 20:
            session.send(sized(payload_bytes))
            await asyncio.sleep(0.01)
            tries = tries + 1 if session._link._sent == sent else 0
            sent = session._link._sent


@contextlib.asynccontextmanager
async def served():
    sessions, devices = Sessions(), Devices()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_SessionServicer_to_server(SessionServicer(sessions, lambda: (NAME, devices)), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield sessions, devices, address
    finally:
        await server.stop(0)


async def drained(call):
    while await call.read() is not grpc.aio.EOF:
        pass


def play(story):
    asyncio.run(asyncio.wait_for(story, 120))


@pytest.mark.parametrize("at", range(4))
def test_a_stream_cancelled_at_any_write_does_not_stay_connected(at):
    """Write 0 is the welcome, 1 the greeting's document, 2 a later one, 3 the goodbye."""

    async def story():
        sessions, devices = Sessions(), Devices()
        writing, writes = asyncio.Event(), []

        async def write(frame):
            writes.append(frame.WhichOneof("body"))
            if len(writes) == at + 1:
                writing.set()
                await asyncio.Event().wait()

        async def frames():
            yield pb.Frame(hello=pb.Hello(epoch=new_epoch()))
            await until(lambda: len(writes) == 2)
            sessions.send(NAME, fed.Work())
            await until(lambda: len(writes) == 3)
            sessions.revoke(NAME)
            await asyncio.Event().wait()

        serving = asyncio.create_task(sessions.serve(NAME, frames(), write, devices))
        async with asyncio.timeout(NOTICED_S):
            await writing.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert writes == ["welcome", "work", "work", "goodbye"][: at + 1]
        assert not sessions.is_connected(NAME)
        assert devices.gone == 1

    play(story())


@pytest.mark.slow
def test_streams_that_end_at_random_instants_are_all_noticed():
    rng = random.Random(7)

    async def call_and_leave(sessions, address):
        channel = grpc.aio.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        call = SessionStub(channel).Open()

        async def flood():
            await call.write(pb.Frame(hello=pb.Hello(epoch=new_epoch())))
            for number in range(1, 200):
                sessions.send(NAME, sized(rng.choice((10, 1000, 100_000))))
                await call.write(pb.Frame(number=number, offer=fed.Offer()))
                await asyncio.sleep(rng.random() * 0.002)

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.5:
            call.cancel()
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        await channel.close()

    async def story():
        async with served() as (sessions, devices, address):
            for _ in range(150):
                await call_and_leave(sessions, address)
            await devices.until_gone(sessions)
            assert not sessions.is_connected(NAME)
            gone = devices.gone
            gc.collect()
            await asyncio.sleep(0)
            assert devices.gone == gone  # nothing had waited for the collector

    play(story())


@pytest.mark.slow
@pytest.mark.parametrize("payload_bytes", [0, UNREADABLE_BYTES])
def test_a_killed_caller_is_noticed_while_a_frame_for_it_is_written(payload_bytes):
    async def story():
        async with served() as (sessions, devices, address):
            caller = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CALLER, address,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert caller.stdout is not None
            assert await caller.stdout.readline() == b"welcome\n"
            if payload_bytes:
                await blocked(sessions._sessions[NAME], payload_bytes)
            caller.kill()
            await devices.until_gone(sessions)
            assert not sessions.is_connected(NAME)
            await caller.communicate()

    play(story())


@pytest.mark.slow
def test_a_silent_caller_that_reads_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr("triplane.proto.stream.LAST_WRITE_S", 0.2)

    ended = asyncio.Event()

    async def ignore(_message):
        return

    class OneSession(SessionServicer):
        def __init__(self):
            self.session = ServerSession(new_epoch(), ignore, heartbeat_s=0.5)

        async def Open(self, request_iterator, context):  # type: ignore[override]
            first = await anext(aiter(request_iterator))
            async with status_of_aio(context):
                try:
                    await self.session.serve(first, aiter(request_iterator), context.write)
                finally:
                    ended.set()

    async def story():
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        servicer = OneSession()
        add_SessionServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            call = SessionStub(channel).Open()
            await call.write(pb.Frame(hello=pb.Hello(epoch=new_epoch())))
            await until(lambda: servicer.session.connected)
            await blocked(servicer.session, UNREADABLE_BYTES)
            await asyncio.wait_for(ended.wait(), NOTICED_S)
            assert not servicer.session.connected
            with pytest.raises(grpc.aio.AioRpcError, match="reads nothing"):
                await drained(call)  # it is told why when it reads again
        await server.stop(0)

    play(story())
