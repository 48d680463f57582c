"""The loop that makes a node serve what it shall: level-triggered, one attempt at a time.

It looks at three things, every time anew: what is desired, what is committed (pointers), how the
newest attempts ended (journal). What differs is mended; being told the same thing twice, or waking
up after a crash in the middle, is no special case.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from triplane.edge.agent.attempt import Attempt, Progress, Superseded, World, restore
from triplane.edge.agent.refusal import Refused
from triplane.edge.serving.pointers import Pointer, read_pointers
from triplane.proto import fleet_pb2 as pb
from triplane.proto.disk import OS_DISK, Disk, write_atomic
from triplane.proto.documents import MAX_INCIDENTS, MAX_MODELS, check_desired
from triplane.proto.errors import InvalidInput, NotFound, TriplaneError, Unavailable

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Between two looks when nothing happens."""
REFRESH_S: Final = 600.0
"""Between two looks at the signed metadata when nothing is to be done."""
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0
MAX_WAITING_INCIDENTS: Final = 100
"""Told in reports, oldest first; while the cloud hears none of them the oldest are forgotten."""


class Reconciler:
    """The loop and what it knows. changed: called when there is something new to report."""

    def __init__(self, world: World, changed: Callable[[], None], disk: Disk = OS_DISK) -> None:
        self._world, self._changed, self._disk = world, changed, disk
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._retry_s = RETRY_S
        self._refresh_due_s = 0.0
        self._serving_up = False
        self._epoch: bytes | None = None
        self.desired = read_desired(world.home.desired)
        self.pointers, broken = read_pointers(world.home.models)
        self.incidents: deque[pb.Incident] = deque(maxlen=MAX_WAITING_INCIDENTS)
        self.progress: dict[str, Progress] = {
            line.model: Progress(line.model, line.version, line.attempt, line.state, line.reason)
            for line in world.journal.last.values()
        }
        for error in broken:
            logger.error("pointer unreadable", extra={"reason": str(error)})

    def take(self, desired: pb.Desired, epoch: bytes = b"") -> None:
        """Go by this document from now on; one that is out of its limits is an incident.

        epoch: of the cloud process that sent it. Within one epoch the highest number counts; a new
        process is believed anew, so that a cloud that was restored from a backup, or taken back
        from a thief who had counted to the end, is obeyed again.
        """
        try:
            check_desired(desired)
        except InvalidInput as error:
            self.incident(Refused("document", f"document {desired.number} is ignored: {error}"))
            return
        with self._lock:
            if epoch == self._epoch and desired.number <= self.desired.number:
                return
            self._epoch = epoch
            if desired == self.desired:
                return
            write_atomic(self._world.home.desired, desired.SerializeToString(), self._disk)
            self.desired = desired
        self._wake.set()
        self._changed()

    def stop(self) -> None:
        """End the loop after the step it is in."""
        self._stop.set()
        self._wake.set()

    def incident(self, refusal: Refused) -> None:
        """Remember a refusal for the report."""
        with self._lock:
            self.incidents.append(refusal.incident(self._world.clock()))
        self._changed()

    def untold(self) -> list[pb.Incident]:
        """Incidents that wait to be told, oldest first, as many as a report takes."""
        with self._lock:
            return list(islice(self.incidents, MAX_INCIDENTS))

    def drop_told(self, told: Iterable[pb.Incident]) -> None:
        """The cloud has these."""
        with self._lock:
            for incident in told:
                if incident in self.incidents:
                    self.incidents.remove(incident)

    def run(self) -> None:
        """Look and mend until stopped."""
        while not self._stop.is_set():
            self._wake.clear()
            try:
                later = self.step()
                self._retry_s = RETRY_S
            except Unavailable as error:
                logger.info("waiting", extra={"reason": str(error)})
                later, self._retry_s = self._retry_s, min(2 * self._retry_s, MAX_RETRY_S)
            except TriplaneError:
                logger.exception("step failed")
                later = MAX_RETRY_S
            self._wake.wait(later)

    def step(self) -> float:
        """Mend one thing; returns after how many seconds to look again."""
        self._settle()
        for assignment in sorted(self.desired.assignments, key=lambda a: a.model):
            if self._is_due(assignment):
                self._attempt(assignment)
                return 0.0
        self._collect_garbage()
        self._refresh_trust()
        return LOOK_S

    def _refresh_trust(self) -> None:
        """Notice a freeze or an attack also while nothing is to be done."""
        if time.monotonic() < self._refresh_due_s:
            return
        self._refresh_due_s = time.monotonic() + REFRESH_S
        for refusal in self._world.trust.refresh().refusals:
            self.incident(refusal)

    def _is_due(self, assignment: pb.Assignment) -> bool:
        pointer = self.pointers.get(assignment.model)
        if pointer and (pointer.version, pointer.target_path) == (
            assignment.version,
            assignment.target_path,
        ):
            self._note_committed(assignment, pointer)
            return False
        last = self._world.journal.last.get(assignment.model)
        if last is None or not last.ended or last.state == "COMMITTED":
            return True
        # Attempts are counted by rollout: whatever number one cloud gave, the next begins anew.
        return last.rollout != assignment.rollout or last.attempt < assignment.attempt

    def _note_committed(self, assignment: pb.Assignment, pointer: Pointer) -> None:
        """A new attempt at what is committed already has succeeded."""
        known = self.progress.get(assignment.model)
        wanted = Progress(assignment.model, pointer.version, assignment.attempt, "COMMITTED")
        if known is None or (known.version, known.attempt, known.state) != (
            wanted.version,
            wanted.attempt,
            wanted.state,
        ):
            self.progress[assignment.model] = wanted
            self._changed()

    def _attempt(self, assignment: pb.Assignment) -> None:
        document = self.desired

        def superseded() -> bool:
            if self._stop.is_set():
                return True
            return self.desired is not document and assignment not in self.desired.assignments

        attempt = Attempt(
            self._world,
            assignment,
            self.pointers.get(assignment.model),
            self._told,
            superseded,
        )
        try:
            pointer = attempt.run()
        except Superseded:
            logger.info("attempt superseded", extra={"model": assignment.model})
            return
        if pointer:
            self.pointers = {**self.pointers, pointer.model: pointer}
            self._changed()

    def _told(self, progress: Progress) -> None:
        self.progress = {**self.progress, progress.model: progress}
        self._changed()

    def _settle(self) -> None:
        """No attempt is running: serving shall serve what is committed and nothing else."""
        try:
            serving = self._world.seam.versions()
        except Unavailable:
            self._note_serving(up=False)
            raise
        self._note_serving(up=True)
        for model in {*serving, *self.pointers}:
            pointer = self.pointers.get(model)
            try:
                restore(self._world.seam, self._world.home, model, pointer)
            except NotFound:
                logger.warning("unloaded by itself", extra={"model": model})

    def _note_serving(self, *, up: bool) -> None:
        if up != self._serving_up:
            self._serving_up = up
            self._changed()

    def _collect_garbage(self) -> None:
        """Drop bundles that no pointer names; nothing is being fetched now."""
        kept = {pointer.sha256 for pointer in self.pointers.values()}
        for path in [*self._world.blobs.folder.iterdir(), *self._world.blobs.partial.iterdir()]:
            if path.is_file() and path.name not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            self._disk.remove(path)
        except OSError as error:
            logger.warning("not removed", extra={"path": str(path), "reason": str(error)})


