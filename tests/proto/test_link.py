import asyncio

from triplane.proto.fleet_pb2 import Desired, Report
from triplane.proto.session_pb2 import Frame
from triplane.proto.stream import LINGER_S, Link, StreamState, new_epoch

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


def test_a_message_that_a_handler_queues_carries_its_acknowledgement():
    async def story():
        half = StreamState(new_epoch())
        half.meet(new_epoch())

        async def handle(_):
            half.add("desired", Desired(number=1))
            link.wake()
            await asyncio.sleep(0)  # as a caller of a commit, which returns after its effects

        link = Link(half, handle, HEARTBEAT_S)
        return await first_frame(link, Frame(number=1, report=Report(number=1)))

    frame = asyncio.run(story())
    assert (frame.number, frame.acknowledged) == (1, 1)


def test_the_acknowledgement_of_a_document_leaves_with_the_answer_to_it():
    async def story():
        half = StreamState(new_epoch())
        half.meet(new_epoch())

        async def handle(_):
            asyncio.get_running_loop().call_later(0.01, answer)

        def answer():
            half.add("report", Report(number=1))
            link.wake()

        link = Link(half, handle, HEARTBEAT_S, linger_s=HEARTBEAT_S)
        return await first_frame(link, Frame(number=1, desired=Desired(number=1)))

    frame = asyncio.run(story())
    assert (frame.number, frame.acknowledged) == (1, 1)


def test_an_acknowledgement_is_not_put_off_by_further_messages():
    async def story():
        half = StreamState(new_epoch())
        half.meet(new_epoch())

        async def handle(_):
            await asyncio.sleep(LINGER_S / 2)

        link = Link(half, handle, HEARTBEAT_S)
        frames = (Frame(number=n, report=Report(number=n)) for n in range(1, 100))
        return await first_frame(link, *frames)

    assert asyncio.run(story()).acknowledged < 99


async def first_frame(link, *arriving):
    """Return the first frame that a link writes while these arrive."""
    written: asyncio.Queue[Frame] = asyncio.Queue()
    arrived = iter([*arriving, None])

    async def read():
        return next(arrived)

    writing = asyncio.create_task(link.write_all(written.put))
    await asyncio.sleep(0)
    reading = asyncio.create_task(link.incoming(read))
    frame = await asyncio.wait_for(written.get(), 30)
    for task in (writing, reading):
        task.cancel()
    await asyncio.gather(writing, reading, return_exceptions=True)
    return frame
