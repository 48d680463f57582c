"""A plan: the graphs and the state that a device gets, run step by step within limits.

Parts: `plan.pb`, `ENTRY.onnx` for each entry, `state.safetensors` with a role for every tensor.
One rule connects graphs and state: a graph input with the name of a state tensor is that tensor,
and the output `next_name(tensor)` is its new value; every other input belongs to the batch, and
every other output is a result. Loading refuses, by name, everything that a plan demands and this
version does not offer: any demand for privacy, and compressions outside `COMPRESSIONS`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import numpy as np

from triplane.proto import files_pb2 as pb
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.messages import message_from, value_from
from triplane.unified_ir.files import container, digests
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.files.digests import Buffer
from triplane.unified_ir.files.manifest import ROLES, parse
from triplane.unified_ir.files.tensors import StoredTensor
from triplane.unified_ir.runtime.description import bounded, check_amounts
from triplane.unified_ir.runtime.session import (
    DEFAULT_OPTIONS,
    CancellationToken,
    Loop,
    Session,
    SessionOptions,
)
from triplane.unified_ir.runtime.signature import INSIDE_ONLY, Array, TensorInfo, next_name

DESCRIPTION: Final = "plan.pb"
STATE: Final = "state.safetensors"
MAX_STEPS: Final = 2**31
"""Limit for the steps of one call of `adapt`: years of work, far below the limit of a counter."""

LOSS: Final = "loss"
"""The result that `adapt` collects."""

COMPRESSIONS: Final = ("int8", "top-k")
"""Names of compressions of updates; `federated/core/compress.py`, above this package, has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for a device's work on a plan, 0 for no limit.

    max_steps: steps that change state, over the plan's life; the count is saved with its state.
    time_s: seconds spent inside steps, counted and saved like them. memory_bytes: limit for two
    copies of the state, checked on loading.
    """

    max_steps: int = 0
    memory_bytes: int = 0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpec:
    """The contents of a plan.

    entries: ONNX by entry name. state, roles: by tensor name; every tensor has a role. steps:
    default number of steps of an entry. parent: the model's digest.
    """

    entries: Mapping[str, bytes]
    state: Mapping[str, Array | StoredTensor]
    roles: Mapping[str, str]
    steps: Mapping[str, int] = field(default_factory=dict)
    limits: Limits = Limits()
    compression: tuple[str, ...] = ()
    privacy: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    parent: str = ""


def write_plan(path: Path, spec: PlanSpec, *, check: Callable[[Path], object] | None = None) -> str:
    """Write the plan whole or not at all and return its root digest; same spec, same bytes.

    check: see `files.container.write`.
    """
    if spec.roles.keys() != spec.state.keys() or not set(spec.roles.values()) <= set(ROLES[1:]):
        raise InvalidInput(f"every state tensor needs one role of {ROLES[1:]}: {dict(spec.roles)}")
    message = pb.Plan(
        entries=[
            pb.Entry(name=name, part=f"{name}.onnx", steps=spec.steps.get(name, 0))
            for name in sorted(spec.entries)
        ],
        limits=message_from(pb.Limits, spec.limits),
        compression=spec.compression,
        privacy=spec.privacy,
        labels=spec.labels,
    )
    parts = [container.part(DESCRIPTION, message.SerializeToString(deterministic=True))]
    parts += [container.part(f"{name}.onnx", spec.entries[name]) for name in sorted(spec.entries)]
    parts.append(container.tensor_part(STATE, spec.state, spec.roles))
    return container.write(path, "plan", parts, parent=spec.parent, check=check)


class Plan:
    """A verified plan with its current state. Not for several threads.

    digest: the root digest. roles: by state tensor. entries: names. limits, labels: as written.
    compression: the accepted compressions of an update, empty for any. steps, spent_s: used so far.
    A session is opened when its entry is first run.
    """

    def __init__(
        self,
        file: Container,
        *,
        options: SessionOptions = DEFAULT_OPTIONS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Verify every byte of `file`; InvalidInput if it demands an unknown feature."""
        file.verify()
        self._file, self._options, self._clock = file, options, clock
        self.digest = file.digest
        what = f"{file.path.name}: part {DESCRIPTION!r}"
        message = _decode(file.part(DESCRIPTION), what)
        self._default_steps = {entry.name: entry.steps for entry in message.entries}
        self.entries = tuple(self._default_steps)
        _check_parts(file, message, what)
        self.labels = tuple(message.labels)
        self.compression = tuple(message.compression)
        self.limits = value_from(Limits, message.limits)
        self.roles = {t.name: t.role for t in file.manifest.tensors_of(STATE)}
        self._state = {name: tensor.data for name, tensor in file.tensors(STATE).items()}
        _check_state(file, self.limits, self._state)
        # The pages of the state stay mapped, but need not stay in memory.
        file.release()
        self.steps, self.spent_s = 0, 0.0
        self._sessions: dict[str, Session] = {}
        # Entries that change state; `_session` finds them when it opens their graph.
        self._looping: set[str] = set()
        # The loop whose buffers hold the newest state; `_state` may be older for the names that it
        # has.
        self._newest: Loop | None = None
        self._newest_entry = ""
        self._stop: CancellationToken | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        expected_digest: str | None = None,
        options: SessionOptions = DEFAULT_OPTIONS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> "Plan":
        """Open and verify the plan at `path`, of that root digest when one is given."""
        file = Container(Path(path), kind="plan", expected_digest=expected_digest)
        return cls(file, options=options, clock=clock)

    def inputs(self, entry: str) -> tuple[TensorInfo, ...]:
        """Return the inputs of a batch for `entry`."""
        return tuple(t for t in self._session(entry).inputs if t.name not in self.roles)

    def signature(self, entry: str) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
        """Return the inputs of a batch for `entry` and its results; keeps no session open."""
        is_open = entry in self._sessions
        batch, results = self.inputs(entry), self._session(entry).outputs
        if not is_open:
            del self._sessions[entry]
        return batch, results

    def entry_digest(self, entry: str) -> str:
        """Return the SHA-256 of an entry's graph: if equal, two plans run the same function."""
        if entry not in self.entries:
            raise NotFound(f"the plan has entries {self.entries}, not {entry!r}")
        return digests.sha256(self._file.part(f"{entry}.onnx")).hex()

    def run(
        self, entry: str, batch: Mapping[str, Array] | None = None, /, **more: Array
    ) -> dict[str, Array]:
        """Do one step of `entry` on the current state and return the results that are not state.

        Conflict: a limit is reached. Unavailable: the stop of `stop_with` was set. A step that
        raises leaves the state as it was.
        """
        session = self._session(entry)
        fed = {**(batch or {}), **more}
        if state := sorted(fed.keys() & self.roles.keys()):
            raise InvalidInput(f"{state} is state, not batch; use assign() to replace state")
        if fed.keys() != (batch_names := {t.name for t in session.inputs} - self.roles.keys()):
            raise InvalidInput(f"{entry} takes exactly {sorted(batch_names)}, got {sorted(fed)}")
        if entry not in self._looping:
            return session.run({**self._feeds(session), **fed}, stop=self._stop)
        self._check_limits()
        loop = self._loop(entry, session)
        loop.stop = self._stop
        started = self._clock()
        try:
            results = loop.step(**fed)
        finally:
            self.spent_s += self._clock() - started
        self.steps += 1
        return results

    def stop_with(self, stop: CancellationToken | None) -> None:
        """End later runs between two nodes once `stop` is set; None removes it."""
        self._stop = stop

    def predict(self, *x: Array, **inputs: Array) -> dict[str, Array]:
        """Run the `predict` entry, on its only input when one array is given."""
        return self.run("predict", self._only("predict", x), **inputs)

    def evaluate(
        self, batch: Mapping[str, Array] | None = None, /, **inputs: Array
    ) -> dict[str, Array]:
        """Run the `evaluate` entry."""
        return self.run("evaluate", batch, **inputs)

    def adapt(self, batches: Sequence[Mapping[str, Array]], *, steps: int = 0) -> list[float]:
        """Step through `batches`, starting again when they run out; return the loss of each step.

        Runs `adapt`, or `local_update` in a plan without it. steps: by default those that the plan
        states, or else one pass.
        """
        entry = "adapt" if "adapt" in self.entries else "local_update"
        if not batches or isinstance(batches, Mapping):
            raise InvalidInput("adapt needs a list of at least one batch, each with inputs by name")
        if not 0 <= steps <= MAX_STEPS:
            raise InvalidInput(f"adapt takes 0 to {MAX_STEPS} steps, got {steps}")
        self._session(entry)
        count = steps or self._default_steps[entry] or len(batches)
        return [float(self._loss(entry, batch)) for batch in islice(cycle(batches), count)]

    def state(self, *roles: str) -> dict[str, Array]:
        """Return a copy of the state, or of the given roles only."""
        return {name: value.copy() for name, value in self.view(*roles).items()}

    def view(self, *roles: str) -> dict[str, Array]:
        """Return the state itself: read it before the next step and never write to it."""
        if unknown := sorted(set(roles) - set(ROLES)):
            raise InvalidInput(f"roles are {ROLES[1:]}, not {unknown}")
        values = self._values()
        return {n: x for n, x in values.items() if not roles or self.roles[n] in roles}

    def assign(self, values: Mapping[str, Array]) -> None:
        """Replace the named state tensors, all or (InvalidInput) none; the others stay."""
        values = {name: np.asarray(value) for name, value in values.items()}
        for name, value in values.items():
            old = self._state.get(name)
            if old is None or (old.dtype, old.shape) != (value.dtype, value.shape):
                seen = "no such tensor" if old is None else f"{old.dtype}{old.shape}"
                raise InvalidInput(f"state {name!r}: {seen} here, got {value.dtype}{value.shape}")
        # Every value was checked above, so from here on nothing can fail halfway.
        looped = self._newest.view().keys() & values.keys() if self._newest else set()
        if self._newest:
            self._newest.load({name: values[name] for name in looped})
        self._state |= {n: value.copy() for n, value in values.items() if n not in looped}

    def save_state(self, path: Path) -> str:
        """Write the state, steps and time spent, atomically; return the file's digest."""
        part = container.tensor_part(STATE, self.view(), self.roles)
        properties = {"steps": str(self.steps), "spent_s": repr(self.spent_s)}
        return container.write(
            path, "checkpoint", [part], properties=properties, parent=self.digest
        )

    def load_state(self, path: Path) -> None:
        """Continue from a saved state of this very plan (Conflict for another plan's)."""
        file = Container(Path(path), kind="checkpoint")
        file.verify()
        if file.manifest.parent != self.digest:
            raise Conflict(f"{file.path.name} is of plan {file.manifest.parent}, not {self.digest}")
        values = {name: tensor.data for name, tensor in file.tensors(STATE).items()}
        if values.keys() != self.roles.keys():
            raise Corrupt(f"{file.path.name}: holds {sorted(values)}, not {sorted(self.roles)}")
        # Parsed before `assign`, so that a damaged file changes nothing.
        counters = _counters(dict(file.manifest.properties), file.path.name)
        self.assign(values)
        self.steps, self.spent_s = counters

    def _session(self, entry: str) -> Session:
        if entry not in self.entries:
            raise NotFound(f"the plan has entries {self.entries}, not {entry!r}")
        if entry not in self._sessions:
            model = bytes(self._file.part(f"{entry}.onnx"))
            # A block for the whole run would hold its memory beside the state of training; see
            # SessionOptions.
            options = replace(self._options, one_block=False)
            session = self._sessions[entry] = Session(model, options=options)
            results = {tensor.name for tensor in session.outputs}
            if any(next_name(name) in results for name in self._state):
                self._looping.add(entry)
        return self._sessions[entry]

    def _loop(self, entry: str, session: Session) -> Loop:
        """Return the loop of `entry`. There is one at a time: its buffers are twice the state."""
        if self._newest is None or self._newest_entry != entry:
            self._state = self._values()
            self._newest = None  # frees its buffers before the next ones are allocated
            self._newest, self._newest_entry = session.loop(self._feeds(session)), entry
            self._state |= self._newest.view()
        return self._newest

    def _feeds(self, session: Session) -> dict[str, Array]:
        values = self._values()
        return {t.name: values[t.name] for t in session.inputs if t.name in values}

    def _values(self) -> dict[str, Array]:
        """Return the state with the newest values of the current loop."""
        return {**self._state, **(self._newest.view() if self._newest else {})}

    def _check_limits(self) -> None:
        if 0 < self.limits.max_steps <= self.steps:
            raise Conflict(f"the plan allows {self.limits.max_steps} steps and took {self.steps}")
        if 0 < self.limits.time_s <= self.spent_s:
            raise Conflict(f"the plan allows {self.limits.time_s} s and took {self.spent_s:.3f} s")

    def _only(self, entry: str, x: tuple[Array, ...]) -> dict[str, Array]:
        if not x:
            return {}
        names = [tensor.name for tensor in self.inputs(entry)]
        if len(x) != 1 or len(names) != 1:
            raise InvalidInput(f"{entry} takes {names}; pass them by name, got {len(x)} unnamed")
        return {names[0]: x[0]}

    def _loss(self, entry: str, batch: Mapping[str, Array]) -> Array:
        results = self.run(entry, batch)
        if LOSS not in results or results[LOSS].size != 1:
            raise InvalidInput(f"{entry} must return one number named {LOSS!r}: {list(results)}")
        return results[LOSS].reshape(())


