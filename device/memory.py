"""The memory of a device about its runs, each part in one durable file.

`personal/RUN.state`: personal tensors, and the remainder of compression, as of the newest update
that counted; `personal/RUN.N.state` after the Nth return of the run from a spoilt state.
`personal/RUN.before`: those before that update, whose round may be abandoned after it counted
(`take_back`). `personal/PLAN.spent`: steps and seconds that a plan with limits has used, so that a
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
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar, get_type_hints

from triplane.proto.disk import OS_DISK, OsDisk, atomic_file, write_atomic
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.transfer import Buffers
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container

logger = logging.getLogger(__name__)

UPDATE: Final = "update"
PERSONAL: Final = "personal.safetensors"
REMAINDER: Final = "remainder.safetensors"
KIND: Final = "checkpoint"
LEASE: Final = "lease"
"""Property of personal state: the lease of the update that implied it."""
BEFORE: Final = ".before"
"""Ending of the personal state before the newest update that counted."""
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
    """The facts of an update. seconds: duration of learning.

    base: the state that it was learned from, SHA-256 in hexadecimal; empty if an earlier release
    stored the update.
    """

    run: str
    round: int
    lease: str
    examples: int
    loss: float
    seconds: float
    base: str = ""


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

    path: its file, which does not exist if the update is held in memory; see `Memory.hold`. layout:
    digest of its layout if it is a vector, else empty.
    """

    path: Path
    facts: UpdateFacts
    layout: bytes = b""


