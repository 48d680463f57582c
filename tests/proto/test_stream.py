import asyncio
import contextlib
from itertools import pairwise
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto import fleet_pb2 as fleet
from triplane.proto import session_pb2 as pb
from triplane.proto import stream
from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.proto.session_pb2_grpc import SessionServicer, add_SessionServicer_to_server
from triplane.proto.status import status_of_aio
from triplane.proto.stream import (
    MAX_UNACKNOWLEDGED,
    Link,
    ServerSession,
    SessionClient,
    StreamState,
    check_hello,
    new_epoch,
)

BEAT_S = 0.2


class Cloud(SessionServicer):
    """One session, whoever calls."""

    def __init__(self, epoch=None):
        self.reports = []
        self.got = asyncio.Event()
        self.session = ServerSession(epoch or new_epoch(), self.take, heartbeat_s=BEAT_S)
        self.streams = 0

    async def take(self, report):
        self.reports.append(report.number)
        self.got.set()

    async def Open(self, request_iterator, context):  # type: ignore[override]
        self.streams += 1
        async with status_of_aio(context):
            first = await anext(aiter(request_iterator))
            await self.session.serve(first, aiter(request_iterator), context.write)


@contextlib.asynccontextmanager
async def serving(cloud, port=0):
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_SessionServicer_to_server(cloud, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def calling(port, on_message, greeting=None, rng=lambda: 0.05):
    client = SessionClient(
        lambda: grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
        ),
        on_message,
        rng=rng,
        greeting=greeting,
    )
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Inbox:
    def __init__(self):
        self.numbers = []
        self.arrived = asyncio.Condition()

    async def __call__(self, desired):
        async with self.arrived:
            self.numbers.append(desired.number)
            self.arrived.notify_all()

    async def has(self, number):
        async with self.arrived:
            await asyncio.wait_for(self.arrived.wait_for(lambda: number in self.numbers), 60)


def run(main):
    return asyncio.run(asyncio.wait_for(main(), 120))


def test_messages_go_both_ways_and_sending_waits_for_the_handler():
    async def main():
        cloud, inbox = Cloud(), Inbox()
        async with serving(cloud) as port, calling(port, inbox) as client:
            await client.send(fleet.Report(number=1))
            assert cloud.reports == [1]
            cloud.session.send(fleet.Desired(number=7))
            await inbox.has(7)
            await client.send(fleet.Report(number=2))
            assert cloud.reports == [1, 2]

    run(main)


def test_a_greeting_is_said_on_every_stream_and_waits_once():
    async def main():
        said = iter(range(1, 100))

        def greeting():
            return fleet.Report(number=next(said))

        first, second = Cloud(), Cloud()
        async with serving(first) as port, calling(port, Inbox(), greeting) as client:
            await until(first, 1)
            first.session.close(pb.Goodbye.REPLACED)
            await until(first, 2)
            await client.send(fleet.Report(number=1000))
            assert first.reports == [1, 2, 1000]
        async with calling(port, Inbox(), greeting), serving(second, port):
            await until(second, 3)

    run(main)


async def until(cloud, number):
    """Until that report was taken."""
    async with asyncio.timeout(30):
        while number not in cloud.reports:
            cloud.got.clear()
            await cloud.got.wait()


def test_a_message_sent_while_the_cloud_is_away_arrives_when_it_is_back():
    async def main():
        inbox = Inbox()
        first = Cloud()
        async with serving(first) as port:
            pass
        async with calling(port, inbox) as client:
            sending = asyncio.create_task(client.send(fleet.Report(number=5)))
            second = Cloud()
            second.session.send(fleet.Desired(number=9))
            async with serving(second, port):
                await asyncio.wait_for(sending, 60)
                assert second.reports == [5]
                await inbox.has(9)

    run(main)


