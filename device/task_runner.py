"""Do tasks, each from its document to its contribution: fetch, learn or score, store, upload.

A task runs in a separate thread, so that the session goes on. The cloud's data is checked here:
digests, whether plan and state belong together, demands that this version does not support. A task
that is refused gives a contribution that declines with the reason; only an error that may pass
later is raised (`Unavailable`).
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np

from triplane.device.dataset_shard import shard_for
from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.memory import (
    UNSYNCED,
    Memory,
    PendingUpdate,
    PersonalState,
    UpdateFacts,
    check_base,
    unsettled,
)
from triplane.device.model import SHARED, DeviceModel, ModelChoice
from triplane.device.privacy_account import PrivacyAccount
from triplane.device.roster import current_roster
from triplane.device.signed_plans import SignedPlans, Verify, verified_here
from triplane.device.stopping import StopToken, Withdrawn
from triplane.device.tasks import KEYS, MAX_REASON_CHARS, Blob, Task, WorkSet
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder, digest_of
from triplane.proto.channels import connect
from triplane.proto.disk import OS_DISK, write_atomic
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, TriplaneError, Unavailable
from triplane.proto.roster import Roster
from triplane.proto.transfer import download, size_of, upload
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.files import (
    encode_update,
    like_of,
    read_state,
    write_update,
)
from triplane.unified_ir.federated.core.learn import (
    ANCHOR,
    SHARED_ROLES,
    Shard,
    buffers,
    check_labels,
    learn,
    metric_of_plan,
    shared,
)
from triplane.unified_ir.federated.core.vector import VectorLayout, vector_buffers
from triplane.unified_ir.federated.privacy.clipping import clip
from triplane.unified_ir.files.container import Container, release_mapped
from triplane.unified_ir.runtime.plan import Plan
from triplane.unified_ir.runtime.session import CancellationToken as GraphStop
from triplane.unified_ir.runtime.session import OutOfMemory, SessionOptions

if TYPE_CHECKING:
    from triplane.device.masked_rounds import MaskedRound, MaskedRounds

logger = logging.getLogger(__name__)

OPTIONS: Final = SessionOptions(arena=False)
"""One thread that does not spin, and no memory kept between runs: others use the device, too."""


class StoppablePlan:
    """A `Learner` that runs a plan until `stop`: it ends between the nodes of a graph, too."""

    def __init__(self, plan: Plan, stop: StopToken) -> None:
        self._plan, self._stop = _stopping(plan, stop), stop
        self.entries, self.roles, self.inputs = plan.entries, plan.roles, plan.inputs
        self.state, self.view, self.assign = plan.state, plan.view, plan.assign

    def run(self, entry: str, batch: Mapping[str, Array], /) -> Mapping[str, Array]:
        """See `Plan`; raise Withdrawn instead of taking a step of withdrawn work."""
        self._stop.check()
        try:
            return self._plan.run(entry, batch)
        except Unavailable:
            self._stop.check()
            raise


class TaskRunner:
    """Runs the tasks of a device. One thread at a time uses it, for `do` or `settle`.

    channel: opens a channel to the cloud, or returns the open one. verify: looks a plan up in
    signed metadata. app: the owner's `ClientApp`.
    """

    def __init__(
        self,
        home: DeviceHome,
        shard: Shard,
        settings: DeviceSettings,
        channel: Callable[[], grpc.Channel],
        verify: Verify,
        app: Any = None,
    ) -> None:
        self._home, self._samples, self._settings = home, shard, settings
        self._signed = SignedPlans(settings, verify, self._roster)
        self._shard = shard  # as the present plan takes it
        self._channel, self._app = channel, app
        self._blobs = BlobFolder(home.plans, max_bytes=settings.max_blob_bytes)
        self._states = BlobFolder(home.plans, UNSYNCED, max_bytes=settings.max_blob_bytes)
        self.memory = Memory(home.personal, home.pending)
        self.model = DeviceModel(home.model)
        self._privacy = PrivacyAccount(home, settings)
        self._plan: Plan | None = None
        self._plan_blob = b""
        self._fetched: set[bytes] = set()  # the state that this process fetched and verified
        self._fresh: dict[str, Array] = {}
        self._layout = VectorLayout.of({})  # of the present plan
        self._assigned: Mapping[str, Array] = {}  # the start of the present round
        self._inline_state: tuple[bytes, Mapping[str, Array]] | None = None  # of this plan
        self._masking: MaskedRounds | None = None

    def do(self, task: Task, stop: StopToken, wanted: Iterable[Blob] = ()) -> pb.Contribution:
        """Return the task's contribution. wanted: blobs of other current tasks, which stay on disk.

        Withdrawn: the task was withdrawn. Unavailable: the link or the disk failed; try again.
        """
        try:
            return self._attempt(task, stop, frozenset(blob.sha256 for blob in wanted))
        except Withdrawn:
            self._leave(task, "its step was withdrawn, or was not done by its deadline")
            raise

    def _attempt(self, task: Task, stop: StopToken, wanted: frozenset[bytes]) -> pb.Contribution:
        """Return the contribution, which declines for every error that does not pass by itself."""
        try:
            return self._do(task, stop, wanted)
        except Unavailable:
            stop.check()
            raise
        except (MemoryError, OutOfMemory) as error:
            stop.check()
            limit = (
                f"out of memory; a task may take {self._settings.max_memory_bytes} bytes where it "
                "runs in a child process (max_memory_bytes in this device's device.json)"
            )
            return self._decline(task, f"{limit}: {error}")
        except TriplaneError as error:
            stop.check()
            return self._decline(task, str(error))

    def _decline(self, task: Task, reason: str) -> pb.Contribution:
        self._leave(task, reason)
        facts = {"run": task.work.run, "round": task.work.round, "lease": task.lease[:8]}
        logger.warning("task declined", extra={**facts, "reason": reason})
        return task.decline(reason)

    def _leave(self, task: Task, reason: str) -> None:
        if self._masking is not None:
            self._masking.leave(task, reason)

    def settle(self, work_set: WorkSet) -> None:
        """Let updates that counted take effect, and forget those whose lease is over."""
        if self._masking is not None:
            self._masking.keep(work_set.leases)
        settlements = {(s.run, s.lease.hex()): s for s in work_set.settled}
        for pending in self.memory.pending():
            run, lease = pending.facts.run, pending.facts.lease
            settlement = settlements.get((run, lease))
            # Neither settled nor over: the round is still open.
            if settlement is None and lease in work_set.leases:
                continue
            counted = settlement is not None and settlement.counted
            self.memory.settle(pending, counted=counted)
            reason = settlement.reason[:MAX_REASON_CHARS] if settlement else "its lease is over"
            facts = {"run": run, "round": pending.facts.round, "counted": counted, "reason": reason}
            logger.info("update settled", extra=facts)
        if not work_set.tasks:
            self.model.write_waiting()

    def write_model(self) -> None:
        """Write the newest state that waits for the next one: the device stops."""
        self.model.write_waiting(at_once=True)

    def _do(self, task: Task, stop: StopToken, wanted: frozenset[bytes]) -> pb.Contribution:
        if task.step not in {"", KEYS}:
            return self._masked_rounds().contribution(task, stop)
        wanted |= {task.plan.sha256, task.state.sha256}
        for pending in self.memory.pending():
            # The update of this lease was stored before a crash or a lost link: send the same
            # bytes, unless its plan is not signed any more (or never was: an earlier release).
            if pending.facts.lease == task.lease and not task.step:
                check_base(pending.facts, task.state.sha256)
                if pending.layout and not task.takes_vector:
                    # The cloud is of an earlier release now: learn again, for a file.
                    self.memory.settle(pending, counted=False)
                    continue
                if not self.memory.has_bytes(pending):
                    raise Conflict("the update of this lease is masked and is sent in no other way")
                self._signed.require(task, self._fetch(task.plan, self._blobs, wanted, stop))
                return self._contribution_of(pending, task, stop)
            other = pending.facts.lease != task.lease
            if other and pending.facts.run == task.work.run and task.kind in WRITERS:
                raise Conflict(unsettled(pending.facts))
        self._check_work(task)
        path = self._fetch(task.plan, self._blobs, wanted, stop)
        # Before anything in the plan is used, or any other file is fetched for it.
        statement = self._signed.require(task, path)
        if task.message is not None:
            self._signed.check_message(statement, task)
        if not task.inline_state or task.message is not None:
            self._fetch(task.state, self._states, wanted, stop)
        if task.message is not None:
            return self._answer_by_app(
                task, path, task.message, wanted | {task.message.sha256}, stop
            )
        plan = self._plan_of(task, path)
        self._signed.check(statement, plan, task, self._shard)
        self._assign(plan, task)
        try:
            return (self.learn if task.kind == "learn" else self.score)(plan, task, stop)
        finally:
            if plan.limits.max_steps or plan.limits.time_s:
                # Also after an error: a task that always fails must not get unlimited steps out of
                # a plan that limits them.
                self.memory.note_spent(plan.digest, plan.steps, plan.spent_s)

    def _check_work(self, task: Task) -> None:
        """Raise Conflict if this device does no such work at present."""
        if task.kind in WRITERS:
            self._privacy.check(task.work.run, task.work.round, task.lease, task.noise)
        if task.kind == "evaluate" and not self._settings.scores:
            raise Conflict("the owner of this device shares no scores (scores in device.json)")
        if task.message is not None and self._app is None:
            raise Conflict("this device has no ClientApp; its owner gives it one (--app)")

    def learn(self, plan: Plan, task: Task, stop: StopToken) -> pb.Contribution:
        """Learn; an update that implies something is on the disk before any byte of it is sent."""
        if plan.compression and task.compression not in plan.compression:
            raise Conflict(
                f"the plan demands an update by {' or '.join(plan.compression)}, the task asks for "
                f"{task.compression or 'none'}"
            )
        masked = self._begun(plan, task) if task.step else None
        self._adopt_unmeasured(plan, task)
        began_s = time.monotonic()
        learned = learn(
            StoppablePlan(plan, stop), task.work, self._shard, lambda: self._state_of(plan, task)
        )
        facts = _update_facts(task, learned.examples, learned.loss, began_s)
        change = learned.change
        if masked is not None:  # which clips it, and says whether it was
            return self._advertised(plan, task, masked, facts, change)
        if task.noise is not None:
            change = {name: np.array(x) for name, x in change.items()}
            clip(change, task.noise.clip)
        return self._contribution_of(self._written(plan, task, facts, change), task, stop)

    def _begun(self, plan: Plan, task: Task) -> "MaskedRound":
        """Return the masked round of a task; its state is hashed here, whatever the task says."""
        if task.inline_state:
            state = hashlib.sha256(task.inline_state).digest()
        else:
            state = digest_of(self._states.find(task.state.sha256))
        if task.kind == "evaluate":
            return self._masked_rounds().begin_scores(task, state, metric_of_plan(plan))
        return self._masked_rounds().begin(task, state, plan.view(*SHARED_ROLES), plan.roles)

    def _advertised(
        self,
        plan: Plan,
        task: Task,
        masked: "MaskedRound",
        facts: UpdateFacts,
        change: dict[str, Array],
    ) -> pb.Contribution:
        """Keep an update as integers and return the keys of its round.

        What it implies is on the disk before the round can count it.
        """
        if personal := plan.view("personal"):
            self.memory.keep(facts, b"", PersonalState(personal, {}))
        else:
            self.memory.hold(facts, b"")
        return self._masked_rounds().advertise(task, masked, change, facts.examples)

    def _masked_rounds(self) -> "MaskedRounds":
        if self._masking is None:
            # Imported here: cryptography takes 14 MB that a device without masking need not hold.
            from triplane.device.masked_rounds import MaskedRounds

            self._masking = MaskedRounds(self._home, self._channel, self._roster, self._privacy)
        return self._masking

    def _roster(self) -> Roster | None:
        return current_roster(self._home, time.time())

    def score(self, plan: Plan, task: Task, stop: StopToken) -> pb.Contribution:
        """Score the shared state before and after adaptation; keep the better for `predict`."""
        masked = self._begun(plan, task) if task.step else None
        judged = self.model.judge(
            plan, StoppablePlan(plan, stop), task.work, self._shard,
            steps=task.steps, blob=task.plan.sha256.hex(),
            restart=lambda: self._assign(plan, task),
            other=lambda blob: _stopping(Plan.load(self._home.plans / blob, options=OPTIONS), stop),
        )  # fmt: skip
        metric, samples = metric_of_plan(plan), judged.samples
        before, after = (metric.reported(x, samples) for x in (judged.before, judged.after))
        if masked is not None:
            return self._masked_rounds().advertise_scores(task, masked, (before, after), samples)
        score = pb.Score(samples=samples, before=before, after=after, round=task.work.round)
        return task.contribution(score=score)

    def _answer_by_app(
        self, task: Task, plan: Path, message: Blob, wanted: frozenset[bytes], stop: StopToken
    ) -> pb.Contribution:
        """Let the owner's app answer; its reply is stored with its state before it is sent."""
        from triplane.device.flower import app_reply

        run, name = task.work.run, f"flower.{task.work.run}"
        state = read_state(
            self._blobs.find(task.state.sha256), plan=Container(plan, kind="plan").digest
        )
        arrays = {n: x for n, x in state.items() if np.issubdtype(x.dtype, np.floating)}
        kept = self.memory.personal(run).tensors.get(name)
        data = self._fetch(message, self._blobs, wanted, stop).read_bytes()
        began_s = time.monotonic()
        reply = app_reply(
            self._app, data, arrays, b"" if kept is None else kept.tobytes(), run=run,
            device=task.work.device,
        )  # fmt: skip
        stop.check()
        facts = _update_facts(task, reply.examples, reply.loss, began_s)
        path = self._home.pending / f"{run}.new"
        write_atomic(path, reply.reply)
        implied = PersonalState({name: np.frombuffer(reply.kept, np.uint8)}, {})
        return self._contribution_of(self.memory.keep(facts, path, implied), task, stop)

    def _written(
        self, plan: Plan, task: Task, facts: UpdateFacts, change: Mapping[str, Array]
    ) -> PendingUpdate:
        is_durable, layout = not _can_repeat(plan, task), self._layout
        if task.takes_vector and not is_durable:
            buffers_ = vector_buffers(change, layout, task.lease)
            vector = b"".join(buffers_) if layout.size <= task.inline_bytes else buffers_
            return self.memory.hold(facts, vector, layout.digest)
        options: dict[str, Any] = {
            "run": facts.run,
            "round": facts.round,
            "lease": facts.lease,
            "compression": task.compression,
            "keep": task.keep,
            "seed": task.work.seed,
            "remainder": _fitting(self.memory.remainder(facts.run, returns=task.returns), change),
            "device": task.work.device,
            "buffers": buffers(plan.roles),
        }
        update: Path | bytes
        if sum(x.nbytes for x in change.values()) <= task.inline_bytes:
            update, remainder = encode_update(change, **options)
        else:
            update = self._home.pending / f"{facts.run}.new"
            disk = OS_DISK if is_durable else UNSYNCED
            remainder = write_update(update, change, disk=disk, **options).remainder
        if not is_durable:
            return self.memory.hold(facts, update)
        implied = PersonalState(plan.view("personal"), remainder)
        return self.memory.keep(facts, update, implied, returns=task.returns)

    def _contribution_of(
        self, pending: PendingUpdate, task: Task, stop: StopToken
    ) -> pb.Contribution:
        """Return the contribution of an update: with its bytes, or after uploading them."""
        facts = pending.facts
        # Before a byte leaves. A repeat under the same lease is free: it sends the same bytes.
        self._privacy.charge(facts.run, facts.round, facts.lease, task.noise)
        data = self.memory.inline_of(pending, task.inline_bytes) if task.inline_bytes else None
        stop.check()
        if data is None:
            source = self.memory.source_of(pending)
            # Returns only when the cloud has stored all bytes, so the contribution never names a
            # missing blob.
            sha256, size = upload(self._channel(), source), size_of(source)
        else:
            sha256, size = hashlib.sha256(data).digest(), len(data)
        update = pb.Update(
            blob=pb.Blob(sha256=sha256, size=size), examples=facts.examples, loss=facts.loss,
            seconds=facts.seconds,
        )  # fmt: skip
        if pending.layout:
            update.vector.CopyFrom(pb.UpdateVector(data=data or b"", layout=pending.layout))
        elif data is not None:
            update.inline = data
        return task.contribution(update=update)

    def _fetch(
        self, blob: Blob, into: BlobFolder, wanted: frozenset[bytes], stop: StopToken
    ) -> Path:
        if into.has(blob.sha256):
            return into.path(blob.sha256)
        self._make_room(blob, wanted)
        path = download(
            self._channel(), blob.sha256, blob.size, into, lambda _done, _size: stop.check()
        )
        # Its digest was just verified by the download, so `read_state` need not hash it again.
        self._fetched = {blob.sha256} if into is self._states else self._fetched
        return path

    def _make_room(self, blob: Blob, wanted: frozenset[bytes]) -> None:
        """Remove blobs that neither a task nor the model needs. Conflict if that is not enough."""
        used, choice = 0, self.model.choice()
        if choice is not None:
            wanted |= {bytes.fromhex(choice.plan)}
        for path in (*self._home.plans.iterdir(), *self._blobs.partial.iterdir()):
            if path.is_dir():
                continue
            if bytes.fromhex(path.name) in wanted:
                used += path.stat().st_size
            else:
                self._blobs.remove(bytes.fromhex(path.name))
        if used + blob.size > self._settings.max_disk_bytes:
            raise Conflict(
                f"plans and states take at most {self._settings.max_disk_bytes} bytes here "
                f"(max_disk_bytes in device.json); {used} are in use and {blob.size} more are asked"
            )

    def _plan_of(self, task: Task, path: Path) -> Plan:
        if self._plan is None or self._plan_blob != task.plan.sha256:
            # Free the old plan before loading the new one: the device may lack memory for both.
            self._plan, self._fresh, self._assigned, self._inline_state = None, {}, {}, None
            plan = Plan.load(path, options=OPTIONS)
            self._shard = shard_for(plan, self._samples)
            check_labels(plan, self._shard)
            of_run = set(shared(plan.roles))
            shared_state = {n: x for n, x in plan.view().items() if n in of_run}
            self._layout = VectorLayout.of(like_of(shared_state))
            kept = (n for n in plan.roles if n not in of_run and not n.startswith(ANCHOR))
            initial = plan.view()
            self._fresh = {name: initial[name].copy() for name in kept}
            plan.steps, plan.spent_s = self.memory.effort_spent(plan.digest)
            self._plan, self._plan_blob = plan, task.plan.sha256
        return self._plan

    def _state_of(self, plan: Plan, task: Task) -> Mapping[str, Array]:
        if task.inline_state:
            if self._inline_state is None or self._inline_state[0] != task.inline_state:
                # The bytes were compared with the state's digest when the document was parsed.
                state = read_state(
                    Path("state"), plan=plan.digest, data=task.inline_state, verified=True
                )
                self._inline_state = task.inline_state, state
            return self._inline_state[1]
        path = self._states.find(task.state.sha256)
        try:
            verified = task.state.sha256 in self._fetched
            return read_state(path, plan=plan.digest, verified=verified)
        except Corrupt as error:
            if digest_of(path) == task.state.sha256:
                raise  # these are the bytes that the cloud sent
            self._states.remove(task.state.sha256)
            raise Unavailable(f"a power cut damaged the state on disk: {error}") from error

    def _assign(self, plan: Plan, task: Task) -> None:
        """Set the start of a round: the shared state, our personal tensors, the plan's rest."""
        state = self._state_of(plan, task)
        # A state that also set personal tensors would let the cloud overwrite what never leaves.
        if odd := sorted(state.keys() ^ set(shared(plan.roles))):
            raise InvalidInput(f"the state of a task is all shared state; it differs in {odd[:4]}")
        # Personal tensors with an anchor are an algorithm's: SCAFFOLD's control variates sum up to
        # that of the shared state, which begins at 0 in each run and after each return.
        fresh = {name.removeprefix(ANCHOR) for name in plan.roles if name.startswith(ANCHOR)}
        personal = plan.view("personal")
        if task.included is not None:
            run = task.work.run
            self.memory.take_back(run, included=task.included, returns=task.returns)
        kept = (
            self.memory.personal(task.work.run, fresh, returns=task.returns).tensors
            if personal
            else {}
        )
        ours = _fitting(kept, personal)
        # Later entries win: optimizer and the like restart from the plan, then shared, then
        # personal.
        self._assigned = {**self._fresh, **state, **ours}
        plan.assign(self._assigned)
        # They stay mapped while the model may have to be written, but not in memory.
        release_mapped(state.values())

    def _adopt_unmeasured(self, plan: Plan, task: Task) -> None:
        """Use the shared state if no model was measured: at first, or with nothing held out.

        A measured model stays until another one is measured, even if a run has another plan.
        """
        blob, choice = task.plan.sha256.hex(), self.model.choice()
        if not choice or not choice.samples or not self._shard.held_out_samples:
            work = task.work
            new = ModelChoice(run=work.run, round=work.round, plan=blob, chosen=SHARED)
            # Held no longer than needed: a device may lack the memory for another copy.
            assigned, self._assigned = self._assigned, {}
            anchors = {n: n.removeprefix(ANCHOR) for n in plan.roles if n.startswith(ANCHOR)}
            at_start = {n: assigned[base] for n, base in anchors.items() if base in assigned}
            self.model.adopt_unmeasured(plan, new, {**at_start, **assigned})


