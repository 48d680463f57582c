"""The model that a device uses: the better one of the shared state and its adapted state.

Both are measured on held-out samples that neither learning nor adaptation has seen. A personal
state stays only while it is better than every later shared state. The model is one durable file,
`personal/model`.

Without a measurement the model is the newest shared state, which changes with every task. Such
states are written to `personal/model.newest` without a sync, and to the durable file when a run
begins and once in `SYNC_S`; after a power cut the model may be older by that time. While rounds
follow each other fast, one is written in `WRITE_S`, and the last after `WAIT_S` or at `stop`. After
a kill the model may be older by that time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from triplane.device.memory import UNSYNCED, drop, parse_facts
from triplane.proto.disk import OS_DISK, Disk
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.learn import (
    EVALUATE,
    Learner,
    LearnerScore,
    Shard,
    Work,
    adapt,
    metric_of_plan,
    score,
)
from triplane.unified_ir.federated.core.metric import ACCURACY, Metric, metric_named
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime.plan import STATE, Plan

logger = logging.getLogger(__name__)

KIND: Final = "checkpoint"
SHARED: Final = "shared"
PERSONAL: Final = "personal"
SYNC_S: Final = 60.0
"""Seconds between two durable writes of states that were not measured."""
WRITE_S: Final = 5.0
"""Seconds between two writes of states that were not measured, while rounds follow fast."""
WAIT_S: Final = 1.0
"""Seconds that a state waits for the next one before it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The chosen model of a device.

    chosen: shared or personal. plan: SHA-256 of its plan's file, hexadecimal. samples: number of
    held-out samples it was measured on, 0 if it was not. before: score of the newest shared state;
    after: score of that state after adaptation. metric: "accuracy", or "loss" for a model without
    one, where lower is better. accuracy: that of the chosen model; 0 if `metric` is another one.
    """

    run: str
    round: int
    plan: str
    chosen: str
    samples: int = 0
    before: float = 0.0
    after: float = 0.0
    accuracy: float = 0.0
    metric: str = ACCURACY.name

    @property
    def score(self) -> float:
        """The score of the chosen model."""
        return self.after if self.chosen == PERSONAL else self.before

    def record(self) -> dict[str, Any]:
        """Return the fields that are stored: the metric is named only if it is not accuracy."""
        left_out = "metric" if self.metric == ACCURACY.name else "accuracy"
        return {name: value for name, value in asdict(self).items() if name != left_out}


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The contents of a file of the model. plan: the plan's root digest."""

    choice: ModelChoice
    state: Mapping[str, Array]
    roles: Mapping[str, str]
    properties: Mapping[str, str]
    plan: str


def _checkpoint(plan: Plan, choice: ModelChoice, state: Mapping[str, Array]) -> _Checkpoint:
    properties = {name: str(value) for name, value in choice.record().items()}
    properties |= {"steps": str(plan.steps), "spent_s": repr(plan.spent_s)}
    return _Checkpoint(choice, state, plan.roles, properties, plan.digest)


