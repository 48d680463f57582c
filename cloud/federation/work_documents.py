"""Documents with the work of each device, and the blobs that it may read for that work.

A device gets one document: a task for each open lease, oldest run first, and the settlements of its
contributions. It reads the plan and the state of its open tasks, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from triplane.cloud.federation import messages
from triplane.cloud.federation.flower.runs import FlowerRuns
from triplane.cloud.federation.live import LiveRun
from triplane.cloud.federation.masked_cohorts import MaskedCohorts
from triplane.cloud.federation.run_projection import Turn, turn_of
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.files import INLINE_BYTES
from triplane.unified_ir.federated.core.lease_changes import base_of, open_lease
from triplane.unified_ir.federated.core.masked_round import is_in_step

MAX_TOLD: Final = 32
"""Largest number of tasks in one document; a device refuses more than 64."""
MASKING_BYTES: Final = 2 << 20
"""Largest size of what masked rounds ask in one document; the list of a large cohort's keys has up
to 0.3 MB. Tasks beyond it are sent once others are done."""
MAX_SETTLED: Final = 64
"""Largest number of settlements in one document, two for each run; a device refuses more."""

Answers = Mapping[tuple[str, bytes], pb.Settlement]
"""Settlements by run and lease."""


class WorkDocuments:
    """Documents over the runs that `runs` returns, oldest first. clock: seconds since 1970."""

    def __init__(
        self,
        runs: Callable[[], Iterable[LiveRun]],
        flower: FlowerRuns,
        masked: MaskedCohorts,
        blobs: BlobFolder,
        clock: Callable[[], float],
    ) -> None:
        self._runs, self._flower, self._blobs, self._clock = runs, flower, blobs, clock
        self._masked = masked
        self._down: dict[str, tuple[Turn | None, dict[str, int]]] = {}
        self._steps: dict[str, tuple[Turn | None, set[tuple[str, str | None]]]] = {}
        self._sizes: dict[str, int] = {}
        self._states: dict[str, tuple[str, bytes]] = {}  # by run: a small state, and its bytes

    def forget(self, run: str) -> None:
        """Drop what is cached of a run that has ended."""
        self._down.pop(run, None)
        self._steps.pop(run, None)
        self._states.pop(run, None)

    def work_of(self, name: str, more: Answers) -> pb.Work:
        """Return all open tasks of a device and the settlements of its contributions.

        more: answers to contributions that none of these runs settles.
        """
        work, now_s, room = pb.Work(), self._clock(), MASKING_BYTES
        answers: dict[tuple[str, bytes], pb.Settlement] = {}
        for run in self._runs():
            state = run.projection.state
            member = state.members.get(name)
            if member is not None:
                known = messages.settlements(run.record.id, member)
                answers |= {(x.run, x.lease): x for x in known}
            if self._is_told(run, name) and len(work.tasks) < MAX_TOLD:
                # One inline state at most: with more, the document could exceed the message limit.
                files = self._files(run, name, inline=not work.tasks)
                room -= files.masking.ByteSize() if files.masking is not None else 0
                # Without its step, a device would take a masked round for one in the clear.
                lacks_step = files.masking is None and state.round and state.round.masked
                if room >= 0 and not lacks_step:
                    work.tasks.append(messages.task_message(run.record, state, name, files, now_s))
        answers |= {key: answer for key, answer in more.items() if key not in answers}
        # The newest ones, as runs are in order of age.
        work.settled.extend(list(answers.values())[-MAX_SETTLED:])
        return work

    def _is_told(self, run: LiveRun, name: str) -> bool:
        """Return whether the device has work in the run.

        In a run with a Flower strategy it has, once the strategy has asked the device.
        """
        state = run.projection.state
        lease, round_ = open_lease(state, name), state.round
        if lease is None or round_ is None:
            return False
        if round_.masked is not None:
            return is_in_step(lease, round_.masked)
        spec = run.record.spec
        return not spec.HasField("flower") or (
            self._flower.message(run.record.id, state, name) is not None
        )

    def _files(self, run: LiveRun, name: str, *, inline: bool) -> messages.TaskFiles:
        """Return the files of a task. inline: send a small state with it, in one task at most."""
        prepared, state, spec = run.record.prepared, run.projection.state, run.record.spec
        lease = open_lease(state, name)
        assert prepared is not None
        assert lease is not None
        base = base_of(state, lease)
        asked = self._flower.message(run.record.id, state, name) if spec.flower.app else ""
        masking = self._masked.asks(run.record, state, name)
        learns = masking is None or masking.HasField("keys")  # later steps need no state
        data = self._small_state(run, base) if inline and learns and not spec.flower.app else b""
        if data:
            self.bytes_down(run).setdefault(name, len(data))
        own_std = own_bit_std = 0.0
        if masking is not None:
            self._count_step(run, name, masking)
            encoding = self._masked.terms(run.record, state).encoding
            own_std, own_bit_std = encoding.own_std, encoding.own_bit_std
        return messages.TaskFiles(
            self._blob(prepared.plan),
            self._blob(base),
            self._blob(asked) if asked else None,
            masking=masking,
            own_std=own_std,
            own_bit_std=own_bit_std,
            inline=data,
            inline_bytes=0 if spec.HasField("flower") else INLINE_BYTES,
        )

    def _count_step(self, run: LiveRun, name: str, masking: pb.MaskingStep) -> None:
        """Count the bytes of a masked step that a device is sent, once however often it is."""
        turn, step = turn_of(run.projection.state.round), (name, masking.WhichOneof("asks"))
        known = self._steps.get(run.record.id)
        if known is None or known[0] != turn:
            known = self._steps[run.record.id] = turn, set()
        counted = known[1]
        if step not in counted:
            counted.add(step)
            down = self.bytes_down(run)
            down[name] = down.get(name, 0) + masking.ByteSize()

    def _small_state(self, run: LiveRun, base: str) -> bytes:
        """Return a state of a run if it is small, else empty bytes. It is read once a round."""
        known = self._states.get(run.record.id)
        if known is None or known[0] != base:
            sha256 = bytes.fromhex(base)
            small = self._blob(base).size <= INLINE_BYTES
            known = base, self._blobs.find(sha256).read_bytes() if small else b""
            self._states[run.record.id] = known
        return known[1]

    def _blob(self, name: str) -> pb.Blob:
        sha256 = bytes.fromhex(name)
        if name not in self._sizes:
            self._sizes[name] = self._blobs.find(sha256).stat().st_size
        return pb.Blob(sha256=sha256, size=self._sizes[name])

    def check_readable(self, device: str, blob: bytes) -> None:
        """Raise unless an open task of the device names the blob; InvalidInput."""
        for run in self._runs():
            state, prepared = run.projection.state, run.record.prepared
            lease = open_lease(state, device)
            # A device without an open lease reads nothing: states of runs are for their members.
            if lease is None or prepared is None:
                continue
            message = self._flower.message(run.record.id, state, device)
            if blob.hex() in {prepared.plan, base_of(state, lease), message}:
                down = self.bytes_down(run)
                down[device] = down.get(device, 0) + self._blob(blob.hex()).size
                return
        raise InvalidInput("a device reads the plans and states of its open tasks only")

    def bytes_down(self, run: LiveRun) -> dict[str, int]:
        """Return the bytes that each device downloaded for the open round."""
        turn = turn_of(run.projection.state.round)
        known = self._down.get(run.record.id)
        if known is None or known[0] != turn:
            known = self._down[run.record.id] = turn, {}
        return known[1]