class InProcessExecutor(TaskRunner):
    """Runs tasks in the calling thread of this process; onnxruntime's own flag ends graphs.

    Any thread may call `interrupt` and `close`.
    """

    def __init__(
        self,
        home: DeviceHome,
        shard: Shard,
        settings: DeviceSettings,
        app: Any,
        verify: Verify | None = None,
    ) -> None:
        """Take the way to look plans up; by default it is done in this process."""
        if verify is None:
            verify = verified_here(home, self._open, settings)
        super().__init__(home, shard, settings, self._open, verify, app)
        self._identity = home.identity
        self._open_channel: grpc.Channel | None = None
        self._lock = threading.Lock()

    def use_new_certificate(self) -> None:
        """Use the new certificate from now on."""
        self.interrupt()

    def interrupt(self) -> None:
        """Close the channel, which ends a call that waits for the cloud."""
        with self._lock:
            old, self._open_channel = self._open_channel, None
        # Outside the lock: closing waits for calls in progress, which may be opening a channel.
        if old is not None:
            old.close()

    def close(self) -> None:
        """Release all resources."""
        self.interrupt()

    def _open(self) -> grpc.Channel:
        with self._lock:
            if self._open_channel is None:
                self._open_channel = connect(self._identity)
            return self._open_channel


WRITERS: Final = ("learn", "flower")
"""Kinds of tasks that write an update."""


