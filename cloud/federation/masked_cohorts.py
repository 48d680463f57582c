"""The masked rounds of live runs: their terms, their cohorts, and what their devices are asked.

The answers of devices are on the disk before the next step of their round begins. A cohort is
computed from those that were taken; a process that was killed, or whose commit failed, does so
again before any device is asked the next step.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from triplane.cloud.federation.journal import RunRecord
from triplane.cloud.federation.live import MakeEvent
from triplane.cloud.federation.masked_cohort import CohortMean, GivenAnswer, MaskedCohort
from triplane.cloud.federation.masked_encoding import RoundEncoding, norms_at, round_encoding
from triplane.cloud.federation.masked_spec import follows_updates
from triplane.cloud.federation.run_projection import RunProjection, Turn, turn_of
from triplane.cloud.federation.spec import fewest_left
from triplane.cloud.federation.update_store import UpdateStore, printable
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.proto.roster import Roster
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.files import Like, like_of, read_state
from triplane.unified_ir.federated.core.learn import BUFFER, PARAMETER, shared
from triplane.unified_ir.federated.core.lease_changes import open_lease
from triplane.unified_ir.federated.core.masked_round import GROUP_LEFT_OUT, answer_of, has_taken
from triplane.unified_ir.federated.core.masked_step import STEPS, LostGroup, MaskedStep
from triplane.unified_ir.federated.core.metric import metric_named
from triplane.unified_ir.federated.core.run import (
    Exchange,
    Exchanged,
    Lease,
    RunState,
    Score,
)
from triplane.unified_ir.federated.masking import MaskingTerms, wire
from triplane.unified_ir.federated.masking.encoding import MAX_CAP
from triplane.unified_ir.federated.masking.integers import packed_bytes
from triplane.unified_ir.federated.masking.scores import ScoreEncoding, score_base

logger = logging.getLogger(__name__)

MAX_NAMED: Final = 5
"""Number of devices that the reason of a failed round names."""


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """What a round's devices agree on. norms: of each section. message: without `asks`."""

    terms: MaskingTerms
    encoding: RoundEncoding
    norms: tuple[float, ...]
    message: pb.MaskingStep

    def input_bytes(self, devices: int) -> int:
        """Return the length of a masked input of so many devices that are masked together."""
        fields = self.terms.fields
        return sum(packed_bytes(field.entries, field.width(devices)) for field in fields)


@dataclass(slots=True)
class _OpenCohort:
    """The masked round that a run is in. cohort: None until an answer was taken.

    lock: held by the thread that takes answers. An exchange whose answers could not be committed
    may still be under way when it is repeated. arrived: leases whose masked inputs `adding` adds.
    """

    turn: Turn
    terms: RoundTerms
    cohort: MaskedCohort | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    arrived: deque[Lease] = field(default_factory=deque)
    adding: asyncio.Future[None] | None = None


