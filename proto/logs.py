"""Configure the log of a process: one line per event on standard error.

Only `__main__` modules call `configure_logging`; libraries log to their own loggers.
"""

import json
import logging
from typing import Final

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
    known = level.upper() if isinstance(level, str) else level
    logging.basicConfig(level=known, handlers=[handler])
