"""Differential privacy of runs: validation of `Spec.noise`, and a round's reduction with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from triplane.cloud.federation.masked_spec import least_and_honest
from triplane.cloud.federation.noise_store import NoiseStore
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.limits import ADAPTIVE, RoundUpdate
from triplane.unified_ir.federated.core.run import Lease, RunState
from triplane.unified_ir.federated.privacy.accountant import DELTA, MAX_EPSILON
from triplane.unified_ir.federated.privacy.release import (
    check_release,
    draw,
    entries_of,
    shapes_of,
)
from triplane.unified_ir.federated.privacy.report import (
    PrivacySpent,
    no_round_fits,
    privacy_spent,
    too_many_rounds,
)
from triplane.unified_ir.federated.privacy.settings import (
    CENTRAL,
    CLIP,
    QUANTILE,
    DifferentialPrivacy,
)

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms.aggregators import Reduction, Robustness
    from triplane.unified_ir.federated.core.reduce import ServerHyper, ServerOptimizer


def privacy_of(spec: pb.Spec) -> DifferentialPrivacy | None:
    """Return the privacy of a run whose defaults are filled in; None without."""
    if not spec.HasField("noise"):
        return None
    noise = spec.noise
    return DifferentialPrivacy(
        epsilon=noise.epsilon or MAX_EPSILON,
        delta=noise.delta or DELTA,
        clip=noise.clip or CLIP,
        multiplier=noise.multiplier,
        placement=noise.placement or CENTRAL,
        quantile=(noise.clip_quantile or QUANTILE) if noise.adaptive else 0.0,
        separation=noise.separation or 1,
        most_uses=noise.most_uses,
        correlated=noise.correlated,
    )


def fill_noise(spec: pb.Spec) -> None:
    """Check a spec's noise, and fill in what follows from it. InvalidInput names what is wrong.

    The spec's rounds are filled in before. Whether it composes is checked last; see `check_rows`.
    """
    privacy = privacy_of(spec)
    if privacy is None:
        return
    noise = spec.noise
    if noise.clip_quantile and not noise.adaptive:
        raise InvalidInput("clip_quantile belongs to adaptive clipping; state it or leave it out")
    privacy = privacy.resolved(spec.rounds)
    budget = privacy.budget()
    if not budget.most_rounds(spec.rounds):
        raise InvalidInput(no_round_fits(budget))
    noise.placement, noise.clip = privacy.placement, privacy.clip
    noise.separation = privacy.separation
    noise.epsilon, noise.delta, noise.multiplier = (
        privacy.epsilon,
        privacy.delta,
        privacy.multiplier,
    )
    noise.clip_quantile = privacy.quantile
    _fill_limits(spec.robustness, privacy)


def _fill_limits(limits: pb.Robustness, privacy: DifferentialPrivacy) -> None:
    bound = ADAPTIVE if privacy.quantile else repr(privacy.clip)
    if limits.norm_bound not in {"", bound} or limits.max_examples or limits.returns:
        raise InvalidInput(
            "a norm bound, a largest weight and returns do not go with differential privacy: the "
            f"clipping norm {privacy.clip:g} is the bound, all devices weigh the same, and which "
            "state is next must not depend on losses; leave them out"
        )
    limits.SetInParent()
    limits.norm_bound, limits.returns = bound, 0


def check_rows(spec: pb.Spec, robustness: Robustness, *, buffers: bool = False) -> None:
    """Raise InvalidInput unless what a run with noise or masking demands composes.

    All defaults are filled in before; see `core.pipeline`.
    """
    from triplane.unified_ir.federated.algorithms.composition import check_composition

    check_composition(
        algorithm=spec.algorithm,
        devices=spec.cohort.devices,
        compression=spec.compression,
        keep=spec.keep or 1.0,
        robustness=robustness,
        privacy=privacy_of(spec),
        masked=least_and_honest(spec),
        groups=spec.masking.groups or 1,
        strategy=spec.HasField("flower"),
        app=spec.flower.app,
        buffers=buffers,
    )


def check_tensors(spec: pb.Spec, state: Mapping[str, Array], frozen: Collection[str]) -> None:
    """Raise InvalidInput if rounds of this state cannot get the noise. frozen: see `shapes_of`."""
    if (privacy := privacy_of(spec)) is not None:
        check_release(privacy, state, frozen, spec.cohort.devices)


def noise_terms(
    spec: pb.Spec, state: RunState, own_std: float, own_bit_std: float
) -> pb.NoiseTerms | None:
    """Return what a device does with its update, and what the round costs it; None for nothing.

    own_std: deviation of the noise that it adds to its integers, 0 for none. own_bit_std: of that
    in its clipping bit.
    """
    privacy = privacy_of(spec)
    if privacy is None:
        return None
    return pb.NoiseTerms(
        clip=state.norm,
        multiplier=privacy.multiplier,
        separation=privacy.separation,
        most_uses=privacy.most_uses,
        delta=privacy.delta,
        own_std=own_std,
        own_bit_std=own_bit_std,
        clip_bit=bool(privacy.quantile),
    )


def published_change(
    spec: pb.Spec, change: dict[str, Array], contributed: int, frozen: Collection[str]
) -> dict[str, Array]:
    """Return what a round publishes of the mean of `contributed` updates with noise of devices.

    As with central noise, a missing device counts as zeros, and tensors that stay as they are lose
    their noise. Of a group, the divisor is the number of devices over that of groups.
    """
    share = contributed * (spec.masking.groups or 1) / spec.cohort.devices
    return {n: np.zeros_like(x) if n in frozen else x * share for n, x in change.items()}


def spent_by(spec: pb.Spec, state: RunState) -> PrivacySpent | None:
    """Return what a run has spent; None without differential privacy."""
    privacy, budget = privacy_of(spec), state.budget
    return None if privacy is None or budget is None else privacy_spent(privacy, budget)


def why_fewer_rounds(spec: pb.Spec, state: RunState) -> str:
    """Return why the run has fewer rounds than its spec asks for, or empty."""
    budget = state.budget
    return "" if budget is None else too_many_rounds(spec.rounds, state.plan.rounds, budget)


def reduce_with_noise(
    store: NoiseStore,
    spec: pb.Spec,
    before: RunState,
    state: dict[str, Array],
    slots: dict[str, Array],
    updates: Sequence[RoundUpdate],
    *,
    leases: Sequence[Lease],
    frozen: Collection[str],
    server: ServerOptimizer,
    hyper: ServerHyper,
) -> Reduction:
    """Reduce a round with the noise that is stored for it, or drawn and stored now.

    leases: those of the updates. frozen: tensors that stay as they are.
    """
    from triplane.unified_ir.federated.algorithms.composition import reduce_private_round

    privacy, budget = privacy_of(spec), before.budget
    assert privacy is not None
    assert budget is not None
    devices, entries = spec.cohort.devices, entries_of(shapes_of(state, frozen))
    noise = store.noise_of(
        before.run, budget.charge(before.turn[0]), privacy.bands,
        lambda past: draw(privacy, before.norm, entries, devices, past),
        updates=_digest_of(leases),
    )  # fmt: skip
    return reduce_private_round(
        state, slots, [update.open for update in updates], privacy=privacy, clip=before.norm,
        devices=devices, noise=noise, frozen=frozen, server=server, hyper=hyper,
    )  # fmt: skip


def _digest_of(leases: Iterable[Lease]) -> str:
    blobs = [(lease.id, lease.update.blob) for lease in leases if lease.update is not None]
    return hashlib.sha256(json.dumps(sorted(blobs)).encode()).hexdigest()
