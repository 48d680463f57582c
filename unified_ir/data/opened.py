"""A pipeline in a run: the source, opened once, and the view of each epoch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data.columns import Columns
from triplane.unified_ir.data.kinds import is_batch_feed, is_batches
from triplane.unified_ir.data.step import Memo, Step, StepContext
from triplane.unified_ir.data.table import Feed, Source, Table
from triplane.unified_ir.data.views import View

KEPT_EPOCHS: Final = 3
"""Epochs whose views are kept, for each step: a shuffled one holds 8 bytes for each sample."""


@dataclass(eq=False)
class Origin:
    """Where samples come from: a source that is opened when it is first needed, or arrays.

    source: its description, None for arrays and Python objects. name: for messages.
    """

    source: Source | None
    opened: Table | Feed | None
    name: str
    _lock: Lock = field(default_factory=Lock)

    @property
    def is_random(self) -> bool:
        """Whether the source itself differs between epochs, as datasets within it may."""
        return bool(getattr(self.source, "is_random", False))

    @property
    def table(self) -> Table | Feed:
        """The open source; opened once, then shared by all datasets that begin with it."""
        if self.opened is None:
            with self._lock:
                if self.opened is None:
                    assert self.source is not None
                    self.opened = self.source.open()
        return self.opened


@dataclass(eq=False)
class Opened:
    """A pipeline with the seed of a run.

    probe: wraps each view, to measure it. place: of this pipeline among those of a run, so that two
    that are zipped draw different numbers.
    """

    origin: Origin
    steps: tuple[Step, ...]
    seed: int
    memo: Memo
    probe: Callable[[View, int], View] | None = None
    place: int = 0
    _views: dict[int, OrderedDict[int, View]] = field(default_factory=dict)
    _lock: Any = field(default_factory=RLock)

    def view(self, epoch: int) -> View:
        """Return what the pipeline gives in an epoch."""
        return self._view(len(self.steps), epoch)

    def batches(self, epoch: int, start: int = 0) -> Generator[Columns]:
        """Return the batches of an epoch from number `start` on, read in the calling thread."""
        view = self.view(epoch)
        if is_batches(view):
            return (view.batch(k) for k in range(start, len(view)))
        if is_batch_feed(view):
            return (batch for _, batch in view.batches(start))
        raise InvalidInput("the dataset gives samples, not batches; add .batch(size)")

    def _view(self, count: int, epoch: int) -> View:
        """Return the view after the first `count` steps."""
        if count == 0:
            parts = getattr(self.origin.table, "of_epoch", None)
            view: View = self.origin.table if parts is None else parts(self.seed, epoch, self.place)
            return view if self.probe is None else self.probe(view, 0)
        # Locked because `repeat` asks for views of other epochs from the threads that read.
        with self._lock:
            views = self._views.setdefault(count, OrderedDict())
            if epoch not in views:
                step, context = self.steps[count - 1], self._context(count, epoch)
                view = step.view(lambda number: self._view(count - 1, number), context)
                views[epoch] = view if self.probe is None else self.probe(view, count)
                if len(views) > KEPT_EPOCHS:
                    views.popitem(last=False)
            return views[epoch]

    def _context(self, count: int, epoch: int) -> StepContext:
        before: Any = self.steps[: count - 1]
        random = varies = False
        for step in before:
            varies = varies or (step.is_filter and (random or self.origin.is_random))
            random = random or step.is_random
        return StepContext(
            seed=self.seed,
            epoch=epoch,
            number=count - 1,
            key=before,
            memory=self.memo,
            random=random or self.origin.is_random,
            varies=varies,
            place=self.place,
        )
