"""The view of a running training that callbacks receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.train.history import History, Place, Row

if TYPE_CHECKING:
    from triplane.unified_ir.train.snapshot import Snapshot


@dataclass(eq=False, repr=False)
class Run:
    """One running call of `Trainer.fit`.

    epochs: the epoch at which it ends. batches: batches per epoch, None if unknown. results: the
    scalar results of the newest step by name; tensors: its others, such as `histogram/NAME`.
    """

    place: Place
    history: History
    epochs: int
    batches: int | None
    snapshot: Callable[[], Snapshot]
    """Copies everything that a checkpoint holds."""
    learning_rate: Callable[[], float]
    """Returns the rate of the next update, for parameters in no group."""
    weights: Callable[[], dict[str, Array]]
    """Copies parameters and buffers, with their moving averages, but no random keys."""
    restore: Callable[[Mapping[str, Array]], None]
    """Copies such state into the cell, once the run has ended."""
    results: Row = field(default_factory=dict)
    tensors: dict[str, Array] = field(default_factory=dict)
    stopped: bool = False

    @property
    def step(self) -> int:
        """Number of updates done."""
        return self.place.step

    @property
    def epoch(self) -> int:
        """Number of epochs finished."""
        return self.place.epoch

    def state(self) -> Mapping[str, Array]:
        """Return a copy of the whole state: parameters, buffers, keys, optimizer."""
        return self.snapshot().state

    def stop(self) -> None:
        """End the run after this step or epoch; it can be resumed."""
        self.stopped = True
