"""Counts the bytes between devices and server: a relay on loopback, in a thread of its own.

It costs time, so it stands between them only where bytes are counted and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

CHUNK_BYTES = 1 << 18


class Relay:
    """Listens on `port`, passes on to `target`. up: bytes to the target, down: from it."""

    def __init__(self) -> None:
        self.port = self.target = self.up = self.down = 0

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass(reader, back, "up"), self._pass(there, writer, "down"))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                setattr(self, way, getattr(self, way) + len(data))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(self, ready: threading.Event) -> None:
        """Until `end`."""
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._meet, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await self._over.wait()

    def end(self) -> None:
        """From another thread."""
        self._loop.call_soon_threadsafe(self._over.set)


@contextlib.contextmanager
def relaying() -> Iterator[Relay]:
    """A relay that knows its port; give it a target before anybody calls."""
    relay, ready = Relay(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(relay.serve(ready)))
    thread.start()
    ready.wait()
    try:
        yield relay
    finally:
        relay.end()
        thread.join()
