"""One attempt to bring one model to one version: its phases in order, and the rollback.

Each phase is journaled and synced before it takes effect. After a crash in any phase, a pointer
names the committed version and the journal says how far the attempt came; the attempt begins again,
with the files that were downloaded. Only COMMITTED, KEPT, FAILED and RETURNED end it for good.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from triplane.edge.agent.adapting import Compared
from triplane.edge.agent.journal import Journal, Line
from triplane.edge.agent.trying import judge_trial, run_adaptation, run_trial
from triplane.edge.home import NodeHome
from triplane.edge.serving.pointers import Pointer, write_pointer
from triplane.proto.blobs import BlobFolder, digest_of
from triplane.proto.disk import OS_DISK, Disk
from triplane.proto.documents import MAX_REASON_CHARS
from triplane.proto.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    TriplaneError,
    Unavailable,
)
from triplane.proto.fleet_pb2 import Assignment
from triplane.proto.signed.policy import Admission, check_metric
from triplane.proto.signed.refusal import AttemptRefused, clipped
from triplane.proto.signed.trust import Freshness
from triplane.proto.targets import SignedTarget
from triplane.proto.transfer import TooSlow, WrongLength

logger = logging.getLogger(__name__)

POLL_S: Final = 0.2
"""Time between two checks of a version on probation."""
ABSENT_S: Final = 5.0
"""How long the serving process may be unreachable during a probation."""
MIN_CALLS: Final = 10
MAX_FAILED_SHARE: Final = 0.5
"""A version on probation is rolled back if more of at least `MIN_CALLS` calls fail."""
SPACE_FACTOR: Final = 2


class Superseded(Exception):
    """Another version is desired now, so the attempt stops without a result."""


class Trusting(Protocol):
    """The part of `Trust` that an attempt uses."""

    def refresh(self) -> Freshness:
        """Fetch and verify new metadata."""

    def admit(self, path: str, *, node: str, committed_version: int) -> Admission:
        """Return the signed target, if it may be tried here."""


class Switching(Protocol):
    """The part of `Seam` that an attempt uses."""

    def load(self, model: str, path: Path, digest: str) -> None:
        """Serve a bundle in place of the model's others."""

    def unload(self, model: str) -> None:
        """Stop serving a model."""

    def versions(self) -> dict[str, str]:
        """The ready version of each model."""

    def calls(self, model: str) -> tuple[int, int]:
        """Calls that succeeded and failed."""


Fetch = Callable[[bytes, int, BlobFolder, Callable[[int, int], None]], Path]
"""(sha256, size, into, progress) -> the verified file."""
Trial = Callable[..., dict[str, Any]]
Adaptation = Callable[..., Compared]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """Everything that an attempt uses.

    node: our name. targets: targets of the converter that this machine runs. incident: called with
    each refusal.
    """

    node: str
    targets: tuple[str, ...]
    home: NodeHome
    blobs: BlobFolder
    trust: Trusting
    seam: Switching
    fetch: Fetch
    journal: Journal
    incident: Callable[[AttemptRefused], None]
    trial: Trial = run_trial
    adaptation: Adaptation = run_adaptation
    disk: Disk = OS_DISK
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep
    probation_s: float = 5.0


@dataclass(frozen=True, slots=True)
class AttemptProgress:
    """The current phase of an attempt. state: a name of NodeState."""

    model: str
    version: int
    attempt: int
    state: str
    reason: str = ""
    downloaded_bytes: int = 0
    total_bytes: int = 0


