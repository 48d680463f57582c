"""The memory of a device about its runs, each in one durable file.

`personal/RUN.state`: personal tensors, and the remainder of compression, as of the newest update
that counted. `personal/PLAN.spent`: steps and seconds that a plan with limits has used, so that a
restart does not refill them. `pending/RUN.update`: an update before it leaves, with the personal
tensors and the remainder it implies; they take effect when the cloud says it counted. So a kill at
any instant costs nothing: either nothing was written, or the same bytes are sent again.

An update that implies nothing is held in memory only (`Memory.hold`): a process that is killed
learns it again, to the same bytes, from the same state.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from triplane.proto.disk import OS_DISK, OsDisk, write_atomic
from triplane.proto.errors import Conflict, Corrupt, InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container

logger = logging.getLogger(__name__)

UPDATE: Final = "update"
PERSONAL: Final = "personal.safetensors"
REMAINDER: Final = "remainder.safetensors"
KIND: Final = "checkpoint"
MAX_RUNS: Final = 32
"""Whose personal state is kept; the oldest goes first."""

Arrays = Mapping[str, Array]


class Unsynced(OsDisk):
    """Files that are made again where a power cut lost or tore them.

    States of rounds are fetched again, and updates that imply nothing are learned again.
    """

    def sync(self, file: BinaryIO) -> None:
        """See `Disk`; what reads the file sees it all, and no more is waited for."""
        file.flush()

    def sync_folder(self, folder: Path) -> None:
        """See `Disk`; nothing is waited for."""


UNSYNCED: Final = Unsynced()


@dataclass(frozen=True, slots=True)
class PersonalState:
    """Personal tensors by name, and what compression lost of earlier updates of one run."""

    tensors: Arrays
    remainder: Arrays


NOTHING: Final = PersonalState({}, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """The facts of an update. seconds: duration of learning."""

    run: str
    round: int
    lease: str
    examples: int
    loss: float
    seconds: float

    @classmethod
    def parse(cls, said: Mapping[str, str]) -> "UpdateFacts":
        """Parse the properties of a file. Corrupt where they are not such facts."""
        try:
            return cls(
                run=said["run"],
                round=int(said["round"]),
                lease=said["lease"],
                examples=int(said["examples"]),
                loss=float(said["loss"]),
                seconds=float(said["seconds"]),
            )
        except (KeyError, ValueError) as error:
            raise Corrupt(f"the facts of an update are missing or no numbers: {error}") from error


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update that waits for its settlement. path: of the file that holds all of it.

    Nothing has that name while the update is only held; see `Memory.hold`.
    """

    path: Path
    facts: UpdateFacts


