"""Runs whose rounds are decided by a Flower strategy: their processes and the orders to them.

The rules of runs stay as they are (`core.rules`): they open a round with the devices that are
present, the strategy narrows it to those that it asks (`Asked`), devices work as in any run, and
the strategy aggregates what counted in place of our own mean and optimizer. The new state and the
strategy's memory are blobs that one commit names, so a process that was killed, with or without its
cloud, is started again from the newest of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from triplane.cloud.federation import journal
from triplane.cloud.federation.flower.orders import (
    asked_files,
    read_next,
    score_reply,
    strategy_order,
)
from triplane.cloud.federation.flower.process import PREFIX, StrategyLimits, StrategyProcess
from triplane.cloud.federation.flower.spec import fill_flower
from triplane.cloud.federation.journal import RunRecord
from triplane.cloud.federation.live import RETRY_S, LiveRun, MakeEvent, Write
from triplane.cloud.federation.results import Results, reduced_event
from triplane.cloud.federation.run_projection import RunProjection, Turn, turn_of
from triplane.cloud.federation.spec import with_defaults
from triplane.cloud.federation.update_store import Refusal, UpdateStore, most_examples
from triplane.cloud.registry.collecting import claim
from triplane.cloud.store import Database
from triplane.cloud.tasks import BackgroundTasks
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    TriplaneError,
    Unavailable,
)
from triplane.proto.sandbox import ChildDied, remove_job_folders
from triplane.unified_ir.federated.core.rules import lease_id
from triplane.unified_ir.federated.core.run import (
    ENDED,
    Asked,
    Exchange,
    Failed,
    Judged,
    Lease,
    Outcome,
    Phase,
    Reduce,
    Round,
    RunState,
    Stopped,
)

logger = logging.getLogger(__name__)

LIMITS: Final = StrategyLimits()
LAST_S: Final = 10.0
"""Time for a strategy to receive the last evaluation when its run is done."""
OVER: Final = (1, math.nan)
"""Result of checking a reply whose round is over."""
TRIES: Final = 3
"""Number of processes in a row that may die in one turn."""

Put = Callable[[str, MakeEvent], Awaitable[RunProjection]]
"""Apply an event to a run; return the projection after its commit."""


@dataclass(slots=True)
class _Run:
    """A run's process. turn: the turn whose replies it waits for. asked: the newest `Asked`."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: StrategyProcess | None = None
    turn: Turn | None = None
    asked: Asked | None = None
    asking: asyncio.Task[None] | None = None
    over: bool = False


