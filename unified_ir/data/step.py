"""What a step of a pipeline is; the class of steps that treat each sample by itself."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

from triplane.unified_ir.data.columns import Columns, Rows, Schema
from triplane.unified_ir.data.randomness import WORD, RowDraws
from triplane.unified_ir.data.views import Upstream, View, mapped


@dataclass(eq=False)
class Memo:
    """Values that a pipeline computes once and keeps for all epochs; one may need another."""

    values: MutableMapping[Any, Any] = field(default_factory=dict)
    lock: Any = field(default_factory=RLock)

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return the value of `key`, computed by the first caller while others wait."""
        if key not in self.values:
            with self.lock:
                if key not in self.values:
                    self.values[key] = compute()
        return self.values[key]


@dataclass(frozen=True, eq=False)
class StepContext:
    """Where a step stands: the run's seed, the epoch, and its place in the pipeline.

    key: identifies what the step and those before it compute, whatever the epoch. random: whether a
    step before it draws random numbers, so that epochs differ. varies: whether they may also
    differ in their number of samples. place: see `Opened`.
    """

    seed: int
    epoch: int
    number: int
    key: Any
    memory: Memo
    random: bool = False
    varies: bool = False
    place: int = 0

    def draws(self, rows: Rows) -> RowDraws:
        """Return the random numbers of these rows at this step."""
        return RowDraws(self.seed, self.epoch, (self.place + self.number) % WORD, rows)


@dataclass(frozen=True)
class Step:
    """A step of a pipeline: a frozen dataclass whose fields are its JSON form.

    Fields are numbers, strings, booleans, None, and tuples of these. A step is checked when it is
    made; what it needs of its input is checked by `schema`.
    """

    @property
    def is_random(self) -> bool:
        """Whether the step draws random numbers."""
        return False

    @property
    def is_filter(self) -> bool:
        """Whether the step keeps samples by their values, in each epoch perhaps another number."""
        return False

    def names_after(self, column: str) -> tuple[str, ...]:
        """Return the name of a column after the step; () if the step drops it."""
        return (column,)

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """Return what the step makes of its input in the epoch of `context`."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowStep(Step):
    """A step that turns each sample into one sample, without regard to others.

    It treats blocks of samples at once: the first axis of every column counts samples, both before
    and after `batch`. The result for a sample must not depend on the block that it comes in.
    """

    def schema(self, schema: Schema) -> Schema:
        """Return the schema after the step; InvalidInput names the column and what it needs."""
        raise NotImplementedError

    def apply(self, block: Columns, draws: RowDraws) -> Columns:
        """Return the block after the step. Columns that it does not name pass unchanged."""
        raise NotImplementedError

    def view(self, upstream: Upstream, context: StepContext) -> View:
        """See `Step`."""
        source = upstream(context.epoch)
        self.schema(source.schema)  # refuses the input before anything is read

        def function(block: Columns, rows: Rows) -> Columns:
            return self.apply(block, context.draws(rows))

        return mapped(source, function, self.schema, lambda name: keeps(self, name))


def keeps(step: Step, name: str) -> bool:
    """Return whether a step certainly leaves the values and the order of a column as they are."""
    # What a step with a column may write: that column, one under another name, its lengths.
    written = [getattr(step, field, None) for field in ("column", "into", "lengths")]
    return isinstance(step, RowStep) and isinstance(written[0], str) and name not in written
