"""Parse and check the cloud's work document, so that a compromised cloud cannot harm a device.

Values out of range are refused, naming the limit, before anything is fetched. An invalid task that
names its lease is declined, so that the cloud's operators can read why; the other tasks are done.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from triplane.device.privacy_account import NoiseTask, noise_task
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.plan_statement import MAX_LEAST
from triplane.unified_ir.federated.core.compress import Compressor
from triplane.unified_ir.federated.core.files import INLINE_BYTES
from triplane.unified_ir.federated.core.learn import MAX_STEPS, Work

MAX_TASKS: Final = 64
"""Largest number of tasks in one document, and of settlements."""
MAX_ROUND: Final = 1_000_000_000
MAX_SAMPLES: Final = 1 << 24
"""Largest number of samples in one batch, support or query set."""
MAX_SECONDS: Final = 30 * 86_400.0
MAX_REASON_CHARS: Final = 1000
RUN: Final = re.compile(r"[0-9a-f]{16}")
LEASE_BYTES: Final = 16
KEYS: Final = "keys"
"""The step of a masked round in which a device learns; its secrets of the round begin with it."""
STEPS: Final = (KEYS, "share", "mask", "sign", "unmask")
"""The steps of a masked round, in order."""
MASKABLE: Final = ("learn", "evaluate")
"""Kinds of tasks whose result may be masked."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Name and size of bytes to fetch."""

    sha256: bytes
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work.

    kind: a field of the task's `work`. lease: its id in hexadecimal. until_s: the deadline, on the
    clock of `work_set_of`'s `now_s`. steps: number of steps of adaptation. message: the message for
    this device's own app.
    inline_state: the verified bytes of the state, if they came with the task. inline_bytes: largest
    update that is sent within its contribution; takes_vector: whether it may then be a vector.
    cohort: fewest updates of which the next state is computed, as the cloud says; 0 if it does not.
    returns: how often the run returned from a spoilt state. included: lease of this device's newest
    update that the state includes, or empty; None if the cloud does not say. step: of a masked
    round, a field of `MaskingStep.asks`; "" if the result is in the clear. noise: what the cloud
    asks of the change in a run with differential privacy. base: number of states that the run had
    published, of which `state` is the last; None if the cloud does not say. document: the message
    that it was parsed from.
    """

    kind: str
    lease: str
    plan: Blob
    state: Blob
    work: Work
    until_s: float
    compression: str = ""
    keep: float = 1.0
    steps: int = 0
    message: Blob | None = None
    inline_state: bytes = b""
    inline_bytes: int = 0
    takes_vector: bool = False
    cohort: int = 0
    noise: NoiseTask | None = None
    returns: int = 0
    included: str | None = None
    step: str = ""
    base: int | None = None
    document: pb.Task = field(default_factory=pb.Task, repr=False, compare=False)

    @property
    def key(self) -> str:
        """What one contribution answers: a lease, or one step of a masked round's lease."""
        return f"{self.lease}.{self.step}" if self.step else self.lease

    def contribution(self, **outcome: Any) -> pb.Contribution:
        """Return a contribution for this task."""
        lease, run, round_ = bytes.fromhex(self.lease), self.work.run, self.work.round
        return pb.Contribution(run=run, round=round_, lease=lease, base=self.base, **outcome)

    def decline(self, reason: str) -> pb.Contribution:
        """Return a contribution that says why there is no result."""
        return self.contribution(declined=reason[:MAX_REASON_CHARS])


@dataclass(frozen=True, slots=True)
class WorkSet:
    """All work that a device has now.

    refused: contributions that decline invalid tasks. document: the message it was parsed from.
    population_asked: whether a run asks the population offered; None if the cloud does not say so.
    """

    tasks: tuple[Task, ...] = ()
    settled: tuple[pb.Settlement, ...] = ()
    refused: tuple[pb.Contribution, ...] = ()
    document: pb.Work = field(default_factory=pb.Work, repr=False, compare=False)
    population_asked: bool | None = None

    @property
    def leases(self) -> frozenset[str]:
        """Leases of all tasks, including refused ones."""
        return frozenset(t.lease for t in self.tasks) | {c.lease.hex() for c in self.refused}

    @property
    def keys(self) -> frozenset[str]:
        """Keys of all tasks; of refused ones their leases."""
        return frozenset(t.key for t in self.tasks) | {c.lease.hex() for c in self.refused}


def work_set_of(message: pb.Work, device: str, *, max_blob_bytes: int, now_s: float) -> WorkSet:
    """Parse the document. InvalidInput: it is invalid as a whole."""
    if len(message.tasks) > MAX_TASKS or len(message.settled) > MAX_TASKS:
        raise InvalidInput(
            f"a work document has at most {MAX_TASKS} tasks and settlements, got "
            f"{len(message.tasks)} and {len(message.settled)}"
        )
    tasks, refused = [], []
    for task in message.tasks:
        # Outside the `try`: without a valid lease, no contribution could decline the task by name.
        _check_lease(task.run, task.lease)
        try:
            tasks.append(_task(task, device, max_blob_bytes, now_s))
        except InvalidInput as error:
            reason = str(error)[:MAX_REASON_CHARS]
            run, round_, lease = task.run, task.round, task.lease
            refused.append(pb.Contribution(run=run, round=round_, lease=lease, declined=reason))
    asked = message.population_asked if message.HasField("population_asked") else None
    for settlement in message.settled:
        _check_lease(settlement.run, settlement.lease)
    return WorkSet(tuple(tasks), tuple(message.settled), tuple(refused), message, asked)


