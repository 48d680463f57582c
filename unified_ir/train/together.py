"""Runs of several processes: they must be the same run, and end together.

Each process runs the whole of `fit`; the engine's devices are those of all processes. The first
process alone shows and writes; a stop is agreed on, since a step needs all of them.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from triplane.proto.errors import Conflict
from triplane.unified_ir.engines import ProcessGroup
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.train import identity
from triplane.unified_ir.train.batches import BatchSource
from triplane.unified_ir.train.callbacks import Callback, EarlyStop
from triplane.unified_ir.train.checkpoint import Checkpoint
from triplane.unified_ir.train.interrupt import Interrupt, deferred_interrupt

if TYPE_CHECKING:
    from triplane.unified_ir.train.trainer import Trainer


def group_of(engine: Any) -> ProcessGroup | None:
    """Return the processes that an engine belongs to; None for an engine of this process alone."""
    group: ProcessGroup | None = getattr(engine, "processes", None)
    return group


def begin(
    trainer: Trainer,
    source: BatchSource,
    validation: Any,
    goal: int,
    callbacks: Sequence[Callback],
) -> list[Callback]:
    """Return the callbacks that this process calls; Conflict unless all processes are one run.

    goal: the epoch at which the run ends. In a process of its own it is all of `callbacks`.
    """
    group = group_of(trainer.engine)
    if group is None:
        return list(callbacks)
    keepers = [c for c in callbacks if isinstance(c, Checkpoint)]
    facts = _facts(trainer, source, validation, goal, keepers)
    stops = ", ".join(str(c) for c in callbacks if isinstance(c, EarlyStop))
    difference = group.difference(facts | {"early stop": stops or "none"})
    if difference is not None:
        number, part, there, here = difference
        raise Conflict(
            f"process {number} differs from process 1 in its {part}: "
            f"{identity.shown(there, here)} (here: in process 1); start every process with the "
            "same files and options, and with one checkpoint folder, which all of them share"
        )
    for keeper in keepers:
        keeper.processes = group
    return [c for c in callbacks if group.is_first or not c.only_writes]


def _facts(
    trainer: Trainer,
    source: BatchSource,
    validation: Any,
    goal: int,
    keepers: Sequence[Checkpoint],
) -> dict[str, str]:
    """Return what must be equal for the processes to compute, and communicate, in step."""
    place = trainer.place
    engine: Any = trainer.engine
    facts = identity.of_model(trainer.model, trainer.recipe) | identity.of_data(source)
    every = [(c.every_steps, c.every_epochs) for c in keepers]
    facts["options"] = (
        f"to epoch {goal}, seed {trainer.seed}, {trainer.steps_per_launch} steps per launch, "
        f"checkpoints every {every}, metrics {sorted(trainer.model.metrics)}, "
        f"deterministic {engine.deterministic}"
    )
    facts["mesh"] = engine.devices.layout
    if validation is not None:
        with closing(BatchSource(validation, source.size, trainer.seed)) as held_out:
            facts["validation data"] = identity.of_data(held_out).get("data", "")
    facts["program"] = identity.of_function(trainer.training_program().function)
    start = f"step {place.step}, epoch {place.epoch}" if place.step else "none"
    facts["checkpoint"] = f"{start}, state {_digest(trainer.state())}"
    return facts


def _digest(state: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(state.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[: identity.DIGITS]


class SharedInterrupt:
    """Ctrl-C or SIGTERM in any process ends the run in all of them, after the same step."""

    def __init__(self, own: Interrupt, group: ProcessGroup) -> None:
        self._own, self._group, self._sent = own, group, False

    def check(self) -> None:
        """Raise KeyboardInterrupt if the processes end here."""
        if self._own.pressed and not self._sent:
            self._sent = True
            # How the group learns of it, also from a scheduler that ends the process.
            os.kill(os.getpid(), signal.SIGTERM)
        if self._group.stops():
            raise KeyboardInterrupt


@contextmanager
def interrupt(
    trainer: Trainer, on_event: Callable[[str], None]
) -> Iterator[Interrupt | SharedInterrupt]:
    """Yield what ends the run between steps; see `deferred_interrupt`."""
    group = group_of(trainer.engine)
    with deferred_interrupt(on_event) as own:
        yield own if group is None else SharedInterrupt(own, group)
