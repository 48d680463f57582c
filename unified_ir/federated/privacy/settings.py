"""What a run or a study asks of differential privacy, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.privacy.accountant import (
    CONCENTRATED,
    DELTA,
    GAUSSIAN,
    MAX_EPSILON,
    MAX_SEPARATION,
    check_delta,
    check_epsilon,
    noise_multiplier_for,
)
from triplane.unified_ir.federated.privacy.budget import MAX_ROUNDS, RunBudget
from triplane.unified_ir.federated.privacy.central import CentralNoise, central_noise, coefficients
from triplane.unified_ir.federated.privacy.clipping import AdaptiveNorm, check_norm

CENTRAL: Final = "central"
DISTRIBUTED: Final = "distributed"
PLACEMENTS: Final = (CENTRAL, DISTRIBUTED)
UNIT: Final = "one device"
CLIP: Final = 1.0
QUANTILE: Final = 0.5
RATE: Final = 0.2
"""Learning rate of the logarithm of an adaptive norm (Andrew et al. 2021, section 3.1)."""
BIT_SHARE: Final = 1 / 20
"""Noise of the clipping bits, as a share of the devices of a round (the same, section 3.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialPrivacy:
    """The privacy of a run. InvalidInput: a value is out of its range, or contradicts another.

    placement: who adds the noise, see `PLACEMENTS`. clip: L2 norm of a device's change; the first
    one if `quantile` is not 0, which lets it follow that quantile of the changes' norms.
    multiplier: standard deviation of a round's noise over `clip`, the clipping bits included; 0 for
    the least that epsilon allows. epsilon: what the run may spend on a device; `MAX_EPSILON` for
    no limit. separation: rounds from one use of a device to its next, at least. most_uses: of one
    device, 0 for no limit. correlated: later rounds take back a part of the noise.
    """

    epsilon: float = MAX_EPSILON
    delta: float = DELTA
    clip: float = CLIP
    multiplier: float = 0.0
    placement: str = CENTRAL
    quantile: float = 0.0
    separation: int = 1
    most_uses: int = 0
    correlated: bool = False

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise InvalidInput(f"noise is {' or '.join(PLACEMENTS)}, got {self.placement[:40]!r}")
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        check_norm(self.clip)
        if self.quantile:
            AdaptiveNorm(self.clip, 0.0, self.quantile, RATE)
        if not 0 <= self.multiplier < math.inf:
            raise InvalidInput(f"a noise multiplier is above 0, got {self.multiplier}")
        if not self.multiplier and self.epsilon == MAX_EPSILON:
            raise InvalidInput("noise needs an epsilon or a noise multiplier; state one of them")
        if not (1 <= self.separation <= MAX_SEPARATION and 0 <= self.most_uses <= MAX_ROUNDS):
            raise InvalidInput(
                f"uses of a device are 1 to {MAX_SEPARATION} rounds apart and at most "
                f"{MAX_ROUNDS}, got {self.separation} and {self.most_uses}"
            )
        if self.correlated and self.separation == 1:
            raise InvalidInput(
                "correlated noise needs devices that rest, because a use must not meet the noise "
                "that an earlier one relies on; ask for a separation of 2 rounds or more"
            )
        coefficients(self.bands)

    @property
    def law(self) -> str:
        """What the accountant knows of the noise."""
        return GAUSSIAN if self.placement == CENTRAL else CONCENTRATED

    @property
    def bands(self) -> int:
        """Rounds whose noise is correlated; 1 if none is."""
        return self.separation if self.correlated else 1

    def resolved(self, rounds: int) -> DifferentialPrivacy:
        """Return the same with the least multiplier that keeps all rounds within epsilon."""
        if self.multiplier:
            return self
        uses = min(self.most_uses or MAX_ROUNDS, math.ceil(rounds / self.separation))
        multiplier = noise_multiplier_for(self.epsilon, self.delta, uses, law=self.law)
        return replace(self, multiplier=multiplier)

    def budget(self) -> RunBudget:
        """Return the budget of the run before its first round; the multiplier must be set."""
        return RunBudget(
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=self.multiplier,
            law=self.law,
            separation=self.separation,
            most_uses=self.most_uses or MAX_ROUNDS,
        )

    def adaptive(self, clip: float, devices: int) -> AdaptiveNorm | None:
        """Return the norm that follows the updates, as of `clip`; None if it is fixed."""
        if not self.quantile:
            return None
        # Twice the noise of the bits has to be above the multiplier; this spends a quarter on them.
        bit_noise = max(BIT_SHARE * devices, self.multiplier)
        return AdaptiveNorm(clip, bit_noise, self.quantile, RATE)

    def update_multiplier(self, devices: int) -> float:
        """Return the multiplier of the sum of updates, without what the clipping bits spend."""
        norm = self.adaptive(self.clip, devices)
        return self.multiplier if norm is None else norm.update_multiplier(self.multiplier)

    def central(self, clip: float, entries: int, devices: int) -> CentralNoise:
        """Return the noise of a round whose changes are clipped to `clip`."""
        return central_noise(
            self.update_multiplier(devices), norm=clip, entries=entries, bands=self.bands
        )
