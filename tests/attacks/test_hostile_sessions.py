"""A cloud that keeps its nodes away with one frame: what they do when it is taken back."""

import asyncio
import math

import grpc.aio
import pytest

from triplane.proto import fleet_pb2
from triplane.proto import session_pb2 as pb
from triplane.proto.session_pb2_grpc import SessionServicer, add_SessionServicer_to_server
from triplane.proto.stream import ServerSession, SessionClient, new_epoch

DEADLINE_S = 120.0
HOSTILE = {
    "come back in 30 years": pb.Frame(goodbye=pb.Goodbye(retry_after_s=1e9)),
    "come back never": pb.Frame(goodbye=pb.Goodbye(retry_after_s=math.inf)),
    "come back at no time": pb.Frame(goodbye=pb.Goodbye(retry_after_s=math.nan)),
    "come back before now": pb.Frame(goodbye=pb.Goodbye(retry_after_s=-1.0)),
    "silence is life": pb.Frame(welcome=pb.Welcome(epoch=new_epoch(), heartbeat_s=1e9)),
    "beats without end": pb.Frame(welcome=pb.Welcome(epoch=new_epoch(), heartbeat_s=-1.0)),
    "beats at no time": pb.Frame(welcome=pb.Welcome(epoch=new_epoch(), heartbeat_s=math.nan)),
    "no welcome at all": pb.Frame(desired=fleet_pb2.Desired(number=1)),
    "nothing": pb.Frame(),
}


class Thief(SessionServicer):
    """Answers the first stream with a frame and then holds it; later ones are an honest cloud's."""

    def __init__(self, frame, heard):
        self._frames = [frame]
        self._session = ServerSession(new_epoch(), heard)

    async def Open(self, request_iterator, context):  # type: ignore[override]
        frames = aiter(request_iterator)
        first = await anext(frames)
        if self._frames:
            await context.write(self._frames.pop())
            await asyncio.sleep(DEADLINE_S)
        await self._session.serve(first, frames, context.write)


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_node_comes_back_whatever_a_thief_asked_it_to_wait(attack):
    heard = []

    async def hear(message):
        heard.append(message.number)

    async def story():
        server = grpc.aio.server()
        add_SessionServicer_to_server(Thief(HOSTILE[attack], hear), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        client = SessionClient(lambda: grpc.aio.insecure_channel(address), hear, rng=lambda: 0.1)
        running = asyncio.create_task(client.run())
        try:
            async with asyncio.timeout(DEADLINE_S - 1):
                await client.send(fleet_pb2.Report(number=7))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.stop(0)

    asyncio.run(story())
    assert heard == [7]
