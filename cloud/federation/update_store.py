"""Updates on the cloud's disk, in a folder of their own that only devices fill.

A device may put a file there while it has a lease to learn, up to what such an update can take.
Nothing in the folder counts until its bytes were compared with the lease and the shared state:
`judge` returns either an `Arrived`, or a `Refused` with its kind and the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import mmap
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from triplane.cloud.federation.journal import RunRecord
from triplane.cloud.federation.live import LiveRun, MakeEvent
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.disk import AppendFile
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.messages import value_from
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.files import (
    INLINE_BYTES,
    BadUpdate,
    Like,
    like_of,
    most_bytes,
    read_state,
    read_update,
)
from triplane.unified_ir.federated.core.files import KINDS as BAD_UPDATES
from triplane.unified_ir.federated.core.learn import buffers
from triplane.unified_ir.federated.core.lease_changes import open_lease
from triplane.unified_ir.federated.core.limits import Norms, norms_of
from triplane.unified_ir.federated.core.metric import Metric, metric_named
from triplane.unified_ir.federated.core.run import (
    Answered,
    Arrived,
    Declined,
    Event,
    Lease,
    Refused,
    RunMember,
    RunState,
    Score,
    Scored,
    Update,
)
from triplane.unified_ir.federated.core.vector import VectorLayout, decode_vector

LEASE_BYTES: Final = 16
MAX_REASON_CHARS: Final = 500
MAX_WORK_S: Final = 30 * 86_400.0
CLOCK_S: Final = 60.0
"""Largest backwards step of the clock, in seconds, since a round began."""
MAX_KEPT_BYTES: Final = 64 << 20
"""Limit for unpacked changes that are cached between their arrival and their round's end."""
BELATED: Final = 64
"""Limit for journaled contributions of a device without an open lease, plus `PER_ROUND` a round."""
PER_ROUND: Final = 4
UPLOADS: Final = 4
"""Different files that a device may begin for one lease."""

# fmt: off
KINDS: Final[Mapping[str, str]] = {
    **BAD_UPDATES,
    "missing":  "the file that it names was not uploaded",
    "figures":  "examples, loss or score out of range",
    "clipping": "it changes more than the strategy's clipping norm",
    "kind":     "an update where a score was asked for, or the other way round",
    "masking":  "an answer of a masked round that does not fit its terms or its step",
    "base":     "it was learned from another state than that of its lease",
}
# fmt: on


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """The tensors of an update of one run, the largest size of its file in bytes, its vector."""

    like: Like
    most_bytes: int
    vector: VectorLayout


Check = Callable[[LiveRun, str, Path], Awaitable[tuple[int, float]]]
"""(run, device, file of a reply) -> its examples and its loss, or NaN. Raises Refusal."""


Row = Callable[[str, bytes], bytes | None]
"""(run, SHA-256) -> bytes."""


def _no_row(_run: str, _sha256: bytes) -> bytes | None:
    return None


