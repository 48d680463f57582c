"""The process of one strategy: `python -m triplane.cloud.federation.flower.child`.

It reads an order (a line of JSON) at a time from standard input and answers each with one line on
standard output. The first order says what to run; it holds itself to the order's limits before it
imports the strategy, and without a state in it nothing more is done. Then, for each turn (a round
that learns or evaluates):

    {"do": "turn", "number", "evaluates", "nodes"}   -> {"asked": {device: message file or ""}}
    {"do": "check", "path", "kind"}                  -> {"examples", "loss"} of a reply
    {"do": "replies", "replies": {device: {...}}}    -> {"state", "memory"} once it is aggregated

`Strategy.start` runs in the main thread and waits for these lines inside its grid, so what it is
asked and what it answers cannot get out of step. It ends with its whole process group when standard
input is closed, that is when the cloud is gone.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from triplane.cloud.registry.converting import GRACE_S, limit
from triplane.proto import signals
from triplane.proto.errors import InvalidInput, TriplaneError, Unavailable

MAX_REASON_CHARS: Final = 1500


class StdioPipe:
    """Lines in, lines out. An order is answered once; time runs from order to answer."""

    def __init__(self) -> None:
        self._out: BinaryIO = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # whatever a strategy prints goes to standard error
        self._seconds = 0

    def begin(self) -> dict[str, Any]:
        """The first order; from here on limits hold."""
        order = self._read()
        threading.Thread(target=_end_with_parent, daemon=True).start()
        limit(**order["limits"])
        self._seconds = int(order["limits"]["seconds"])
        return order

    def next(self) -> dict[str, Any]:
        """The next order; waiting for it takes no time."""
        signal.alarm(0)
        order = self._read()
        signal.alarm(self._seconds + GRACE_S)
        return order

    def say(self, answer: Mapping[str, Any]) -> None:
        """Answer the order at hand."""
        self._out.write(json.dumps({"done": answer}).encode() + b"\n")
        self._out.flush()

    def refuse(self, error: BaseException) -> None:
        """Answer that it cannot be, and why."""
        told = error if isinstance(error, TriplaneError) else _raised(error)
        record = {"refused": type(told).__name__, "text": str(told)}
        self._out.write(json.dumps(record).encode() + b"\n")
        self._out.flush()

    def _read(self) -> dict[str, Any]:
        line = sys.stdin.buffer.readline()
        if not line:
            os.killpg(0, signal.SIGKILL)
        order: dict[str, Any] = json.loads(line)
        return order


def main() -> None:
    """Run the strategy of the first order until the cloud ends this process."""
    signals.restore_defaults()
    logging.getLogger("flwr").setLevel(logging.WARNING)  # it tells of every round, a run has many
    pipe = StdioPipe()
    order = pipe.begin()
    try:
        from triplane.cloud.federation.flower.drive import Drive, made

        strategy = made(order)
        if "state" not in order:  # whether it can be made was all that was asked
            pipe.say({"ready": type(strategy).__name__})
            return
        drive = Drive(strategy, order, pipe)
        pipe.say({"ready": type(strategy).__name__})
        drive.run()
        pipe.next()
        raise InvalidInput("the strategy is through with its rounds")
    except Exception as error:  # noqa: BLE001 -- an operator's code may raise anything
        traceback.print_exc()
        pipe.refuse(error)
    # Not through the interpreter's end, which would wait for threads that a strategy may have left.
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    """Wait until nobody holds the other end of standard input."""
    poll = select.poll()
    poll.register(0, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _raised(error: BaseException) -> TriplaneError:
    """What the strategy raised, and where in its own file."""
    if isinstance(error, MemoryError):
        return Unavailable("the strategy needs more memory than it may take")
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return InvalidInput(
        f"the strategy raised {type(error).__name__}{at}: {error!s:.{MAX_REASON_CHARS}}"
    )


if __name__ == "__main__":
    main()
