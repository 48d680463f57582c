"""The journal of attempts: one line per transition, synced before the transition takes effect.

A line is one JSON object, the first 16 digits of its SHA-256, and a newline. Reading stops at a
line that is incomplete or damaged. The last line of a model has the phase of its newest attempt;
the committed version is in the pointer, not in the journal.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from triplane.proto.disk import OS_DISK, AppendFile, Disk, write_atomic
from triplane.proto.fleet_pb2 import NodeState

logger = logging.getLogger(__name__)

MAX_JOURNAL_BYTES: Final = 4 << 20
"""A longer journal is reduced to the last line of each model."""
MAX_MODELS_KEPT: Final = 256
"""Limit of models in a reduced journal, because a compromised cloud may make names up."""
MAX_REASON_CHARS: Final = 1000
ENDED: Final = frozenset({"COMMITTED", "FAILED", "RETURNED", "KEPT"})


@dataclass(frozen=True, slots=True)
class Line:
    """One transition of one attempt. state: a name of fleet.proto's NodeState."""

    time_s: float
    model: str
    version: int
    attempt: int
    rollout: str
    state: str
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Whether the attempt is over for good."""
        return self.state in ENDED


class Journal:
    """The open journal of a node; one process writes it."""

    def __init__(self, path: Path, disk: Disk = OS_DISK) -> None:
        self._path, self._disk = path, disk
        self.last: dict[str, Line] = {}
        valid = b""
        if path.exists():
            data = path.read_bytes()
            for line, raw in _lines(data):
                self._note(line)
                valid += raw
            # A crash may leave an incomplete last line. Appending after it would make the new line
            # unreadable.
            if len(valid) != len(data) or len(data) > MAX_JOURNAL_BYTES:
                logger.warning(
                    "journal cut", extra={"bytes": len(data), "readable_bytes": len(valid)}
                )
                fits = len(valid) <= MAX_JOURNAL_BYTES
                write_atomic(path, valid if fits else self._shortest(), disk)
        self._file = AppendFile(path, disk)

    def add(self, line: Line) -> None:
        """Return once the line is on the disk."""
        if self._file.size > MAX_JOURNAL_BYTES:
            self._cut()
        self._file.write(_encode(line))
        self._file.sync()
        self._note(line)
        logger.info("attempt", extra=asdict(line))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _note(self, line: Line) -> None:
        """Store the last line of each model, the newest at the end."""
        # A dict keeps insertion order: removing first moves the model to the end.
        self.last.pop(line.model, None)
        self.last[line.model] = line

    def _cut(self) -> None:
        self._file.close()
        try:
            write_atomic(self._path, self._shortest(), self._disk)
        finally:
            self._file = AppendFile(self._path, self._disk)

    def _shortest(self) -> bytes:
        self.last = dict(list(self.last.items())[-MAX_MODELS_KEPT:])
        return b"".join(map(_encode, self.last.values()))


def readable(path: Path) -> list[Line]:
    """Return the lines of a journal that another process may be writing; none without a file."""
    return [line for line, _ in _lines(path.read_bytes())] if path.exists() else []


def _encode(line: Line) -> bytes:
    assert line.state in NodeState.keys()  # noqa: SIM118 -- an enum wrapper, not a mapping
    text = json.dumps(asdict(line), sort_keys=True).encode()
    return text + b" " + _check(text) + b"\n"


def _check(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


def _lines(data: bytes) -> Iterator[tuple[Line, bytes]]:
    """Yield the lines up to the first that is incomplete or damaged."""
    for raw in data.splitlines(keepends=True):
        text, _, check = raw.rstrip(b"\n").rpartition(b" ")
        if not raw.endswith(b"\n") or _check(text) != check:
            return
        yield Line(**json.loads(text)), raw