def read_desired(path: Path) -> pb.Desired:
    """The document kept from before; an empty one where there is none that can be read."""
    desired = pb.Desired()
    try:
        desired.ParseFromString(path.read_bytes())
        check_desired(desired)
    except FileNotFoundError:
        pass
    except (DecodeError, InvalidInput):
        logger.warning("desired document unreadable; the cloud will send it again")
        desired.Clear()
    return desired


def report(
    reconciler: Reconciler,
    capability: pb.Capability,
    *,
    metadata_age_s: float,
    serving_up: bool,
    serving_address: str,
) -> pb.Report:
    """The whole truth about this node, now. Its number grows with the time."""
    wanted = [assignment.model for assignment in reconciler.desired.assignments]
    models = dict.fromkeys((*reconciler.pointers, *wanted, *reconciler.progress))
    return pb.Report(
        number=time.time_ns() // 1_000_000,
        desired_number=reconciler.desired.number,
        capability=capability,
        models=[_model_report(reconciler, m) for m in sorted(islice(models, MAX_MODELS))],
        metadata_age_s=metadata_age_s,
        incidents=reconciler.untold(),
        serving_up=serving_up,
        serving_address=serving_address,
    )


def _model_report(reconciler: Reconciler, model: str) -> pb.ModelReport:
    pointer, progress = reconciler.pointers.get(model), reconciler.progress.get(model)
    found = pb.ModelReport(model=model)
    if pointer:
        found.committed_version = pointer.version
        found.committed_digest = bytes.fromhex(pointer.digest)
    if progress:
        found.version, found.attempt = progress.version, progress.attempt
        found.state = pb.NodeState.Value(progress.state)
        found.reason = progress.reason
        found.downloaded_bytes = progress.downloaded_bytes
        found.total_bytes = progress.total_bytes
    return found
