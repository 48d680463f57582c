"""A federated run in one process: the same round, device work and reduction as over the network.

The run follows `core.rules`, devices work by `core.learn`, updates go through `core.compress`, so a
study predicts a real run of the same seed and names bit for bit, provided that every asked device
reports. The result depends only on the arguments; a killed study with a folder resumes to the same
bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from triplane.proto.errors import Conflict, InvalidInput
from triplane.proto.messages import value_from
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.federated.algorithms import Hyper, algorithm, plan_of
from triplane.unified_ir.federated.algorithms.aggregators import MEAN, Robustness
from triplane.unified_ir.federated.algorithms.hyper import LR
from triplane.unified_ir.federated.algorithms.plan import PlanMade, functions_with_state
from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.core import learn as device
from triplane.unified_ir.federated.core import run as machine
from triplane.unified_ir.federated.core.compress import Compressor
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.episodes import check_ways
from triplane.unified_ir.federated.core.learn import LOSS, Shard, Work
from triplane.unified_ir.federated.core.rules import step
from triplane.unified_ir.federated.core.run_plan import RunPlan
from triplane.unified_ir.federated.privacy.clipping import clip
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy
from triplane.unified_ir.federated.study import masked_sums
from triplane.unified_ir.federated.study.change_spool import ChangeSpool
from triplane.unified_ir.federated.study.checkpoint import Keeper, StudyProgress, identity
from triplane.unified_ir.federated.study.private_rounds import (
    check_rows,
    norm_of,
    prepared,
    with_account,
)
from triplane.unified_ir.federated.study.server import (
    Contribution,
    MeanServer,
    Next,
    RoundServer,
    ServedStudy,
    StudyServer,
)
from triplane.unified_ir.federated.study.trial import DeviceScore, RoundRow, Trial
from triplane.unified_ir.ir import Module
from triplane.unified_ir.runtime import Plan

if TYPE_CHECKING:
    from triplane.unified_ir.engines.xla.cohort import Cohort, CohortClient, CohortOutcome
    from triplane.unified_ir.federated.study.cohort_scores import CohortScorer

PLAN: Final = "study.plan"
ENGINE: Final = "onnx"
ENGINES: Final = (ENGINE, "xla")
"""What runs the steps of devices: one device after the other, or many at once."""
TOGETHER: Final = 256
"""Devices of a cohort whose batches are in memory at once."""
PERSONAL: Final = "personal"
START: Final = 0
"""The round whose scores are those of the model that a run begins with."""
SHARED: Final = "shared"
GOOD: Final = "good"
"""Names, in the state of the rules, of the shared state and of the one that it may return to."""
NOW_S: Final = 0.0
"""The constant clock of a simulation, in which nothing waits."""

Some = TypeVar("Some")
Arrays = Mapping[str, Array]
Learnt = list[tuple[Arrays, machine.Update]]
OnRound = Callable[[RoundRow], None]
OnScores = Callable[[int, float | None, tuple[DeviceScore, ...]], None]
"""(round, 0 for the start; rate of adaptation if it is one of `Study.rates`; scores).