class UpdateStore:
    """The folder of updates, and the rules for writing into it. blobs: holds the states.

    row: returns a small update that came within its contribution, from the database; any thread
    may call it.
    """

    def __init__(self, folder: Path, blobs: BlobFolder, row: Row = _no_row) -> None:
        self._row = row
        self.folder = BlobFolder(folder)
        self._blobs = blobs
        self._specs: dict[str, UpdateSpec] = {}
        self._begun: dict[str, dict[bytes, None]] = {}  # the newest files by lease, oldest first
        self._outdated: set[bytes] = set()  # files that were begun before those
        # By blob, and whether it is a vector: bytes could be both a file and a vector.
        self._kept: dict[tuple[str, bool], tuple[int, dict[str, Array]]] = {}
        self._kept_bytes = 0

    async def update_spec(self, run: LiveRun) -> UpdateSpec:
        """Return the spec of a prepared run's updates, from its first state."""
        if run.record.id not in self._specs:
            prepared = run.record.prepared
            assert prepared is not None
            path = self._blobs.find(bytes.fromhex(prepared.state))
            like = like_of(await asyncio.to_thread(read_state, path, plan=prepared.plan_digest))
            self._specs[run.record.id] = UpdateSpec(like, most_bytes(like), VectorLayout.of(like))
        return self._specs[run.record.id]

    async def admit(
        self, runs: Iterable[LiveRun], device: str, sha256: bytes, size: int
    ) -> BlobFolder:
        """Return the folder if the device may now upload such a file.

        Conflict: it has no open lease to learn. InvalidInput: the file is larger than any update of
        its runs, or the device began too many files.
        """
        held = [(r, x) for r in runs if (x := _sends(r, device)) is not None]
        if not held:
            raise Conflict(
                f"{device!r} has no open lease to learn; an update is uploaded while its round "
                "goes on"
            )
        most = max([(await self.update_spec(run)).most_bytes for run, _ in held])
        if size > most:
            raise InvalidInput(f"an update of {device!r} has at most {most} bytes, got {size}")
        # A file counts for every open lease, since the upload does not say for which one it is.
        begun = [self._begun.setdefault(lease, {}) for _, lease in held]
        if not any(sha256 in files or len(files) < UPLOADS for files in begun):
            raise InvalidInput(f"{device!r} began {UPLOADS} files for one lease (limit {UPLOADS})")
        for files in begun:
            files.pop(sha256, None)  # so that it is the newest, also where its upload goes on
            files[sha256] = None
            if len(files) > UPLOADS:  # for other leases: this one has room for no more
                oldest = next(iter(files))
                del files[oldest]
                self._outdated.add(oldest)
        return self.folder

    async def judge(
        self, run: LiveRun, device: str, contribution: pb.Contribution, check: Check | None = None
    ) -> MakeEvent:
        """Return the event of a contribution. Reads the update; has no other effect.

        check: reads the file instead, if it is the reply of a device's own app.
        """
        lease = contribution.lease.hex()
        # Checked without reading the file: a device could otherwise keep the cloud busy with old
        # leases.
        if not _is_open(run.projection.state, device, lease):
            return late_event(device, lease)
        outcome = contribution.WhichOneof("outcome")
        if check is not None and outcome != "declined":
            return await self._answer_event(run, device, lease, contribution, check)
        if outcome == "update":
            return await self._update(run, device, lease, contribution.update)
        if outcome == "score":
            metric = metric_named(run.projection.metric)
            return _score(device, lease, contribution, metric)
        reason = printable(contribution.declined) or "it gave no reason"
        return lambda _, at_s: Declined(at_s=at_s, device=device, lease=lease, reason=reason)

    async def _update(self, run: LiveRun, device: str, lease: str, message: pb.Update) -> MakeEvent:
        try:
            _check_figures(run.projection.state, device, message)
            blob = message.blob
            data, is_vector = bytes_in(message), message.HasField("vector")
            update = value_from(
                Update, message, blob=blob.sha256.hex(), size=blob.size, norms=None,
                is_vector=is_vector,
            )  # fmt: skip
            spec = await self.update_spec(run)
            _check_form(run, message)

            def read() -> tuple[dict[str, Array], Norms | None]:
                if is_vector:
                    content = data or self._mapped(self.announced_file(blob.sha256, blob.size))
                    change = decode_vector(content, message.vector.layout, spec.vector, lease)
                else:
                    change = self._read(run, lease, update, spec, data or None)
                return change, _norms(run, change)

            # In the event loop if it is inline: a thread would cost more than parsing at most
            # 64 KiB.
            change, norms = read() if data else await asyncio.to_thread(read)
            update = replace(update, norms=norms)
            self._remember(update, change, len(data))
        except (Refusal, BadUpdate) as refusal:
            return refusal_event(device, lease, refusal.kind, str(refusal))
        return lambda _, at_s: Arrived(at_s=at_s, device=device, lease=lease, update=update)

    async def _answer_event(
        self, run: LiveRun, device: str, lease: str, contribution: pb.Contribution, check: Check
    ) -> MakeEvent:
        try:
            if contribution.WhichOneof("outcome") != "update":
                raise Refusal("kind", "the strategy asked for a reply, not a score")
            blob = contribution.update.blob
            path = self.announced_file(blob.sha256, blob.size)
            most = (await self.update_spec(run)).most_bytes
            if blob.size > most:
                raise Refusal("oversized", f"a reply has at most {most} bytes, got {blob.size}")
            examples, loss = await check(run, device, path)
            update = Update(
                blob=blob.sha256.hex(),
                size=blob.size,
                examples=examples,
                loss=loss,
                seconds=min(max(0.0, contribution.update.seconds), MAX_WORK_S),
            )
        except Refusal as refusal:
            return refusal_event(device, lease, refusal.kind, str(refusal))
        return lambda _, at_s: Answered(at_s=at_s, device=device, lease=lease, update=update)

    def _remember(self, update: Update, change: dict[str, Array], inline: int) -> None:
        """Keep a change until its round is reduced, so that its file is checked only once.

        A view of the file costs no memory. What was unpacked, or came inline, does; it is kept up
        to `MAX_KEPT_BYTES`.
        """
        owned = inline + sum(x.nbytes for x in change.values() if x.flags.owndata)
        key = update.blob, update.is_vector
        if key not in self._kept and self._kept_bytes + owned <= MAX_KEPT_BYTES:
            self._kept[key] = owned, change
            self._kept_bytes += owned

    def opened(self, run: RunRecord, lease: str, update: Update, like: Like) -> dict[str, Array]:
        """Return the change of a counted update, remembered or read from its file again."""
        remembered = self._kept.get((update.blob, update.is_vector))
        if remembered is not None:
            return remembered[1]
        sha256 = bytes.fromhex(update.blob)
        if update.is_vector:
            layout, in_file = VectorLayout.of(like), self.folder.has(sha256)
            row = None if in_file else self._row(run.id, sha256)
            content = self._mapped(self.folder.find(sha256)) if row is None else row
            return decode_vector(content, layout.digest, layout, lease)
        data = None if self.folder.has(sha256) else self._row(run.id, sha256)
        assert run.prepared is not None
        return read_update(
            self.folder.find(sha256) if data is None else self.folder.path(sha256),
            like,
            run=run.id,
            lease=lease,
            max_bytes=most_bytes(like),
            buffers=buffers(run.prepared.roles),
            data=data,
            verified=True,
        )

    @staticmethod
    def _mapped(path: Path) -> bytes | mmap.mmap:
        """Return the bytes of a complete file of the folder, which only ever is removed."""
        with path.open("rb") as file:
            is_empty = not path.stat().st_size  # which cannot be mapped
            return b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _read(
        self, run: LiveRun, lease: str, update: Update, spec: UpdateSpec, data: bytes | None = None
    ) -> dict[str, Array]:
        """Return the change in an update that was just announced. BadUpdate, Refusal."""
        sha256 = bytes.fromhex(update.blob)
        path = self.folder.path(sha256)
        if data is None:
            path = self.announced_file(sha256, update.size)
        at_hand = run.projection.state.round
        assert at_hand is not None
        assert run.record.prepared is not None
        return read_update(
            path,
            spec.like,
            run=run.record.id,
            lease=lease,
            max_bytes=spec.most_bytes,
            round=at_hand.number,
            compression=run.record.spec.compression,
            buffers=frozenset(buffers(run.record.prepared.roles)),
            data=data,
            verified=True,  # the folder's names are digests of whole files, and so is `data`'s
        )

    def small(self, run: str, blob: str) -> bytes:
        """Return bytes that came within a contribution; for a thread. Corrupt: they are gone."""
        data = self._row(run, bytes.fromhex(blob))
        if data is None:
            raise Corrupt(f"the database lacks {blob}, which run {run} names; restore a backup")
        return data

    def announced_file(self, sha256: bytes, size: int) -> Path:
        """Return the file of a contribution that was just announced. Raises Refusal."""
        try:
            path = self.folder.find(sha256)
        except (NotFound, InvalidInput) as error:
            raise Refusal("missing", f"the update was not uploaded: {error}") from error
        if path.stat().st_size != size:
            raise Refusal(
                "missing", f"the update has {path.stat().st_size} bytes, announced {size}"
            )
        return path

    def forget(self, leases: Iterable[Lease]) -> set[bytes]:
        """Forget leases that are over, and return the files that came for them, for `remove`."""
        files, self._outdated = self._outdated, set()
        for lease in leases:
            files |= self._begun.pop(lease.id, {}).keys()
            files |= {bytes.fromhex(answer.file) for answer in lease.answers if answer.file}
            if lease.update is not None:
                # A small one usually has no file. If it was uploaded, it is among the begun ones;
                # `sweep` removes those of an earlier process.
                if lease.update.size > INLINE_BYTES:
                    files.add(bytes.fromhex(lease.update.blob))
                key = lease.update.blob, lease.update.is_vector
                owned, _ = self._kept.pop(key, (0, {}))
                self._kept_bytes -= owned
        # A file came for every lease that was open then, and another run may need it still.
        return files.difference(*self._begun.values())

    def remove(self, files: Iterable[bytes]) -> None:
        """Remove files from the disk; for a thread."""
        for sha256 in files:
            self.folder.remove(sha256)

    def sweep(self, needed: set[str], since_s: float) -> None:
        """Remove, at the start, files that no open round names and no device can still announce.

        since_s: when the oldest open round began, infinite without one. Later files stay: their
        devices may have been cut off before they could announce them.
        """
        for path in [*self.folder.folder.iterdir(), *self.folder.partial.iterdir()]:
            if path.is_file() and path.name not in needed:
                with contextlib.suppress(FileNotFoundError):
                    # By time, because the lease of an upload is not stored with the file.
                    if path.stat().st_mtime < since_s - CLOCK_S:
                        self.folder.disk.remove(path)
        self._settle()

    def _settle(self) -> None:
        """Sync files that an earlier process wrote but did not sync before it was killed.

        From now on an upload with all its bytes, or with its final name, counts as durable. Without
        this sync, a power cut could remove a file that the journal names.
        """
        for path in self.folder.partial.iterdir():
            file = AppendFile(path, self.folder.disk)
            file.sync()
            file.close()
        self.folder.disk.sync_folder(self.folder.folder)


