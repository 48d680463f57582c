"""Background tasks end with their owner and can be found by their key."""

import asyncio

from triplane.cloud.tasks import BackgroundTasks


def test_a_task_is_found_by_its_key_until_it_ends():
    async def main():
        tasks = BackgroundTasks()
        task = tasks.spawn(asyncio.sleep(0), "wait", key=("digits", 3))
        assert tasks.running == {("digits", 3): task}
        await task
        assert tasks.running == {}

    asyncio.run(main())


def test_stop_cancels_every_task_and_waits_for_its_end():
    ended = []

    async def work(name):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def main():
        tasks = BackgroundTasks()
        for name in "ab":
            tasks.spawn(work(name), name)
        await asyncio.sleep(0)
        await tasks.stop()
        assert ended == ["a", "b"]
        assert tasks.running == {}

    asyncio.run(main())


async def nothing() -> None:
    pass


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_key_used_again_before_the_end_is_noticed_keeps_the_newer_task():
    async def main():
        tasks = BackgroundTasks()
        first = tasks.spawn(nothing(), "first", key="k")
        await asyncio.sleep(0)
        assert first.done()  # its callback is due in the next turn of the loop
        newer = tasks.spawn(forever(), "newer", key="k")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert tasks.running == {"k": newer}
        await tasks.stop()
        assert newer.cancelled()

    asyncio.run(main())
