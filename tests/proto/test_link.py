import asyncio

from triplane.proto.fleet_pb2 import Desired, Report
from triplane.proto.session_pb2 import Frame
from triplane.proto.stream import Link, StreamState, new_epoch

HEARTBEAT_S = 1000.0


def test_what_is_handled_while_another_frame_is_written_is_acknowledged_at_once():
    async def story():
        async def handle(_):
            return

        half = StreamState(new_epoch())
        half.meet(new_epoch())
        half.add("desired", Desired(number=1))
        link = Link(half, handle, HEARTBEAT_S)
        written: asyncio.Queue[Frame] = asyncio.Queue(maxsize=1)
        writing = asyncio.create_task(link.write_all(written.put))
        first = await written.get()
        assert (first.number, first.acknowledged) == (1, 0)
        arrived = iter([Frame(number=1, report=Report(number=1)), None])

        async def read():
            return next(arrived)

        await link.incoming(read)
        beat = await asyncio.wait_for(written.get(), 30)
        writing.cancel()
        return beat

    beat = asyncio.run(story())
    assert (beat.number, beat.acknowledged) == (0, 1)
