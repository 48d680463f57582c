"""The process of one strategy: `python -m triplane.cloud.federation.flower.child`.

It reads orders from standard input, each a line of JSON, and answers each with one line on standard
output. The first order names the strategy; this process applies the order's limits to itself before
it imports the strategy. If that order has no state, the process only checks that the strategy can
be made, and ends. Otherwise it expects for each turn (a round that learns or evaluates):

    {"do": "turn", "number", "evaluates", "nodes"}   -> {"asked": {device: message file or ""}}
    {"do": "check", "path", "kind"}                  -> {"examples", "loss"} of a reply
    {"do": "replies", "replies": {device: {...}}}    -> {"state", "memory"} once it is aggregated

`Strategy.start` runs in the main thread and reads these orders inside its grid, so orders and
answers cannot get out of step. The process ends with its whole process group when standard input is
closed, which means that the cloud is gone.
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
    logging.getLogger("flwr").setLevel(logging.WARNING)  # at INFO it logs several lines a round
    pipe = OrderPipe()
    order = pipe.begin()
    try:
        from triplane.cloud.federation.flower.drive import Drive, make_strategy

        strategy = make_strategy(order)
        if "state" not in order:  # the order only asks whether the strategy can be made
            pipe.answer({"ready": type(strategy).__name__})
            return
        drive = Drive(strategy, order, pipe)
        pipe.answer({"ready": type(strategy).__name__})
        drive.run()
        pipe.next()
        raise InvalidInput("the strategy has finished all of its rounds")
    except Exception as error:  # noqa: BLE001 -- an operator's code may raise anything
        traceback.print_exc()
        pipe.refuse(error if isinstance(error, TriplaneError) else _error_of(error))
    # A normal exit would wait for threads that the strategy may have started.
    sys.stderr.flush()
    os._exit(0)


def _error_of(error: BaseException) -> TriplaneError:
    """Describe the error that the strategy raised, and where."""
    if isinstance(error, MemoryError):
        return Unavailable("the strategy needs more memory than its limit")
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return InvalidInput(
        f"the strategy raised {type(error).__name__}{at}: {error!s:.{MAX_REASON_CHARS}}"
    )


if __name__ == "__main__":
    main()