def _decode(data: Buffer, what: str) -> pb.Plan:
    message = parse(pb.Plan(), bounded(data, what), what)
    check_amounts([message.limits.time_s], what)
    if any(entry.steps > MAX_STEPS for entry in message.entries):
        raise Corrupt(f"{what}: an entry takes more than {MAX_STEPS} steps by default")
    unknown = [name for name in message.compression if name not in COMPRESSIONS]
    for demand in (*unknown, *message.privacy):
        raise InvalidInput(f"this plan demands {demand[:80]}, which this version does not offer")
    return message


def _check_parts(file: Container, message: pb.Plan, what: str) -> None:
    entries = [entry.part for entry in message.entries]
    if entries != [f"{entry.name}.onnx" for entry in message.entries]:
        raise Corrupt(f"{what}: an entry NAME is the part NAME.onnx, got {entries}")
    names, expected = [part.name for part in file.manifest.parts], [DESCRIPTION, *entries, STATE]
    if names != expected:
        raise Corrupt(f"{what}: requires the parts {expected}, got {names}")
    if not all(tensor.role for tensor in file.manifest.tensors_of(STATE)):
        raise Corrupt(f"{what}: a state tensor has no role")


def _check_state(file: Container, limits: Limits, state: Mapping[str, Array]) -> None:
    for tensor in file.manifest.tensors_of(STATE):
        if tensor.dtype in INSIDE_ONLY:
            raise InvalidInput(f"state {tensor.name!r} is {tensor.dtype}, which numpy cannot hold")
    # A loop has two sets of buffers, which it reads and writes in turn.
    need = 2 * sum(value.nbytes for value in state.values())
    if 0 < limits.memory_bytes < need:
        raise InvalidInput(
            f"the plan allows {limits.memory_bytes} bytes; its state alone takes {need}"
        )


def _counters(properties: Mapping[str, str], what: str) -> tuple[int, float]:
    try:
        steps, spent_s = int(properties["steps"]), float(properties["spent_s"])
        check_amounts([float(steps), spent_s], what)
    except (KeyError, ValueError, OverflowError) as error:
        raise Corrupt(f"{what}: steps or spent_s is missing or no number") from error
    return steps, spent_s
