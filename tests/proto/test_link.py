import asyncio

from triplane.proto.fleet_pb2 import Desired, Report
from triplane.proto.session_pb2 import Frame
from triplane.proto.stream import Half, Link, new_epoch

HEARTBEAT_S = 1000.0


def test_what_is_handled_while_another_frame_is_written_is_acknowledged_at_once():
    async def story():
        async def handle(_):
            return

        half = Half(new_epoch())
        half.meet(new_epoch())
        half.add("desired", Desired(number=1))
        link = Link(half, handle, HEARTBEAT_S)
        out = link.outgoing()
        written = await anext(out)
        assert (written.number, written.acknowledged) == (1, 0)
        arrived = iter([Frame(number=1, report=Report(number=1)), None])

        async def read():
            return next(arrived)

        await link.incoming(read)
        return await asyncio.wait_for(anext(out), 5)

    beat = asyncio.run(story())
    assert (beat.number, beat.acknowledged) == (0, 1)
