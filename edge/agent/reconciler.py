"""The loop that brings a node to its desired versions: level-triggered, one attempt at a time.

Each turn compares the desired document with the committed versions (pointers) and the ends of the
newest attempts (journal), and repairs one difference. A repeated document, or a start after a crash
during an attempt, is not a special case.

Models do not affect each other: an error of one model is logged, reported with that model and
retried after a pause, while the others go on. A committed bundle that is damaged on the disk is put
aside and fetched again; until it serves again, the model is reported without a committed version.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from triplane.edge.agent.attempt import (
    Attempt,
    AttemptContext,
    AttemptProgress,
    Fetch,
    Superseded,
    is_whole,
    quarantine,
    restore,
)
from triplane.edge.serving.pointers import Pointer, read_pointers
from triplane.proto import fleet_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.disk import OS_DISK, Disk, write_atomic
from triplane.proto.documents import (
    MAX_INCIDENTS,
    MAX_MODELS,
    MAX_REASON_CHARS,
    check_desired,
)
from triplane.proto.errors import InvalidInput, NotFound, TriplaneError, Unavailable
from triplane.proto.messages import message_from
from triplane.proto.signed.refusal import AttemptRefused, clipped

logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Seconds between two turns when nothing happens."""
REFRESH_S: Final = 600.0
"""Seconds between two refreshes of signed metadata while idle."""
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0
DAMAGED: Final = "damaged on this node's disk"
MAX_WAITING_INCIDENTS: Final = 100
"""Incidents that wait for a report. Without a connection the oldest are dropped."""


