"""What a run or a study has spent, as people and the metadata of its model show it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from triplane.unified_ir.federated.privacy.accountant import MAX_EPSILON, NoiseEvent, epsilon
from triplane.unified_ir.federated.privacy.budget import RunBudget
from triplane.unified_ir.federated.privacy.settings import UNIT, DifferentialPrivacy


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacySpent:
    """What the published states of a run cost a device.

    epsilon: spent, at `delta`, for the device that was used most often. target: what the run may
    spend, 0 without a limit. unit: what neighbouring runs differ in. uses: most of one device.
    """

    epsilon: float
    target: float
    delta: float
    unit: str
    noise: str
    noise_multiplier: float
    law: str
    rounds: int
    uses: int
    separation: int
    clip: float

    @property
    def text(self) -> str:
        """One line for people."""
        spent = spent_text(self.epsilon, self.target, self.delta)
        return (
            f"{spent} after {self.rounds} rounds: {self.noise} noise with multiplier "
            f"{self.noise_multiplier:.4g}, {self.uses} uses of a device at most"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def spent_text(epsilon: float, target: float, delta: float) -> str:
    """Return a few words for people. target: what may be spent, 0 without a limit."""
    of = f" of {target:g}" if 0 < target < MAX_EPSILON else ""
    return f"epsilon {epsilon:.4g}{of} spent at delta {delta:g} for {UNIT}"


def privacy_spent(privacy: DifferentialPrivacy, budget: RunBudget) -> PrivacySpent:
    """Return what the charged rounds spent, by dp-accounting where it is installed."""
    uses = budget.uses(budget.rounds)
    event = NoiseEvent(budget.noise_multiplier, uses, budget.law)
    return PrivacySpent(
        epsilon=epsilon([event], budget.delta),
        target=0.0 if budget.epsilon == MAX_EPSILON else budget.epsilon,
        delta=budget.delta,
        unit=UNIT,
        noise=f"correlated {privacy.placement}" if privacy.correlated else privacy.placement,
        noise_multiplier=budget.noise_multiplier,
        law=budget.law,
        rounds=budget.rounds,
        uses=uses,
        separation=budget.separation,
        clip=privacy.clip,
    )


def too_many_rounds(rounds: int, fitting: int, budget: RunBudget) -> str:
    """Return why only `fitting` of the rounds are done, or empty."""
    if fitting >= rounds:
        return ""
    return (
        f"{fitting} of {rounds} rounds fit into epsilon {budget.epsilon:g} at delta "
        f"{budget.delta:g} with noise multiplier {budget.noise_multiplier:g}"
    )


def no_round_fits(budget: RunBudget) -> str:
    """Return why a run cannot begin."""
    spent = replace(budget, rounds=1).spent
    return (
        f"one round with noise multiplier {budget.noise_multiplier:g} spends epsilon {spent:.4g} "
        f"at delta {budget.delta:g}, above {budget.epsilon:g}; raise epsilon or the noise "
        "multiplier, or leave the multiplier out to get the least one"
    )
