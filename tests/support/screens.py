"""A terminal of a given width, for tests of what is drawn on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

CONTROL = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


class Screen:
    """A pseudo terminal, and what was written to it."""

    def __init__(self, columns: int) -> None:
        self._master, slave = pty.openpty()
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self.written = b""
        self.resize(columns)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def close(self) -> None:
        self.stream.close()
        self._reader.join()
        os.close(self._master)

    def _read(self) -> None:
        # The last close of the other side ends the reading with an error.
        try:
            while block := os.read(self._master, 1 << 16):
                self.written += block
        except OSError:
            return

    def drawings(self) -> list[str]:
        """Return every text that stood on the moving line, in order."""
        text = CONTROL.sub("", self.written.decode())
        return [part for part in re.split(r"[\r\n]+", text) if part]


@contextmanager
def screen(columns: int) -> Iterator[Screen]:
    opened = Screen(columns)
    try:
        yield opened
    finally:
        opened.close()
