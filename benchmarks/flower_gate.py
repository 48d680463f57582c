"""Lets a Flower strategy of `rounds.py` open as many rounds as it was told to, then waits.

Runs in Flower's environment and imports nothing of it. The harness listens on a Unix socket; a line
from it is a number of rounds, a line to it the milliseconds that each of them took, as JSON. The
first line is empty of figures: the strategy is ready.
"""

from __future__ import annotations

import json
import socket
import sys
import time


class Gate:
    """path: of the harness's socket."""

    def __init__(self, path: str) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        self._lines = link.makefile("rw", encoding="utf-8")
        self._marks: list[float] = []
        self._left = 0

    def open(self) -> None:
        """Called before each round; the end of one is the call for the next."""
        self._marks.append(time.perf_counter())
        if not self._left:
            spans = zip(self._marks, self._marks[1:], strict=False)
            self._lines.write(json.dumps([1000 * (b - a) for a, b in spans]) + "\n")
            self._lines.flush()
            told = self._lines.readline()
            if not told:
                sys.exit()
            self._left = int(told)
            self._marks = [time.perf_counter()]
        self._left -= 1