def _task(message: pb.Task, device: str, max_blob_bytes: int, now_s: float) -> Task:
    # A kind that a later protocol adds parses as an unset field here, and is declined.
    kind = message.WhichOneof("work") or "nothing"
    if kind not in KINDS:
        raise InvalidInput(f"this device supports tasks of {', '.join(KINDS)}, got {kind!r}")
    _in_range("deadline_s", message.deadline_s, MAX_SECONDS)
    _in_range("round", message.round, MAX_ROUND)
    task = Task(
        kind=kind,
        lease=message.lease.hex(),
        plan=_blob("plan", message.plan, max_blob_bytes),
        state=_blob("state", message.state, max_blob_bytes),
        work=_work(message, device),
        until_s=now_s + message.deadline_s,
        inline_state=_inline_state(message),
        # The cloud may ask for more than this device puts into one message of the session.
        inline_bytes=min(message.inline_bytes, INLINE_BYTES),
        takes_vector=message.takes_vector,
        cohort=min(message.cohort, MAX_LEAST),
        returns=message.returns,
        included=_included(message),
        step=_step(message, kind),
        base=message.base if message.HasField("base") else None,
        document=message,
    )
    return KINDS[kind](task, message, max_blob_bytes)


def _step(message: pb.Task, kind: str) -> str:
    """Return the step of a masked round. Its contents are parsed where tasks run."""
    if not message.HasField("masking"):
        return ""
    step = message.masking.WhichOneof("asks")
    if kind not in MASKABLE or step is None:
        raise InvalidInput(
            f"masking has {', '.join(STEPS)} of a task to {' or '.join(MASKABLE)}, got {step!r} of "
            f"{kind!r}"
        )
    if message.learn.compression:
        raise InvalidInput(
            f"a masked update is not compressed, the task asks for {message.learn.compression!r}"
        )
    return str(step)


def _learns(task: Task, message: pb.Task, _max_blob_bytes: int) -> Task:
    learn = message.learn
    if not 1 <= task.work.steps <= MAX_STEPS:
        raise InvalidInput(f"learning must take 1 to {MAX_STEPS} steps, got {task.work.steps}")
    keep = learn.keep or 1.0
    # Constructed only to validate its arguments.
    Compressor(learn.compression, keep=keep)
    masked = message.HasField("masking")
    noise = noise_task(message.noise, masked=masked) if message.HasField("noise") else None
    if noise is not None and learn.compression:
        raise InvalidInput(
            "a change that is clipped for differential privacy is not compressed, which may make "
            f"it longer; the task asks for {learn.compression!r}"
        )
    return replace(task, compression=learn.compression, keep=keep, noise=noise)


def _evaluates(task: Task, message: pb.Task, _max_blob_bytes: int) -> Task:
    _in_range("steps of adaptation", message.evaluate.steps, MAX_STEPS)
    return replace(task, steps=message.evaluate.steps)


def _answers(task: Task, message: pb.Task, max_blob_bytes: int) -> Task:
    return replace(task, message=_blob("message", message.flower, max_blob_bytes))


KINDS: Final[dict[str, Callable[[Task, pb.Task, int], Task]]] = {
    "learn": _learns,
    "evaluate": _evaluates,
    "flower": _answers,
}
"""Parsers of tasks, by the field of `Task.work`."""


def _work(message: pb.Task, device: str) -> Work:
    sampling = message.sampling
    for name in ("batch_size", "support", "query"):
        _in_range(name, getattr(sampling, name), MAX_SAMPLES)
    sizes = {n: getattr(sampling, n) for n in ("steps", "batch_size", "support", "query")}
    return Work(run=message.run, round=message.round, device=device, seed=message.seed, **sizes)


def _blob(what: str, blob: pb.Blob, max_bytes: int) -> Blob:
    if len(blob.sha256) != 32:
        raise InvalidInput(f"a {what} is named by 32 bytes of SHA-256, got {len(blob.sha256)}")
    if not 1 <= blob.size <= max_bytes:
        raise InvalidInput(f"a {what} has 1 to {max_bytes} bytes on this device, got {blob.size}")
    return Blob(blob.sha256, blob.size)


def _inline_state(message: pb.Task) -> bytes:
    data = message.inline_state
    if not data:
        return b""
    if len(data) > INLINE_BYTES:
        raise InvalidInput(f"a state in a task has at most {INLINE_BYTES} bytes, got {len(data)}")
    # Verified here, because a download would have been verified against the same digest.
    if len(data) != message.state.size or hashlib.sha256(data).digest() != message.state.sha256:
        raise InvalidInput("the state in the task is not the one that it names")
    return data


def _included(message: pb.Task) -> str | None:
    if not message.HasField("included"):
        return None
    if len(message.included) not in {0, LEASE_BYTES}:
        raise InvalidInput(f"a lease has {LEASE_BYTES} bytes, got {len(message.included)}")
    return message.included.hex()


def _check_lease(run: str, lease: bytes) -> None:
    if not RUN.fullmatch(run) or len(lease) != LEASE_BYTES:
        raise InvalidInput(
            f"a run is 16 hexadecimal digits and a lease {LEASE_BYTES} bytes, got {run[:80]!r} "
            f"and {len(lease)} bytes"
        )


def _in_range(what: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise InvalidInput(f"{what} is 0 to {most:.0f} in a task, got {value}")