No scores: adaptation at that rate made a loss that is not finite.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One simulated run. devices: number per round, 0 for all. run: its name in lease ids.

    steps, batch_size, support, query: a device's sampling, support 0 for all its samples.
    ways: classes of an episode, drawn and numbered anew for each; 0: those of the samples.
    evaluate_every: rounds between scorings, 0 to score at the end only. rates: rates of adaptation
    that are tried at the end in addition to the run's own; the best of all counts. engine: what
    runs and scores devices: "onnx", one after the other, or "xla", many at once. privacy, masking:
    noise in sums, integers of 8 bits; the same seed then gives other bits each time.
    """

    algorithm: str
    rounds: int
    hyper: Hyper = field(default_factory=Hyper)
    devices: int = 0
    steps: int = defaults.STEPS
    batch_size: int = defaults.BATCH_SIZE
    support: int = defaults.SUPPORT
    query: int = defaults.QUERY
    ways: int = 0
    evaluate_every: int = 0
    rates: tuple[float, ...] = ()
    compression: str = ""
    keep: float = 1.0
    seed: int = 0
    run: str = "study"
    engine: str = ENGINE
    robustness: Robustness = field(default_factory=Robustness)
    privacy: DifferentialPrivacy | None = None
    masking: masked_sums.MaskedStudy | None = None

    def __post_init__(self) -> None:
        row = algorithm(self.algorithm)
        Compressor(self.compression, keep=self.keep)
        check_choice("engine", self.engine, ENGINES)
        if self.rounds < 1 or self.devices < 0 or self.evaluate_every < 0:
            raise InvalidInput(
                f"a study needs at least 1 round and counts >= 0, got {self.rounds} "
                f"rounds, {self.devices} devices, evaluate_every {self.evaluate_every}"
            )
        if self.rates and row.learns_rates:
            raise InvalidInput(f"{row.name} learns its rates of adaptation; give no others")
        if self.ways:
            check_ways(self.ways, self.support, self.query)
            if not row.episodes:
                raise InvalidInput(
                    f"{row.name} does not learn from episodes; with classes that are numbered anew "
                    "in each it has nothing to learn. Choose maml, fomaml or meta-sgd"
                )
        if not all(math.isfinite(rate) and rate >= 0 for rate in self.rates):
            raise InvalidInput(f"rates are finite and not negative, got {self.rates}")


def simulate(
    module: Module,
    shards: Mapping[str, Shard],
    study: Study,
    *,
    unseen: Mapping[str, Shard] | None = None,
    folder: Path | None = None,
    server: StudyServer | None = None,
    on_round: OnRound | None = None,
    on_scores: OnScores | None = None,
) -> Trial:
    """Run the study on these devices; `unseen` ones are scored and never learned from.

    server: the cloud's side, by default that of the algorithm's row. folder: keeps the study's
    progress after each round. Progress of the same study found there is resumed, also with more
    rounds or other `rates`; that of another study is a Conflict.
    """
    others = dict(unseen or {})
    if both := sorted(shards.keys() & others.keys()):
        raise InvalidInput(f"a device must either take part or be unseen, not both: {both[:4]}")
    server = server or MeanServer()
    if not server.follows_limits:
        limits = replace(study.robustness, aggregator=MEAN, numbers={}, returns=0)
        study = replace(study, robustness=limits)
    if not shards or study.devices > len(shards):
        raise InvalidInput(f"a round asks {study.devices or 1} devices; there are {len(shards)}")
    asked, study = study.rounds, prepared(study, len(shards))
    groups = study.masking.groups if study.masking else 1
    study.robustness.check_count(study.devices or len(shards), groups=groups)
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / PLAN
        # Through a file, so that a study runs exactly the plan that a device would receive.
        planned = plan_of(module, study.algorithm, study.hyper, path)
        plan = Plan.load(path, expected_digest=planned.digest)
    has_buffers = bool(device.sent_buffers(plan.view(), plan.roles))
    check_rows(study, len(shards), planned, buffers=has_buffers, strategy=not server.follows_limits)
    facts = {**identity(planned.digest, study, shards, others), **server.facts}
    keeper = None if folder is None else Keeper(folder, facts)
    simulation = _Simulation(
        plan, _together(module, study, plan), study, shards, others,
        keeper=keeper, on_round=on_round, on_scores=on_scores,
    )  # fmt: skip
    with server.serving(simulation.served(planned)) as rounds:
        trial = simulation.go(rounds, server.title(study.algorithm))
    return trial if study.privacy is None else with_account(trial, study.privacy, asked)


class _Simulation:
    """The devices, the plan they share in turn, and the cloud."""

    def __init__(
        self,
        plan: Plan,
        together: tuple[Cohort, CohortScorer] | None,
        study: Study,
        seen: Mapping[str, Shard],
        unseen: Mapping[str, Shard],
        *,
        keeper: Keeper | None,
        on_round: OnRound | None,
        on_scores: OnScores | None,
    ) -> None:
        self.plan, self.study, self.keeper = plan, study, keeper
        self.cohort = together[0] if together else None
        self.scorer = together[1] if together else None
        self.spool = ChangeSpool()
        self.on_round = on_round or (lambda _: None)
        self.on_scores = on_scores or (lambda *_: None)
        self.metric = device.metric_of_plan(plan)
        self.seen, self.shards = seen, {**seen, **unseen}
        for name, shard in self.shards.items():
            try:
                device.check_labels(plan, shard, ways=study.ways)
                work = self._work(START, name)
                device.check_episodes(plan, work, shard, learns=name in seen)
            except InvalidInput as error:
                raise InvalidInput(f"{name}: {error}") from error
        self.buffers = device.buffers(plan.roles)
        self.compressor = Compressor(study.compression, keep=study.keep, plain=self.buffers)
        shared = {n: x for n, x in plan.state().items() if n in device.shared(plan.roles)}
        self.fresh = plan.state(PERSONAL)
        self.place = (keeper.newest() if keeper else None) or StudyProgress(shared=shared)
        if (done := len(self.place.rounds)) > study.rounds:
            raise Conflict(
                f"{done} rounds of this study are done; ask for as many or more, got {study.rounds}"
            )

    def served(self, plan: PlanMade) -> ServedStudy:
        """Return what a server knows of this study. plan: that of its devices."""
        return value_from(
            ServedStudy, self.study, devices=self._count(), plan=plan.digest, frozen=plan.frozen,
            roles={name: self.plan.roles[name] for name in self.place.shared}, metric=self.metric,
            population=len(self.seen),
        )  # fmt: skip

    def go(self, server: RoundServer, title: str) -> Trial:
        """Run from the present progress to the end. title: the trial's name."""
        if not self.place.rounds:
            self._score_start()
        state = self._begin()
        while state.phase is not machine.Phase.FINISHING:
            assert state.round is not None
            evaluates = state.round.evaluates
            if evaluates:
                state = self._score(state)
                server.judge(self.place)
            else:
                state = self._round(state, server)
            if self.keeper is not None and not (state.round and state.round.evaluates):
                self.keeper.save(self.place)
        place, sweep = self.place, self._sweep()
        start, scores = (
            tuple(s for s in place.scores if (s.round == START) is first) for first in (True, False)
        )
        return Trial(
            title, place.rounds, scores, sweep, place.shared, self.metric, self.study.seed, start
        )

    def _score_start(self) -> None:
        """Score the model that the run begins with, unless it cannot be adapted at this rate."""
        try:
            scores = self._scored_all(START, self._scorers())
        except InvalidInput:
            # A rate too large for the first model may suit the learned one. Other errors recur.
            return
        self.place = replace(self.place, scores=scores)
        self.on_scores(START, None, scores)

    def _begin(self) -> machine.RunState:
        study = self.study
        count = self._count()
        # Every device that is asked reports at once, so quorum, deadline and patience never matter.
        plan = RunPlan(
            rounds=study.rounds, devices=count, asked=count, quorum=1, deadline_s=1.0,
            patience_s=0.0, evaluate_every=study.evaluate_every, seed=study.seed,
            returns=study.robustness.returns,
            budget=None if study.privacy is None else study.privacy.budget(),
        )  # fmt: skip
        scorer, used = self._scorers()[:1], self.place.used  # the rules only count the rounds
        members = {
            name: machine.RunMember(
                device=name, connected=True,
                held_out=shard.held_out_samples if name in scorer else 0,
                examples=shard.examples if name in self.seen else 0,
                used_round=used.get(name, (0, 0))[0], uses=used.get(name, (0, 0))[1],
            )
            for name, shard in sorted(self.shards.items())
        }  # fmt: skip
        state = machine.RunState(
            plan=plan, run=study.run, shared=SHARED, members=members, rules=machine.NEWEST_RULES,
            turn=(len(self.place.rounds) + 1, False), watch=self.place.watch,
            good=GOOD if self.place.good else "",
        )  # fmt: skip
        return step(state, machine.Tick(at_s=NOW_S))[0]

    def _count(self) -> int:
        """Return the number of devices in a round."""
        return self.study.devices or len(self.seen)

    def _round(self, state: machine.RunState, server: RoundServer) -> machine.RunState:
        """Let the devices that the server asks learn, and reduce the updates in their order."""
        started = time.perf_counter()
        state, leases = self._asked(state, server)
        assert state.round is not None
        number, before = state.round.number, self.place
        with ChangeSpool() as self.spool:
            learned = self._learn_all(number, leases)
            for lease, (_, update) in zip(leases, learned, strict=True):
                arrived = machine.Arrived(
                    at_s=NOW_S, device=lease.device, lease=lease.id, update=update
                )
                state, effects = step(state, arrived)
            reduces = any(isinstance(effect, machine.Reduce) for effect in effects)
            result = self._reduced(server, leases, learned) if reduces else None
        scaled = self._return() if result is None else self._adopt(state, before, result)
        took = time.perf_counter() - started
        ended = state.history[-1]
        down = sum(x.nbytes for x in self.place.shared.values()) * len(leases)
        budget = state.plan.budget
        row = RoundRow(
            number, len(leases), ended.loss, ended.bytes_up, down, took, scaled, ended.returned,
            0.0 if budget is None else replace(budget, rounds=number).spent,
        )  # fmt: skip
        self.place = replace(self.place, rounds=(*self.place.rounds, row), watch=state.watch)
        self.on_round(row)
        if state.phase is machine.Phase.STOPPED:
            raise InvalidInput(f"in round {number}, {state.reason}")
        if not reduces:
            return replace(state, shared=SHARED)
        charged = number if budget is not None else 0
        reduced = machine.Reduced(at_s=NOW_S, number=number, shared=SHARED, charged=charged)
        after = step(state, reduced)[0]
        if budget is not None:
            used = {m.device: (m.used_round, m.uses) for m in after.members.values() if m.uses}
            self.place = replace(self.place, used=used)
        return replace(after, good=GOOD if self.place.good else "")

    def _return(self) -> int:
        """Take the last good state; no update is reduced.

        Personal tensors with an anchor are an algorithm's, such as control variates: they begin
        again, as on devices (`device.memory`).
        """
        kept = {n for n in self.fresh if device.ANCHOR + n not in self.plan.roles}
        personal = {
            name: self.fresh | {n: x for n, x in own.items() if n in kept}
            for name, own in self.place.personal.items()
        }
        self.place = replace(
            self.place, shared=self.place.good, slots={}, personal=personal, remainders={}
        )
        return 0

    def _learn_all(self, number: int, leases: Sequence[machine.Lease]) -> Learnt:
        """Do the devices' work and return their changes as the cloud reads them."""
        if self.cohort is None:
            return [self._sent(number, lease, *self._learn(number, lease)) for lease in leases]
        # Devices with as many samples have batches of one shape, which a launch needs.
        order = sorted(leases, key=lambda lease: self.shards[lease.device].examples)
        sent: dict[str, tuple[Arrays, machine.Update]] = {}
        for some in _some(order):
            for lease, outcome in zip(some, self._together(number, some), strict=True):
                sent[lease.device] = self._sent(
                    number, lease, *self._outcome(number, lease, outcome)
                )
        return [sent[lease.device] for lease in leases]

    def _learn(self, number: int, lease: machine.Lease) -> tuple[device.Learned, Arrays]:
        """Return what a device learned, and its personal state."""
        name = lease.device
        self._take(name)
        with _naming(name, number):
            done = device.learn(self.plan, self._work(number, name), self.shards[name])
        return done, self.plan.state(PERSONAL)

    def _together(self, number: int, leases: Sequence[machine.Lease]) -> Sequence[CohortOutcome]:
        """Let these devices learn at once."""
        assert self.cohort is not None
        clients = [self._client(number, lease.device) for lease in leases]
        start = {**self.plan.state(), **self.place.shared}
        try:
            return self.cohort.run(start, clients)
        except InvalidInput:
            for lease in leases:  # one by one, the plan's own error names device and values
                self._learn(number, lease)
            raise

    def _client(self, number: int, name: str) -> CohortClient:
        """Return a device as one of a cohort: its own state, and its batches."""
        from triplane.unified_ir.engines.xla.cohort import CohortClient

        self._take(name)
        work, shard = self._work(number, name), self.shards[name]
        own = {**self.plan.state(PERSONAL), **device.beginning(self.plan, work)}
        with _naming(name, number):
            return CohortClient(own, list(device.batches(self.plan, work, shard)))

    def _outcome(
        self, number: int, lease: machine.Lease, outcome: CohortOutcome
    ) -> tuple[device.Learned, Arrays]:
        """Return what a device of a cohort learned, and its personal state."""
        name, after = lease.device, {**self.place.shared, **outcome.state}
        with _naming(name, number):
            done = device.learned_elsewhere(
                self.plan, self.shards[name], self.place.shared, after, outcome.results[LOSS]
            )
        return done, {n: np.array(outcome.state.get(n, x)) for n, x in self.fresh.items()}

    def _sent(
        self, number: int, lease: machine.Lease, done: device.Learned, own: Arrays
    ) -> tuple[Arrays, machine.Update]:
        """Keep a device's own state, and return its change as the cloud reads it."""
        name, place = lease.device, self.place
        change: dict[str, Array] = dict(done.change)
        if self.study.privacy is not None and self.study.masking is None:
            change = {n: np.array(x) for n, x in change.items()}
            clip(change, norm_of(place.slots, self.study.privacy))
        rng = Draws(self.study.seed, number, lease.id, "compression")
        # Packed and unpacked again, because the cloud sees only what compression leaves.
        sent, lost = self.compressor.pack(change, place.remainders.get(name, {}), rng)
        personal = {**place.personal, name: own} if self.fresh else {}
        remainders = {**place.remainders, name: lost} if lost else place.remainders
        self.place = replace(place, personal=personal, remainders=remainders)
        size = sum(x.nbytes for x in sent.values())
        if (masking := self.study.masking) is not None:
            size = masked_sums.masked_bytes(change, masking, self._count(), self.study.privacy)
        update = machine.Update(
            blob="", size=size, examples=done.examples, loss=done.loss, seconds=0.0
        )
        return self.spool.keep(self.compressor.unpack(sent)), update

    def _asked(
        self, state: machine.RunState, server: RoundServer
    ) -> tuple[machine.RunState, Sequence[machine.Lease]]:
        """Return the state and its leases after the server chose among the round's devices."""
        assert state.round is not None
        leases = {lease.device: lease.id for lease in state.round.leases}
        asked = server.choose(self.place, leases)
        event = value_from(
            machine.Asked, state.round, at_s=NOW_S, messages=dict.fromkeys(asked, "")
        )
        state, _ = step(state, event)
        assert state.round is not None
        return state, state.round.leases

    def _reduced(
        self, server: RoundServer, leases: Sequence[machine.Lease], learned: Learnt
    ) -> Next:
        contributions = [
            Contribution(lease.device, lease.id, update.examples, update.loss, change)
            for lease, (change, update) in zip(leases, learned, strict=True)
        ]
        return server.reduce(self.place, contributions)

    def _adopt(self, state: machine.RunState, before: StudyProgress, after: Next) -> int:
        """Take the next shared state, and return how many updates were scaled."""
        is_good = state.plan.returns > 0 and not state.watch.bad
        good = self.place.shared if is_good else self.place.good
        place = self.place.taken_back(before, after.left_out) if after.left_out else self.place
        self.place = replace(place, shared=after.shared, slots=after.slots, good=good)
        return after.scaled

    def _score(self, state: machine.RunState) -> machine.RunState:
        """Adapt and score every device with held-out samples; the rules get one device's event."""
        assert state.round is not None
        number = state.round.number
        scores = self._scored_all(number, self._scorers())
        self.place = replace(self.place, scores=(*self.place.scores, *scores))
        self.on_scores(number, None, scores)
        (lease,), score = state.round.leases, value_from(machine.Score, scores[0])
        event = machine.Scored(at_s=NOW_S, device=lease.device, lease=lease.id, score=score)
        return step(state, event)[0]

    def _scorers(self) -> list[str]:
        return sorted(name for name, shard in self.shards.items() if shard.held_out_samples)

    def _scored_all(self, number: int, names: Sequence[str]) -> tuple[DeviceScore, ...]:
        if self.scorer is None:
            return tuple(self._scored(number, name) for name in names)
        scores: dict[str, device.LearnerScore] = {}
        for some in _some(names):
            try:
                scores |= self._scored_together(self.scorer, number, some)
            except InvalidInput:
                for name in some:  # one by one, the error names the device
                    self._scored(number, name)
                raise
        return tuple(self._row(number, name, scores[name]) for name in names)

    def _scored_together(
        self, scorer: CohortScorer, number: int, names: Sequence[str]
    ) -> dict[str, device.LearnerScore]:
        """Return the scores of these devices, which are adapted and scored at once."""
        from triplane.unified_ir.federated.study.cohort_scores import mean_scores, scorings

        steps, devices = self.study.hyper.inner_steps, {}
        for name in names:
            self._take(name)
            own, work, shard = (
                self.plan.state(PERSONAL),
                self._work(number, name),
                self.shards[name],
            )
            parts = scorings(self.plan, own, work, shard, steps)
            devices[name] = shard.held_out_samples, parts
        every = [part for _, parts in devices.values() for part in parts]
        start = {**self.plan.state(), **self.place.shared}
        before, after = scorer.scores(start, every), scorer.adapted(start, every, steps)
        return mean_scores(devices, before, after)

    def _scored(self, number: int, name: str) -> DeviceScore:
        self._take(name)
        work, shard = self._work(number, name), self.shards[name]
        try:
            score = device.evaluate(self.plan, work, shard, steps=self.study.hyper.inner_steps)
        except InvalidInput as error:
            raise InvalidInput(f"{name} after round {number}: {error}") from error
        return self._row(number, name, score)

    def _row(self, number: int, name: str, score: device.LearnerScore) -> DeviceScore:
        return value_from(DeviceScore, score, device=name, seen=name in self.seen, round=number)

    def _sweep(self) -> dict[float, tuple[DeviceScore, ...]]:
        """Return the scores at the end by rate, the run's own included; empty without rates."""
        study = self.study
        # The rate is state of the plan, so other rates need no other graphs.
        own = {name: x for name, x in self.plan.state().items() if name == LR}
        last = tuple(s for s in self.place.scores if s.round == study.rounds)
        sweep = {}
        for rate in dict.fromkeys((*study.rates, study.hyper.lr)) if study.rates else ():
            if rate == study.hyper.lr:
                sweep[rate] = last
            else:
                self.plan.assign({name: np.full_like(x, rate) for name, x in own.items()})
                scores = self._adapted_all(last)
                self.on_scores(study.rounds, rate, scores)
                sweep |= {rate: scores} if scores else {}
        self.plan.assign(own)
        return sweep

    def _adapted_all(self, scores: Sequence[DeviceScore]) -> tuple[DeviceScore, ...]:
        """Score the devices at the plan's rate; nothing if that rate is too large for a device."""
        try:
            if self.scorer is not None and scores:
                number, names = scores[0].round, [score.device for score in scores]
                again = [
                    s
                    for some in _some(names)
                    for s in self._scored_together(self.scorer, number, some).values()
                ]
                return tuple(replace(s, after=a.after) for s, a in zip(scores, again, strict=True))
            return tuple(map(self._adapted, scores))
        except InvalidInput:
            # A rate that diverges is a result of the comparison of rates, not an error.
            return ()

    def _adapted(self, score: DeviceScore) -> DeviceScore:
        """Score the same device at the plan's rate; its score before adaptation stays."""
        name, shard = score.device, self.shards[score.device]
        self._take(name)
        work = self._work(score.round, name)
        steps = self.study.hyper.inner_steps
        return replace(score, after=device.adapted_score(self.plan, work, shard, steps=steps))

    def _take(self, name: str) -> None:
        """Give the plan the shared state and the device's own."""
        self.plan.assign({**self.place.shared, **self.place.personal.get(name, self.fresh)})

    def _work(self, number: int, name: str) -> Work:
        return value_from(Work, self.study, round=number, device=name)


def _together(module: Module, study: Study, plan: Plan) -> tuple[Cohort, CohortScorer] | None:
    """Return what lets devices learn and scores them on XLA, if the study asks for it."""
    if study.engine == ENGINE:
        return None
    from triplane.unified_ir.engines.xla.cohort import Cohort
    from triplane.unified_ir.federated.study.cohort_scores import CohortScorer

    functions = functions_with_state(module, study.algorithm, study.hyper)
    return Cohort(functions[device.LEARN], list(plan.roles)), CohortScorer(functions, plan.roles)


def _some(devices: Sequence[Some]) -> Iterator[Sequence[Some]]:
    """Yield as many devices as are in memory at once."""
    return (devices[at : at + TOGETHER] for at in range(0, len(devices), TOGETHER))


@contextmanager
def _naming(name: str, number: int) -> Iterator[None]:
    """Name the device and the round in an error."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{name} in round {number}: {error}") from error
