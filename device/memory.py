"""The memory of a device about its runs, each part in one durable file.

`personal/RUN.state`: personal tensors, and the remainder of compression, as of the newest update
that counted. `personal/PLAN.spent`: steps and seconds that a plan with limits has used, so that a
restart does not reset them. `pending/RUN.update`: an update that has not been settled, with the
personal tensors and the remainder that it implies; they take effect when the cloud says that it
counted. So a kill at any instant loses nothing: either nothing was written, or the same bytes are
sent again.

An update that implies nothing is held in memory only (`Memory.hold`): after a kill, the device
learns it again from the same state, to the same bytes. A masked update is pending without its
bytes: only what it implies waits for the settlement.
"""

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar, get_type_hints

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
"""Number of runs whose personal state is kept; the oldest are removed first."""

Arrays = Mapping[str, Array]
F = TypeVar("F")


class Unsynced(OsDisk):
    """Writes files without a sync, which are made again if a power cut loses or damages them.

    States of rounds are fetched again, and updates that imply nothing are learned again.
    """

    def sync(self, file: BinaryIO) -> None:
        """See `Disk`; readers see the contents, which are not yet on the disk."""
        file.flush()

    def sync_folder(self, folder: Path) -> None:
        """See `Disk`; this does nothing."""


UNSYNCED: Final = Unsynced()


@dataclass(frozen=True, slots=True)
class PersonalState:
    """Personal tensors of one run by name, and what compression lost of its earlier updates."""

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