def test_a_broken_stream_is_opened_again_and_nothing_is_handled_twice():
    async def main():
        cloud, inbox = Cloud(), Inbox()
        async with serving(cloud) as port, calling(port, inbox) as client:
            for number in range(1, 6):
                await client.send(fleet.Report(number=number))
                cloud.session.send(fleet.Desired(number=number))
                await inbox.has(number)
                cloud.session.close(pb.Goodbye.SHUTTING_DOWN)
            await client.send(fleet.Report(number=6))
        assert cloud.reports == [1, 2, 3, 4, 5, 6]
        assert inbox.numbers == [1, 2, 3, 4, 5]
        assert cloud.streams > 1

    run(main)


async def refuse(_cloud):
    raise InvalidInput("a node sends reports")


async def replace(cloud):
    cloud.session.close(pb.Goodbye.REPLACED)


@pytest.mark.parametrize("end", [refuse, replace])
def test_a_caller_whose_streams_end_for_what_it_is_comes_back_ever_less_often(end, monkeypatch):
    """Each stream is welcomed first, so a wait that a welcome resets would never grow."""
    monkeypatch.setattr(stream, "FIRST_WAIT_S", 0.04)
    opened = []

    class Refusing(Cloud):
        async def take(self, _report):
            opened.append(asyncio.get_running_loop().time())
            self.got.set()
            await end(self)

    async def main():
        cloud = Refusing()
        async with serving(cloud) as port, calling(port, Inbox(), fleet.Report, rng=lambda: 1.0):
            async with asyncio.timeout(30):
                while len(opened) < 5:
                    cloud.got.clear()
                    await cloud.got.wait()

    run(main)
    waits = [after - before for before, after in pairwise(opened)]
    assert all(wait >= 0.04 * 2**k for k, wait in enumerate(waits)), waits


def test_a_caller_waits_longer_for_a_welcome_after_each_try_in_vain(monkeypatch, caplog):
    """A cloud that a whole fleet calls at once has nearly got there when its callers give up."""
    monkeypatch.setattr(stream, "HELLO_S", 0.02)
    monkeypatch.setattr(stream, "MAX_PATIENCE_S", 0.1)
    caplog.set_level("INFO", "triplane.proto.stream")

    class Overloaded(Cloud):
        """Welcomes the fifth caller, and those after it."""

        async def Open(self, request_iterator, context):  # type: ignore[override]
            self.got.set()
            if self.streams < 4:
                self.streams += 1
                await asyncio.Event().wait()
            await super().Open(request_iterator, context)

    async def main():
        cloud = Overloaded()
        async with serving(cloud) as port, calling(port, Inbox(), rng=lambda: 0.0) as client:
            await asyncio.wait_for(client.connected.wait(), 50)
            assert client._patience_s == 0.02

    run(main)
    reasons = [vars(r)["reason"] for r in caplog.records if r.msg == "session lost"]
    waits = [float(r.split()[-2]) for r in reasons if r.startswith("no welcome within")]
    assert waits[:4] == [0.02, 0.04, 0.08, 0.1], reasons


