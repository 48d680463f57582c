"""The steps of a masked round, as values of a run's state.

keys         learn, then advertise the keys of the round
shares       share the secrets of its masks
inputs       send the masked update
signatures   sign the list of devices whose updates came
reveals      reveal the shares that unmask their sum
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PHASE_S: Final = 30.0
"""Default time in seconds for each step after that of keys."""


class MaskedStep(StrEnum):
    """A step of a masked round, named by what devices answer."""

    KEYS = "keys"
    SHARES = "shares"
    INPUTS = "inputs"
    SIGNATURES = "signatures"
    REVEALS = "reveals"

    @property
    def next(self) -> MaskedStep | None:
        """The step after it; None after the last one."""
        at = STEPS.index(self) + 1
        return STEPS[at] if at < len(STEPS) else None

    def is_at_least(self, other: MaskedStep) -> bool:
        """Return whether it is that step or a later one."""
        return STEPS.index(self) >= STEPS.index(other)


STEPS: Final = tuple(MaskedStep)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """A device's answer to a step, on the cloud's disk. blob: SHA-256 in hexadecimal.

    size: bytes of the answer and of its file. file: SHA-256 of the masked update in hexadecimal if
    it was uploaded, else empty.
    """

    step: MaskedStep
    blob: str
    size: int
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGroup:
    """A group of a masked round whose sum cannot be had. reason: for the people of the cloud."""

    devices: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedProgress:
    """Where a masked round is. opened_s: when the step began. cap: examples that count at most.

    exchanging: all answers are there and the cloud takes them.
    """

    step: MaskedStep
    opened_s: float
    cap: int
    exchanging: bool = False
