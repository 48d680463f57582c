"""When a run's state is spoilt: the loss over devices tells.

The updates of a round carry the mean loss of each device's steps from the round's state. The lower
median over the devices, which no half of them can raise, judges that state. It is *bad* if

    loss > worst + RISE * max(|worst|, FLOOR * |first|)

with `first` the loss of the run's first round, and `worst` the highest of the last `RECENT` good
rounds. Not the lowest: rounds ask different devices, so honest losses differ from round to round,
and one claim of 0 would make the next ten rounds bad. A round that most of its devices decline
is bad, too: they do where their loss is not finite. After `PATIENCE` bad rounds in a row
the run returns to its last good state: the one at the start of the newest good round. After the
run's last round, a single bad one is enough (`round_end.must_return`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

RISE: Final = 2.0
"""Rise above the worst recent loss, as a multiple of it, from which a round is bad: 3 times it."""
FLOOR: Final = 0.1
"""Share of the first loss below which the worst one does not count as lower: near 0, a multiple of
a loss is reached by chance."""
RECENT: Final = 10
PATIENCE: Final = 3
MAX_RETURNS: Final = 3
"""Times that a run returns, by default; then it stops for a person to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWatch:
    """What a run remembers of its losses. recent: of the newest good rounds, oldest first.

    bad: bad rounds in a row up to now. returns: how often the run returned.
    """

    first: float = math.nan
    recent: tuple[float, ...] = ()
    bad: int = 0
    returns: int = 0


NO_LOSSES: Final = LossWatch()


def most_loss(watch: LossWatch) -> float:
    """Return the largest loss that is not bad; infinite before the first good round."""
    if not watch.recent:
        return math.inf
    worst = max(watch.recent)
    return worst + RISE * max(abs(worst), FLOOR * abs(watch.first))


def after_loss(watch: LossWatch, loss: float) -> LossWatch:
    """Return the watch after a round with this loss; one that is not a number is bad."""
    if not loss <= most_loss(watch):
        return replace(watch, bad=watch.bad + 1)
    first = loss if math.isnan(watch.first) else watch.first
    return replace(watch, first=first, recent=(*watch.recent, loss)[-RECENT:], bad=0)


def is_spoilt(watch: LossWatch) -> bool:
    """Return whether the state of the round that is over should be replaced."""
    return watch.bad >= PATIENCE