class Attempt:
    """One attempt at one assignment.

    committed: the version that serves now. on_progress: called at each change. superseded: called
    between steps; True stops the attempt.
    """

    def __init__(
        self,
        context: AttemptContext,
        assignment: Assignment,
        committed: Pointer | None,
        on_progress: Callable[[AttemptProgress], None],
        superseded: Callable[[], bool],
    ) -> None:
        self._context, self._assignment, self._committed = context, assignment, committed
        self._on_progress, self._superseded = on_progress, superseded
        names = ("model", "version", "attempt", "rollout")
        self._names: dict[str, Any] = {name: getattr(assignment, name) for name in names}
        self._progress = AttemptProgress(
            assignment.model, assignment.version, assignment.attempt, "ASSIGNED"
        )

    def run(self) -> Pointer | None:
        """Return the new pointer, or None if another version stays. Unavailable: retry later."""
        try:
            return self._run()
        except AttemptRefused as refusal:
            self._context.incident(refusal)
            self._enter("FAILED", str(refusal))
        except (Corrupt, InvalidInput, NotFound) as error:
            self._enter("FAILED", str(error))
        # Temporary: no journal entry, so the attempt is not over and begins again after a pause.
        except (Unavailable, Conflict) as error:
            self._show(reason=clipped(f"waits: {error}", MAX_REASON_CHARS))
            raise
        except Superseded:
            raise
        except Exception as error:  # an unexpected error ends this attempt, but no other
            logger.exception("attempt failed by a fault", extra={"model": self._assignment.model})
            self._enter("FAILED", f"internal error of the agent: {type(error).__name__}: {error}")
        return None

    def _run(self) -> Pointer | None:
        self._enter("ASSIGNED")
        admission = self._admit()
        target = admission.target
        # Before the download: a full disk would also stop the journal and the pointers.
        self._require_space(target.length)
        self._enter("DOWNLOADING")
        path = self._fetch(target, self._moved)
        self._enter("VERIFIED")
        golden = admission.golden and self._fetch(admission.golden, self._stop_if_superseded)
        self._enter("STAGED")
        # In a child with limits: the bundle is signed, but a signer can make mistakes, and the role
        # `auto` signs on the cloud.
        answer = self._context.trial(path, size=target.length, golden=golden)
        judge_trial(answer, target)
        if admission.rule is not None:
            check_metric(admission, float(answer["accuracy"]))
        self._check_superseded()
        self._enter("TRIED")
        digest, sha256 = str(answer["digest"]), target.sha256
        if answer["adapt_steps"]:
            compared, path, sha256 = self._adapt(path, target)
            if not compared.is_better:
                self._enter("KEPT", f"{target.path} is not better here: {compared}")
                return None
            self._enter("ADAPTED", str(compared))
            digest = compared.digest
        pointer = Pointer(
            **self._names,
            sha256=sha256.hex(),
            digest=digest,
            target_path=target.path,
            source=target.sha256.hex(),
            size=path.stat().st_size,
        )
        return self._switch(pointer, path)

    def _adapt(self, start: Path, target: SignedTarget) -> tuple[Compared, Path, bytes]:
        """Adapt a start point to this node's samples; return comparison, path and its SHA-256."""
        context, model = self._context, self._assignment.model
        samples = context.home.samples / f"{model}.npz"
        if not samples.is_file():
            raise AttemptRefused(
                "adaptation",
                f"{target.path} is a start point: it needs labelled samples of this node to "
                f"adapt to before it serves, and there are none; add them: triplane edge samples "
                f"{model} FILE.npz --home {context.home.path}",
            )
        now = context.home.bundles / self._committed.sha256 if self._committed else None
        if now is not None and not now.is_file():  # it was damaged and is being fetched again
            now = None
        adapted = context.home.run / f"{model}.adapted"
        try:
            compared = context.adaptation(
                start, size=target.length, samples=samples, seed=f"{context.node}\0{model}",
                out=adapted, current=now,
            )  # fmt: skip
            # Stored under its own digest, like a download, so that a damaged file is noticed later.
            sha256 = context.blobs.put_file(adapted)
        finally:
            adapted.unlink(missing_ok=True)
        return compared, context.blobs.path(sha256), sha256

    def _admit(self) -> Admission:
        freshness = self._context.trust.refresh()
        for refusal in freshness.refusals:
            self._context.incident(refusal)
        if not freshness.is_fresh:
            why = freshness.error or "; ".join(map(str, freshness.refusals)) or "it has expired"
            raise Unavailable(f"signed metadata is stale, so no new version is accepted: {why}")
        version = self._committed.version if self._committed else 0
        admission = self._context.trust.admit(
            self._assignment.target_path, node=self._context.node, committed_version=version
        )
        name = admission.target.name
        # The assignment is not signed; without this check a cloud could serve another genuine model
        # under this name.
        if (name.model, name.version) != (self._assignment.model, self._assignment.version):
            raise AttemptRefused(
                "wrong-target",
                f"{self._assignment.model}@{self._assignment.version} is assigned, but the target "
                f"is {admission.target.path}",
            )
        wanted = self._assignment.sha256
        if wanted and wanted != admission.target.sha256:
            raise Unavailable(
                f"{admission.target.path} is signed with SHA-256 {admission.target.sha256.hex()}, "
                f"but {wanted.hex()} is assigned: the cloud's registry and its signed metadata "
                "contradict each other; if this persists, push and sign the version again"
            )
        if name.target not in self._context.targets:
            raise AttemptRefused(
                "hardware",
                f"{admission.target.path} is made for {name.target}, this node takes "
                f"{', '.join(self._context.targets) or 'no target of the converter'}",
            )
        return admission

    def _fetch(self, target: SignedTarget, progress: Callable[[int, int], None]) -> Path:
        """Fetch the signed file. A peer that sends it too slowly becomes an incident."""
        # A file that has the name already counts as received, so a damaged one must go first.
        if quarantine(self._context, target.sha256.hex()):
            self._context.incident(AttemptRefused("damaged", f"{target.path} was damaged on disk"))
        try:
            return self._context.fetch(target.sha256, target.length, self._context.blobs, progress)
        except TooSlow as error:
            self._context.incident(AttemptRefused("slow-retrieval", f"{target.path}: {error}"))
            raise
        except Corrupt as error:
            kind = "length" if isinstance(error, WrongLength) else "digest"
            raise AttemptRefused(kind, f"{target.path}: {error}") from error

    def _switch(self, pointer: Pointer, path: Path) -> Pointer | None:
        self._enter("PROBATION")
        try:
            self._context.seam.load(pointer.model, path, pointer.digest)
            self._watch(pointer)
        except AttemptRefused as refusal:
            self._context.incident(refusal)
            self._go_back(str(refusal))
            return None
        except (Unavailable, Superseded):
            self._restore()
            raise
        except TriplaneError as error:
            self._go_back(f"serving refused it: {error}")
            return None
        # The commit point: after a crash before this line the old version serves again, afterwards
        # the new one. The journal follows, because a missing COMMITTED only repeats the report.
        write_pointer(self._context.home.models, pointer, self._context.disk)
        self._enter("COMMITTED")
        return pointer

    def _watch(self, pointer: Pointer) -> None:
        """Raise AttemptRefused if the version fails during its probation."""
        probation_s = self._assignment.probation_s or self._context.probation_s
        until_s = time.monotonic() + probation_s
        while True:
            self._check_superseded()
            self._look(pointer)
            if time.monotonic() >= until_s:
                return
            self._context.pause(min(POLL_S, max(0.0, until_s - time.monotonic())))

    def _look(self, pointer: Pointer) -> None:
        gone_s = time.monotonic() + ABSENT_S
        while True:
            try:
                serving = self._context.seam.versions().get(pointer.model)
                # A serving process that was restarted loads committed versions only, so the version
                # on probation is gone: it may have caused the crash.
                if serving != str(pointer.version):
                    raise AttemptRefused(
                        "probation",
                        f"version {pointer.version} is no longer served, but {serving}: the "
                        "serving process ended during the probation",
                    )
                succeeded, failed = self._context.seam.calls(pointer.model)
            except Unavailable as error:
                if time.monotonic() > gone_s:
                    raise AttemptRefused(
                        "probation", f"serving was unreachable for {ABSENT_S:.0f} s: {error}"
                    ) from error
                self._context.pause(POLL_S)
                continue
            calls = succeeded + failed
            # With few calls, one invalid request of a client would roll a good version back.
            if calls >= MIN_CALLS and failed > MAX_FAILED_SHARE * calls:
                raise AttemptRefused("probation", f"{failed} of {calls} calls failed on probation")
            return

    def _go_back(self, reason: str) -> None:
        self._restore()
        self._enter("RETURNED", reason)

    def _restore(self) -> None:
        """Serve the committed version again; if serving is unreachable, its next start does so."""
        try:
            restore(self._context.seam, self._context.home, self._assignment.model, self._committed)
        except TriplaneError as error:
            logger.warning("return not confirmed", extra={"reason": str(error)})

    def _require_space(self, size: int) -> None:
        space = os.statvfs(self._context.home.bundles)
        free = space.f_bavail * space.f_frsize
        # More than the file: adaptation, journal and pointers write to the same disk.
        needed = SPACE_FACTOR * size
        if free < needed:
            raise InvalidInput(
                f"the disk has {free} bytes free, a bundle of {size} needs {needed}; make room"
            )

    def _stop_if_superseded(self, _done: int, _total: int) -> None:
        self._check_superseded()

    def _moved(self, done: int, total: int) -> None:
        self._check_superseded()
        self._show(downloaded_bytes=done, total_bytes=total)

    def _check_superseded(self) -> None:
        if self._superseded():
            raise Superseded

    def _enter(self, state: str, reason: str = "") -> None:
        """Journal the transition, then report it."""
        reason = clipped(reason, MAX_REASON_CHARS)
        time_s = self._context.clock()
        self._context.journal.add(Line(time_s, **self._names, state=state, reason=reason))
        self._show(state=state, reason=reason)

    def _show(self, **changed: Any) -> None:
        self._progress = replace(self._progress, **changed)
        self._on_progress(self._progress)


