"""Which devices of a cohort are masked together, where its sum is taken in several groups.

A robust aggregator sees the sums of groups in place of updates. The partition follows from the
digest of all signed round keys, as the graph of neighbours does: a cloud that chose the groups
could put a device among colluders, or a liar into the group where it does most. Whoever makes keys
can still try many of them, so the bound on the colluders of a group (`parameters.py`) holds for
that many partitions.
"""

from __future__ import annotations

from collections.abc import Sequence

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.masking.parameters import (
    MIN_COHORT,
    MaskingParameters,
    choose_parameters,
)


def group_sizes(devices: int, groups: int) -> tuple[int, ...]:
    """Return the sizes of so many groups of `devices`, larger ones first; they differ by 1 at most.

    InvalidInput: one of several groups has fewer than `MIN_COHORT` devices. One group is a cohort,
    whose size `choose_parameters` checks.
    """
    most = max(1, devices // MIN_COHORT)
    if not 1 <= groups <= most:
        raise InvalidInput(
            f"masking needs groups of at least {MIN_COHORT} devices, and {devices} devices make 1 "
            f"to {most} of them, got {groups} groups; ask more devices, or form fewer groups"
        )
    size, larger = divmod(devices, groups)
    return (size + 1,) * larger + (size,) * (groups - larger)


def group_parameters(
    cohort: int,
    groups: int,
    *,
    least: int,
    lost_share: float,
    colluding_share: float,
    failure: float,
) -> tuple[MaskingParameters, ...]:
    """Return what a cohort uses, for each size that its groups have, the smallest first.

    See `choose_parameters`. InvalidInput: a group cannot be masked.
    """
    return tuple(
        choose_parameters(
            size,
            cohort=cohort,
            least=least,
            lost_share=lost_share,
            colluding_share=colluding_share,
            failure=failure,
        )
        for size in sorted(set(group_sizes(cohort, groups)))
    )


def least_and_honest(every: Sequence[MaskingParameters]) -> tuple[int, int]:
    """Return the fewest devices, and the fewest honest ones, in a sum that is revealed."""
    return min(x.least for x in every), min(x.least - x.colluding for x in every)


def groups_of(digest: bytes, devices: int, groups: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions 0 to devices - 1 in groups, each in rising order; see `group_sizes`.

    digest: of all signed round keys; equal arguments give the same groups on every machine.
    """
    sizes = group_sizes(devices, groups)
    draws = Draws(int.from_bytes(digest, "big"), 0, "", "masking groups")
    order = iter(draws.permutation(devices).tolist())
    return tuple(tuple(sorted(next(order) for _ in range(size))) for size in sizes)
