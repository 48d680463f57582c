"""Studies whose cloud's step is a strategy of Flower, driven as in a run.

The strategy has a process of its own and gets the orders that a run gives it (`process`, `orders`,
`drive`), so it chooses, weights and fails as in a run. Its memory is part of the study's progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.cloud.federation.flower.orders import (
    asked_files,
    read_next,
    score_reply,
    strategy_order,
)
from triplane.cloud.federation.flower.process import StrategyLimits, StrategyProcess
from triplane.cloud.federation.flower.spec import INSTALL, fill_flower, shipped_row
from triplane.cloud.federation.spec import least_updates
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput, MissingExtra
from triplane.proto.hyperparameters import FIELDS, set_values, values_of
from triplane.unified_ir.federated.algorithms import Hyper
from triplane.unified_ir.federated.algorithms import defaults as defaults_of
from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.core.files import write_state, write_update
from triplane.unified_ir.federated.core.learn import buffers
from triplane.unified_ir.federated.study.checkpoint import StudyProgress
from triplane.unified_ir.federated.study.server import Contribution, Next, RoundServer, ServedStudy

logger = logging.getLogger(__name__)

LIMITS: Final = StrategyLimits()
MEMORY: Final = "memory"
"""Name, in a study's progress, of the bytes of the strategy's memory."""
SERVER_LR: Final = "server_lr"
RUN_CHARS: Final = 16

Wait = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end and returns its result."""


