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

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Final

from triplane.proto import signals
from triplane.proto.errors import InvalidInput, TriplaneError, Unavailable
from triplane.proto.sandbox import OrderPipe

MAX_REASON_CHARS: Final = 1500


def main() -> None:
    """Run the strategy of the first order until the cloud ends this process."""
    signals.restore_defaults()
    logging.getLogger("flwr").setLevel(logging.WARNING)  # it tells of every round, a run has many
    pipe = OrderPipe()
    order = pipe.begin()
    try:
        from triplane.cloud.federation.flower.drive import Drive, make_strategy

        strategy = make_strategy(order)
        if "state" not in order:  # whether it can be made was all that was asked
            pipe.answer({"ready": type(strategy).__name__})
            return
        drive = Drive(strategy, order, pipe)
        pipe.answer({"ready": type(strategy).__name__})
        drive.run()
        pipe.next()
        raise InvalidInput("the strategy is through with its rounds")
    except Exception as error:  # noqa: BLE001 -- an operator's code may raise anything
        traceback.print_exc()
        pipe.refuse(error if isinstance(error, TriplaneError) else _error_of(error))
    # Not through the interpreter's end, which would wait for threads that a strategy may have left.
    sys.stderr.flush()
    os._exit(0)


def _error_of(error: BaseException) -> TriplaneError:
    """Describe what the strategy raised, and where in its own file."""
    if isinstance(error, MemoryError):
        return Unavailable("the strategy needs more memory than it may take")
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return InvalidInput(
        f"the strategy raised {type(error).__name__}{at}: {error!s:.{MAX_REASON_CHARS}}"
    )


if __name__ == "__main__":
    main()