def test_a_second_stream_of_a_name_replaces_the_first():
    async def main():
        cloud = Cloud()
        async with (
            serving(cloud) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            open_: Any = channel.stream_stream(
                "/triplane.session.v1.Session/Open",
                request_serializer=pb.Frame.SerializeToString,
                response_deserializer=pb.Frame.FromString,
            )
            first, second = open_(), open_()
            hello = pb.Frame(hello=pb.Hello(epoch=new_epoch()))
            await first.write(hello)
            assert (await first.read()).WhichOneof("body") == "welcome"
            await second.write(hello)
            assert (await second.read()).WhichOneof("body") == "welcome"
            while (frame := await first.read()).WhichOneof("body") is None:
                pass
            assert frame.goodbye.why == pb.Goodbye.REPLACED
            first.cancel()
            second.cancel()

    run(main)


def test_a_caller_that_was_told_goodbye_is_not_heard_while_it_takes_its_last_frame():
    async def main():
        handled: list[int] = []
        said: asyncio.Queue[pb.Frame] = asyncio.Queue()
        heard, writing, may_write = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def take(report):
            handled.append(report.number)
            heard.set()

        async def frames():
            while True:
                yield await said.get()

        async def write(frame):
            if frame.WhichOneof("body") == "goodbye":
                writing.set()
                await may_write.wait()

        session = ServerSession(new_epoch(), take)
        hello = pb.Frame(hello=pb.Hello(epoch=new_epoch()))
        serving = asyncio.create_task(session.serve(hello, frames(), write))
        await said.put(pb.Frame(number=1, report=fleet.Report(number=1)))
        await heard.wait()
        session.close(pb.Goodbye.REVOKED)
        await writing.wait()
        await said.put(pb.Frame(number=2, report=fleet.Report(number=2)))
        for _ in range(20):  # turns of the loop, of which handling takes three
            await asyncio.sleep(0)
        may_write.set()
        await serving
        return handled

    assert run(main) == [1]


def test_a_handler_that_fails_leaves_its_message_unacknowledged():
    async def main():
        cloud, inbox = Cloud(), Inbox()
        failures = iter([Unavailable("disk full")])

        async def take(report):
            with contextlib.suppress(StopIteration):
                raise next(failures)
            await Cloud.take(cloud, report)

        cloud.session._on_message = take
        async with serving(cloud) as port, calling(port, inbox) as client:
            await asyncio.wait_for(client.send(fleet.Report(number=3)), 60)
        assert cloud.reports == [3]

    run(main)


@pytest.mark.parametrize(
    "frame", [pb.Frame(), pb.Frame(hello=pb.Hello(epoch=b"short")), pb.Frame(number=1)]
)
def test_a_stream_without_a_greeting_is_refused(frame):
    with pytest.raises(InvalidInput, match="begins with a hello"):
        check_hello(frame)


def test_messages_that_nobody_acknowledges_are_bounded():
    half = StreamState(new_epoch())
    for number in range(MAX_UNACKNOWLEDGED):
        half.add("report", fleet.Report(number=number))
    with pytest.raises(Conflict, match="not acknowledged yet"):
        half.add("report", fleet.Report())


@given(st.data())
def test_whatever_the_link_loses_each_message_is_handled_once_in_order(data):
    sender, receiver = StreamState(b"s" * 16), StreamState(b"r" * 16)
    handled, added = [], 0
    for _ in range(data.draw(st.integers(1, 8))):  # streams
        receiver.meet(sender.epoch)
        sender.acknowledge(receiver.received)
        for _ in range(data.draw(st.integers(0, 4))):
            added += 1
            sender.add("report", fleet.Report(number=added))
        arrive = data.draw(st.integers(0, len(sender.unacknowledged)))
        for frame in [*sender.unacknowledged[:arrive], *sender.unacknowledged[:arrive]]:
            if receiver.is_new(frame):
                handled.append(frame.report.number)
                receiver.handled(frame)
        if data.draw(st.booleans()):
            sender.acknowledge(receiver.received)
    assert handled == list(range(1, len(handled) + 1))
    assert {f.report.number for f in sender.unacknowledged} >= set(
        range(len(handled) + 1, added + 1)
    )


def test_a_new_epoch_of_the_peer_counts_from_nothing():
    receiver = StreamState(b"r" * 16)
    receiver.meet(b"a" * 16)
    frame = StreamState(b"a" * 16).add("report", fleet.Report())
    receiver.handled(frame)
    assert not receiver.is_new(frame)
    receiver.meet(b"b" * 16)
    assert receiver.is_new(frame)


def test_a_cancellation_that_meets_a_frame_ends_the_reader_all_the_same():
    async def main():
        loop = asyncio.get_running_loop()
        arriving = loop.create_future()
        frames = iter([arriving])

        async def read():
            return await next(frames, loop.create_future())

        async def handle(_):
            return

        link = Link(StreamState(new_epoch()), handle, heartbeat_s=100.0)
        reading = asyncio.create_task(link.incoming(read))
        for _ in range(5):
            await asyncio.sleep(0)
        arriving.set_result(pb.Frame())
        for _ in range(1):  # until the frame is there and its reader not yet told
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading}, timeout=60)
        assert reading.cancelled()

    run(main)
