"""The page docs/evidence/rounds.md, of what `rounds.py --keep` kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness import table


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The whole page."""
    return table(["case"], [[row["case"]["name"]] for row in rows])
