"""A hundred steps on the engine xla: in one launch of the device, or in a launch each.

A case is a network and a way to run it, and a "batch" holds the batches of a hundred steps.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import networks
from networks import Case, Dense, Stack
from side_ours import trainer_of
from worker import POOL, Step, one_processor_per_thread, serve

STEPS: Final = 100
SMALL: Final = Case("MLP of 32 B32 SGD", Stack((Dense(784, 32), Dense(32, 10))), 32, 0.05)
NETWORKS: Final = {SMALL.name: SMALL, **networks.CASES}
TOGETHER: Final = " in one launch"


@dataclass(frozen=True)
class Launches:
    """A hundred steps of a network; together: in one launch."""

    case: Case
    together: bool


CASES: Final = {
    case.name + TOGETHER * together: Launches(case, together)
    for case in NETWORKS.values()
    for together in (False, True)
}


def batches(launches: Launches) -> Iterator[tuple[Any, Any]]:
    """Endless batches of a hundred steps; the arrays repeat, so they take little memory."""
    pool = itertools.cycle(list(itertools.islice(networks.batches(launches.case), POOL)))
    while True:
        xs, labels = zip(*itertools.islice(pool, STEPS), strict=True)
        yield xs, labels


def side(launches: Launches) -> tuple[Step, dict[str, Any]]:
    """A hundred training steps; the loss is the last one's."""
    one_processor_per_thread()
    trainer = trainer_of(launches.case, engine="xla")
    program, state = trainer.training_program(), trainer.state()
    loop = program.loop({name: state[name] for name in trainer.state_names(program.function)})
    names = trainer.model.batch_names()

    def run(xs: Any, labels: Any) -> float:
        feeds = [dict(zip(names, batch, strict=True)) for batch in zip(xs, labels, strict=True)]
        results = loop.steps(feeds) if launches.together else [loop.step(**f) for f in feeds]
        assert len(results) == STEPS
        return float(results[-1]["loss"])

    return run, {}


if __name__ == "__main__":
    serve(side, sys.modules[__name__])
