"""What a step of a pipeline is, and the class of steps that treat each sample by itself."""

from __future__ import annotations

from dataclasses import dataclass

from triplane.unified_ir.data.columns import Columns, Schema
from triplane.unified_ir.data.randomness import RowDraws


@dataclass(frozen=True)
class Step:
    """A step of a pipeline: a frozen dataclass whose fields are its JSON form.

    Fields are numbers, strings, booleans, None, and tuples of these. A step is checked when it is
    made; what it needs of its input is checked by `schema`.
    """


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
