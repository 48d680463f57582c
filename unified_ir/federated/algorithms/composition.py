"""What the options of a run or a study demand of an update's pipeline, and whether it composes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from triplane.unified_ir.federated.algorithms.aggregators import (
    BUCKETING,
    MEAN,
    Reduction,
    Robustness,
)
from triplane.unified_ir.federated.algorithms.table import algorithm as algorithm_row
from triplane.unified_ir.federated.core import pipeline
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.limits import check_no_start
from triplane.unified_ir.federated.core.reduce import ServerHyper, ServerOptimizer
from triplane.unified_ir.federated.core.reduce import reduce as reduce_updates
from triplane.unified_ir.federated.privacy.release import Open, RoundNoise, release, shapes_of
from triplane.unified_ir.federated.privacy.settings import DISTRIBUTED, DifferentialPrivacy

LEAST_HONEST: Final = 2
"""Of distributed noise without masking, which is refused anyway."""
Rows = dict[str, dict[str, Any]]


def check_composition(
    *,
    algorithm: str,
    devices: int,
    compression: str = "",
    keep: float = 1.0,
    robustness: Robustness,
    privacy: DifferentialPrivacy | None = None,
    masked: tuple[int, int] | None = None,
    groups: int = 1,
    strategy: bool = False,
    app: bool = False,
    buffers: bool = False,
) -> None:
    """Raise InvalidInput unless what a run demands composes; the message names what does not.

    masked: the fewest devices whose sum may be unmasked, and how many of them are honest at least;
    None where updates are in the clear. groups: number of those that are masked apart. buffers:
    whether updates have float buffers, as SCAFFOLD's always do.
    """
    rows: Rows = {}
    if masked is None:
        check_no_start(robustness.norm_bound)
    if privacy is not None:
        rows |= _privacy_rows(privacy, devices, masked[1] if masked else LEAST_HONEST)
    if masked:
        rows["mask"] = {"least_cohort": masked[0]}
    if groups > 1:
        rows["group-sums"] = {"groups": groups}
    if compression:
        rows[compression] = {"keep": keep} if compression == "top-k" else {}
    if algorithm_row(algorithm).by_share:
        rows["control-variates"] = {}
    elif buffers:
        rows["buffers"] = {}
    if strategy:
        rows["flower-strategy"] = {}
    if app:
        rows["flower-app"] = {}
    if robustness.aggregator != MEAN:
        rows[BUCKETING if "+" in robustness.aggregator else robustness.aggregator] = {}
    pipeline.check(rows)


def _privacy_rows(privacy: DifferentialPrivacy, devices: int, honest: int) -> Rows:
    norm = privacy.adaptive(privacy.clip, devices)
    rows: Rows = {"clip-fixed": {"norm": privacy.clip}}
    if norm is not None:
        rows = {
            "clip-adaptive": {
                "norm": norm.norm,
                "quantile": norm.quantile,
                "rate": norm.rate,
                "bit_noise": norm.bit_noise,
            }
        }
    multiplier = {"noise_multiplier": privacy.multiplier}
    if privacy.correlated:
        rows["noise-correlated"] = {**multiplier, "separation": privacy.separation}
    if privacy.placement == DISTRIBUTED:
        rows["noise-distributed"] = {**multiplier, "honest": honest}
    return rows if len(rows) > 1 else {**rows, "noise-central": multiplier}


def reduce_private_round(
    state: Mapping[str, Array],
    slots: Mapping[str, Array],
    updates: Sequence[Open],
    *,
    privacy: DifferentialPrivacy,
    clip: float,
    devices: int,
    noise: RoundNoise,
    frozen: Collection[str] = (),
    server: ServerOptimizer,
    hyper: ServerHyper,
) -> Reduction:
    """Reduce a round with central noise; see `release` for the mean. frozen: tensors that stay.

    The optimizer's step only sees what is published, so it costs nothing.
    """
    published = release(
        shapes_of(state, frozen), updates, privacy=privacy, clip=clip, devices=devices, noise=noise
    )
    after, next_slots = reduce_updates(
        state, slots, [(1, opened) for opened in updates], weighting="equal", server=server,
        hyper=hyper, combine=lambda _: published.mean,
    )  # fmt: skip
    clip_after = published.clip if privacy.quantile else 0.0
    return Reduction(after, next_slots, published.clipped, clip_after)
