"""Coroutines that may not take for ever."""

import asyncio

DEADLINE_S = 120.0


def within(coroutine, seconds=DEADLINE_S):
    """Run it to its end, at most this long; return its result."""

    async def bounded():
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(bounded())
