"""Rests: rounds for which a device that was of no use to a round is not drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from triplane.unified_ir.federated.core.run import RunMember

MAX_REST: Final = 32
"""Largest number of rounds for which a device that misses deadlines, or sends what cannot count, is
not drawn. The number is 1 after the first time and doubles with each further one in a row."""


def resting(member: RunMember, number: int) -> RunMember:
    """Return the member after it gave nothing of use to the round of that number."""
    rest = min(2**member.missed, MAX_REST)
    missed = min(member.missed + 1, MAX_REST)  # a count beyond it would make no difference
    return replace(member, missed=missed, rests_until=number + 1 + rest)
