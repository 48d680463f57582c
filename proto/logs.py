"""Options and output of a process: log and errors on standard error, ready line on standard output.

Only `__main__` modules call `configure_logging`; libraries log to their own loggers. This module
does not import grpc: `quiet_grpc` works only before that import.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from triplane.proto.errors import InvalidInput, TriplaneError

logger = logging.getLogger(__name__)

STANDARD_OUTPUT: Final = 1
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FieldsFormatter(logging.Formatter):
    """One line per event: time, level, module, constant text, then the fields as JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        line = f"{self.formatTime(record)} {record.levelname} {record.name} {record.getMessage()}"
        line += f" {json.dumps(fields, default=str)}" if fields else ""
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure_logging(level: str | int = "INFO") -> None:
    """Log events of `level` and above to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(FieldsFormatter())
    number = level.upper() if isinstance(level, str) else level
    logging.basicConfig(level=number, handlers=[handler])


def quiet_grpc() -> None:
    """Keep gRPC from printing to standard error; our errors contain the same facts.

    A process that listens or calls must do this before it imports grpc. Set GRPC_VERBOSITY to see
    gRPC's messages.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def say_ready(line: str) -> None:
    """Print the ready line of a serving process, for its parent or a person, and flush it.

    If it cannot be written, that is only logged: a service goes on without a reader.
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
    """Send standard output to /dev/null: the flush at the end of the process would raise."""
    if sys.stdout is None or sys.stdout.closed:
        return
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, STANDARD_OUTPUT)
    if null != STANDARD_OUTPUT:
        os.close(null)


def read_options(argv: Sequence[str], example: str) -> dict[str, Any]:
    """Return the one argument of a process, a JSON object. InvalidInput shows the example."""
    try:
        (text,) = argv
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise InvalidInput(f"give one JSON object such as {example}")
    return values


def exit_on_error(process: str, main: Callable[[], object]) -> None:
    """Run the main function of a process; report an error of our families as its last line."""
    try:
        main()
    except TriplaneError as error:
        sys.exit(f"{process}: {error}")
