"""How many neighbours a device has, and how many shares and signatures are needed.

With n devices of which at most L are lost and C collude with the cloud, everybody computes from the
same terms (Bell et al. 2020, section 3, adapted; decision 0075):

    k neighbours for each device, in a graph that a hash chooses
    t of k shares recover a secret:  2 (t - c) > k,  c = most colluders among anyone's neighbours
    q signatures over one survivor set:  2 q > n + C,  so no second set ever gets as many

For k < n - 1, c and the lost neighbours are bounded by hypergeometric tails, in exact integers: two
machines must never disagree about k. The complete graph has no tails; there 2 t > k + C suffices.

Where a cohort of N devices is masked in G groups that a hash draws (`groups.py`), n is the size of
one group, and C is the least number that the N devices' colluders pass in any of the groups with a
small probability only:

    2 G P[more than C colluders among n of N] <= failure / GRINDING_TRIES

The other half of `failure` is for the graphs of all groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

from triplane.proto.errors import InvalidInput

MIN_COHORT: Final = 3
"""With two devices, each learns the other's update from the sum."""
MAX_COHORT: Final = 10_000
COMPLETE_UP_TO: Final = 64
"""Cohorts of up to as many devices use the complete graph, which needs no assumption on chance."""
ROUNDING: Final = 1e-9
"""1/3 of 99 is 33 also where the product is rounded to less."""
GRINDING_TRIES: Final = 2**80
"""Graphs that a cloud may try: a colluding device can make round keys until the graph suits it.

A try costs some 20 us of one core, offline: 2^40 would be within reach of whoever runs a cloud.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskingParameters:
    """What a cohort of `devices` uses, or one group of `devices` of a cohort.

    cohort: devices of all groups. least: fewest survivors whose sum may be unmasked. lost: losses
    after which the round still succeeds. colluding: devices that may share all they know with the
    cloud; at most `colluding_neighbours` of them are neighbours of one device. colluding_cohort:
    the same in all groups.
    """

    devices: int
    cohort: int
    neighbours: int
    threshold: int
    quorum: int
    least: int
    lost: int
    colluding: int
    colluding_neighbours: int
    colluding_cohort: int
    failure: float

    @property
    def complete(self) -> bool:
        """Whether every device is a neighbour of every other."""
        return self.neighbours == self.devices - 1

    def text(self) -> str:
        """Return a description for people, a few lines."""
        grouped = self.cohort > self.devices
        cohort = f"groups of {self.devices} of {self.cohort}" if grouped else f"{self.devices}"
        others, of = ("others of its group", " of a group") if grouped else ("others", "")
        graph = (
            f"every device shares its secrets with all {others}"
            if self.complete
            else "every device shares its secrets with neighbours that a hash of all keys chooses"
        )
        return (
            f"masking for {cohort} devices: {graph} ({self.neighbours}); "
            f"{self.threshold} of {self.neighbours} shares recover a secret\n"
            f"the cloud learns a sum only over {self.least} or more devices{of}, after "
            f"{self.quorum} of them have signed the same list\n"
            f"holds while at most {self.lost} devices{of} are lost and at most {self._colluders()} "
            f"collude with the cloud, except with probability {self.failure:g}"
        )

    def _colluders(self) -> str:
        if self.cohort == self.devices:
            return f"{self.colluding}"
        # A hash draws the groups, so a share of the cohort is no bound on the share of a group.
        return f"{self.colluding_cohort} of all {self.cohort} ({self.colluding} in one group)"


@lru_cache(maxsize=64)
def choose_parameters(
    devices: int,
    *,
    least: int,
    lost_share: float,
    colluding_share: float,
    failure: float,
    cohort: int = 0,
) -> MaskingParameters:
    """Return the parameters with the fewest neighbours for a cohort, or a group, of `devices`.

    cohort: devices of all groups, 0 if there is one group only. lost_share: of `devices`;
    colluding_share: of the cohort; both in [0, 1), rounded down and up: 5 percent of 10
    devices are none lost and one colluding. failure: probability that the bounds on neighbours, or
    on the colluders in each group, do not hold, in (0, 1). InvalidInput if `devices` are fewer
    than `least` or if not even the complete graph satisfies both bounds.
    """
    cohort = cohort or devices
    _check(devices, cohort, least, lost_share, colluding_share, failure)
    in_all = math.ceil(colluding_share * cohort - ROUNDING)
    colluding, chance = _colluding_in_group(devices, cohort, in_all, Fraction(failure))
    of, more, way = "devices", "ask more devices", ""
    if cohort > devices:
        of, way = "devices in each group", ", or form fewer groups"
        more = "form fewer groups, or state a smaller share of colluding devices"
    # A sum of one honest device and the colluders' own updates would be that device's update.
    least = max(least, colluding + 2)
    if devices < least:
        raise InvalidInput(
            f"masking needs a cohort of at least {least} {of} (with {colluding} colluding), got "
            f"{devices}; {more}"
        )
    lost = min(math.floor(lost_share * devices + ROUNDING), devices - least)
    quorum = (devices + colluding) // 2 + 1
    chosen = _fewest_neighbours(devices, lost, colluding, chance)
    if chosen is None or devices - lost < quorum:
        raise InvalidInput(
            f"masking cannot tolerate {lost} lost and {colluding} colluding of {devices} {of}: "
            f"{quorum} of them must sign the survivors and {devices - lost} remain; state a "
            f"smaller share of lost or colluding devices{way}"
        )
    neighbours, colluders, threshold = chosen
    return MaskingParameters(
        devices=devices,
        cohort=cohort,
        neighbours=neighbours,
        threshold=threshold,
        quorum=quorum,
        least=least,
        lost=lost,
        colluding=colluding,
        colluding_neighbours=colluders,
        colluding_cohort=in_all,
        failure=failure,
    )


def _colluding_in_group(
    devices: int, cohort: int, colluding: int, failure: Fraction
) -> tuple[int, Fraction]:
    """Return the most colluders in a group, and what is left of `failure` for its graph."""
    if cohort == devices:
        return colluding, failure
    # More groups of nearly equal size would have fewer devices each.
    groups = (cohort - 1) // (devices - 1)
    chance = failure / (2 * groups)
    return _most(cohort, colluding, devices, chance / GRINDING_TRIES), chance


def _check(
    devices: int, cohort: int, least: int, lost: float, colluding: float, failure: float
) -> None:
    if not MIN_COHORT <= least <= devices <= MAX_COHORT:
        grouped = f"groups of {devices} devices; form fewer groups, or ask more devices"
        raise InvalidInput(
            f"masking needs {MIN_COHORT} <= least cohort <= devices <= {MAX_COHORT}, got least "
            f"cohort {least} and {grouped if cohort > devices else f'{devices} devices'}"
        )
    if not devices <= cohort <= MAX_COHORT:
        raise InvalidInput(
            f"a group of {devices} devices is of a cohort of as many to {MAX_COHORT}, got {cohort}"
        )
    if not (0 <= lost < 1 and 0 <= colluding < 1 and 0 < failure < 1):
        raise InvalidInput(
            "shares of lost and colluding devices are in [0, 1) and the failure probability is in "
            f"(0, 1), got {lost}, {colluding} and {failure}"
        )


def _fewest_neighbours(
    n: int, lost: int, colluding: int, failure: Fraction
) -> tuple[int, int, int] | None:
    """Return (k, c, t), or None if not even the complete graph satisfies the bounds."""
    # Feasibility grows with k but for roundings of t, so a search by halves finds the least k or
    # one close to it.
    low, high = 1, 0 if n <= COMPLETE_UP_TO else (n - 2) // 2
    best: tuple[int, int, int] | None = None
    while low <= high:
        middle = (low + high) // 2
        threshold = _sparse(n, 2 * middle, lost, colluding, failure)
        if threshold is None:
            low = middle + 1
        else:
            best, high = (2 * middle, *threshold), middle - 1
    return best or _complete(n, lost, colluding)


def _complete(n: int, lost: int, colluding: int) -> tuple[int, int, int] | None:
    threshold = (n - 1 + colluding) // 2 + 1
    return (n - 1, colluding, threshold) if threshold <= n - 1 - lost else None


def _sparse(n: int, k: int, lost: int, colluding: int, failure: Fraction) -> tuple[int, int] | None:
    """Return (c, t) for k neighbours, or None. Each kind of failure gets half of `failure`."""
    c = _most(n - 1, colluding, k, failure / (2 * n * GRINDING_TRIES))
    t = k // 2 + c + 1
    if t > k:
        return None
    return (c, t) if _below(n - 1, n - 1 - lost, k, t) * 2 * n <= failure else None


def _terms(total: int, marked: int, drawn: int) -> tuple[int, list[int]]:
    """Return (i0, C(marked, i) C(total - marked, drawn - i) for i = i0, i0 + 1, ...)."""
    first, last = max(0, drawn - (total - marked)), min(marked, drawn)
    term = math.comb(marked, first) * math.comb(total - marked, drawn - first)
    terms = [term]
    for i in range(first, last):
        term = term * (marked - i) * (drawn - i) // ((i + 1) * (total - marked - drawn + i + 1))
        terms.append(term)
    return first, terms


def _most(total: int, marked: int, drawn: int, failure: Fraction) -> int:
    """Return the smallest c with P(more than c marked among `drawn` of `total`) <= failure."""
    first, terms = _terms(total, marked, drawn)
    allowed = failure * math.comb(total, drawn)
    tail = 0
    for i in range(len(terms) - 1, 0, -1):
        tail += terms[i]
        if tail > allowed:
            return first + i
    return first


def _below(total: int, marked: int, drawn: int, least: int) -> Fraction:
    """Return P(fewer than `least` marked among `drawn` of `total`)."""
    first, terms = _terms(total, marked, drawn)
    return Fraction(sum(terms[: max(0, least - first)]), math.comb(total, drawn))