class Memory:
    """The folders `personal` and `pending` of a home. One thread at a time uses it.

    Nothing else adds files to them: they are listed once, so that a task looks for none in vain.
    """

    def __init__(self, personal: Path, pending: Path) -> None:
        self._personal, self._pending = personal, pending
        self._verified: dict[Path, PendingUpdate] = {}
        self._small: dict[Path, bytes] = {}
        self._large: dict[Path, Buffers] = {}
        self._held: dict[Path, PendingUpdate] = {}
        self._files: set[Path] | None = None  # of unsettled updates
        self._outs: set[Path] | None = None  # of updates alone; like `_states`, some may be gone
        self._states: set[Path] | None = None  # personal states

    def personal(self, run: str, fresh: Collection[str] = (), *, returns: int = 0) -> PersonalState:
        """Return the personal state of a run; a new run begins with the newest run's tensors.

        fresh: names of tensors that a new run does not begin with. returns: how often the run
        returned from a spoilt state; after each time it begins as a new one, with its own tensors.
        """
        path = self._personal / f"{_stem(run, returns)}.state"
        if path.exists():
            return self._read(path) or NOTHING
        # Of the run itself, if there are any: the device may take part in several.
        earlier = [*self._personal.glob(f"{run}*.state")] or self._personal.glob("*.state")
        newest = max(earlier, key=_written_s, default=None)
        state = self._read(newest) if newest else None
        # The remainder belongs to the updates of its own run, so only the tensors carry over.
        carried = {n: x for n, x in state.tensors.items() if n not in fresh} if state else {}
        return PersonalState(carried, {}) if carried else NOTHING

    def remainder(self, run: str, *, returns: int = 0) -> Arrays:
        """Return what compression lost of the updates of this run, since it returned last."""
        path = self._personal / f"{_stem(run, returns)}.state"
        state = self._read(path) if path.exists() else None
        return state.remainder if state is not None else {}

    def keep(
        self,
        facts: UpdateFacts,
        update: Path | bytes,
        implied: PersonalState,
        *,
        returns: int = 0,
    ) -> PendingUpdate:
        """Store an update and what it implies durably, as one file.

        update: its bytes, which also stay in memory, or a file, which is moved. returns: see
        `personal`. Conflict if an update of another lease of the run was not settled: it may have
        counted.
        """
        path = self._free(facts, returns)
        properties = {name: str(value) for name, value in asdict(facts).items()}
        if isinstance(update, bytes):
            first = container.part(UPDATE, update)
        else:
            first = container.file_part(UPDATE, update)
        # One file, so that update and implied state cannot get out of step in a crash.
        container.write(path, KIND, [first, *_parts(implied)], properties=properties)
        self._listed().add(path)
        self._take(path, update)
        self._verified[path] = PendingUpdate(path, facts)
        return self._verified[path]

    def hold(
        self, facts: UpdateFacts, update: Path | bytes | Buffers, layout: bytes = b""
    ) -> PendingUpdate:
        """Keep an update that implies nothing, without a sync: it can be learned again.

        update: as for `keep`, or a large vector, which stays in memory. layout: see
        `PendingUpdate`. Conflict: as for `keep`.
        """
        path = self._free(facts)
        if isinstance(update, Path | bytes):
            self._take(path, update)
        else:
            self._large[path] = update
        self._held[path] = PendingUpdate(path, facts, layout)
        return self._held[path]

    def _take(self, path: Path, update: Path | bytes) -> None:
        """Keep the update alone, as it is sent: its bytes in memory, or its file."""
        if isinstance(update, bytes):
            self._small[path] = update
        else:
            update.replace(self._out(path))

    def _free(self, facts: UpdateFacts, returns: int = 0) -> Path:
        """Return the path for an update, and forget what an earlier one left in memory."""
        path = self._pending / f"{_stem(facts.run, returns)}.update"
        waiting = self._at(path)
        # The older update may have counted, and then its personal state must still take effect.
        if waiting is not None and waiting.facts.lease != facts.lease:
            raise Conflict(unsettled(waiting.facts))
        for kept in (self._held, self._small, self._large):
            kept.pop(path, None)
        self._drop_out(path)
        return path

    def pending(self) -> tuple[PendingUpdate, ...]:
        """Return the unsettled updates. Damaged ones cannot be sent again and are removed."""
        updates = (self._at(path) for path in sorted({*self._listed(), *self._held}))
        return tuple(pending for pending in updates if pending is not None)

    def _listed(self) -> set[Path]:
        if self._files is None:
            self._files = set(self._pending.glob("*.update"))
            if self._files:  # a killed process may not have synced its last renames
                OS_DISK.sync_folder(self._pending)
        return self._files

    def _out(self, path: Path) -> Path:
        """Return the path for an update alone, which may exist from here on."""
        out = path.with_suffix(".out")
        self._listed_outs().add(out)
        return out

    def _drop_out(self, path: Path) -> None:
        out, outs = path.with_suffix(".out"), self._listed_outs()
        if out in outs:
            drop(out)
            outs.discard(out)

    def _listed_outs(self) -> set[Path]:
        if self._outs is None:
            self._outs = set(self._pending.glob("*.out"))
        return self._outs

    def _listed_states(self) -> set[Path]:
        if self._states is None:
            self._states = set(self._personal.glob("*.state"))
        return self._states

    def inline_of(self, pending: PendingUpdate, most: int) -> bytes | None:
        """Return the update alone, if it has at most `most` bytes."""
        if pending.path not in self._small:
            if pending.path in self._held:
                return None  # it is in a file or in buffers, because it is too large
            file = Container(pending.path, kind=KIND)
            if file.manifest.part(UPDATE).size > most:
                return None
            self._small[pending.path] = bytes(file.part(UPDATE))
        data = self._small[pending.path]
        return data if len(data) <= most else None

    def source_of(self, pending: PendingUpdate) -> Path | Buffers:
        """Return the update alone, which has the same bytes each time: as a file, or a vector."""
        if pending.path in self._large:
            return self._large[pending.path]
        return (
            (memoryview(self._small[pending.path]),) if pending.layout else self.bytes_of(pending)
        )

    def has_bytes(self, pending: PendingUpdate) -> bool:
        """Return whether the update can be sent; one that was masked is pending without bytes."""
        if pending.path in self._small:
            return bool(self._small[pending.path])
        if pending.path in self._held:
            return True
        return Container(pending.path, kind=KIND).manifest.part(UPDATE).size > 0

    def bytes_of(self, pending: PendingUpdate) -> Path:
        """Return the update alone as a file, which has the same bytes each time."""
        path = self._out(pending.path)
        if not path.exists() and pending.path in self._held:
            write_atomic(path, self._small[pending.path], UNSYNCED)
        elif not path.exists():
            write_atomic(path, Container(pending.path, kind=KIND).part(UPDATE))
        return path

    def settle(self, pending: PendingUpdate, *, counted: bool) -> None:
        """Apply the personal state of a counted update, or forget it. It can be repeated."""
        held = self._held.pop(pending.path, None)
        implied = self._read(pending.path) if counted and held is None else None
        path = self._personal / f"{pending.path.stem}.state"
        if implied is not None and _lease_of(path) == pending.facts.lease:
            # A crash cut this short; its rename may be seen and not be on the disk yet.
            OS_DISK.sync_folder(path.parent)
        elif implied is not None:
            if path.exists():  # a copy, so that there is a state at every instant
                with path.open("rb") as now, atomic_file(path.with_suffix(BEFORE)) as before:
                    shutil.copyfileobj(now, before)
            else:
                drop(path.with_suffix(BEFORE))  # of a state that was damaged and removed
            self._listed_states().add(path)
            container.write(path, KIND, _parts(implied), properties={LEASE: pending.facts.lease})
            self._forget_oldest("*.state")
        for kept in (self._verified, self._small, self._large):
            kept.pop(pending.path, None)
        # Removed last: after a crash before this line the same settlement is applied again, with
        # the same result.
        if held is None:
            drop(pending.path)
            self._listed().discard(pending.path)
            self._out(pending.path)
        self._drop_out(pending.path)

    def take_back(self, run: str, *, included: str, returns: int = 0) -> None:
        """Take the newest settled update back if its round was abandoned after it counted.

        included: lease of the newest update that the cloud's state includes, or empty; returns: see
        `personal`. If the cloud includes neither the newest update nor the one before it, as after
        the cloud was restored from a backup, what there is stays.
        """
        path = self._personal / f"{_stem(run, returns)}.state"
        before = path.with_suffix(BEFORE)
        if path not in self._listed_states() or _lease_of(path) in {None, included}:
            return
        if not before.exists():
            drop(path)
        elif _lease_of(before) == included:
            OS_DISK.replace(before, path)

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
        if path not in self._listed() or not path.exists():
            return None
        return self._verified.get(path) or self._verify(path)

    def _verify(self, path: Path) -> PendingUpdate | None:
        try:
            file = Container(path, kind=KIND)
            file.verify()
            properties = {"base": ""} | dict(file.manifest.properties)
            update = PendingUpdate(path, parse_facts(UpdateFacts, properties.items()))
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
            drop(path.with_suffix(BEFORE))
            drop(path)


def unsettled(facts: UpdateFacts) -> str:
    """Return why an update must not be overwritten yet."""
    return (
        f"the update of round {facts.round} of run {facts.run} waits until the cloud settles it "
        f"(lease {facts.lease[:8]}...); this device keeps one update of a run at a time"
    )


def check_base(facts: UpdateFacts, state: bytes) -> None:
    """Raise Conflict if the cloud names another state for a lease than its update has."""
    base = state.hex()
    if facts.base not in {"", base}:
        raise Conflict(
            f"the update of this lease was learned from the state {facts.base[:16]}..., and the "
            f"task names {base[:16]}... now; a lease keeps its state, so this device gives it up"
        )


def _lease_of(path: Path) -> str | None:
    """Return the lease of the update that implied a state; None if no file says so."""
    try:
        return dict(Container(path, kind=KIND).manifest.properties).get(LEASE)
    except (NotFound, Corrupt, InvalidInput):
        return None


def _stem(run: str, returns: int) -> str:
    """Return the name, without its ending, of what belongs to a run that returned so often."""
    return f"{run}.{returns}" if returns else run


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
