"""The numbers a person chooses for an algorithm, and the names they have as state of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core import defaults

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """What an algorithm leaves open.

    lr: of a device's own steps and of adaptation. meta_lr: of a device's meta-steps. inner_steps:
    of adaptation, on a device and within a meta-step. proximal: weight of FedProx's distance.
    server_lr, beta1, beta2, floor: of the cloud's optimizer; the last three are Adam's.
    """

    lr: float = defaults.LR
    meta_lr: float = defaults.META_LR
    inner_steps: int = defaults.INNER_STEPS
    proximal: float = defaults.PROXIMAL
    server_lr: float = defaults.SERVER_LR
    beta1: float = defaults.BETA1
    beta2: float = defaults.BETA2
    floor: float = defaults.FLOOR

    def __post_init__(self) -> None:
        for name, (fits, rule) in _RULES.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and fits(value)):
                raise InvalidInput(f"hyperparameter {name} is {rule}, got {value}")
            if not fits_float32(value):
                raise InvalidInput(
                    f"hyperparameter {name} is a float32 on devices, 0 or from {LEAST:.3g} to "
                    f"{MOST:.3g}, got {value}"
                )


def fits_float32(value: float) -> bool:
    """Whether it stays a number other than 0 in float32; 0 itself fits."""
    return value == 0 or LEAST <= abs(value) <= MOST


_Rule = tuple[Callable[[float], bool], str]
_NOT_NEGATIVE: Final[_Rule] = (lambda v: v >= 0, "finite and not negative")
_POSITIVE: Final[_Rule] = (lambda v: v > 0, "finite and above 0")
_DECAY: Final[_Rule] = (lambda v: 0 <= v < 1, "at least 0 and below 1")
_STEPS: Final[_Rule] = (
    lambda v: 1 <= v <= MAX_INNER_STEPS and v == int(v),
    f"a whole number from 1 to {MAX_INNER_STEPS}",
)
_RULES: Final = {
    "lr": _NOT_NEGATIVE,
    "meta_lr": _NOT_NEGATIVE,
    "inner_steps": _STEPS,
    "proximal": _NOT_NEGATIVE,
    "server_lr": _POSITIVE,
    "beta1": _DECAY,
    "beta2": _DECAY,
    "floor": _POSITIVE,
}