class DeviceModel:
    """The files of the model; the device's thread writes them, and any thread may read them."""

    def __init__(self, path: Path) -> None:
        self._path, self._newest = path, path.with_name(f"{path.name}.newest")
        self._written: tuple[ModelChoice, float] | None = (
            None  # the newest unmeasured one, and when
        )
        self._waiting: _Checkpoint | None = None  # newer than the files
        self._waits_since_s = 0.0

    def choice(self) -> ModelChoice | None:
        """Return the newest choice. A damaged file is removed; the next state replaces it."""
        return self._waiting.choice if self._waiting is not None else self._current()[1]

    def _current(self) -> tuple[Path, ModelChoice | None]:
        """Return the newer of the two files and its contents.

        The contents say which is newer, because a power cut may bring back a removed file.
        """
        durable = _read(self._path)
        # A measured model is only written durably, so the file without a sync cannot be newer.
        newest = _read(self._newest) if durable is not None and not durable.samples else None
        if durable is not None and newest is not None and _follows(newest, durable):
            return self._newest, newest
        return self._path, durable

    def load_into(self, plan: Plan) -> None:
        """Load the model's state into its plan. Conflict: the newest is damaged; ask again."""
        path, _ = self._current()
        try:
            plan.load_state(path)
        except NotFound:
            if path == self._path:
                raise
            plan.load_state(self._path)  # it has replaced the other file just now
        except Corrupt as error:
            if path == self._path:
                raise
            drop(path)
            raise Conflict(f"a power cut damaged the newest state: {error}; ask again") from error

    def adopt_unmeasured(
        self, plan: Plan, choice: ModelChoice, assigned: Mapping[str, Array]
    ) -> None:
        """Make the plan's state the model, with a write and with a sync only now and then.

        assigned: the arrays that the plan was assigned, which nobody changes.
        """
        state = plan.view()
        # Learning changes the plan's own arrays; a copy of them could exceed the device's memory.
        if self._was_just_written(choice) and assigned.keys() == state.keys():
            self._waiting, self._waits_since_s = (
                _checkpoint(plan, choice, assigned),
                time.monotonic(),
            )
            return
        durable = _read(self._path)
        if durable and _follows(choice, durable) and _age_s(self._path) < SYNC_S:
            self._write(self._newest, _checkpoint(plan, choice, state), UNSYNCED)
        else:
            self.adopt(plan, choice)
        self._written = choice, time.monotonic()

    def _was_just_written(self, choice: ModelChoice) -> bool:
        """Return whether a file has a state of the same run that is younger than `WRITE_S`."""
        if self._written is None:
            return False
        written, at_s = self._written
        return _follows(choice, written) and time.monotonic() - at_s < WRITE_S

    def write_waiting(self, *, at_once: bool = False) -> None:
        """Write the newest state if it has waited for the next one long enough, or at once."""
        newest, waited_s = self._waiting, time.monotonic() - self._waits_since_s
        if newest is not None and (at_once or waited_s >= WAIT_S):
            self._write(self._newest, newest, UNSYNCED)
            self._written = newest.choice, time.monotonic()

    def adopt(self, plan: Plan, choice: ModelChoice) -> None:
        """Make the plan's state the model."""
        self._write(self._path, _checkpoint(plan, choice, plan.view()), OS_DISK)
        drop(self._newest)
        self._written = None

    def _write(self, path: Path, new: _Checkpoint, disk: Disk) -> None:
        self._waiting = None  # older than what is written
        part = container.tensor_part(STATE, new.state, new.roles)
        container.write(path, KIND, [part], properties=new.properties, parent=new.plan, disk=disk)

    def judge(
        self,
        plan: Plan,
        watched: Learner,
        work: Work,
        shard: Shard,
        *,
        steps: int,
        blob: str,
        restart: Callable[[], None],
        other: Callable[[str], Plan] | None = None,
    ) -> LearnerScore:
        """Score the plan's state, adapt it, score it again, and keep the better for `predict`.

        watched: `plan`, stoppable at each step. blob: SHA-256 of the plan's file. restart: restores
        the present state of the plan. other: opens the plan of an earlier run by its blob; without
        it the models of earlier runs are not compared. The result is that of `core.evaluate` and
        does not depend on the earlier model of this device.
        """
        n = shard.held_out_samples
        before = score(watched, shard)
        adapt(watched, work, shard, steps=steps)
        after = score(watched, shard)
        metric = metric_of_plan(plan)
        best = ModelChoice(
            run=work.run,
            round=work.round,
            plan=blob,
            chosen=PERSONAL if metric.gain(after, before) > 0 else SHARED,
            samples=n,
            before=before,
            after=after,
            accuracy=max(before, after) if metric == ACCURACY else 0.0,
            metric=metric.name,
        )
        # The plan now holds the adapted state; put the shared one back before it is stored.
        if best.chosen == SHARED:
            restart()
        if not self._old_is_better(best, plan, watched, shard, other):
            self.adopt(plan, best)
        return LearnerScore(n, before, after)

    def _old_is_better(
        self,
        new: ModelChoice,
        plan: Plan,
        watched: Learner,
        shard: Shard,
        other: Callable[[str], Plan] | None,
    ) -> bool:
        """Return whether the earlier model beats the new state on today's held-out samples."""
        old = self.choice()
        if old is None or not old.samples or old.metric != new.metric:
            return False
        metric = metric_named(new.metric)
        # The state of another plan does not fit this one, so its own plan has to be opened.
        if old.plan != new.plan:
            score_there = other and self._scored_by(other, old, plan, shard)
            return score_there is not None and metric.gain(score_there, new.score) > 0
        # One plan in memory is enough: the states take turns in it.
        challenger = plan.state()
        try:
            plan.load_state(self._path)
            if metric.gain(_score_of(watched, shard, metric), new.score) > 0:
                return True
        except (Corrupt, NotFound) as error:
            logger.warning("model replaced", extra={"file": self._path.name, "reason": str(error)})
        plan.assign(challenger)
        return False

    def _scored_by(
        self, other: Callable[[str], Plan], old: ModelChoice, plan: Plan, shard: Shard
    ) -> float | None:
        """Return the score of another run's model.

        None: its plan is gone or does not fit, or its loss may be another function than that of
        `plan`, so that the two numbers cannot be compared.
        """
        try:
            earlier = other(old.plan)
            if old.metric != ACCURACY.name and not _measure_alike(earlier, plan):
                return None
            earlier.load_state(self._path)
            return score(earlier, shard)
        except (Corrupt, InvalidInput, NotFound, Conflict):
            return None


def _score_of(plan: Learner, shard: Shard, metric: Metric) -> float:
    """Return the score of an earlier state, the worst one if its loss is not finite any more."""
    try:
        return score(plan, shard)
    except InvalidInput:
        if metric.share:
            raise
        return math.inf


def _measure_alike(one: Plan, other: Plan) -> bool:
    return one.entry_digest(EVALUATE) == other.entry_digest(EVALUATE)


def _age_s(path: Path) -> float:
    """Return the age of a file; absolute, because the clock may have been set back."""
    return abs(time.time() - path.stat().st_mtime)


def _read(path: Path) -> ModelChoice | None:
    # A choice has either of these; see `ModelChoice.record`.
    absent = {"metric": ACCURACY.name, "accuracy": "0.0"}
    try:
        properties = dict(Container(path, kind=KIND).manifest.properties)
        return parse_facts(ModelChoice, (absent | properties).items())
    except NotFound:
        return None
    except (Corrupt, InvalidInput):
        drop(path)
        return None


def _follows(newer: ModelChoice, older: ModelChoice) -> bool:
    """Return whether both are unmeasured states of one run, and the first is of a later round."""
    same = (newer.run, newer.plan) == (older.run, older.plan)
    return same and newer.round > older.round and not (newer.samples or older.samples)