class Memory:
    """The folders `personal` and `pending` of a home. One thread at a time."""

    def __init__(self, personal: Path, pending: Path) -> None:
        self._personal, self._pending = personal, pending
        self._verified: dict[Path, PendingUpdate] = {}
        self._small: dict[Path, bytes] = {}
        self._held: dict[Path, PendingUpdate] = {}

    def personal(self, run: str) -> PersonalState:
        """Return the personal state of this run; a new run starts with the newest run's tensors."""
        path = self._personal / f"{run}.state"
        if path.exists():
            return self._read(path) or NOTHING
        newest = max(self._personal.glob("*.state"), key=_written_s, default=None)
        state = self._read(newest) if newest else None
        return PersonalState(state.tensors, {}) if state else NOTHING

    def keep(
        self, facts: UpdateFacts, update: Path | bytes, implied: PersonalState
    ) -> PendingUpdate:
        """Write an update and what it implies, durable, as one file.

        update: its bytes, kept at hand too, or a file, which is taken. Conflict where an update of
        another lease of the run was not settled: it may have counted.
        """
        path = self._free(facts)
        alone = path.with_suffix(".out")
        properties = {name: str(value) for name, value in asdict(facts).items()}
        if isinstance(update, bytes):
            first = container.part(UPDATE, update)
        else:
            first = container.file_part(UPDATE, update)
        container.write(path, KIND, [first, *_parts(implied)], properties=properties)
        if isinstance(update, bytes):
            self._small[path] = update
        else:
            update.replace(alone)
        self._verified[path] = PendingUpdate(path, facts)
        return self._verified[path]

    def hold(self, facts: UpdateFacts, update: Path | bytes) -> PendingUpdate:
        """Keep an update that implies nothing, without a sync: it can be learned again.

        update, Conflict: as for `keep`.
        """
        path = self._free(facts)
        if isinstance(update, bytes):
            self._small[path] = update
        else:
            update.replace(path.with_suffix(".out"))
        self._held[path] = PendingUpdate(path, facts)
        return self._held[path]

    def _free(self, facts: UpdateFacts) -> Path:
        """Return the path for an update, after forgetting what an earlier one left in memory."""
        path = self._pending / f"{facts.run}.update"
        waiting = self._at(path)
        if waiting is not None and waiting.facts.lease != facts.lease:
            raise Conflict(unsettled(waiting.facts))
        self._held.pop(path, None)
        self._small.pop(path, None)
        _drop(path.with_suffix(".out"))
        return path

    def pending(self) -> tuple[PendingUpdate, ...]:
        """Return every unsettled update.

        A damaged one is removed, because it cannot be sent again.
        """
        paths = sorted({*self._pending.glob("*.update"), *self._held})
        updates = (self._at(path) for path in paths)
        return tuple(pending for pending in updates if pending is not None)

    def inline_of(self, pending: PendingUpdate, most: int) -> bytes | None:
        """Return the update alone, if it has at most `most` bytes."""
        if pending.path not in self._small:
            if pending.path in self._held:
                return None  # it is a file, and too large
            file = Container(pending.path, kind=KIND)
            if file.manifest.part(UPDATE).size > most:
                return None
            self._small[pending.path] = bytes(file.part(UPDATE))
        data = self._small[pending.path]
        return data if len(data) <= most else None

    def bytes_of(self, pending: PendingUpdate) -> Path:
        """Return the update alone as a file, with the same bytes each time."""
        path = pending.path.with_suffix(".out")
        if not path.exists() and pending.path in self._held:
            write_atomic(path, self._small[pending.path], UNSYNCED)
        elif not path.exists():
            write_atomic(path, Container(pending.path, kind=KIND).part(UPDATE))
        return path

    def settle(self, pending: PendingUpdate, *, counted: bool) -> None:
        """Apply the personal state of a counted update, or forget it.

        Safe to repeat after a crash.
        """
        held = self._held.pop(pending.path, None)
        implied = self._read(pending.path) if counted and held is None else None
        if implied is not None:
            path = self._personal / f"{pending.facts.run}.state"
            container.write(path, KIND, _parts(implied))
            self._forget_oldest("*.state")
        self._verified.pop(pending.path, None)
        self._small.pop(pending.path, None)
        if held is None:
            _drop(pending.path)
        _drop(pending.path.with_suffix(".out"))

    def spent(self, plan: str) -> tuple[int, float]:
        """Return the steps and seconds spent on a plan; a damaged record counts as none."""
        try:
            steps, seconds = (self._personal / f"{plan}.spent").read_text().split()
            return int(steps), float(seconds)
        except (OSError, ValueError):
            return 0, 0.0

    def note_spent(self, plan: str, steps: int, seconds: float) -> None:
        """Store how much of its limits a plan has used."""
        write_atomic(self._personal / f"{plan}.spent", f"{steps} {seconds!r}\n".encode())
        self._forget_oldest("*.spent")

    def _at(self, path: Path) -> PendingUpdate | None:
        """Return the update in this file, or None; a damaged one is removed."""
        if path in self._held:
            return self._held[path]
        if not path.exists():
            return None
        return self._verified.get(path) or self._verify(path)

    def _verify(self, path: Path) -> PendingUpdate | None:
        try:
            file = Container(path, kind=KIND)
            file.verify()
            update = PendingUpdate(path, UpdateFacts.parse(dict(file.manifest.properties)))
        except (Corrupt, InvalidInput) as error:
            logger.warning("update dropped", extra={"file": path.name, "reason": str(error)})
            _drop(path)
            return None
        self._verified[path] = update
        return update

    def _read(self, path: Path) -> PersonalState | None:
        """Return the state in a file. A damaged file is removed: learning goes on without it."""
        try:
            file = Container(path, kind=KIND)
            file.verify()
            tensors, remainder = (
                {name: t.data for name, t in file.tensors(part).items()}
                for part in (PERSONAL, REMAINDER)
            )
            return PersonalState(tensors, remainder)
        except (Corrupt, InvalidInput) as error:
            logger.warning("personal state lost", extra={"file": path.name, "reason": str(error)})
            _drop(path)
            return None

    def _forget_oldest(self, names: str) -> None:
        for path in sorted(self._personal.glob(names), key=_written_s)[:-MAX_RUNS]:
            _drop(path)


def unsettled(facts: UpdateFacts) -> str:
    """Return why an update must not be overwritten yet."""
    return (
        f"the update of round {facts.round} of run {facts.run} waits until the cloud settles it "
        f"(lease {facts.lease[:8]}...); this device keeps one update of a run at a time"
    )


def _parts(personal: PersonalState) -> list[container.PartData]:
    roles = dict.fromkeys(personal.tensors, "personal")
    return [
        container.tensor_part(PERSONAL, personal.tensors, roles),
        container.tensor_part(REMAINDER, personal.remainder),
    ]


def _written_s(path: Path) -> float:
    return path.stat().st_mtime


def _drop(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        OS_DISK.remove(path)
