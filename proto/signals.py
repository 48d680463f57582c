"""React to SIGTERM and SIGINT at any instant, and end the process within a stated time.

CPython runs a signal's handler between two bytecodes of the main thread. A signal that arrives
after the last of them and before a system call blocks is only recorded: the call is not
interrupted, and a handler that sets a flag or writes to a pipe does not run until something else
wakes the main thread. The same holds where the kernel hands the signal to another thread. Here the
C-level handler itself writes to a pipe (`signal.set_wakeup_fd`) and a thread of this module
reads it, so nothing depends on what the main thread is doing.

No other module installs handlers, except `unified_ir/train/interrupt.py`, whose caller never waits,
and `unified_ir/cli/watching.py`, whose waits are short.
"""

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, NoReturn

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
HURRY_S: Final = 3.0
"""Longest time from the second signal to the end of the process."""
LOG_S: Final = 1.0
"""Time limit for the last line of the log: standard error may be a pipe that is never read."""
ALARM_S: Final = 5
"""Seconds between a limit and the kernel's alarm, which works without the interpreter."""
NUDGE_S: Final = 0.05
MAX_NUDGES: Final = 200
"""A main thread that is busy in C code for longer handles its signals when it returns."""
NUDGE: Final = signal.SIGURG
"""A signal that is ignored by default; it only interrupts a system call of the main thread."""


def restore_defaults() -> None:
    """Let SIGTERM and SIGINT end this process at once, even if its parent ignored or blocked them.

    This is for the time before `Termination`, when there is nothing to save; Python's own handler
    of SIGINT would wait for a model to load. Call it from the main thread.
    """
    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    if os.getpid() == 1:  # the kernel drops a default action that would end a container's init
        for number in SIGNALS:
            signal.signal(number, lambda number, _: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, signal.SIGALRM))


class Termination:
    """Makes SIGTERM and SIGINT ask the process to stop, from construction on.

    The first signal sets `requested` and calls `stop`, the second one calls `hurry`; both run in a
    thread and must not block. The process ends with status 1 if it still runs `limit_s` after the
    first signal or `hurry_s` after the second. One per process, made in the main thread.
    """

    def __init__(
        self,
        stop: Callable[[], object] = lambda: None,
        *,
        limit_s: float,
        hurry: Callable[[], object] = lambda: None,
        hurry_s: float = HURRY_S,
    ) -> None:
        self._stop, self._hurry = stop, hurry
        self._limit_s, self._hurry_s = limit_s, hurry_s
        self.requested = threading.Event()
        self._is_closed = False
        self._wakeup = _Wakeup()
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        self._wakeup.install(_noted)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the first signal; return whether it has arrived."""
        return self.requested.wait(timeout_s)

    def request(self) -> None:
        """Begin to stop without a signal, so that the time limit applies."""
        # Take the same path as a signal: the watching thread sets the alarm and enforces the limit.
        if not (self.requested.is_set() or self._is_closed):
            self.requested.set()
            self._wakeup.write()

    def close(self) -> None:
        """Restore the default action of the signals, in a process that goes on with other work.

        Call it from the main thread. It has no effect after a stop was requested.
        """
        if self.requested.is_set():
            return
        self._is_closed = True
        # `_is_closed` is set first, so that the thread, which this wakes, ends without an alarm.
        self._wakeup.uninstall()
        self._thread.join()
        self._wakeup.close()

    def _watch(self) -> None:
        self._wakeup.read(None)
        if self._is_closed:
            return
        _alarm_in(self._limit_s)
        if not self.requested.is_set():
            self.requested.set()
            _call(self._stop)
        # This thread now ends the process unless the main thread ends it earlier.
        self._wakeup.enforce(self._limit_s, lambda: _call(self._hurry), self._hurry_s)


class Interrupts:
    """Makes SIGTERM and SIGINT raise one KeyboardInterrupt in the main thread, from `install` on.

    The first signal interrupts whatever the main thread waits for. It is held back within
    `deferred`, where an exception would leave a child process behind. Later signals only set
    `hurried`, so they cannot interrupt the clean-up that the first one began. The process ends with
    status 1 if it still runs `limit_s` after the first or `hurry_s` after the second. One per
    process.
    """

    def __init__(self, *, limit_s: float, hurry_s: float) -> None:
        self._limit_s, self._hurry_s = limit_s, hurry_s
        self.hurried = False
        self._depth, self._is_pending, self._is_raised, self._is_awake = 0, False, False, False

    def install(self) -> None:
        """Handle the signals until the process ends. Call it from the main thread."""
        wakeup = _Wakeup()
        threading.Thread(target=self._watch, args=(wakeup,), name="signals", daemon=True).start()
        signal.signal(NUDGE, self._on_nudge)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {NUDGE})
        wakeup.install(self._on_signal)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Delay the exception of a signal that arrives within the block to the end of the block."""
        # CPython delivers KeyboardInterrupt to the main thread only; others have nothing to defer.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._is_pending and self._depth == 0:
                self._raise()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Plain fields: the lock of an event may be held by the very code that this interrupts.
        if self._is_raised or self._is_pending:
            self.hurried = True
        elif self._depth:
            self._is_pending = True
        else:
            self._raise()

    def _raise(self) -> None:
        self._is_pending, self._is_raised = False, True
        raise KeyboardInterrupt

    def _on_nudge(self, number: int, frame: FrameType | None) -> None:
        self._is_awake = True

    def _watch(self, wakeup: "_Wakeup") -> None:
        wakeup.read(None)
        _alarm_in(self._limit_s)
        self._nudge()
        wakeup.enforce(self._limit_s, self._nudge, self._hurry_s)

    def _nudge(self) -> None:
        """Wake the main thread until it has run the handlers of all signals that arrived."""
        main = threading.main_thread().ident
        assert main is not None
        self._is_awake = False
        for _ in range(MAX_NUDGES):
            signal.pthread_kill(main, NUDGE)
            time.sleep(NUDGE_S)
            if self._is_awake:  # handlers run in the order of numbers, and this one is the last
                return