class FlowerRuns:
    """The `live.Worker` of runs whose spec has `flower`.

    folder: for the processes' files. strategies: folder of the operator's own strategies. put:
    applies an event to a run.
    """

    def __init__(
        self,
        db: Database,
        blobs: BlobFolder,
        updates: UpdateStore,
        results: Results,
        *,
        folder: Path,
        strategies: Path,
        put: Put,
        limits: StrategyLimits = LIMITS,
    ) -> None:
        self._db, self._updates, self._results = db, updates, results
        self._blobs, self._folder, self._strategies = blobs, folder, strategies
        self._put, self._limits = put, limits
        self._runs: dict[str, _Run] = {}
        self._tasks = BackgroundTasks()
        remove_job_folders(folder, PREFIX)

    async def check(self, spec: pb.Spec, live: int) -> None:
        """Raise unless the spec's strategy can be made here. live: runs that have one already."""
        if live >= self._limits.runs:
            raise Conflict(f"{live} runs with a strategy are in progress; wait for one, or stop it")
        process = await StrategyProcess.start(self._folder, self._facts(spec), self._limits)
        await process.end()

    def with_defaults(self, asked: pb.Spec) -> pb.Spec:
        """See `spec.with_defaults`; also fills in the strategy. Call it in a thread."""
        spec = pb.Spec()
        spec.CopyFrom(asked)
        if spec.HasField("flower"):
            fill_flower(spec, self._strategies)
        return with_defaults(spec)

    async def take_up(self, record: RunRecord) -> None:
        """Load which devices a run's strategy had asked in an earlier process of the cloud."""
        self._of(record.id).asked = await self._db.read(lambda c: journal.last_asked(c, record.id))

    async def stop(self) -> None:
        """End every process; `take_up` continues its run."""
        await self._tasks.stop()
        await asyncio.gather(*(self._end(run) for run in self._runs.values()))

    def message(self, run: str, state: RunState, device: str) -> str | None:
        """Return the blob of a device's message in this round, "" for its plan; None: not asked."""
        known = self._runs.get(run)
        asked = known.asked if known else None
        if asked is None or state.round is None or turn_of(asked) != turn_of(state.round):
            return None
        return asked.messages.get(device)

    async def check_reply(self, run: LiveRun, device: str, path: Path) -> tuple[int, float]:
        """See `update_store.Check`: a ClientApp's reply, read by the strategy's process."""
        ours, state = self._of(run.record.id), run.projection.state
        assert state.round is not None
        turn = turn_of(state.round)
        order = {
            "do": "check",
            "path": str(path),
            "device": device,
            "evaluates": turn[1],
            "examples": most_examples(state.members[device], evaluates=turn[1]),
        }
        try:
            async with ours.lock:
                # Again after waiting for the lock: the round may have closed, and its reply is not
                # needed.
                at_hand = run.projection.state.round
                if at_hand is None or turn_of(at_hand) != turn:
                    return OVER  # its event will find that the round is over
                answer = await self._persistently(
                    ours, lambda: self._checked(ours, run.record, state, turn, order)
                )
        except ChildDied as error:
            raise Refusal("damaged", f"reading the reply: {error}") from error
        if "refused" in answer:
            raise Refusal(answer["refused"], answer["text"])
        return int(answer["examples"]), math.nan if answer["loss"] is None else float(
            answer["loss"]
        )

    async def _checked(
        self, run: _Run, record: RunRecord, state: RunState, turn: Turn, order: Mapping[str, Any]
    ) -> dict[str, Any]:
        if run.process is None or run.turn != turn:
            await self._begun_again(run, record, state, turn)
        assert run.process is not None
        return await run.process.ask(order)

    # As a worker

    async def reduce(
        self, record: RunRecord, projection: RunProjection, order: Reduce
    ) -> tuple[MakeEvent, Write]:
        """See `live.Worker`."""
        replies = {lease.device: self._update(lease) for lease in order.leases}
        run = self._of(record.id)
        async with run.lock:
            answer = await self._persistently(
                run, lambda: self._reduced(run, record, projection, replies)
            )
            # Within the lock: the files are in the folder of the process, which `_end` removes.
            state, memory = await asyncio.to_thread(self._store_output, record, answer)
        await claim(self._db, self._blobs, {state, memory})

        def write(connection: sa.Connection, _: RunProjection) -> bool:
            journal.change(connection, record.id, slots=memory)
            return True

        return reduced_event(order, state.hex(), int(answer["scaled"])), write

    async def exchange(
        self, record: RunRecord, projection: RunProjection, order: Exchange
    ) -> MakeEvent:
        """See `live.Worker`."""
        raise AssertionError("a run with a strategy is never masked")

    def arrived(self, record: RunRecord, projection: RunProjection, devices: Sequence[str]) -> None:
        """See `live.Worker`."""
        raise AssertionError("a run with a strategy is never masked")

    async def judged(self, record: RunRecord, projection: RunProjection, order: Judged) -> None:
        """See `live.Worker`: tells the strategy, unless its process restarted since it asked."""
        run, members = self._of(record.id), projection.state.members
        replies: dict[str, Any] = {}
        for lease in order.leases:
            score = members[lease.device].score
            if lease.update is not None:
                replies[lease.device] = {}  # it read the reply on arrival; the file may be removed
            elif score is not None and score.round == order.number:
                replies[lease.device] = score_reply(score, projection.metric)
        async with run.lock:
            if run.process is None or run.turn is None or run.turn[:2] != (order.number, True):
                return
            try:
                answer = await run.process.ask({"do": "replies", "replies": replies})
            except Exception as error:  # noqa: BLE001 - the run goes on without it
                logger.warning("evaluation lost", extra={"run_id": record.id, "reason": str(error)})
                await self._end(run)
                return
            run.turn = None
        said = {"run_id": record.id, "round": order.number, "metrics": answer["metrics"]}
        logger.info("strategy evaluated", extra=said)

    async def finish(self, record: RunRecord, projection: RunProjection) -> tuple[MakeEvent, Write]:
        """See `live.Worker`."""
        return await self._results.finish(record, projection)

    def settled(
        self, old: RunRecord, new: RunRecord, before: RunProjection, after: RunProjection
    ) -> None:
        """See `live.Worker`: starts the turn of a round that was opened."""
        self._results.settled(old, new, before, after)
        self.look(new, after)

    def look(self, record: RunRecord, projection: RunProjection) -> None:
        """Ask the strategy about the current round, unless that is under way; end an idle one."""
        state, at_hand = projection.state, projection.state.round
        if state.phase is Phase.STOPPED or state.phase in ENDED:
            idle = self._runs.pop(record.id, None)
            if idle is not None:
                wait_s = LAST_S if state.phase is Phase.DONE else 0.0
                self._tasks.spawn(self._end_later(idle, wait_s), f"end strategy of {record.id}")
            return
        run = self._of(record.id)
        if state.phase is not Phase.COLLECTING or at_hand is None or run.asking is not None:
            return
        if run.asked is None or turn_of(run.asked) != turn_of(at_hand):
            work = self._ask(run, record, projection, at_hand)
            run.asking = self._tasks.spawn(work, f"ask strategy of {record.id}")

    # Turns

    async def _ask(
        self, run: _Run, record: RunRecord, projection: RunProjection, at_hand: Round
    ) -> None:
        make = await self._turn(run, record, projection, at_hand)
        while True:
            try:
                after = await self._put(record.id, lambda _, at_s: make(at_s))
            except Unavailable as error:  # the database, or the cloud is stopping and ends this
                facts = {"run_id": record.id, "reason": str(error)}
                logger.info("strategy's answer not committed", extra=facts)
                await asyncio.sleep(RETRY_S)
            except NotFound:  # the run is over and forgotten
                return
            else:
                run.asking = None
                self.look(record, after)  # the round may be another one by now
                return

    async def _turn(
        self, run: _Run, record: RunRecord, projection: RunProjection, at_hand: Round
    ) -> Callable[[float], Asked | Failed | Stopped]:
        """Return the event in which a turn of the strategy results."""
        turn = turn_of(at_hand)
        devices = {x.device: x.id for x in at_hand.leases if x.outcome is Outcome.OPEN}
        try:
            async with run.lock:
                answer = await self._persistently(
                    run, lambda: self._begun(run, record, projection.state, turn, devices)
                )
                asked = await self._asked_event(record, turn, answer, devices)
        except (InvalidInput, Corrupt, Conflict) as error:
            reason = f"the strategy cannot go on: {error}"
            return lambda at_s: Failed(at_s=at_s, reason=reason)
        except TriplaneError as error:
            why = f"{error}; resume the run when that is fixed"
            return lambda at_s: Stopped(at_s=at_s, reason=why)
        except Exception as error:
            logger.exception("strategy not asked", extra={"run_id": record.id})
            fault = f"internal error: {type(error).__name__}; see the cloud's log"
            return lambda at_s: Stopped(at_s=at_s, reason=fault)
        run.asked = asked(0.0)  # before the commit, which tells the devices
        return asked

    async def _asked_event(
        self, record: RunRecord, turn: Turn, answer: Mapping[str, Any], devices: Mapping[str, str]
    ) -> Callable[[float], Asked]:
        """Return the event of an answer. InvalidInput: too few devices, or unknown ones."""
        number, evaluates, attempt = turn
        quorum = 0 if evaluates else journal.plan_of(record.spec).quorum
        files = asked_files(answer, devices, quorum)
        messages = await asyncio.to_thread(self._message_blobs, files)
        await claim(self._db, self._blobs, {bytes.fromhex(x) for x in messages.values() if x})
        return lambda at_s: Asked(
            at_s=at_s, number=number, evaluates=evaluates, attempt=attempt, messages=messages
        )

    def _message_blobs(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return the blobs of messages by device; "" for a device that follows its plan."""
        return {
            device: self._blobs.put_file(Path(path)).hex() if path else ""
            for device, path in files.items()
        }

    async def _begun(
        self, run: _Run, record: RunRecord, state: RunState, turn: Turn, devices: Mapping[str, str]
    ) -> dict[str, Any]:
        """Give the strategy a turn; start a process if none is ready for it."""
        if run.process is None or run.turn is not None:
            await self._end(run)
            run.process = await self._process(record, state, turn)
        order = {"do": "turn", "number": turn[0], "evaluates": turn[1], "nodes": dict(devices)}
        answer = await run.process.ask(order)
        run.turn = turn
        return answer

    async def _reduced(
        self, run: _Run, record: RunRecord, projection: RunProjection, replies: Mapping[str, Any]
    ) -> dict[str, Any]:
        at_hand = projection.state.round
        assert at_hand is not None
        turn = turn_of(at_hand)
        if run.process is None or run.turn != turn:
            await self._begun_again(run, record, projection.state, turn)
        assert run.process is not None
        answer = await run.process.ask({"do": "replies", "replies": replies})
        run.turn = None
        return answer

    async def _begun_again(self, run: _Run, record: RunRecord, state: RunState, turn: Turn) -> None:
        """Bring a new process to a turn that another one began.

        The other one has asked devices already, so all members are offered to the new process, and
        the messages that it gives are not sent.
        """
        leases = {x.device: x.id for x in state.round.leases} if state.round else {}
        number, evaluates, attempt = turn
        for name in sorted(state.members.keys() - leases.keys()):
            leases[name] = lease_id(
                state.run, number, evaluates=evaluates, attempt=attempt, device=name,
                epoch=state.epoch,
            )  # fmt: skip
        devices = {name: leases[name] for name in sorted(state.members)}
        await self._begun(run, record, state, turn, devices)

    async def _persistently(
        self, run: _Run, work: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """Do `work`; repeat it with a new process if one died. Other errors end the process."""
        for tries in range(TRIES, 0, -1):
            try:
                return await work()
            except ChildDied as error:
                await self._end(run)
                if tries == 1 or run.over:
                    raise
                logger.warning("strategy begun anew", extra={"reason": str(error)})
            except BaseException:
                await self._end(run)
                raise
        raise AssertionError("the tries end with an error")

    # Processes

    async def _process(self, record: RunRecord, state: RunState, turn: Turn) -> StrategyProcess:
        prepared = record.prepared
        assert prepared is not None
        order = {
            **self._facts(record.spec),
            "run": record.id,
            "number": turn[0],
            "evaluates": turn[1],
            "plan": prepared.plan_digest,
            "roles": dict(prepared.roles),
            "state": str(self._blobs.find(bytes.fromhex(state.shared))),
            "memory": str(self._blobs.find(record.slots)) if record.slots else "",
        }
        process = await StrategyProcess.start(self._folder, order, self._limits)
        facts = {"run_id": record.id, "strategy": record.spec.flower.strategy, "round": turn[0]}
        logger.info("strategy begun", extra={**facts, "pid": process.pid})
        return process

    def _facts(self, spec: pb.Spec) -> dict[str, Any]:
        """Return the order that constructs a strategy, without a run."""
        return strategy_order(spec, self._strategies, quorum=journal.plan_of(spec).quorum)

    def _update(self, lease: Lease) -> dict[str, Any]:
        update = lease.update
        assert update is not None
        path = self._updates.folder.find(bytes.fromhex(update.blob))
        return {
            "path": str(path),
            "lease": lease.id,
            "examples": update.examples,
            "loss": update.loss,
            "norms": update.norms,
        }

    def _store_output(self, record: RunRecord, answer: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """Store a strategy's output as blobs: the next state, validated, and its memory."""
        assert record.prepared is not None
        state = Path(answer["state"])
        read_next(state, record.prepared.plan_digest, record.prepared.roles)
        return self._blobs.put_file(state), self._blobs.put_file(Path(answer["memory"]))

    def _of(self, run: str) -> _Run:
        return self._runs.setdefault(run, _Run())

    async def _end_later(self, run: _Run, wait_s: float) -> None:
        """End a process that is no longer needed, after at most `wait_s`."""
        run.over = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s), run.lock:
                    pass
        finally:
            if run.asking is not None:
                run.asking.cancel()
            await self._end(run)

    async def _end(self, run: _Run) -> None:
        # Taken out before the await, so that two callers do not end the same process.
        process, run.process, run.turn = run.process, None, None
        if process is not None:
            await process.end()
