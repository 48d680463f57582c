"""A round of a study with differential privacy.

What has to survive between rounds is with the optimizer's slots, and saved with them: the noise
that later rounds take back, and the norm if it follows the updates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.algorithms.aggregators import Reduction
from triplane.unified_ir.federated.algorithms.composition import (
    check_composition,
    reduce_private_round,
)
from triplane.unified_ir.federated.algorithms.plan import PlanMade
from triplane.unified_ir.federated.algorithms.table import algorithm
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.limits import OFF
from triplane.unified_ir.federated.core.reduce import ServerHyper, ServerOptimizer
from triplane.unified_ir.federated.privacy.central import check_population
from triplane.unified_ir.federated.privacy.release import (
    Open,
    check_release,
    draw,
    entries_of,
    shapes_of,
)
from triplane.unified_ir.federated.privacy.report import (
    no_round_fits,
    privacy_spent,
    too_many_rounds,
)
from triplane.unified_ir.federated.privacy.settings import CENTRAL, DifferentialPrivacy
from triplane.unified_ir.federated.study.checkpoint import StudyProgress
from triplane.unified_ir.federated.study.masked_sums import masked_cohort, with_equal_weights
from triplane.unified_ir.federated.study.trial import Trial

NOISE: Final = "noise."
"""Prefix of earlier noise among the slots; the number of its round follows."""
NORM: Final = f"{NOISE}norm"


def norm_of(slots: Mapping[str, Array], privacy: DifferentialPrivacy) -> float:
    """Return the norm to which changes of the next round are clipped."""
    return float(slots[NORM]) if NORM in slots else privacy.clip


def within_budget(study: Any, *, devices: int, population: int) -> dict[str, Any]:
    """Return the fields of a study that its privacy decides: the noise, the rounds that fit.

    devices: in each round. population: devices that learn. InvalidInput: not one round fits, or
    there are too few devices.
    """
    privacy: DifferentialPrivacy = study.privacy.resolved(study.rounds)
    budget = privacy.budget()
    rounds = budget.most_rounds(study.rounds)
    if not rounds:
        raise InvalidInput(no_round_fits(budget))
    # In fewer rounds than the separation no device has to come again.
    check_population(population, devices, min(privacy.separation, rounds))
    most = privacy.most_uses
    if most and devices * rounds > population * most:
        raise InvalidInput(
            f"{rounds} rounds of {devices} devices need {devices * rounds} uses, and {population} "
            f"devices have {population * most} (most uses of a device: {most}); ask for fewer "
            "rounds or devices a round, or allow more uses"
        )
    # The clipping norm is the bound, and losses must not decide which state is next.
    limits = replace(study.robustness, norm_bound=OFF, returns=0)
    return {"privacy": privacy, "rounds": rounds, "robustness": limits}


def prepared(study: Any, population: int) -> Any:
    """Return a study with the noise, the rounds and the weights that its options lead to.

    population: devices that learn. InvalidInput: not one round fits, or there are too few devices.
    """
    if study.privacy is not None or algorithm(study.algorithm).weighting == "equal":
        study = replace(study, masking=with_equal_weights(study.masking, study.privacy))
    if study.privacy is None:
        return study
    devices = study.devices or population
    return replace(study, **within_budget(study, devices=devices, population=population))


def check_rows(
    study: Any, population: int, planned: PlanMade, *, buffers: bool, strategy: bool
) -> None:
    """Raise InvalidInput unless what a study demands composes; see `check_composition`."""
    devices = study.devices or population
    check_composition(
        algorithm=study.algorithm,
        devices=devices,
        compression=study.compression,
        keep=study.keep,
        robustness=study.robustness,
        privacy=study.privacy,
        masked=masked_cohort(study.masking, devices),
        groups=1 if study.masking is None else study.masking.groups,
        strategy=strategy,
        buffers=buffers,
    )
    if study.privacy is not None and study.privacy.placement == CENTRAL:
        check_release(study.privacy, planned.state, planned.frozen, devices)


def with_account(trial: Trial, privacy: DifferentialPrivacy, asked: int) -> Trial:
    """Return the trial with what it spent. asked: rounds that it would have had."""
    budget = replace(privacy.budget(), rounds=trial.last_round)
    ended = too_many_rounds(asked, trial.last_round, budget)
    return replace(trial, privacy=privacy_spent(privacy, budget), ended=ended)


def reduce_privately(
    at: StudyProgress,
    updates: Sequence[Open],
    privacy: DifferentialPrivacy,
    *,
    devices: int,
    frozen: Collection[str],
    server: ServerOptimizer,
    hyper: ServerHyper,
) -> Reduction:
    """Reduce the round after `at.rounds` with noise that is drawn now, and kept in the slots."""
    number, norm = len(at.rounds) + 1, norm_of(at.slots, privacy)
    kept = range(number - 1, max(0, number - privacy.bands), -1)
    past = {name: at.slots[name] for n in kept if (name := f"{NOISE}{n}") in at.slots}
    entries = entries_of(shapes_of(at.shared, frozen))
    noise = draw(privacy, norm, entries, devices, list(past.values()))
    slots = {name: x for name, x in at.slots.items() if not name.startswith(NOISE)}
    done = reduce_private_round(
        at.shared, slots, updates, privacy=privacy, clip=norm, devices=devices, noise=noise,
        frozen=frozen,        server=server, hyper=hyper,
    )  # fmt: skip
    own = {NORM: np.array(done.clip)} if privacy.quantile else {}
    if privacy.bands > 1:
        own |= past | {f"{NOISE}{number}": noise.steps}
    return replace(done, slots={**done.slots, **own})
