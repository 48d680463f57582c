"""The ways to combine the updates of a round, one row each: the mean, and means that resist liars.

A row declares its numbers as algorithms do. `bucketing+NAME` gives means of a few updates each to
the row NAME.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.algorithms.hyper import NOT_NEGATIVE, Hyperparameter, HyperRule
from triplane.unified_ir.federated.core import robust
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.limits import (
    ADAPTIVE,
    OFF,
    RoundUpdate,
    check_norm_bound,
    floats_of,
    limited,
    longest,
    longest_controlled,
    medians_of,
    norms_of,
    with_norms,
)
from triplane.unified_ir.federated.core.reduce import MAX_EXAMPLES, ServerHyper, ServerOptimizer
from triplane.unified_ir.federated.core.reduce import reduce as reduce_updates
from triplane.unified_ir.federated.core.spoilt import MAX_RETURNS

MEAN: Final = "mean"
BUCKETING: Final = "bucketing"
LARGEST: Final = "largest_medians"
"""Name, beside the optimizer's slots, of the largest lower medians of a run's norms up to now."""
Numbers = Mapping[str, float]

# fmt: off
_TRIM: Final = Hyperparameter(
    "trim", 0.2, HyperRule("above 0 and below 0.5", 0, 0.5, low_open=True, high_open=True),
    "For trimmed-mean: share of the updates to leave out at each end.",
)
_BYZANTINE: Final = Hyperparameter(
    "byzantine", 1, HyperRule("a whole number from 1 to 10000", 1, 10_000, whole=True),
    "For krum and multi-krum: number of devices of a round that may lie.",
)
_RADIUS: Final = Hyperparameter(
    "radius", 0.0, NOT_NEGATIVE,
    "For centred-clip: distance to clip to; 0 for the lower median of the norms.",
)
_ITERATIONS: Final = Hyperparameter(
    "clip_iterations", 3, HyperRule("a whole number from 1 to 100", 1, 100, whole=True),
    "For centred-clip: iterations.",
)
_BUCKET_SIZE: Final = Hyperparameter(
    "bucket_size", 2, HyperRule("a whole number from 2 to 1000", 2, 1000, whole=True),
    "For bucketing: updates of a bucket.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregator:
    """One way to combine updates. breakdown: how many liars among n it resists, for people.

    least: number of updates that it needs. entries, weights: its rule with the numbers bound, for n
    updates; see `core.robust`. Both are None for the mean.
    """

    name: str
    source: str
    summary: str
    breakdown: str
    numbers: tuple[Hyperparameter, ...] = ()
    least: Callable[[Numbers], int] = lambda _: 1
    entries: Callable[[Numbers], robust.Entries] | None = None
    weights: Callable[[Numbers], robust.Weights] | None = None


def _krum(numbers: Numbers) -> robust.Weights:
    return lambda products: robust.krum(products, byzantine=int(numbers["byzantine"]), kept=1)


def _multi_krum(numbers: Numbers) -> robust.Weights:
    f = int(numbers["byzantine"])
    # At least one, since buckets that were left out may leave fewer.
    return lambda products: robust.krum(products, byzantine=f, kept=max(1, len(products) - f))


def _centred_clip(numbers: Numbers) -> robust.Weights:
    radius, iterations = numbers["radius"], int(numbers["clip_iterations"])
    return lambda products: robust.centred_clip(products, radius=radius, iterations=iterations)


_ROWS: Final = (
    Aggregator(
        name=MEAN, source="McMahan et al. 2017, arXiv 1602.05629",
        summary="the mean, weighted as the algorithm says", breakdown="0, but for the norm bound",
    ),
    Aggregator(
        name="median", source="Yin et al. 2018, arXiv 1803.01498, option I",
        summary="the median of each entry", breakdown="fewer than n / 2",
        least=lambda _: 3, entries=lambda _: robust.median,
    ),
    Aggregator(
        name="trimmed-mean", source="Yin et al. 2018, arXiv 1803.01498, option II",
        summary="the mean of each entry without the smallest and the largest",
        breakdown="floor(trim n)", numbers=(_TRIM,),
        least=lambda numbers: math.ceil(1 / numbers["trim"] - robust.ROUNDING),
        entries=lambda numbers: lambda block: robust.trimmed_mean(block, trim=numbers["trim"]),
    ),
    Aggregator(
        name="krum", source="Blanchard et al. 2017, arXiv 1703.02757",
        summary="the update that is closest to its neighbours",
        breakdown="byzantine, with n >= 2 byzantine + 3", numbers=(_BYZANTINE,),
        least=lambda numbers: 2 * int(numbers["byzantine"]) + 3, weights=_krum,
    ),
    Aggregator(
        name="multi-krum", source="Blanchard et al. 2017, arXiv 1703.02757, section 4",
        summary="the mean of the n - byzantine updates that are closest to their neighbours",
        breakdown="byzantine, with n >= 2 byzantine + 3", numbers=(_BYZANTINE,),
        least=lambda numbers: 2 * int(numbers["byzantine"]) + 3, weights=_multi_krum,
    ),
    Aggregator(
        name="centred-clip", source="Karimireddy et al. 2021, arXiv 2012.10333, without momentum",
        summary="the mean of updates that are clipped around it",
        breakdown="about n / 10, by its source", numbers=(_RADIUS, _ITERATIONS),
        least=lambda _: 3, weights=_centred_clip,
    ),
)
# fmt: on
AGGREGATORS: Final = {row.name: row for row in _ROWS}
NUMBERS: Final = {n.name: n for row in _ROWS for n in row.numbers} | {
    _BUCKET_SIZE.name: _BUCKET_SIZE
}
BUCKETING_SOURCE: Final = "Karimireddy et al. 2022, arXiv 2006.09365"


def aggregator(name: str) -> Aggregator:
    """Return the row of that name; for bucketing+NAME one that needs enough buckets.

    InvalidInput lists the existing names.
    """
    first, plus, rest = name.rpartition("+")
    row = AGGREGATORS.get(rest)
    if row is None or (plus and (first != BUCKETING or rest == MEAN)):
        raise InvalidInput(
            f"no aggregator {name[:80]!r}; choose from {', '.join(AGGREGATORS)}, or put "
            f"{BUCKETING}+ before a robust one, as in {BUCKETING}+median"
        )
    if not plus:
        return row

    def least(numbers: Numbers) -> int:
        return (row.least(numbers) - 1) * int(numbers["bucket_size"]) + 1

    return Aggregator(
        name=name, source=f"{BUCKETING_SOURCE}; {row.source}",
        summary=f"{row.summary}, of means of bucket-size updates",
        breakdown=f"as {row.name} in buckets", numbers=(*row.numbers, _BUCKET_SIZE),
        least=least, entries=row.entries, weights=row.weights,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """What limits the devices of a run or study.

    norm_bound, max_examples: see `core.limits.limited`. aggregator: the name of a row. numbers: of
    that row, where they are not its defaults. returns: how often a spoilt state may be replaced by
    the last good one, see `core.spoilt`. InvalidInput: a value is not valid.
    """

    norm_bound: str = ADAPTIVE
    max_examples: int = 0
    aggregator: str = MEAN
    numbers: Numbers = field(default_factory=dict)
    returns: int = MAX_RETURNS

    def __post_init__(self) -> None:
        check_norm_bound(self.norm_bound)
        if not 0 <= self.max_examples <= MAX_EXAMPLES:
            raise InvalidInput(
                f"the largest weight is 1 to {MAX_EXAMPLES} examples, or 0 for three medians; got "
                f"{self.max_examples}"
            )
        if self.returns < 0:
            raise InvalidInput(f"a run returns 0 times or more, got {self.returns}")
        declared = {number.name: number for number in self.row.numbers}
        if odd := sorted(self.numbers.keys() - declared.keys()):
            names = ", ".join(declared) or "none"
            raise InvalidInput(f"{self.aggregator} has no number {odd[0][:40]!r}; it has {names}")
        for name, value in self.numbers.items():
            declared[name].check(value)

    @property
    def row(self) -> Aggregator:
        """The aggregator."""
        return aggregator(self.aggregator)

    @property
    def all_numbers(self) -> dict[str, float]:
        """The numbers of the aggregator, with their defaults."""
        return {n.name: self.numbers.get(n.name, n.default) for n in self.row.numbers}

    @property
    def warning(self) -> str:
        """What is not protected, in a few words, or empty."""
        return "no norm bound: one device can replace the model" if self.norm_bound == OFF else ""

    @property
    def of_sums(self) -> Robustness:
        """The limits on means of groups that are masked apart: the aggregator alone.

        Nobody sees an update there; devices keep the norm bound and the cap of examples.
        """
        return replace(UNLIMITED, aggregator=self.aggregator, numbers=self.numbers)

    def check_count(self, least: int, *, groups: int = 1) -> None:
        """Raise InvalidInput if a round of so few updates is too small for the aggregator.

        groups: if there are several, their means take the place of updates.
        """
        needed = self.row.least(self.all_numbers)
        inputs = least if groups == 1 else groups
        if inputs < needed:
            numbers = ", ".join(f"{k} {v:g}" for k, v in self.all_numbers.items())
            of = f" with {numbers}" if numbers else ""
            what, way = ("updates", "Ask more devices")
            if groups > 1:
                what, way = ("sums of groups", "Form more groups")
            raise InvalidInput(
                f"the aggregator {self.aggregator}{of} needs at least {needed} {what} in each "
                f"round; a round may have {inputs}. {way}, or choose another aggregator"
            )


UNLIMITED: Final = Robustness(norm_bound=OFF, max_examples=MAX_EXAMPLES, returns=0)
"""That of runs which began under releases without limits."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """The next state and the optimizer's slots. scaled: updates that were above a norm bound.

    They were scaled, or left out. clip: the next round's norm, where it follows the updates of a
    run with differential privacy or masking; buffer_clip: that of masked buffers. left_out: which
    updates were, by their position.
    """

    state: dict[str, Array]
    slots: dict[str, Array]
    scaled: int
    clip: float = 0.0
    buffer_clip: float = 0.0
    left_out: tuple[int, ...] = ()


def reduce_round(
    state: Mapping[str, Array],
    slots: Mapping[str, Array],
    updates: Sequence[RoundUpdate],
    *,
    robustness: Robustness,
    draws: Draws,
    weighting: str,
    server: ServerOptimizer,
    hyper: ServerHyper,
    buffers: frozenset[str] = frozenset(),
    shares: Mapping[str, float] | None = None,
) -> Reduction:
    """Reduce a round within its limits; see `core.reduce.reduce` for the other arguments.

    draws: of the round; they order updates into buckets. shares: with them, devices have control
    variates, and the limits are of all rounds so far.
    """
    row, numbers = robustness.row, robustness.all_numbers
    controlled = bool(shares)
    far: tuple[int, ...] = ()
    largest: dict[str, Array] = {}
    if updates and (controlled or robustness.norm_bound != OFF):
        updates, far, largest = _far(state, slots, updates, buffers, controlled=controlled)
        if robustness.norm_bound == OFF or len(updates) - len(far) < row.least(numbers):
            far = ()
    without = frozenset(far)
    near = [u for at, u in enumerate(updates) if at not in without]
    if not slots:
        # The first round, or the first one after a return: control variates of devices are 0.
        state = {n: np.zeros_like(x) if n in (shares or {}) else x for n, x in state.items()}
    bounded, scaled = limited(
        near, norm_bound=robustness.norm_bound, max_examples=robustness.max_examples,
        buffers=buffers, adaptive=not controlled,
    )  # fmt: skip

    def combine(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        size = numbers.get("bucket_size")
        order = draws.permutation(len(bounded)).tolist() if size else []
        return robust.aggregate(
            shapes, bounded, buffers=buffers,
            entries=row.entries(numbers) if row.entries else None,
            weights=row.weights(numbers) if row.weights else None,
            buckets=robust.bucket_means(order, int(size)) if size else None,
        )  # fmt: skip

    counted = len(bounded) / max(1, len(updates))
    after, next_slots = reduce_updates(
        state, slots, [(u.examples, u.open) for u in bounded], weighting=weighting, server=server,
        hyper=hyper, buffers=buffers,
        shares={name: share * counted for name, share in (shares or {}).items()},
        combine=None if row.name == MEAN else combine,
    )  # fmt: skip
    return Reduction(after, next_slots | largest, scaled + len(far), left_out=far)


def _far(
    state: Mapping[str, Array],
    slots: Mapping[str, Array],
    updates: Sequence[RoundUpdate],
    buffers: frozenset[str],
    *,
    controlled: bool,
) -> tuple[list[RoundUpdate], tuple[int, ...], dict[str, Array]]:
    """Return the updates with norms, positions of those that no honest device sends, and slots.

    controlled: devices have control variates; the slots are what later rounds have to know.
    """
    measured = with_norms(updates, buffers)
    norms = [pair for _, pair in measured]
    if controlled:
        largest = np.maximum(slots.get(LARGEST, 0.0), medians_of(norms))
        most, kept = longest_controlled((largest[0], largest[1])), {LARGEST: largest}
    else:
        most, kept = longest(norms, lambda: norms_of(floats_of(state), buffers)[0]), {}
    far = tuple(at for at, (p, s) in enumerate(norms) if p > most[0] or s > most[1])
    return [u for u, _ in measured], far, kept
