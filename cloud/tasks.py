"""Tasks that belong to one owner and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any


class BackgroundTasks:
    """The tasks of one owner. running: tasks that have not ended, by key, if any."""

    def __init__(self) -> None:
        self.running: dict[Any, asyncio.Task[None]] = {}

    def spawn(
        self, work: Coroutine[Any, Any, None], name: str, *, key: Any = None
    ) -> asyncio.Task[None]:
        """Run the coroutine as a task until it ends or `stop` is called."""
        task = asyncio.create_task(work, name=name)
        key = task if key is None else key
        # Referenced until it ends: asyncio itself holds tasks only weakly.
        self.running[key] = task
        task.add_done_callback(partial(self._forget, key))
        return task

    def _forget(self, key: Any, task: asyncio.Task[None]) -> None:
        # Another task may have begun under the key since.
        if self.running.get(key) is task:
            del self.running[key]

    async def stop(self) -> None:
        """Cancel every task and wait for its end."""
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