class MaskedCohorts:
    """The masked rounds of this process, one for each run.

    blobs: holds the states. roster: returns the signed roster of devices that is valid now.
    """

    def __init__(
        self, updates: UpdateStore, blobs: BlobFolder, roster: Callable[[], Roster | None]
    ) -> None:
        self._updates, self._blobs, self.roster = updates, blobs, roster
        self._open: dict[str, _OpenCohort] = {}
        self._likes: dict[str, Like] = {}

    async def take_up(self, record: RunRecord, projection: RunProjection) -> None:
        """Compute the cohort of a run's open round again, as an earlier process had it."""
        state = projection.state
        if state.round is None or state.round.masked is None:
            return
        try:
            await asyncio.to_thread(self._replayed, record, state)
        except TriplaneError:
            # The round cannot go on; the exchange finds that again and gives it up.
            logger.exception("masked round not taken up", extra={"run_id": record.id})

    async def exchange(
        self, record: RunRecord, projection: RunProjection, order: Exchange
    ) -> MakeEvent:
        """Take the answers of a step; return the event `Exchanged`."""
        refused: Mapping[str, str] = {}
        left_out: Mapping[str, tuple[str, ...]] = {}
        score: Score | None = None
        try:
            refused, left_out, failure, score = await asyncio.to_thread(
                self._exchange, record, projection.state, order
            )
        except (Corrupt, InvalidInput, NotFound) as error:  # an answer cannot be read back
            failure = str(error)
        reasons = {device: printable(reason) for device, reason in refused.items()}
        facts = {"run_id": record.id, "round": order.number, "step": order.step.value}
        groups = [LostGroup(devices=d, reason=printable(why)) for why, d in left_out.items()]
        logger.info("masked step", extra={**facts, "refused": len(reasons), "failure": failure})
        for group in groups:
            logger.warning("masked group left out", extra={**facts, "reason": group.reason})
        return lambda _, at_s: Exchanged(
            at_s=at_s,
            number=order.number,
            attempt=order.attempt,
            step=order.step,
            refused=reasons,
            left_out=tuple(groups),
            failure=printable(failure),
            score=score,
        )

    def arrived(self, record: RunRecord, state: RunState, devices: Iterable[str]) -> None:
        """Add masked inputs that are on the disk to their sum, in a thread, before the step ends.

        The exchange adds those that are not in it by then.
        """
        round_ = state.round
        if round_ is None or round_.masked is None or round_.masked.exchanging:
            return
        if round_.masked.step is not MaskedStep.INPUTS:
            return
        known = self._of(record, state)
        # A device may have left in the commit of its input.
        leases = (open_lease(state, device) for device in devices)
        known.arrived.extend(x for x in leases if x and answer_of(x, MaskedStep.INPUTS))
        if known.adding is None or known.adding.done():
            loop = asyncio.get_running_loop()
            known.adding = loop.run_in_executor(None, self._add_arrived, record, known)

    def _add_arrived(self, record: RunRecord, known: _OpenCohort) -> None:
        try:
            while known.arrived:
                with known.lock:
                    if known.cohort is None or not known.cohort.is_at(MaskedStep.INPUTS):
                        return
                    lease = known.arrived.popleft()
                    known.cohort.add_input(self._answer(record, lease, MaskedStep.INPUTS))
        except Exception as error:  # noqa: BLE001 - the exchange meets it again, and gives it up
            logger.info("input not added", extra={"run_id": record.id, "reason": str(error)})

    def asks(self, record: RunRecord, state: RunState, device: str) -> pb.MaskingStep | None:
        """Return the present step of a device that is in a masked round; None if it has none."""
        round_ = state.round
        if round_ is None or round_.masked is None:
            return None
        known = self._of(record, state)
        if round_.masked.step is MaskedStep.KEYS:
            body: pb.MaskingStep | None = pb.MaskingStep(keys=pb.AdvertiseKeys())
        else:
            body = known.cohort.asks(round_.masked.step, device) if known.cohort else None
        if body is not None:
            body.MergeFrom(known.terms.message)
        return body

    def terms(self, record: RunRecord, state: RunState) -> RoundTerms:
        """Return the terms of the run's open masked round."""
        return self._of(record, state).terms

    def input_bytes(self, record: RunRecord, state: RunState, device: str) -> int:
        """Return the length of the masked input of a device of the open round."""
        known = self._of(record, state)
        devices = known.cohort.group_size(device) if known.cohort else 0
        return known.terms.input_bytes(max(devices, 1))  # outside of the cohort it is refused later

    def means(
        self, record: RunRecord, state: RunState
    ) -> list[tuple[dict[str, Array], CohortMean]]:
        """Return the mean changes of a round that is reduced, by tensor; for a thread.

        There is one for each group that was not left out, and one in all without groups.
        """
        cohort = self._of(record, state).cohort
        if cohort is None or not cohort.is_over:
            cohort = self._replayed(record, state)
        like = self._like(record)
        return [(_by_tensor(record, like, mean), mean) for mean in cohort.means]

    def forget_before(self, run: str, turn: Turn | None) -> None:
        """Drop the round of a run unless it is the one of this turn."""
        known = self._open.get(run)
        if known is not None and known.turn != turn:
            del self._open[run]

    def _of(self, record: RunRecord, state: RunState) -> _OpenCohort:
        turn = turn_of(state.round)
        assert turn is not None
        known = self._open.get(record.id)
        if known is not None and known.turn == turn:
            return known
        begun = _OpenCohort(turn, self._terms(record, state))
        # A thread may outlive its round, and must not take the newer one's cohort from its devices.
        if known is None or known.turn < turn:
            self._open[record.id] = begun
        return begun

    def _exchange(
        self, record: RunRecord, state: RunState, order: Exchange
    ) -> tuple[Mapping[str, str], Mapping[str, tuple[str, ...]], str, Score | None]:
        known, round_ = self._of(record, state), state.round
        score = None
        with known.lock:
            cohort = known.cohort
            devices = {lease.device for lease in order.leases}
            # A device that left after its input was added must not be in the sum.
            has_left = cohort is not None and not devices.issuperset(cohort.added)
            if cohort is None or not cohort.is_at(order.step) or has_left:
                cohort = self._replayed(record, state)
            missing = [x for x in order.leases if x.device not in cohort.added]
            # One at a time: masked inputs of all devices could exceed the memory.
            answers = (self._answer(record, lease, order.step) for lease in missing)
            refused, failure = cohort.take(order.step, answers)
            if failure:
                # Without these answers: if they are not committed, others take their place.
                self._replayed(record, state)
            elif order.step.next is None and round_ is not None and round_.evaluates:
                score = _mean_score(cohort.means[0], order)
        return refused, cohort.left_out, failure and failure + _silent_text(state, order), score

    def _replayed(self, record: RunRecord, state: RunState) -> MaskedCohort:
        """Compute the cohort from the answers that were taken."""
        known, round_ = self._of(record, state), state.round
        assert round_ is not None
        terms = known.terms
        encoding = terms.encoding
        # All who score are one group.
        fewest = None if round_.evaluates else fewest_left(record.spec)
        cohort = MaskedCohort(terms.terms, encoding.parsed, terms.norms, encoding.noise, fewest)
        for step in STEPS:
            taken = [x for x in round_.leases if has_taken(x, step) and answer_of(x, step)]
            if taken:
                cohort.take(step, (self._answer(record, lease, step) for lease in taken))
        known.cohort = cohort
        return cohort

    def _answer(self, record: RunRecord, lease: Lease, step: MaskedStep) -> GivenAnswer:
        answer = answer_of(lease, step)
        assert answer is not None
        message = pb.MaskingAnswer.FromString(self._updates.small(record.id, answer.blob))
        data = message.input.data
        if answer.file:
            data = self._updates.folder.find(bytes.fromhex(answer.file)).read_bytes()
        return GivenAnswer(lease.device, message, data)

    def _terms(self, record: RunRecord, state: RunState) -> RoundTerms:
        round_, base, masking = state.round, bytes.fromhex(state.shared), record.spec.masking
        assert round_ is not None
        encoding = self._encoding(record, state)
        terms = MaskingTerms(
            run=record.id,
            base=score_base(base) if round_.evaluates else base,
            round=round_.number,
            attempt=round_.attempt,
            fields=encoding.parsed.fields,
            groups=1 if round_.evaluates else masking.groups or 1,
            least=masking.least,
            lost_share=masking.lost_share,
            colluding_share=masking.colluding_share,
            failure=masking.failure,
            encoding=encoding.digest(record.spec),
        )
        message = pb.MaskingStep(terms=wire.terms_message(terms), encoding=encoding.message)
        return RoundTerms(terms, encoding, encoding.norms, message)

    def _encoding(self, record: RunRecord, state: RunState) -> RoundEncoding:
        """Return the encoding of a round's inputs."""
        round_, prepared = state.round, record.prepared
        assert prepared is not None
        assert round_ is not None
        assert round_.masked is not None
        if round_.evaluates:
            scores = ScoreEncoding(metric_named(prepared.metric), min(round_.masked.cap, MAX_CAP))
            return RoundEncoding(pb.MaskingEncoding(cap=scores.cap), scores)
        like = self._like(record)
        parameters, buffers = (
            sum(int(np.prod(like[name][1])) for name in names) for names in _sections(record, like)
        )
        return round_encoding(
            record.spec,
            parameters=parameters,
            buffers=buffers,
            cap=_cap(record, round_.masked.cap),
            seed=_seed(state),
            norms=norms_at(state) if follows_updates(record.spec) else None,
        )

    def _like(self, record: RunRecord) -> Like:
        if record.id not in self._likes:
            prepared = record.prepared
            assert prepared is not None
            path = self._blobs.find(bytes.fromhex(prepared.state))
            state = read_state(path, plan=prepared.plan_digest, verified=True)
            self._likes[record.id] = like_of(state)
        return self._likes[record.id]