class _Wakeup:
    """The pipe into which the C-level handler writes the number of each signal."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def install(self, handler: Callable[[int, FrameType | None], None]) -> None:
        """Install the handler after the pipe, so that no signal is missed."""
        # A full pipe holds more than the two signals that matter, so a lost byte changes nothing.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # The alarm must kill the process without the interpreter, whatever the parent had set.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number in SIGNALS:
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, signal.SIGALRM))

    def uninstall(self) -> None:
        """Restore the default actions and end a `read` that is in progress."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        self.write()

    def close(self) -> None:
        """Close the pipe, which no thread may be reading."""
        os.close(self._read)
        os.close(self._write)

    def write(self) -> None:
        """Write what SIGTERM writes."""
        with contextlib.suppress(BlockingIOError):  # full: there is more than one to read
            os.write(self._write, bytes([signal.SIGTERM]))

    def read(self, timeout_s: float | None) -> bool:
        """Wait for one of `SIGNALS`; return whether one arrived in time."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not self._poll.poll(None if left_s is None else math.ceil(left_s * 1000)):
                return False
            if os.read(self._read, 1)[0] in SIGNALS:
                return True

    def enforce(self, limit_s: float, hurry: Callable[[], None], hurry_s: float) -> NoReturn:
        """End the process in `limit_s`, or `hurry_s` after a second signal, which calls `hurry`."""
        if not self.read(limit_s):
            _exit_regardless("it did not stop in time", limit_s)
        _alarm_in(hurry_s)
        hurry()
        time.sleep(hurry_s)
        _exit_regardless("it did not stop after a second signal", hurry_s)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the C-level handler has written to the pipe already."""


def _alarm_in(seconds: float) -> None:
    """Let the kernel end the process `ALARM_S` after our own thread should have done it."""
    signal.alarm(math.ceil(seconds + LOG_S) + ALARM_S)


def _call(hook: Callable[[], object]) -> None:
    try:
        hook()
    except Exception:  # the watching thread must go on, to enforce the limits
        logger.exception("stopping failed")


def _exit_regardless(why: str, seconds: float) -> NoReturn:
    facts = {"extra": {"reason": why, "seconds": seconds}}
    log = threading.Thread(target=logger.warning, args=("exiting regardless",), kwargs=facts)
    log.daemon = True
    log.start()
    log.join(LOG_S)
    # Not sys.exit: it would run clean-up and wait for the very threads that do not end.
    os._exit(1)
