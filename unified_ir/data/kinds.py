"""Which kind a view of a pipeline is of.

`isinstance` with a protocol would read the property `schema`, which may run a function of the
user's on the first sample; these functions look at the class alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from triplane.unified_ir.data.table import Feed, Table
    from triplane.unified_ir.data.views import Batches, BatchFeed


def is_table(view: object) -> TypeIs[Table]:
    """Return whether the view gives rows by number."""
    return hasattr(type(view), "take")


def is_feed(view: object) -> TypeIs[Feed]:
    """Return whether the view gives rows in order."""
    return hasattr(type(view), "blocks")


def is_batches(view: object) -> TypeIs[Batches]:
    """Return whether the view gives batches by number."""
    return hasattr(type(view), "batch")


def is_batch_feed(view: object) -> TypeIs[BatchFeed]:
    """Return whether the view gives batches in order."""
    return hasattr(type(view), "batches")
