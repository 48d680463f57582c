"""Hyperparameters: the numbers that the user chooses for an algorithm, and their names as state.

A row of `table.ALGORITHMS` declares its hyperparameters. The wire, the options of the commands, the
defaults, the report and the state of a plan follow from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """The valid values of a hyperparameter, as a predicate and in words."""

    fits: Callable[[float], bool]
    text: str


NOT_NEGATIVE: Final = HyperRule(lambda v: v >= 0, "finite and not negative")
POSITIVE: Final = HyperRule(lambda v: v > 0, "finite and above 0")
DECAY: Final = HyperRule(lambda v: 0 <= v < 1, "at least 0 and below 1")
INNER_STEPS: Final = HyperRule(
    lambda v: 1 <= v <= MAX_INNER_STEPS and v == int(v),
    f"a whole number from 1 to {MAX_INNER_STEPS}",
)


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """One number of an algorithm. help: the help text of its option.

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
            raise InvalidInput(f"hyperparameter {self.name} is {self.rule.text}, got {value}")
        if value and not LEAST <= abs(value) <= MOST:
            raise InvalidInput(
                f"hyperparameter {self.name} is a float32 on devices, 0 or from {LEAST:.3g} to "
                f"{MOST:.3g}, got {value}"
            )
