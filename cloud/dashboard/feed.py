"""Query the cloud once a second for all open pages, and send each page what changed for it.

The cloud is queried only while a page is open. A page that reads slowly skips states, so at most
one change waits for it. Pages beyond `MOST_PAGES` are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from triplane.cloud.dashboard.rows import State, change, state_from
from triplane.cloud.dashboard.source import DashboardSource
from triplane.proto.errors import Unavailable

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
QUIET_S: Final = 15.0
"""A page gets a message at least this often, so a lost connection is noticed."""
MOST_PAGES: Final = 64


async def look(source: DashboardSource) -> State:
    """Return the present state of the page."""
    return state_from(
        await source.nodes(),
        await source.rollouts(),
        await source.runs(),
        await source.versions(),
        await source.incidents(),
        await source.due(),
    )


class DashboardFeed:
    """Shares one stream of states among the open pages."""

    def __init__(self, source: DashboardSource, *, period_s: float = PERIOD_S) -> None:
        self._source = source
        self._period_s = period_s
        self._state: State | None = None
        self._number = 0
        self._moved = asyncio.Condition()
        self._pages = 0
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    async def changes(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield changes for one page, first the whole state; ends when the feed is closed."""
        if self._pages >= MOST_PAGES:
            raise Unavailable(f"too many pages are open: {MOST_PAGES}, the limit; close one")
        self._pages += 1
        try:
            # The first page starts the polling and the last one ends it.
            if self._looking is None:
                self._looking = asyncio.create_task(self._look_on(), name="dashboard feed")
            async with contextlib.aclosing(self._states_changed()) as stream:
                async for change in stream:
                    yield change
        finally:
            self._pages -= 1
            if self._pages == 0:
                await self._rest()

    async def nudge(self) -> None:
        """Query the cloud now, after a change that was made here."""
        await self._take(await look(self._source))

    async def close(self) -> None:
        """End every page's stream."""
        self._closed = True
        async with self._moved:
            self._moved.notify_all()
        await self._rest()

    async def _states_changed(self) -> AsyncGenerator[dict[str, Any], None]:
        sent: State | None = None
        number = 0
        while await self._is_open_after(number):
            # Read without an await in between, so number and state belong together.
            number = self._number
            now = self._state
            if now is not None:
                yield {"now_s": time.time(), "change": change(sent, now)}
                sent = now

    async def _is_open_after(self, number: int) -> bool:
        """Wait for a state after `number`, for `QUIET_S` at most; return whether more may come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S), self._moved:
                await self._moved.wait_for(lambda: self._closed or self._number > number)
        return not self._closed

    async def _look_on(self) -> None:
        while True:
            try:
                await self._take(await look(self._source))
            except Exception:  # the page shows its age; the next query may succeed
                logger.exception("dashboard look failed")
            await asyncio.sleep(self._period_s)

    async def _take(self, state: State) -> None:
        if state == self._state:
            return
        async with self._moved:
            self._state = state
            self._number += 1
            self._moved.notify_all()

    async def _rest(self) -> None:
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
            # Cleared, so that the next page does not begin with an old state.
            self._state = None
