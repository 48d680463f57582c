"""The journal of attempts: one line per transition, synced before the transition counts.

A line is one JSON object, its SHA-256 shortened to 16 digits, and a newline. Reading stops at a
line that a crash cut off or that was damaged. The last line of a model holds the phase of its
newest attempt; the pointer, not the journal, names the committed version.
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
"""A longer journal is cut down to the last line of each model."""
MAX_MODELS_KEPT: Final = 256
"""By a cut, those of the newest lines: a cloud that was taken over makes names up."""
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
        kept = b""
        if path.exists():
            data = path.read_bytes()
            for line, raw in _lines(data):
                self._note(line)
                kept += raw
            if len(kept) != len(data) or len(data) > MAX_JOURNAL_BYTES:
                logger.warning(
                    "journal cut", extra={"bytes": len(data), "readable_bytes": len(kept)}
                )
                whole = kept if len(kept) <= MAX_JOURNAL_BYTES else self._shortest()
                write_atomic(path, whole, disk)
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
        """Let go of the file."""
        self._file.close()

    def _note(self, line: Line) -> None:
        """Keep the last line of each model, the newest last."""
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
    """Whole, undamaged lines from the start."""
    for raw in data.splitlines(keepends=True):
        text, _, check = raw.rstrip(b"\n").rpartition(b" ")
        if not raw.endswith(b"\n") or _check(text) != check:
            return
        yield Line(**json.loads(text)), raw