def is_whole(home: NodeHome, sha256: str) -> bool:
    """Return whether the bundle's file exists and has the digest that is its name."""
    path = home.bundles / sha256
    try:
        return path.is_file() and digest_of(path).hex() == sha256
    except OSError:
        return False


def quarantine(context: AttemptContext, sha256: str) -> bool:
    """Put a bundle's file aside if it is damaged; return whether it was. The newest one is kept.

    A folder, or anything else in place of the file or its incomplete download, is put aside, too.
    """
    partial = context.blobs.partial / sha256
    if os.path.lexists(partial) and not partial.is_file():
        _put_aside(context, partial)
    path = context.home.bundles / sha256
    if not os.path.lexists(path) or is_whole(context.home, sha256):
        return False
    _put_aside(context, path)
    return True


def _put_aside(context: AttemptContext, path: Path) -> None:
    context.disk.make_folder(context.home.damaged)
    # One damaged file is kept for inspection; more could fill the disk.
    for old in context.home.damaged.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            context.disk.remove(old)
    context.disk.replace(path, context.home.damaged / path.name)
    context.disk.sync_folder(path.parent)
    logger.error("damaged bundle put aside", extra={"path": str(context.home.damaged / path.name)})


def restore(seam: Switching, home: NodeHome, model: str, committed: Pointer | None) -> None:
    """Make serving serve the committed version of a model, or nothing if there is none."""
    serving = seam.versions().get(model)
    if committed is None:
        if serving is not None:
            seam.unload(model)
    elif serving != str(committed.version):
        seam.load(model, home.bundles / committed.sha256, committed.digest)
