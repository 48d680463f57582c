"""Hyperparameters: the numbers that a person chooses for an algorithm, and their names as state.

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
"""Steps of a meta-gradient; its graph grows with each."""

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
    """Which values are valid, as a predicate and in words."""

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
    """One number of an algorithm. help: a phrase for people.

    name: in Python and on the wire; with dashes, of the option; with `hyper.` before it, of the
    plan's state that a step may read. default: where an algorithm's row has no other; a whole
    number's is an int.
    """

    name: str
    default: float
    rule: HyperRule
    help: str

    def check(self, value: float) -> None:
        """InvalidInput unless the value is valid, and a number on a device."""
        if not (math.isfinite(value) and self.rule.fits(value)):
            raise InvalidInput(f"hyperparameter {self.name} is {self.rule.text}, got {value}")
        if not fits_float32(value):
            raise InvalidInput(
                f"hyperparameter {self.name} is a float32 on devices, 0 or from {LEAST:.3g} to "
                f"{MOST:.3g}, got {value}"
            )


def fits_float32(value: float) -> bool:
    """Whether a value stays a number other than 0 in float32; 0 itself fits."""
    return value == 0 or LEAST <= abs(value) <= MOST
