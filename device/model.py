"""The model a device uses: the better of what all learned and what it made of it for itself.

Measured on held-out samples that neither learning nor adaptation saw. A personal state stays only
while it is better than every shared one that came after it. One durable file, `personal/model`.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from triplane.proto.disk import OS_DISK
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.unified_ir.federated.core.learn import Learner, Scored, Shard, Work, adapt, score
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.runtime.plan import STATE, Plan

KIND: Final = "checkpoint"
SHARED: Final = "shared"
PERSONAL: Final = "personal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the model is. chosen: shared or personal. plan: SHA-256 of its plan's file, hexadecimal.

    samples: held-out ones it was measured on, 0 where it was not. before: accuracy of the newest
    shared state, after: of that state adapted; accuracy: of the model.
    """

    run: str
    round: int
    plan: str
    chosen: str
    samples: int = 0
    before: float = 0.0
    after: float = 0.0
    accuracy: float = 0.0


class Model:
    """The file; written by the device's thread, read by anyone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def choice(self) -> Choice | None:
        """What is there; a damaged file is dropped, the next state replaces it."""
        try:
            return _choice(dict(Container(self._path, kind=KIND).manifest.properties))
        except NotFound:
            return None
        except (Corrupt, InvalidInput):
            with contextlib.suppress(FileNotFoundError):
                OS_DISK.remove(self._path)
            return None

    def load_into(self, plan: Plan) -> None:
        """Put the model's state into its plan."""
        plan.load_state(self._path)

    def adopt(self, plan: Plan, choice: Choice) -> None:
        """Make the plan's state the model."""
        properties = {name: str(getattr(choice, name)) for name in _FIELDS}
        part = container.tensor_part(STATE, plan.view(), plan.roles)
        properties |= {"steps": str(plan.steps), "spent_s": repr(plan.spent_s)}
        container.write(self._path, KIND, [part], properties=properties, parent=plan.digest)

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
    ) -> Scored:
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
        best = Choice(
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
        return Scored(n, before, after)

    def _kept_is_better(
        self,
        new: Choice,
        plan: Plan,
        watched: Learner,
        shard: Shard,
        other: Callable[[str], Plan] | None,
    ) -> bool:
        """Whether what was measured before beats the new state on today's held-out samples."""
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

    def _scored_by(self, other: Callable[[str], Plan], kept: Choice, shard: Shard) -> float:
        """Accuracy of the model of another run's plan; 0 where the plan is gone or unfit by now."""
        try:
            earlier = other(kept.plan)
            earlier.load_state(self._path)
            return score(earlier, shard)
        except (Corrupt, InvalidInput, NotFound, Conflict):
            return 0.0


_FIELDS: Final = ("run", "round", "plan", "chosen", "samples", "before", "after", "accuracy")


def _choice(said: dict[str, str]) -> Choice:
    try:
        return Choice(
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
