"""The model that a device uses: the better one of the shared and its adapted personal state.

Both are measured on held-out samples that neither learning nor adaptation saw. A personal state
stays only while it is better than every shared one that came after it. One durable file,
`personal/model`.

Without a measurement the model is the newest shared state, which changes with every task. Such
states are written to `personal/model.newest` without a sync, and to the durable file when a run
begins and once in `SYNC_S`; after a power cut the model may be that much older.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from triplane.device.memory import UNSYNCED
from triplane.proto.disk import OS_DISK, Disk
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.unified_ir.federated.core.learn import (
    Learner,
    LearnerScore,
    Shard,
    Work,
    adapt,
    score,
)
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime.plan import STATE, Plan

KIND: Final = "checkpoint"
SHARED: Final = "shared"
PERSONAL: Final = "personal"
SYNC_S: Final = 60.0
"""Seconds between two durable writes of states that were not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The chosen model of a device.

    chosen: shared or personal. plan: SHA-256 of its plan's file, hexadecimal. samples: held-out
    ones it was measured on, 0 where it was not. before: accuracy of the newest shared state, after:
    of that state adapted; accuracy: of the model.
    """

    run: str
    round: int
    plan: str
    chosen: str
    samples: int = 0
    before: float = 0.0
    after: float = 0.0
    accuracy: float = 0.0


class DeviceModel:
    """The files of the model, written by the device's thread and read by any thread."""

    def __init__(self, path: Path) -> None:
        self._path, self._newest = path, path.with_name(f"{path.name}.newest")

    def choice(self) -> ModelChoice | None:
        """Return the stored choice. A damaged file is removed; the next state replaces it."""
        return self._current()[1]

    def _current(self) -> tuple[Path, ModelChoice | None]:
        """Return the file of the model: the newest state, unless the durable one is newer.

        The files say which is newer, because a power cut may bring back a removed file.
        """
        durable = _read(self._path)
        newest = _read(self._newest) if durable is not None and not durable.samples else None
        if durable is not None and newest is not None and _follows(newest, durable):
            return self._newest, newest
        return self._path, durable

    def load_into(self, plan: Plan) -> None:
        """Load the model's state into its plan.

        Conflict: the newest was torn; an older one holds.
        """
        path, _ = self._current()
        try:
            plan.load_state(path)
        except NotFound:
            if path == self._path:
                raise
            plan.load_state(self._path)  # which has replaced it in this moment
        except Corrupt as error:
            if path == self._path:
                raise
            _drop(path)
            raise Conflict(f"a power cut tore the newest state: {error}; ask again") from error

    def adopt_unmeasured(self, plan: Plan, choice: ModelChoice) -> None:
        """Make the plan's state the model, with a sync only now and then."""
        durable = _read(self._path)
        if durable is not None and _follows(choice, durable) and self._age_s() < SYNC_S:
            self._write(self._newest, plan, choice, UNSYNCED)
        else:
            self.adopt(plan, choice)

    def _age_s(self) -> float:
        """Return the age of the durable file, by a clock that may have been set back."""
        return abs(time.time() - self._path.stat().st_mtime)

    def adopt(self, plan: Plan, choice: ModelChoice) -> None:
        """Make the plan's state the model."""
        self._write(self._path, plan, choice, OS_DISK)
        _drop(self._newest)

    def _write(self, path: Path, plan: Plan, choice: ModelChoice, disk: Disk) -> None:
        properties = {name: str(getattr(choice, name)) for name in _FIELDS}
        part = container.tensor_part(STATE, plan.view(), plan.roles)
        properties |= {"steps": str(plan.steps), "spent_s": repr(plan.spent_s)}
        container.write(path, KIND, [part], properties=properties, parent=plan.digest, disk=disk)

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
        """Score the plan's state, adapt it, score again, and keep the best for `predict`.

        watched: `plan`, which may be interrupted at each step. blob: SHA-256 of the plan's file.
        restart: puts the plan back to the state it has now. other: opens the plan of an earlier
        run, by its blob; without it what was kept of one is not compared. What is returned is
        `core.evaluate`'s and does not depend on what this device had before.
        """
        n = shard.held_out_samples
        before = score(watched, shard)
        adapt(watched, work, shard, steps=steps)
        after = score(watched, shard)
        best = ModelChoice(
            run=work.run,
            round=work.round,
            plan=blob,
            chosen=PERSONAL if after > before else SHARED,
            samples=n,
            before=before,
            after=after,
            accuracy=max(before, after),
        )
        if best.chosen == SHARED:
            restart()
        if not self._kept_is_better(best, plan, watched, shard, other):
            self.adopt(plan, best)
        return LearnerScore(n, before, after)

    def _kept_is_better(
        self,
        new: ModelChoice,
        plan: Plan,
        watched: Learner,
        shard: Shard,
        other: Callable[[str], Plan] | None,
    ) -> bool:
        """Return whether the earlier model beats the new state on today's held-out samples."""
        kept = self.choice()
        if kept is None or not kept.samples:
            return False
        if kept.plan != new.plan:
            return other is not None and self._scored_by(other, kept, shard) > new.accuracy
        challenger = plan.state()
        plan.load_state(self._path)
        if score(watched, shard) > new.accuracy:
            return True
        plan.assign(challenger)
        return False

    def _scored_by(self, other: Callable[[str], Plan], kept: ModelChoice, shard: Shard) -> float:
        """Return the accuracy of another run's model; 0 where its plan is gone or does not fit."""
        try:
            earlier = other(kept.plan)
            earlier.load_state(self._path)
            return score(earlier, shard)
        except (Corrupt, InvalidInput, NotFound, Conflict):
            return 0.0


_FIELDS: Final = ("run", "round", "plan", "chosen", "samples", "before", "after", "accuracy")


def _read(path: Path) -> ModelChoice | None:
    try:
        return _choice(dict(Container(path, kind=KIND).manifest.properties))
    except NotFound:
        return None
    except (Corrupt, InvalidInput):
        _drop(path)
        return None


def _drop(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        OS_DISK.remove(path)


def _follows(newer: ModelChoice, older: ModelChoice) -> bool:
    """Return whether both are unmeasured states of one run, the first of a later round."""
    same = (newer.run, newer.plan) == (older.run, older.plan)
    return same and newer.round > older.round and not (newer.samples or older.samples)


def _choice(said: dict[str, str]) -> ModelChoice:
    try:
        return ModelChoice(
            run=said["run"],
            round=int(said["round"]),
            plan=said["plan"],
            chosen=said["chosen"],
            samples=int(said["samples"]),
            before=float(said["before"]),
            after=float(said["after"]),
            accuracy=float(said["accuracy"]),
        )
    except (KeyError, ValueError) as error:
        raise Corrupt(f"the facts of a model are missing or no numbers: {error}") from error