def parse_facts(kind: type[F], properties: Iterable[tuple[str, str]]) -> F:
    """Return a dataclass of texts and numbers from a file's properties. Corrupt if they are not."""
    texts = dict(properties)
    try:
        types = get_type_hints(kind)
        return kind(**{name: parse(texts[name]) for name, parse in types.items()})
    except (KeyError, ValueError) as error:
        raise Corrupt(f"facts of a file are missing or not numbers: {error}") from error


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update that waits for its settlement.

    path: its file, which does not exist if the update is held in memory; see `Memory.hold`.
    """

    path: Path
    facts: UpdateFacts


class Memory:
    """The folders `personal` and `pending` of a home. One thread at a time uses it."""

    def __init__(self, personal: Path, pending: Path) -> None:
        self._personal, self._pending = personal, pending
        self._verified: dict[Path, PendingUpdate] = {}
        self._small: dict[Path, bytes] = {}
        self._held: dict[Path, PendingUpdate] = {}

    def personal(self, run: str, fresh: Collection[str] = ()) -> PersonalState:
        """Return the personal state of a run; a new run begins with the newest run's tensors.

        fresh: names of tensors that a new run does not begin with.
        """
        path = self._personal / f"{run}.state"
        if path.exists():
            return self._read(path) or NOTHING
        newest = max(self._personal.glob("*.state"), key=_written_s, default=None)
        state = self._read(newest) if newest else None
        # The remainder belongs to the updates of its own run, so only the tensors carry over.
        carried = {n: x for n, x in state.tensors.items() if n not in fresh} if state else {}
        return PersonalState(carried, {}) if carried else NOTHING

    def keep(
        self, facts: UpdateFacts, update: Path | bytes, implied: PersonalState
    ) -> PendingUpdate:
        """Store an update and what it implies durably, as one file.

        update: its bytes, which also stay in memory, or a file, which is moved. Conflict if an
        update of another lease of the run was not settled: it may have counted.
        """
        path = self._free(facts)
        properties = {name: str(value) for name, value in asdict(facts).items()}
        if isinstance(update, bytes):
            first = container.part(UPDATE, update)
        else:
            first = container.file_part(UPDATE, update)
        # One file, so that update and implied state cannot get out of step in a crash.
        container.write(path, KIND, [first, *_parts(implied)], properties=properties)
        self._take(path, update)
        self._verified[path] = PendingUpdate(path, facts)
        return self._verified[path]

    def hold(self, facts: UpdateFacts, update: Path | bytes) -> PendingUpdate:
        """Keep an update that implies nothing, without a sync: it can be learned again.

        update, Conflict: as for `keep`.
        """
        path = self._free(facts)
        self._take(path, update)
        self._held[path] = PendingUpdate(path, facts)
        return self._held[path]

    def _take(self, path: Path, update: Path | bytes) -> None:
        """Keep the update alone, as it is sent: its bytes in memory, or its file."""
        if isinstance(update, bytes):
            self._small[path] = update
        else:
            update.replace(path.with_suffix(".out"))

    def _free(self, facts: UpdateFacts) -> Path:
        """Return the path for an update, and forget what an earlier one left in memory."""
        path = self._pending / f"{facts.run}.update"
        waiting = self._at(path)
        # The older update may have counted, and then its personal state must still take effect.
        if waiting is not None and waiting.facts.lease != facts.lease:
            raise Conflict(unsettled(waiting.facts))
        self._held.pop(path, None)
        self._small.pop(path, None)
        drop(path.with_suffix(".out"))
        return path

    def pending(self) -> tuple[PendingUpdate, ...]:
        """Return the unsettled updates. Damaged ones cannot be sent again and are removed."""
        paths = sorted({*self._pending.glob("*.update"), *self._held})
        updates = (self._at(path) for path in paths)
        return tuple(pending for pending in updates if pending is not None)

    def inline_of(self, pending: PendingUpdate, most: int) -> bytes | None:
        """Return the update alone, if it has at most `most` bytes."""
        if pending.path not in self._small:
            if pending.path in self._held:
                return None  # it is in a file, because it is too large
            file = Container(pending.path, kind=KIND)
            if file.manifest.part(UPDATE).size > most:
                return None
            self._small[pending.path] = bytes(file.part(UPDATE))
        data = self._small[pending.path]
        return data if len(data) <= most else None

    def has_bytes(self, pending: PendingUpdate) -> bool:
        """Return whether the update can be sent; one that was masked is pending without bytes."""
        if pending.path in self._small:
            return bool(self._small[pending.path])
        if pending.path in self._held:
            return True
        return Container(pending.path, kind=KIND).manifest.part(UPDATE).size > 0

    def bytes_of(self, pending: PendingUpdate) -> Path:
        """Return the update alone as a file, which has the same bytes each time."""
        path = pending.path.with_suffix(".out")
        if not path.exists() and pending.path in self._held:
            write_atomic(path, self._small[pending.path], UNSYNCED)
        elif not path.exists():
            write_atomic(path, Container(pending.path, kind=KIND).part(UPDATE))
        return path

    def settle(self, pending: PendingUpdate, *, counted: bool) -> None:
        """Apply the personal state of a counted update, or forget it. It can be repeated."""
        held = self._held.pop(pending.path, None)
        implied = self._read(pending.path) if counted and held is None else None
        if implied is not None:
            path = self._personal / f"{pending.facts.run}.state"
            container.write(path, KIND, _parts(implied))
            self._forget_oldest("*.state")
        self._verified.pop(pending.path, None)
        self._small.pop(pending.path, None)
        # Removed last: after a crash before this line the same settlement is applied again, with
        # the same result.
        if held is None:
            drop(pending.path)
        drop(pending.path.with_suffix(".out"))

    def effort_spent(self, plan: str) -> tuple[int, float]:
        """Return the steps and seconds spent on a plan; 0 if the record is damaged."""
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
            update = PendingUpdate(path, parse_facts(UpdateFacts, file.manifest.properties))
        except (Corrupt, InvalidInput) as error:
            logger.warning("update dropped", extra={"file": path.name, "reason": str(error)})
            drop(path)
            return None
        self._verified[path] = update
        return update

    def _read(self, path: Path) -> PersonalState | None:
        """Return the state in a file. A damaged file is removed; learning goes on without it."""
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
            drop(path)
            return None

    def _forget_oldest(self, names: str) -> None:
        for path in sorted(self._personal.glob(names), key=_written_s)[:-MAX_RUNS]:
            drop(path)


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


def drop(path: Path) -> None:
    """Remove a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        OS_DISK.remove(path)