def _mean_score(mean: CohortMean, order: Exchange) -> Score:
    before, after = map(float, mean.sections[0])
    return Score(samples=mean.weight, before=before, after=after, round=order.number)


def _silent_text(state: RunState, order: Exchange) -> str:
    """Return which devices of the cohort did not answer a step, or empty."""
    assert state.round is not None
    answered = {lease.device for lease in order.leases}
    cohort = [x for x in state.round.leases if has_taken(x, MaskedStep.KEYS)]
    left = [x.device for x in cohort if x.reason != GROUP_LEFT_OUT]
    silent = [device for device in left if device not in answered]
    more = ", ..." if len(silent) > MAX_NAMED else ""
    names = ", ".join(silent[:MAX_NAMED]) + more
    return f"; no answer to the step {order.step} from {names}" if silent else ""


def _sections(record: RunRecord, like: Like) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the parameters and of the float buffers, in the order of an update."""
    assert record.prepared is not None
    roles = record.prepared.roles
    names = [name for name in shared(roles) if name in like]
    parameters, buffers = (
        tuple(n for n in names if roles[n] == role) for role in (PARAMETER, BUFFER)
    )
    return parameters, buffers


def _by_tensor(record: RunRecord, like: Like, mean: CohortMean) -> dict[str, Array]:
    """Return the vectors of a mean as tensors."""
    change: dict[str, Array] = {}
    kinds = [names for names in _sections(record, like) if names]
    for names, vector in zip(kinds, mean.sections, strict=True):
        sizes = [int(np.prod(like[name][1])) for name in names]
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        change |= {n: x.reshape(like[n][1]) for n, x in zip(names, parts, strict=True)}
    return change


def _cap(record: RunRecord, offered: int) -> int:
    """Return the examples that count at most; 1 where devices count alike."""
    assert record.prepared is not None
    if record.prepared.weighting == "equal" or record.spec.HasField("noise"):
        return 1
    return min(record.spec.robustness.max_examples or offered, MAX_CAP)


def _seed(state: RunState) -> int:
    """Return the seed of a round's public rotation."""
    assert state.round is not None
    text = f"{state.run}\n{state.plan.seed}\n{state.round.number}\n{state.round.attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