def _can_repeat(plan: Plan, task: Task) -> bool:
    """Return whether a killed process could learn the same update again without a loss.

    Compression leaves a remainder, and steps of a plan with limits cannot be repeated. With noise,
    other samples must not give a second update under one charge.
    """
    if task.noise is not None:
        return False
    limited = plan.limits.max_steps or plan.limits.time_s
    return not (plan.view("personal") or task.compression or limited)


def _stopping(plan: Plan, stop: StopToken) -> Plan:
    """Return the plan after tying its graphs to `stop`: a loop may never end by itself."""
    graphs = GraphStop()
    plan.stop_with(graphs)
    stop.call(graphs.set)
    return plan


def _update_facts(task: Task, examples: int, loss: float, began_s: float) -> UpdateFacts:
    work, seconds = task.work, time.monotonic() - began_s
    if task.noise is not None:  # epsilon covers no such numbers, and all devices weigh the same
        examples, loss, seconds = 1, 0.0, 0.0
    return UpdateFacts(
        run=work.run, round=work.round, lease=task.lease, examples=examples, loss=loss,
        seconds=seconds, base=task.state.sha256.hex(),
    )  # fmt: skip


def _fitting(ours: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Array]:
    """Return those of our tensors that fit this plan; others belong to another model."""
    return {
        name: x
        for name, x in ours.items()
        if name in like and (x.dtype, x.shape) == (like[name].dtype, like[name].shape)
    }