class Refusal(InvalidInput):
    """A contribution that cannot count. kind: a key of `KINDS`."""

    def __init__(self, kind: str, message: str) -> None:
        assert kind in KINDS
        super().__init__(message)
        self.kind = kind


def refusal_event(device: str, lease: str, kind: str, reason: str) -> MakeEvent:
    """Return the event of a contribution that cannot count; at most one for each lease."""
    text, belated = printable(reason), late_event(device, lease)

    def make(state: RunState, at_s: float) -> Event | None:
        if not _is_open(state, device, lease):
            return belated(state, at_s)
        return Refused(at_s=at_s, device=device, lease=lease, kind=kind, reason=text)

    return make


def wrong_base(state: RunState, device: str, contribution: pb.Contribution) -> MakeEvent | None:
    """Return the event that refuses a contribution to another base than its lease has, or None."""
    lease = open_lease(state, device)
    if lease is None or lease.base is None or not contribution.HasField("base"):
        return None
    base, wanted, lease_id = contribution.base, lease.base.version, contribution.lease.hex()
    if lease.id != lease_id or base == wanted:
        return None
    reason = (
        f"the lease learns from state {wanted} of the run, the contribution from state {base}; "
        "learn again from the state that the task names"
    )
    return refusal_event(device, lease_id, "base", reason)


