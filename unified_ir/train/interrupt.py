"""Ctrl-C between steps: the first ends a run after the current step, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Records that Ctrl-C was pressed."""

    def __init__(self, on_event: Callable[[str], None]) -> None:
        self._on_event = on_event
        self.pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.pressed:
            # Raises KeyboardInterrupt here and now.
            signal.default_int_handler(number, frame)
        self.pressed = True
        self._on_event("ending after this step; Ctrl-C again ends at once")

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.pressed:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt(on_event: Callable[[str], None]) -> Iterator[Interrupt]:
    """Let the first Ctrl-C within the block only set the interrupt and call `on_event` with a line.

    This does nothing in a thread other than the main one, or if the program has its own handler.
    """
    interrupt = Interrupt(on_event)
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