class Reconciler:
    """The loop and its state. changed: called when there is something new to report."""

    def __init__(
        self, context: AttemptContext, changed: Callable[[], None], disk: Disk = OS_DISK
    ) -> None:
        self._context, self._changed, self._disk = context, changed, disk
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._retry_s = RETRY_S
        self._refresh_due_s = 0.0
        self._serving_up = False
        self._epoch: bytes | None = None
        self._pauses: dict[str, _Pause] = {}
        self._fetched: dict[str, tuple[pb.Assignment, set[str]]] = {}
        self._verified: dict[str, int] = {}
        self._seen: set[str] = set()
        self.lost: dict[str, str] = {}
        """Committed models whose bundle is damaged or refused by serving, and why."""
        self.serving: dict[str, str] = {}
        """The version of each model that answered calls in the last turn."""
        self.desired = read_desired(context.home.desired)
        self.pointers, broken = read_pointers(context.home.models)
        self._unreadable = {
            path.stem for path in context.home.models.glob("[!.]*.json")
        } - self.pointers.keys()
        self.incidents: deque[pb.Incident] = deque(maxlen=MAX_WAITING_INCIDENTS)
        self.progress: dict[str, AttemptProgress] = {
            line.model: AttemptProgress(
                line.model, line.version, line.attempt, line.state, line.reason
            )
            for line in context.journal.last.values()
        }
        for error in broken:
            logger.error("pointer unreadable", extra={"reason": str(error)})

    def take(self, desired: pb.Desired, epoch: bytes = b"") -> None:
        """Follow this document from now on; one beyond its limits is reported as an incident.

        epoch: of the cloud process that sent it. Within one epoch the highest number counts; in a
        new epoch any number does. So a node follows a cloud that was restored from a backup, or
        was regained from an attacker who had used the highest number.
        """
        try:
            check_desired(desired)
        except InvalidInput as error:
            self.incident(
                AttemptRefused("document", f"document {desired.number} is ignored: {error}")
            )
            return
        with self._lock:
            if epoch == self._epoch and desired.number <= self.desired.number:
                return
            self._epoch = epoch
            if desired == self.desired:
                return
            # Durable first, because the session acknowledges the document when this returns.
            write_atomic(self._context.home.desired, desired.SerializeToString(), self._disk)
            self.desired = desired
        self._wake.set()
        self._changed()

    def stop(self) -> None:
        """End the loop after the current step."""
        self._stop.set()
        self._wake.set()

    def incident(self, refusal: AttemptRefused) -> None:
        """Remember a refusal for the report."""
        with self._lock:
            self.incidents.append(refusal.incident(self._context.clock()))
        self._changed()

    def unreported(self) -> list[pb.Incident]:
        """Return incidents that are not reported yet, oldest first, as many as fit in a report."""
        with self._lock:
            return list(islice(self.incidents, MAX_INCIDENTS))

    def drop_reported(self, reported: Iterable[pb.Incident]) -> None:
        """Forget these incidents: the cloud has them."""
        with self._lock:
            for incident in reported:
                # The oldest are dropped from a full queue, so a reported one may be gone.
                if incident in self.incidents:
                    self.incidents.remove(incident)

    def run(self) -> None:
        """Reconcile until stopped."""
        while not self._stop.is_set():
            # Clear before the step: a document that arrives during it starts the next turn at once.
            self._wake.clear()
            try:
                later = self.step()
                self._retry_s = RETRY_S
            except Unavailable as error:
                logger.info("waiting", extra={"reason": str(error)})
                later, self._retry_s = self._retry_s, min(2 * self._retry_s, MAX_RETRY_S)
            except Exception:  # the next turn may succeed, and serving goes on meanwhile
                logger.exception("step failed")
                later = MAX_RETRY_S
            self._wake.wait(later)

    def step(self) -> float:
        """Repair one difference; return the seconds until the next turn.

        Unavailable: serving does not answer, or all that is left to do waits for something.
        """
        began_s = time.monotonic()
        # First: serving may have restarted, or a killed agent may have left a probation behind.
        self._settle()
        for model in sorted(self.lost):
            if self._may_try(model) and self._repair(model):
                return 0.0
        for assignment in sorted(self.desired.assignments, key=lambda a: a.model):
            if self._may_try(assignment.model) and self._is_due(assignment):
                self._guarded(assignment.model, partial(self._attempt, assignment))
                return 0.0
        # A model whose pause had ended, and that was not tried, has nothing left to do.
        self._pauses = {m: pause for m, pause in self._pauses.items() if pause.until_s > began_s}
        self._collect_garbage()
        self._refresh_trust()
        return min([LOOK_S, *(pause.left_s for pause in self._pauses.values())])

    def _may_try(self, model: str) -> bool:
        pause = self._pauses.get(model)
        return pause is None or pause.left_s <= 0

    def _guarded(self, model: str, work: Callable[[], None]) -> bool:
        """Do work for one model; return whether it succeeded. An error delays only that model."""
        try:
            work()
        except Exception as error:  # no error of a model may stop the others
            pause = self._pauses.get(model)
            wait_s = RETRY_S if pause is None else min(2 * pause.length_s, MAX_RETRY_S)
            self._pauses[model] = _Pause(wait_s, time.monotonic() + wait_s)
            facts = {"model": model, "reason": str(error), "again_after_s": wait_s}
            if isinstance(error, TriplaneError):
                logger.info("model waits", extra=facts)
            else:
                logger.exception("model waits after a fault", extra=facts)
            return False
        self._pauses.pop(model, None)
        return True

    def _lose(self, model: str, reason: str) -> None:
        """Report that a committed model does not serve, once per reason."""
        reason = clipped(reason, MAX_REASON_CHARS)
        if self.lost.get(model) == reason:
            return
        if model not in self.lost:
            self.incident(AttemptRefused("damaged", f"{model}: {reason}"))
        # A new dict for each change: the report is made in another thread without the lock.
        self.lost = {**self.lost, model: reason}
        self._changed()

    def _recovered(self, model: str) -> None:
        """Note that the committed version of a model serves, and that its bundle is whole."""
        if model in self.lost:
            self.lost = {name: why for name, why in self.lost.items() if name != model}
            logger.info("model recovered", extra={"model": model})
            self._changed()

    def _repair(self, model: str) -> bool:
        """Repair a damaged committed bundle; return whether the next turn may follow at once."""
        pointer = self.pointers[model]
        if is_whole(self._context.home, pointer.sha256):
            return self._guarded(model, lambda: self._load_again(pointer))
        if pointer.source != pointer.sha256 or not pointer.size:
            return False  # it was adapted here, or by an older release: that takes an attempt
        return self._guarded(model, lambda: self._fetch_again(pointer))

    def _fetch_again(self, pointer: Pointer) -> None:
        context = self._context
        quarantine(context, pointer.sha256)
        try:
            sha256 = bytes.fromhex(pointer.sha256)
            context.fetch(sha256, pointer.size, context.blobs, lambda *_: None)
        except Exception as error:
            why = f"version {pointer.version} is {DAMAGED} and was not fetched again: {error}"
            self._lose(pointer.model, why)
            raise
        self._load_again(pointer)

    def _load_again(self, pointer: Pointer) -> None:
        try:
            restore(self._context.seam, self._context.home, pointer.model, pointer)
        except Exception as error:
            self._lose(pointer.model, f"version {pointer.version} does not load: {error}")
            raise
        self.serving = {**self.serving, pointer.model: str(pointer.version)}
        self._recovered(pointer.model)

    def _refresh_trust(self) -> None:
        """Refresh metadata also while idle, so that a freeze or an attack is noticed."""
        if time.monotonic() < self._refresh_due_s:
            return
        self._refresh_due_s = time.monotonic() + REFRESH_S
        for refusal in self._context.trust.refresh().refusals:
            self.incident(refusal)

    def _is_due(self, assignment: pb.Assignment) -> bool:
        pointer = self.pointers.get(assignment.model)
        if pointer and _is_of(pointer, assignment):
            if assignment.model not in self.lost and not self._is_damaged(assignment, pointer):
                self._note_committed(assignment, pointer)
                return False
            if pointer.source == pointer.sha256 and pointer.size:  # it is being fetched again
                self._note(assignment, pointer, "DOWNLOADING", self.lost[assignment.model])
                return False
        last = self._context.journal.last.get(assignment.model)
        # A COMMITTED line is of the version before, or its pointer was lost: try in both cases.
        if last is None or not last.ended or last.state == "COMMITTED":
            return True
        # Attempts are counted by rollout: numbers of one cloud mean nothing to another.
        return last.rollout != assignment.rollout or last.attempt < assignment.attempt

    def _is_damaged(self, assignment: pb.Assignment, pointer: Pointer) -> bool:
        """Check the bundle's file once for each new attempt at the committed version."""
        if self._verified.get(assignment.model) != assignment.attempt:
            self._verified[assignment.model] = assignment.attempt
            if not is_whole(self._context.home, pointer.sha256):
                self._lose(assignment.model, f"version {pointer.version} is {DAMAGED}")
                return True
        return False

    def _note_committed(self, assignment: pb.Assignment, pointer: Pointer) -> None:
        """Report a new attempt at the committed version as done."""
        progress = self.progress.get(assignment.model)
        done = pointer.version, assignment.attempt, "COMMITTED"
        if progress is None or (progress.version, progress.attempt, progress.state) != done:
            self._note(assignment, pointer, "COMMITTED")

    def _note(
        self, assignment: pb.Assignment, pointer: Pointer, state: str, reason: str = ""
    ) -> None:
        version, attempt = pointer.version, assignment.attempt
        progress = AttemptProgress(assignment.model, version, attempt, state, reason)
        if self.progress.get(assignment.model) != progress:
            self._note_progress(progress)

    def _attempt(self, assignment: pb.Assignment) -> None:
        document = self.desired

        def superseded() -> bool:
            if self._stop.is_set():
                return True
            # A newer document that repeats the assignment does not interrupt it.
            return self.desired is not document and assignment not in self.desired.assignments

        attempt = Attempt(
            replace(self._context, fetch=self._noting(assignment)),
            assignment,
            self.pointers.get(assignment.model),
            self._note_progress,
            superseded,
        )
        try:
            pointer = attempt.run()
        except Superseded:
            logger.info("attempt superseded", extra={"model": assignment.model})
            return
        if pointer:
            self.pointers = {**self.pointers, pointer.model: pointer}
            self.serving = {**self.serving, pointer.model: str(pointer.version)}
            self._verified[pointer.model] = assignment.attempt
            self._unreadable.discard(pointer.model)
            self._recovered(pointer.model)
            self._changed()

    def _noting(self, assignment: pb.Assignment) -> Fetch:
        """Return a fetch that notes the files of the assignment, which stay while it waits."""
        known, names = self._fetched.get(assignment.model, (None, set[str]()))
        if known != assignment:
            names = set()
        self._fetched[assignment.model] = assignment, names

        def fetch(
            sha256: bytes, size: int, into: BlobFolder, progress: Callable[[int, int], None]
        ) -> Path:
            names.add(sha256.hex())
            return self._context.fetch(sha256, size, into, progress)

        return fetch

    def _note_progress(self, progress: AttemptProgress) -> None:
        self.progress = {**self.progress, progress.model: progress}
        self._changed()

    def _settle(self) -> None:
        """Make serving serve the committed versions and nothing else; no attempt is running."""
        try:
            serving = self._context.seam.versions()
        except Unavailable:
            self._note_serving(up=False)
            raise
        self._note_serving(up=True)
        self.serving = serving
        for model in sorted({*serving, *self.pointers}):
            pointer = self.pointers.get(model)
            if pointer is None and model in self._unreadable:
                continue  # its pointer is damaged; the version stays until an attempt replaces it
            is_served = pointer is not None and serving.get(model) == str(pointer.version)
            if pointer is not None and is_served and self._left_on_probation(model, pointer):
                is_served = False
                serving.pop(model)
                self._guarded(model, partial(self._context.seam.unload, model))
            if not is_served and self._may_try(model) and model not in self.lost:
                self._guarded(model, partial(self._restore, model, pointer))

    def _left_on_probation(self, model: str, pointer: Pointer) -> bool:
        """Return whether a killed agent may have left another bundle with this number serving."""
        if model in self._seen:
            return False
        self._seen.add(model)
        last = self._context.journal.last.get(model)
        return last is not None and last.state == "PROBATION" and last.version == pointer.version

    def _restore(self, model: str, pointer: Pointer | None) -> None:
        try:
            restore(self._context.seam, self._context.home, model, pointer)
        except NotFound:
            if pointer is None:
                logger.warning("unloaded by itself", extra={"model": model})
                return
            self._lose(model, f"version {pointer.version} is {DAMAGED}: its bundle is missing")
            return
        except Unavailable:
            raise
        except Exception as error:
            if pointer is None:
                raise
            whole = is_whole(self._context.home, pointer.sha256)
            what = "does not load" if whole else f"is {DAMAGED}"
            self._lose(model, f"version {pointer.version} {what}: {error}")
            if whole:
                raise
            return
        if pointer is not None:
            self.serving = {**self.serving, model: str(pointer.version)}
            self._recovered(model)

    def _note_serving(self, *, up: bool) -> None:
        if up != self._serving_up:
            self._serving_up = up
            self._changed()

    def _collect_garbage(self) -> None:
        """Remove bundles that no pointer names. Call it only while nothing is being fetched.

        The downloads of a model that waits stay, complete or not.
        """
        self._fetched = {m: path for m, path in self._fetched.items() if m in self._pauses}
        kept = {pointer.sha256 for pointer in self.pointers.values()}
        for assignment in self.desired.assignments:
            if assignment.model in self._pauses:
                known, names = self._fetched.get(assignment.model, (None, set[str]()))
                needed = names if known == assignment else set[str]()
                if not needed and not assignment.sha256:
                    return  # of an older cloud, and any bundle may be the one
                kept |= {assignment.sha256.hex(), *needed}
        paths = [*self._context.blobs.folder.iterdir()]
        if not self._pauses:
            paths += self._context.blobs.partial.iterdir()
        for path in paths:
            if path.is_file() and path.name not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            self._disk.remove(path)
        except OSError as error:
            logger.warning("not removed", extra={"path": str(path), "reason": str(error)})