def printable(text: str) -> str:
    """Cut a device's text to its limit and replace characters that a terminal acts on."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_REASON_CHARS])


def _sends(run: LiveRun, device: str) -> str | None:
    """Return the open lease for which a device may upload a file, or None.

    A device with an app also uploads its reply to an evaluation.
    """
    state = run.projection.state
    lease = open_lease(state, device)
    if lease is None or state.round is None:
        return None
    return lease.id if run.record.spec.flower.app or not state.round.evaluates else None


def most_examples(member: RunMember, *, evaluates: bool) -> int:
    """Return the most examples that a device's contribution may claim."""
    return member.held_out if evaluates else member.examples


def _is_open(state: RunState, device: str, lease: str) -> bool:
    open_one = open_lease(state, device)
    return open_one is not None and open_one.id == lease


def late_event(device: str, lease: str) -> MakeEvent:
    """Return the event of a contribution to no open lease; its file is not read.

    If the lease was opened meanwhile, its id was guessed, and the contribution is refused. Nothing
    is journaled for a device that is not a member, or that was late more often than its limit.
    """
    update = Update(blob="", size=0, examples=0, loss=math.nan, seconds=0.0)

    def make(state: RunState, at_s: float) -> Arrived | Refused | None:
        # Journaled events stay for ever, so a device must not be able to write them without a
        # limit.
        member, rounds = state.members.get(device), state.round.number if state.round else 0
        if member is None or member.dropped >= BELATED + PER_ROUND * rounds:
            return None
        if _is_open(state, device, lease):
            reason = "it came before its lease was open"
            return Refused(at_s=at_s, device=device, lease=lease, kind="kind", reason=reason)
        return Arrived(at_s=at_s, device=device, lease=lease, update=update)

    return make


