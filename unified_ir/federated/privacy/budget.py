"""Budgets: what a run, and what a device over all runs, may still spend.

Both are pure values with a JSON form, for a journal or a file of a device. A charge is written and
synced before what it pays for is released, and repeating it changes nothing, so that a crash
between the two neither loses a charge nor makes a second one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.federated.privacy.accountant import (
    GAUSSIAN,
    NoiseEvent,
    Spending,
    check_delta,
    check_epsilon,
    noise_multiplier_for,
)

MAX_ROUNDS: Final = 1_000_000
MAX_RUNS: Final = 100_000
MAX_NAME: Final = 200


@dataclass(frozen=True, slots=True)
class RunBudget:
    """A run's target and the rounds charged to it.

    noise_multiplier, law: of one use of a device, its clipping bit included. separation: rounds
    from one use of a device to its next at least. most_uses: rounds that may use one device at
    most. rounds: charged so far.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    law: str = GAUSSIAN
    separation: int = 1
    most_uses: int = MAX_ROUNDS
    rounds: int = 0

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        NoiseEvent(self.noise_multiplier, law=self.law)
        for name, least in (("separation", 1), ("most_uses", 1), ("rounds", 0)):
            _check_count(name, getattr(self, name), least, MAX_ROUNDS)

    def uses(self, rounds: int) -> int:
        """Return how often one device can be used in that many rounds."""
        return min(self.most_uses, math.ceil(rounds / self.separation))

    @property
    def spent(self) -> float:
        """Epsilon at the target's delta after the charged rounds, for the most used device."""
        return self._after(self.rounds)

    def fits(self) -> bool:
        """Whether one more round stays within the target."""
        return self.rounds < MAX_ROUNDS and self._after(self.rounds + 1) <= self.epsilon

    def most_rounds(self, limit: int) -> int:
        """Return how many rounds fit in all, up to `limit`."""
        low, high = 0, min(limit, MAX_ROUNDS)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._after(middle) <= self.epsilon else (low, middle - 1)
        return low

    def charge(self, round_: int) -> RunBudget:
        """Return the budget with round `round_` (from 1) charged; a repeat changes nothing.

        Conflict if it does not fit; InvalidInput if an earlier round was not charged.
        """
        _check_count("round", round_, 1, MAX_ROUNDS)
        if round_ <= self.rounds:
            return self
        if round_ > self.rounds + 1:
            raise InvalidInput(
                f"rounds are charged in order: {self.rounds} are charged, got round {round_}"
            )
        if not self.fits():
            raise Conflict(
                f"round {round_} would spend epsilon {self._after(round_):.6g} at delta "
                f"{self.delta:g}, above the run's {self.epsilon:g}; the run ends with "
                f"{self.spent:.6g} spent after {self.rounds} rounds"
            )
        return replace(self, rounds=round_)

    def to_json(self) -> dict[str, float | int]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, document: object) -> RunBudget:
        """Return the budget that `to_json` wrote; InvalidInput names what is wrong."""
        fields = _fields(document, cls.__slots__)
        numbers = {name: _float(fields, name) for name in cls.__slots__[:3]}
        return cls(**{**fields, **numbers})

    def _after(self, rounds: int) -> float:
        event = NoiseEvent(self.noise_multiplier, self.uses(rounds), self.law)
        return Spending().plus(event).epsilon(self.delta)


def run_budget(
    epsilon: float,
    delta: float,
    rounds: int,
    *,
    law: str = GAUSSIAN,
    separation: int = 1,
    most_uses: int = MAX_ROUNDS,
) -> RunBudget:
    """Return a budget with the least noise multiplier for which `rounds` rounds fit."""
    for name, value in (("rounds", rounds), ("separation", separation), ("most_uses", most_uses)):
        _check_count(name, value, 1, MAX_ROUNDS)
    uses = min(most_uses, math.ceil(rounds / separation))
    multiplier = noise_multiplier_for(epsilon, delta, uses, law=law)
    return RunBudget(epsilon, delta, multiplier, law, separation, most_uses)


