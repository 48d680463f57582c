"""The view that callbacks have of a running training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.train.history import History, Place, Row

if TYPE_CHECKING:
    from triplane.unified_ir.train.snapshot import Snapshot


class Run:
    """One running call of `Trainer.fit`.

    epochs: the epoch at which it ends. batches: batches per epoch, None where unknown. results: of
    the newest step, scalars by name; tensors: the others, such as `histogram/NAME`.
    """

    def __init__(
        self,
        place: Place,
        history: History,
        *,
        epochs: int,
        batches: int | None,
        snapshot: Callable[[], Snapshot],
        learning_rate: Callable[[], float],
    ) -> None:
        self.place = place
        self.history = history
        self.epochs = epochs
        self.batches = batches
        self.results: Row = {}
        self.tensors: dict[str, Array] = {}
        self.stopped = False
        self.snapshot = snapshot
        """Copies everything that a checkpoint holds."""
        self.learning_rate = learning_rate
        """The rate of the next update, for parameters in no group."""

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
