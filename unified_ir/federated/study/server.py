"""The cloud's side of a study: which devices learn in a round, and what their changes become.

`MeanServer` is that of a run without a strategy. A tier above may bring another `StudyServer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from triplane.unified_ir.federated.algorithms import Hyper, algorithm
from triplane.unified_ir.federated.algorithms.aggregators import Robustness, reduce_round
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.learn import buffers
from triplane.unified_ir.federated.core.limits import RoundUpdate, floats_of
from triplane.unified_ir.federated.core.metric import Metric
from triplane.unified_ir.federated.masking.adaptive import next_bound
from triplane.unified_ir.federated.privacy.clipping import l2_norm
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy
from triplane.unified_ir.federated.study.checkpoint import StudyProgress
from triplane.unified_ir.federated.study.masked_sums import MaskedStudy, means_and_bits
from triplane.unified_ir.federated.study.private_rounds import NORM, reduce_privately


@dataclass(frozen=True, slots=True)
class Next:
    """What a round becomes. slots: what the server remembers until the next one.

    scaled: updates that were above a norm bound. left_out: devices whose updates are not in it.
    """

    shared: Mapping[str, Array]
    slots: Mapping[str, Array]
    scaled: int = 0
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedStudy:
    """What a server knows of a study; see `Study`. devices: number of devices in a round.

    population: devices that learn. plan: digest of the devices' plan. roles: of the shared tensors,
    by name. frozen: those that learning does not move.
    """

    algorithm: str
    hyper: Hyper
    rounds: int
    devices: int
    evaluate_every: int
    seed: int
    run: str
    plan: str
    roles: Mapping[str, str]
    metric: Metric
    population: int
    robustness: Robustness
    privacy: DifferentialPrivacy | None = None
    masking: MaskedStudy | None = None
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contribution:
    """A device's update as the cloud reads it. lease: its id. change: float tensors by name."""

    device: str
    lease: str
    examples: int
    loss: float
    change: Mapping[str, Array]


class RoundServer(Protocol):
    """The server of one trial. The round at hand is the one after `at.rounds`."""

    def choose(self, at: StudyProgress, leases: Mapping[str, str]) -> Collection[str]:
        """Return the devices that learn in this round. leases: id by device of the round."""

    def reduce(self, at: StudyProgress, contributions: Sequence[Contribution]) -> Next:
        """Return what the round's contributions become; they are in order of device names.

        What the server remembers is part of the progress, as `at.slots`, and is saved with it.
        """

    def judge(self, at: StudyProgress) -> None:
        """Take notice of the newest scores, which are of the last one of `at.rounds`."""


class StudyServer(Protocol):
    """The cloud's side of any number of trials."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What its results depend on besides the study, by descriptive names."""

    @property
    def follows_limits(self) -> bool:
        """Whether it follows the aggregator and the returns of `Study.robustness`."""

    def title(self, algorithm: str) -> str:
        """Return the name of a trial in which devices follow this algorithm."""

    def serving(self, study: ServedStudy) -> AbstractContextManager[RoundServer]:
        """Return the server of a trial, for the duration of the block."""


class MeanServer:
    """The mean of the changes and the algorithm's optimizer, as in a run without a strategy."""

    facts: Mapping[str, str] = {}
    follows_limits = True

    def title(self, algorithm: str) -> str:
        """See `StudyServer`."""
        return algorithm

    def serving(self, study: ServedStudy) -> AbstractContextManager[RoundServer]:
        """See `StudyServer`."""
        return contextlib.nullcontext(_MeanRounds(study))


class _MeanRounds:
    """All devices of a round learn; the algorithm's row says how their changes are reduced."""

    def __init__(self, study: ServedStudy) -> None:
        self._row, self._study = algorithm(study.algorithm), study
        self._buffers = frozenset(buffers(study.roles))

    def choose(self, at: StudyProgress, leases: Mapping[str, str]) -> Collection[str]:
        del at
        return leases

    def reduce(self, at: StudyProgress, contributions: Sequence[Contribution]) -> Next:
        # The default argument binds each change; a closure would see the last one. It is copied,
        # because a change may be in a file, where each look at a tensor reads it.
        updates = [
            RoundUpdate(x.examples, lambda c=x.change: dict(c))  # type: ignore[misc]
            for x in contributions
        ]
        study, row, number = self._study, self._row, len(at.rounds) + 1
        if study.masking is not None:
            return self._reduce_masked(at, contributions, study.masking)
        if study.privacy is not None:
            private = reduce_privately(
                at, [u.open for u in updates], study.privacy, devices=study.devices,
                frozen=study.frozen, server=row.server, hyper=study.hyper,
            )  # fmt: skip
            return Next(private.state, private.slots, private.scaled)
        shares = row.shares(
            study.hyper, contributions[0].change, updates=len(updates), members=study.population
        )
        done = reduce_round(
            at.shared, at.slots, updates, robustness=study.robustness,
            draws=Draws(study.seed, number, "", "buckets"), weighting=row.weighting,
            server=row.server, hyper=study.hyper, buffers=self._buffers, shares=shares,
        )  # fmt: skip
        left_out = tuple(contributions[at].device for at in done.left_out)
        return Next(done.state, done.slots, done.scaled, left_out)

    def _reduce_masked(
        self, at: StudyProgress, contributions: Sequence[Contribution], masking: MaskedStudy
    ) -> Next:
        study, row, number = self._study, self._row, len(at.rounds) + 1
        # With noise, what is frozen is not summed, since it would not stay as it is.
        frozen = study.frozen if study.privacy is not None else ()
        updates = [
            (x.examples, {n: x.change[n] for n in x.change if n not in frozen})
            for x in contributions
        ]
        slots = dict(at.slots)
        bound = float(slots.pop(NORM, masking.norm))
        sums = means_and_bits(
            updates, replace(masking, norm=bound),
            draws=Draws(study.seed, number, "", "masking"), privacy=study.privacy,
        )  # fmt: skip
        zeros = {n: np.zeros_like(x) for n, x in contributions[0].change.items() if n in frozen}
        done = reduce_round(
            at.shared, slots, [RoundUpdate(1, partial(dict, mean | zeros)) for mean, _ in sums],
            robustness=study.robustness.of_sums, draws=Draws(study.seed, number, "", "buckets"),
            weighting="equal", server=row.server, hyper=study.hyper, buffers=self._buffers,
        )  # fmt: skip
        if not masking.follows:
            return Next(done.state, done.slots)
        after = next_bound(
            bound, sum(bits[0] for _, bits in sums), len(updates), devices=study.devices,
            privacy=study.privacy, most=max(masking.norm, l2_norm(floats_of(at.shared))),
        )  # fmt: skip
        return Next(done.state, done.slots | {NORM: np.array(after)})

    def judge(self, at: StudyProgress) -> None:
        del at
