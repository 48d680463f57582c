"""The plan of a run, and how fields are marked that releases added to what is stored."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.masked_step import PHASE_S
from triplane.unified_ir.federated.core.metric import Scores
from triplane.unified_ir.federated.privacy.budget import RunBudget

OMIT_DEFAULT: Final = "omit_default"
"""Metadata of a field that is only stored with another value than its default.

Such a field can be added without a change of what is stored already, which an earlier release can
read only without it.
"""
ADDED: Final = {OMIT_DEFAULT: True}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of a run; see `Cohort` in federation.proto.

    devices: updates that complete a round. asked: leases given for it, at least `devices`. quorum:
    least number of updates at the deadline; with fewer the round is abandoned. scores: how devices
    score; evaluate_every: 0 to do so after the last round only. needs_scores: whether an evaluation
    that every device declines stops the run; it is off with an external strategy, because the apps
    of the devices' owners often cannot evaluate. returns: how often the run may return from a
    spoilt state to its last good one; see `spoilt`. least: fewest devices with which a masked round
    goes on after its keys; 0 where updates are in the clear. phase_s: time for each step of a
    masked round after that of keys, in which devices learn. budget: of a run with differential
    privacy, before its first round; it allows all `rounds`. clip: the norm of changes in its first
    round, where it follows the updates or there is a budget.
    """

    rounds: int
    devices: int
    asked: int
    quorum: int
    deadline_s: float
    patience_s: float
    evaluate_every: int = 0
    seed: int = 0
    needs_scores: bool = True
    returns: int = field(default=0, metadata=ADDED)
    budget: RunBudget | None = field(default=None, metadata=ADDED)
    clip: float = field(default=0.0, metadata=ADDED)
    least: int = field(default=0, metadata=ADDED)
    phase_s: float = field(default=PHASE_S, metadata=ADDED)
    scores: Scores = field(default=Scores.CLEAR, metadata=ADDED)

    def __post_init__(self) -> None:
        if not 1 <= self.quorum <= self.devices <= self.asked or self.rounds < 1:
            raise InvalidInput(
                "a round needs 1 <= quorum <= devices <= asked, and a run 1 round; got quorum "
                f"{self.quorum}, devices {self.devices}, asked {self.asked}, rounds {self.rounds}"
            )
        if not (self.deadline_s > 0 and self.phase_s > 0 and 0 <= self.patience_s < math.inf):
            raise InvalidInput(
                f"deadlines must be positive and patience not negative, got {self.deadline_s} s, "
                f"{self.phase_s} s and {self.patience_s} s"
            )
        if self.budget is not None and self.budget.most_rounds(self.rounds) < self.rounds:
            raise InvalidInput(f"{self.rounds} rounds do not fit into the budget {self.budget}")

    def fewest(self, *, evaluates: bool) -> int:
        """Return the fewest devices with which a round begins."""
        if evaluates:
            return self.least if self.scores is Scores.MASKED else 1
        return max(self.quorum, self.least)

    def masks(self, *, evaluates: bool) -> bool:
        """Return whether such a round is masked."""
        return bool(self.least) and (not evaluates or self.scores is Scores.MASKED)
