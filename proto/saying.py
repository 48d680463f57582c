"""The ready line of a serving process: one line on standard output, for its parent or a person."""

import logging
import os
import sys
from typing import Final

logger = logging.getLogger(__name__)

STANDARD_OUTPUT: Final = 1


def say_ready(line: str) -> None:
    """Write one line to standard output at once; one that cannot be written is only logged.

    A service whose reader has left still has its work to do, so this never ends the process.
    """
    try:
        if sys.stdout is None:  # descriptor 1 was closed when the process started
            raise OSError("standard output is closed")
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: the stream itself was closed
        logger.warning("ready line not written", extra={"reason": str(error)})
        _discard_output()


def _discard_output() -> None:
    """Let what is buffered, and whatever follows, go nowhere: a flush at the end would raise."""
    if sys.stdout is None or sys.stdout.closed:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(nowhere, STANDARD_OUTPUT)
    finally:
        if nowhere != STANDARD_OUTPUT:
            os.close(nowhere)