def _score(device: str, lease: str, contribution: pb.Contribution, metric: Metric) -> MakeEvent:
    message = contribution.score
    score = value_from(Score, message, round=contribution.round)

    def make(state: RunState, at_s: float) -> Scored | Refused:
        member = state.members.get(device)
        most = member.held_out if member else 0
        number = state.round.number if state.round else 0
        if state.round is not None and not state.round.evaluates:
            reason = "the round learns; it asked for an update, not a score"
            return Refused(at_s=at_s, device=device, lease=lease, kind="kind", reason=reason)
        if state.round is not None and state.round.masked is not None:
            reason = "the round is masked, and this score is in the clear"
            return Refused(at_s=at_s, device=device, lease=lease, kind="kind", reason=reason)
        if not (1 <= score.samples <= most and score.round == number and _admits(metric, score)):
            values = "in [0, 1]" if metric.share else f"with a finite {metric.name}"
            reason = f"a score is of 1 to {most} samples {values} in round {number}, got {score}"
            text = printable(reason)
            return Refused(at_s=at_s, device=device, lease=lease, kind="figures", reason=text)
        return Scored(at_s=at_s, device=device, lease=lease, score=score)

    return make


def _admits(metric: Metric, score: Score) -> bool:
    return all(map(metric.admits, (score.before, score.after)))


def bytes_in(message: pb.Update) -> bytes:
    """Return the bytes of the update that are in the message, as a vector or as a file."""
    return message.vector.data if message.HasField("vector") else message.inline


def _check_form(run: LiveRun, message: pb.Update) -> None:
    """Raise Refusal if an update may not come in this form, or is not what it names."""
    data, spec = bytes_in(message), run.record.spec
    if message.HasField("vector") and (spec.HasField("flower") or spec.compression):
        raise Refusal("compression", "this run takes updates as files, the update is a vector")
    if not data:
        return
    if spec.HasField("flower"):
        raise Refusal("missing", "a run with a Flower strategy takes uploads; upload the update")
    if len(data) > INLINE_BYTES:
        text = f"an inline update has at most {INLINE_BYTES} bytes, got {len(data)}"
        raise Refusal("oversized", text)
    if len(data) != message.blob.size or hashlib.sha256(data).digest() != message.blob.sha256:
        raise Refusal("damaged", "the bytes in the contribution are not those that it names")


def _norms(run: LiveRun, change: dict[str, Array]) -> Norms | None:
    """Return the norms of an update if they count in this run. BadUpdate: beyond float64."""
    prepared = run.record.prepared
    assert prepared is not None
    if not run.record.spec.HasField("robustness"):
        return None
    norms = norms_of(change, frozenset(buffers(prepared.roles)))
    if not all(map(math.isfinite, norms)):
        raise BadUpdate("nonfinite", "the norm of the update is beyond float64")
    return norms


def _check_figures(state: RunState, device: str, message: pb.Update) -> None:
    if state.round is None or state.round.evaluates:
        raise Refusal("kind", "the round evaluates; it asked for a score, not an update")
    if state.round.masked is not None:
        raise Refusal("kind", "the round is masked, and this update is in the clear")
    most = state.members[device].examples
    if not 1 <= message.examples <= most:
        raise Refusal(
            "figures", f"the device offered {most} examples, its update has {message.examples}"
        )
    if not math.isfinite(message.loss) or not 0 <= message.seconds <= MAX_WORK_S:
        raise Refusal(
            "figures",
            f"a loss is finite and work takes 0 to {MAX_WORK_S:.0f} s, got {message.loss} and "
            f"{message.seconds}",
        )
