"""Hyperparameters: the numbers that the user chooses for an algorithm, and their names as state.

A row of `table.ALGORITHMS` declares its hyperparameters. The wire, the options of the commands, the
defaults, the report and the state of a plan follow from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput

MAX_INNER_STEPS: Final = 10
"""Limit for the inner steps of a meta-gradient; its graph grows with each."""

MOST: Final = 3.4028234663852886e38
"""The largest float32; beyond it a device would compute with infinity."""
LEAST: Final = 1.1754943508222875e-38
"""The smallest normal float32; below it a device may compute with 0."""

HYPER: Final = "hyper."
LR: Final = "hyper.lr"
META_LR: Final = "hyper.meta_lr"
PROXIMAL: Final = "hyper.proximal"
ANCHOR: Final = "anchor."
"""Prefix of the round's starting point of a parameter."""
RATE: Final = "rate."
"""Prefix of a parameter's own learned rates, shaped like it."""


@dataclass(frozen=True, slots=True)
class HyperRule:
    """Which values are valid: those from `low` to `high`; an open end is not valid itself.

    text: the same in words, for errors. whole: only whole numbers are valid.
    """

    text: str
    low: float = 0
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    whole: bool = False

    def fits(self, value: float) -> bool:
        """Return whether a finite value is valid."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and (not self.whole or value == int(value))


NOT_NEGATIVE: Final = HyperRule("finite and not negative")
POSITIVE: Final = HyperRule("finite and above 0", low_open=True)
DECAY: Final = HyperRule("at least 0 and below 1", high=1, high_open=True)
INNER_STEPS: Final = HyperRule(
    f"a whole number from 1 to {MAX_INNER_STEPS}", 1, MAX_INNER_STEPS, whole=True
)


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """One number of an algorithm. rule: its valid values. help: the help text of its option.

    name: in Python and on the wire; with dashes, the option; with the prefix `hyper.`, the plan's
    state that a step may read. default: an int where the value is an integer.
    """

    name: str
    default: float
    rule: HyperRule
    help: str

    def check(self, value: float) -> None:
        """Raise InvalidInput if the value is invalid, or becomes 0 or infinite in float32."""
        if not (math.isfinite(value) and self.rule.fits(value)):
            raise InvalidInput(f"hyperparameter {self.name} must be {self.rule.text}, got {value}")
        if value and not LEAST <= abs(value) <= MOST:
            raise InvalidInput(
                f"hyperparameter {self.name} is a float32 on devices: 0, or from {LEAST:.3g} to "
                f"{MOST:.3g}, got {value}"
            )
