"""Callbacks: code that runs at given moments of a training run, and the common cases."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from triplane.proto.disk import write_atomic
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines import HasState
from triplane.unified_ir.frontend.arguments import check_arguments
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.optim.plateau import Better, sign_of
from triplane.unified_ir.train.batches import is_count, is_number
from triplane.unified_ir.train.history import Row
from triplane.unified_ir.train.run import Run


class Callback:
    """Called at given moments of a run; subclass it and override the methods you need.

    An exception from a callback ends the run; the cell then holds the state up to that point. A
    callback with state of its own returns it from `state_dict`, and checkpoints hold it.
    """

    only_writes = False
    """Whether it only shows or writes; of several processes only the first then calls it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return the object without state; ArgumentError for arguments that do not fit."""
        check_arguments(cls, args, kwargs)
        return super().__new__(cls)

    @property
    def state_key(self) -> str:
        """The name of its state in checkpoints; different for each callback of a trainer."""
        return type(self).__name__

    def state_dict(self) -> Mapping[str, Array]:
        """Return arrays that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take the arrays of a checkpoint; none from a checkpoint of a run without this one."""

    def on_start(self, run: Run) -> None:
        """Run before the first step, after a checkpoint was loaded."""

    def on_step(self, run: Run) -> None:
        """Run after each update; `run.results` are its results."""

    def on_epoch(self, run: Run) -> None:
        """Run after each epoch; `run.history.last` is its row."""

    def on_end(self, run: Run) -> None:
        """Run after the last epoch or an early stop, but not after an error."""


def states_of(callbacks: Sequence[HasState]) -> dict[str, Mapping[str, Array]]:
    """Return the state of each callback, or engine, that has any, by its key."""
    states: dict[str, Mapping[str, Array]] = {}
    for callback in callbacks:
        if own := callback.state_dict():
            if callback.state_key in states:
                raise InvalidInput(
                    f"two callbacks have state under {callback.state_key!r}, and a checkpoint "
                    "holds one; give one of them another state_key, or leave it out"
                )
            states[callback.state_key] = own
    return states


_EPOCH: Final = "epoch"


class Record(Callback):
    """Keeps the results of every step in `steps`."""

    def __init__(self) -> None:
        self.steps: list[Row] = []

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        self.steps.append(dict(run.results))


class EarlyStop(Callback):
    """Stops when `measure` has not improved for `patience` epochs.

    better: "smaller" or "larger"; by default larger for accuracies and other shares.
    It depends on the history alone, so a resumed run stops where an uninterrupted one would.
    restore_best: when the run ends, also at its last epoch, the cell gets the weights and buffers
    of the epoch with the best value. Checkpoints hold them, and a resumed run restores the same.
    """

    def __init__(
        self,
        measure: str = "validation.loss",
        *,
        patience: int = 3,
        min_change: float = 0.0,
        better: Better | None = None,
        restore_best: bool = False,
    ) -> None:
        if not is_count(patience, 1) or not is_number(min_change) or min_change < 0:
            raise InvalidInput(
                "EarlyStop needs a whole patience >= 1 and min_change >= 0, got "
                f"{patience!r}, {min_change!r}"
            )
        self.measure, self.patience, self.min_change = measure, patience, min_change
        self.sign = sign_of("EarlyStop", measure, better)
        self.restore_best = restore_best
        self._best: dict[str, Array] = {}
        self._best_epoch = 0

    def __str__(self) -> str:
        kind = "smaller" if self.sign > 0 else "larger"
        return (
            f"patience {self.patience} for a {kind} {self.measure}, min_change {self.min_change:g}"
            f", restore_best {self.restore_best}"
        )

    @property
    def state_key(self) -> str:
        """See `Callback`."""
        return f"EarlyStop.{self.measure}"

    def state_dict(self) -> Mapping[str, Array]:
        """See `Callback`."""
        return {**self._best, _EPOCH: np.array(self._best_epoch)} if self._best else {}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """See `Callback`."""
        self._best = {k: a for k, a in state.items() if k != _EPOCH}
        self._best_epoch = int(np.ravel(state.get(_EPOCH, 0))[0])

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        # A run that had already stopped early must not train another epoch when it is resumed.
        if len(run.history):
            self._judge(run)
        else:
            self.load_state_dict({})  # the callback may have watched another run before

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        if self._judge(run) == 0 and self.restore_best:
            self._best, self._best_epoch = run.weights(), run.epoch

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        if not (self.restore_best and len(run.history)):
            return
        best = run.epoch - self._judge(run)
        if self._best_epoch == best:
            run.restore(self._best)
        elif best:
            warnings.warn(
                f"EarlyStop cannot restore the weights of epoch {best}, the best by {self.measure}:"
                " no checkpoint holds them, because restore_best was off then",
                stacklevel=2,
            )

    def _judge(self, run: Run) -> int:
        """Stop the run where it must; return the number of epochs since the best one."""
        # Recomputed from the whole history at each epoch, so that no counter has to be saved in
        # checkpoints.
        best, since = math.inf, 0
        for value in run.history[self.measure]:
            better = self.sign * value < best - self.min_change
            best, since = (self.sign * value, 0) if better else (best, since + 1)
        if since >= self.patience:
            run.stop()
        return since


class HistoryFile(Callback):
    """Writes the history to a file, atomically: CSV or JSON, by its suffix."""

    only_writes = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.suffix not in _FORMATS:
            raise InvalidInput(
                f"a history file ends in {' or '.join(_FORMATS)}, got {self.path.name}"
            )

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        write_atomic(self.path, _FORMATS[self.path.suffix](run.history).encode())


_FORMATS: Final = {".csv": lambda h: h.csv(), ".json": lambda h: h.json()}