@dataclass(frozen=True, slots=True)
class _Pause:
    """The pause of one model before its next attempt."""

    length_s: float
    until_s: float

    @property
    def left_s(self) -> float:
        return max(0.0, self.until_s - time.monotonic())


def _is_of(pointer: Pointer, assignment: pb.Assignment) -> bool:
    """Return whether the committed version is the assigned one, by content where both know it."""
    if (pointer.version, pointer.target_path) != (assignment.version, assignment.target_path):
        return False
    return not (pointer.source and assignment.sha256) or pointer.source == assignment.sha256.hex()


def read_desired(path: Path) -> pb.Desired:
    """Return the stored document, or an empty one where none can be read."""
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


def report(reconciler: Reconciler, capability: pb.Capability, **fields: Any) -> pb.Report:
    """Return the complete current report of this node, whose number grows with time.

    fields: those of the report that the reconciler does not know.
    """
    assigned = [assignment.model for assignment in reconciler.desired.assignments]
    models = dict.fromkeys((*reconciler.pointers, *assigned, *reconciler.progress))
    return pb.Report(
        number=time.time_ns() // 1_000_000,
        desired_number=reconciler.desired.number,
        capability=capability,
        models=[_model_report(reconciler, m) for m in sorted(islice(models, MAX_MODELS))],
        incidents=reconciler.unreported(),
        **fields,
    )


def _model_report(reconciler: Reconciler, model: str) -> pb.ModelReport:
    pointer, progress = reconciler.pointers.get(model), reconciler.progress.get(model)
    report = pb.ModelReport(model=model)
    if progress:
        state = pb.NodeState.Value(progress.state)
        unset = dict.fromkeys(("committed_version", "committed_digest", "committed_sha256"))
        report = message_from(pb.ModelReport, progress, state=state, **unset)
    lost = reconciler.lost.get(model, "")
    if pointer and (not lost or reconciler.serving.get(model) == str(pointer.version)):
        report.committed_version = pointer.version
        report.committed_digest = bytes.fromhex(pointer.digest)
        report.committed_sha256 = bytes.fromhex(pointer.source)
    if lost and pointer and (not progress or progress.state == "COMMITTED"):
        report.version, report.state, report.reason = pointer.version, pb.FAILED, lost
    return report