@dataclass(frozen=True, slots=True)
class RunCharges:
    """What one run cost a device, the last round charged, and its lease."""

    spending: Spending
    round: int
    lease: str = ""


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """What a device may spend over all runs, and what each run cost it."""

    epsilon: float
    delta: float
    runs: Mapping[str, RunCharges] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        if len(self.runs) > MAX_RUNS:
            raise InvalidInput(f"a device's budget has at most {MAX_RUNS} runs")
        object.__setattr__(self, "runs", MappingProxyType(dict(self.runs)))

    @property
    def spent(self) -> float:
        """Epsilon at the budget's delta, composed over all charges."""
        return self._total().epsilon(self.delta)

    def fits(self, event: NoiseEvent) -> bool:
        """Whether the event stays within the budget."""
        return self._total().plus(event).epsilon(self.delta) <= self.epsilon

    def charge(self, run: str, round_: int, event: NoiseEvent, lease: str = "") -> DeviceBudget:
        """Return the budget with the device's use under a lease; a repeat changes nothing.

        event: all that the round costs; where clipping bits are sent as well, of the multiplier
        that both have together (`AdaptiveNorm.update_multiplier`). lease: of the device in that
        round; a cloud that gave the round up asks for it again under another one.

        Conflict if it does not fit, or if the run's last use was less than the event's separation
        ago: the device declines the round. A device that was charged sends what it sent before, or
        nothing. Another lease of the same round, or of an earlier one after the cloud was restored
        from a backup, is charged again: two sums may have been published.
        """
        _check_run(run)
        _check_count("round", round_, 1, MAX_ROUNDS)
        before = self.runs.get(run, RunCharges(Spending(), 0))
        if (round_, lease) == (before.round, before.lease):
            return self
        if before.round < round_ < (rested := before.round + event.separation) and before.round:
            raise Conflict(
                f"round {round_} of run {run!r} is too early: this device, used in round "
                f"{before.round}, rests until round {rested}, because the noise does not cover "
                "uses that are nearer"
            )
        if not self.fits(event):
            after = self._total().plus(event).epsilon(self.delta)
            raise Conflict(
                f"round {round_} of run {run!r} would spend epsilon {after:.6g} at delta "
                f"{self.delta:g} over all runs, above this device's {self.epsilon:g}; "
                f"{self.spent:.6g} is spent"
            )
        charges = RunCharges(before.spending.plus(event), round_, lease)
        return replace(self, runs={**self.runs, run: charges})

    def to_json(self) -> dict[str, Any]:
        """Return epsilon, delta and, by run, what it spent by law, its last round and lease."""
        runs = {
            name: {
                "gaussian": charges.spending.gaussian,
                "concentrated": charges.spending.concentrated,
                "round": charges.round,
                "lease": charges.lease,
            }
            for name, charges in sorted(self.runs.items())
        }
        return {"epsilon": self.epsilon, "delta": self.delta, "runs": runs}

    @classmethod
    def from_json(cls, document: object) -> DeviceBudget:
        """Return the budget that `to_json` wrote; InvalidInput names what is wrong."""
        fields = _fields(document, ("epsilon", "delta", "runs"))
        if not isinstance(fields["runs"], dict) or len(fields["runs"]) > MAX_RUNS:
            raise InvalidInput(f"the runs of a device's budget are an object of up to {MAX_RUNS}")
        runs = {_check_run(name): _charges(value) for name, value in fields["runs"].items()}
        return cls(_float(fields, "epsilon"), _float(fields, "delta"), runs)

    def _total(self) -> Spending:
        spent = [charges.spending for charges in self.runs.values()]
        return Spending(
            math.fsum(s.gaussian for s in spent), math.fsum(s.concentrated for s in spent)
        )


def _charges(document: object) -> RunCharges:
    fields = _fields(document, ("gaussian", "concentrated", "round", "lease"))
    spent = Spending(_float(fields, "gaussian"), _float(fields, "concentrated"))
    lease = fields["lease"]
    if not isinstance(lease, str) or len(lease) > MAX_NAME:
        raise InvalidInput(f"a lease in a budget has at most {MAX_NAME} characters")
    return RunCharges(spent, _check_count("round", fields["round"], 1, MAX_ROUNDS), lease)


def _fields(document: object, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(document, dict) or sorted(map(str, document)) != sorted(names):
        raise InvalidInput(f"a stored budget is an object of {', '.join(names)}")
    return document


def _float(fields: Mapping[str, Any], name: str) -> float:
    value = fields[name]
    if type(value) not in {int, float} or not -1e308 <= value <= 1e308:
        raise InvalidInput(f"{name} in a stored budget is a finite number")
    return float(value)


def _check_count(name: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidInput(f"{name} is {least} to {most} in a budget, got {str(value)[:40]}")
    return value


def _check_run(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidInput(f"a run in a budget has a name of 1 to {MAX_NAME} characters")
    return name