class FlowerServer:
    """A strategy of Flower as the `StudyServer` of studies.

    strategy: as in `federate run --strategy`. options: its arguments. strategies: the folder of
    files NAME.py of one's own. quorum: least share of a round's devices that it has to ask, as in a
    run; 0: it may ask as few as it likes, because all devices of a study report. algorithm: what
    devices do if nothing else is asked for.

    MissingExtra: flwr is not installed. InvalidInput: a study cannot run this strategy. NotFound:
    there is none of that name. Conflict: flwr has another version, or others may write the file.
    """

    def __init__(
        self,
        strategy: str,
        options: Mapping[str, object] | None = None,
        *,
        strategies: Path,
        quorum: float = 0.0,
    ) -> None:
        if importlib.util.find_spec("flwr") is None:
            raise MissingExtra(f"strategies of Flower need an extra: {INSTALL}")
        row = shipped_row(strategy)
        if row is not None and row.app:
            raise InvalidInput(
                f"{row.name} requires devices to clip their changes with a ClientApp, and the "
                "devices of a study follow plans; use `triplane federate run` with --app"
            )
        pairs = [pb.Option(name=k, json=json.dumps(v)) for k, v in (options or {}).items()]
        self._flower = pb.Flower(strategy=strategy, options=pairs)
        self.strategies, self.quorum = strategies, quorum
        spec = self._spec("", {})
        self._flower, self.algorithm = spec.flower, spec.algorithm or defaults.ALGORITHM

    @property
    def name(self) -> str:
        """The strategy's name: Flower's, or FILE:ATTRIBUTE."""
        return self._flower.strategy

    @property
    def facts(self) -> Mapping[str, str]:
        """See `StudyServer`: the strategy, its arguments, its file and the version of flwr."""
        flower = self._flower
        options = {f"option {option.name}": option.json for option in flower.options}
        file = {"file of the strategy": flower.sha256.hex()} if flower.sha256 else {}
        quorum = {"quorum": f"{self.quorum:g}"} if self.quorum else {}
        return {"strategy": flower.strategy, "flwr": flower.version, **file, **options, **quorum}

    @property
    def follows_limits(self) -> bool:
        """See `StudyServer`: the strategy combines updates in its own way, and remembers."""
        return False

    def title(self, algorithm: str) -> str:
        """See `StudyServer`: "FedAdam over maml"."""
        return f"{self.name} over {algorithm}"

    def hyper(self, algorithm: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return the hyperparameters that were set, and those that follow from the options.

        InvalidInput: one of them belongs to an optimizer that the strategy replaces.
        """
        return {**values, **values_of(self._spec(algorithm, values).hyperparameters)}

    @contextlib.contextmanager
    def serving(self, study: ServedStudy) -> Iterator[RoundServer]:
        """See `StudyServer`. The strategy's process starts with the first round."""
        usual = {hyper[SERVER_LR] for hyper in (Hyper(), defaults_of(study.algorithm))}
        # A default is not taken for a rate that was set, which would be refused.
        unset = {SERVER_LR} if study.hyper[SERVER_LR] in usual else set()
        values = {k: study.hyper[k] for k in FIELDS & study.hyper.keys() - unset}
        spec = self._spec(study.algorithm, values)
        # A file that has changed since is refused by the process: `facts` are those of the old one.
        spec.flower.CopyFrom(self._flower)
        spec.rounds, spec.evaluate_every = study.rounds, study.evaluate_every
        spec.seed, spec.cohort.devices = study.seed, study.devices
        if not spec.HasField("robustness"):  # else the strategy has no norm bound
            limits = study.robustness
            spec.robustness.norm_bound = limits.norm_bound
            spec.robustness.max_examples = limits.max_examples
        quorum = least_updates(study.devices, self.quorum)
        order = strategy_order(spec, self.strategies, quorum=quorum)
        with tempfile.TemporaryDirectory() as folder, _event_loop() as wait:
            rounds = _StrategyRounds(study, order, Path(folder), wait)
            try:
                yield rounds
            finally:
                rounds.end()

    def _spec(self, algorithm: str, values: Mapping[str, float]) -> pb.Spec:
        spec = pb.Spec(algorithm=algorithm, flower=self._flower)
        set_values(spec.hyperparameters, {k: v for k, v in values.items() if k in FIELDS})
        fill_flower(spec, self.strategies)
        return spec


class _StrategyRounds:
    """The process of one trial's strategy. order: constructs the strategy."""

    def __init__(
        self, study: ServedStudy, order: Mapping[str, Any], folder: Path, wait: Wait
    ) -> None:
        self._study, self._folder, self._wait = study, folder, wait
        # The protocol of the process has hexadecimal names of runs.
        self._run = hashlib.sha256(study.run.encode()).hexdigest()[:RUN_CHARS]
        self._order = order
        self._process: StrategyProcess | None = None

    def choose(self, at: StudyProgress, leases: Mapping[str, str]) -> Collection[str]:
        """See `RoundServer`."""
        last = len(at.rounds)
        if self._process is None:
            # The memory is as of the last aggregation. A strategy that learns from evaluations gets
            # that of the last round again, so that a resumed study ends with the same bits.
            every = self._study.evaluate_every
            again = last > 0 and every > 0 and last % every == 0
            self._start(at, last if again else last + 1, evaluates=again)
            if again:
                self.judge(at)
        answer = self._turn(last + 1, leases, evaluates=False)
        return asked_files(answer, leases, self._order["quorum"])

    def reduce(self, at: StudyProgress, contributions: Sequence[Contribution]) -> Next:
        """See `RoundServer`."""
        paths = {x.device: self._folder / f"{x.lease}.update" for x in contributions}
        replies = {x.device: self._reply(at, x, paths[x.device]) for x in contributions}
        answer = self._ask({"do": "replies", "replies": replies})
        for path in paths.values():
            path.unlink()
        shared = read_next(Path(answer["state"]), self._study.plan, self._study.roles)
        memory = np.frombuffer(Path(answer["memory"]).read_bytes(), np.uint8)
        # Copies, because the process will replace its files.
        state = {name: x.copy() for name, x in shared.items()}
        return Next(state, {MEMORY: memory}, int(answer["scaled"]))

    def judge(self, at: StudyProgress) -> None:
        """See `RoundServer`: only devices that learn are nodes of the strategy."""
        number = len(at.rounds)
        if self._process is None:  # a study that was finished and is only scored again
            return
        scores = {s.device: s for s in at.scores if s.round == number and s.seen}
        if not scores:  # as in a run, in which nobody can evaluate
            return
        answer = self._turn(number, dict.fromkeys(scores, ""), evaluates=True)
        asked, metric = asked_files(answer, scores, 0), self._study.metric.name
        replies = {name: score_reply(scores[name], metric) for name in asked}
        answer = self._ask({"do": "replies", "replies": replies})
        logger.info("strategy evaluated", extra={"round": number, "metrics": answer["metrics"]})

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._wait(self._process.end())

    def _start(self, at: StudyProgress, number: int, *, evaluates: bool) -> None:
        study, state, memory = self._study, self._folder / "state", self._folder / MEMORY
        write_state(state, at.shared, study.roles, plan=study.plan)
        if MEMORY in at.slots:
            memory.write_bytes(at.slots[MEMORY].tobytes())
        order = {
            **self._order,
            "run": self._run,
            "number": number,
            "evaluates": evaluates,
            "plan": study.plan,
            "roles": dict(study.roles),
            "state": str(state),
            "memory": str(memory) if MEMORY in at.slots else "",
        }
        self._process = self._wait(StrategyProcess.start(self._folder, order, LIMITS))

    def _turn(
        self, number: int, leases: Mapping[str, str], *, evaluates: bool
    ) -> Mapping[str, Any]:
        order = {"do": "turn", "number": number, "evaluates": evaluates, "nodes": dict(leases)}
        return self._ask(order)

    def _ask(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._process is not None
        answer: dict[str, Any] = self._wait(self._process.ask(order))
        return answer

    def _reply(self, at: StudyProgress, update: Contribution, path: Path) -> dict[str, Any]:
        # Without compression: the change is as the cloud reads it, with what compression lost gone.
        write_update(
            path, update.change, run=self._run, round=len(at.rounds) + 1, lease=update.lease,
            compression="", keep=1.0, seed=0, buffers=buffers(self._study.roles),
        )  # fmt: skip
        facts = {"examples": update.examples, "loss": update.loss, "norms": None}
        return {"path": str(path), "lease": update.lease, **facts}


@contextlib.contextmanager
def _event_loop() -> Iterator[Wait]:
    """Run an event loop in a thread, so that a study may be called within another loop."""
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    # `asyncio.run` cancels what is still running at the end, such as the start of a process.
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    loop, stop = ready.result()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
