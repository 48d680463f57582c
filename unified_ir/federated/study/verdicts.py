"""What a study shows, in sentences: warnings first, then which algorithm is ahead of which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from triplane.unified_ir.federated.core.metric import Metric
from triplane.unified_ir.federated.study.seeds import (
    Completion,
    Replicates,
    Stopped,
    adaptation_gain,
    by_algorithm,
    compared,
    completion,
    final_spread,
    learning_gain,
    metric_of_trials,
)
from triplane.unified_ir.federated.study.trial import Difference, Trial

GROUPS: Final = (
    (True, "training", "Devices that learned"),
    (False, "unseen", "Devices that never took part"),
)
LEAST_COMPARED: Final = 2
NEAR: Final = "not significantly different"
BEHIND: Final = "behind"
UNKNOWN: Final = "one device cannot show a difference to"
Measure = Callable[..., Difference | None]
# fmt: off
WARNINGS: Final[tuple[tuple[Measure, str, str, str], ...]] = (
    (adaptation_gain, "Adaptation hurts here", "Adaptation does not help here",
     "use the model as it is, or adapt at a smaller rate or in fewer steps"),
    (learning_gain,
     "The end is worse than the start (each adapted or not, whichever is better)", "",
     "try a smaller lr, or other numbers of rounds and steps"),
)
# fmt: on
"""(gain that is negative where something is wrong, what is wrong if a gain is significant, and if
none is, the way out). Without a text for the latter, only significant gains are named."""


def warnings(trials: Sequence[Trial], stopped: Stopped | None = None) -> list[str]:
    """Return a line for each algorithm that stopped, and for gains that are negative.

    These are the gain of adaptation, and that from the start to the end. Their lines name the
    algorithms and groups of devices with the mean gain and its margin, significant ones first.
    stopped: see `completion`.
    """
    lines: list[tuple[bool, str]] = []
    for measure, surely, perhaps, way_out in WARNINGS:
        odd = [
            (not gain.shown, _measured(name, group, gain, replicates[0].metric))
            for name, replicates in by_algorithm(trials).items()
            for seen, group, _ in GROUPS
            if (gain := measure(replicates, seen=seen)) is not None
            and _is_loss(gain, replicates[0].metric)
            and (gain.shown or perhaps)
        ]
        texts = [text for _, text in sorted(odd, key=_is_doubtful)]
        is_doubtful = all(map(_is_doubtful, odd))
        if texts:
            what = perhaps if is_doubtful else surely
            lines.append((is_doubtful, f"{what}: {', '.join(texts)}; {way_out}."))
    return [
        *_stopped_lines(completion(trials, stopped)),
        *(line for _, line in sorted(lines, key=_is_doubtful)),
    ]


def _is_doubtful(line: tuple[bool, str]) -> bool:
    """Return whether nothing in the line is significant; as a sort key, it comes last."""
    return line[0]


def _stopped_lines(done: Completion) -> list[str]:
    return [
        f"{done.stopped(name)}, so it "
        + (
            f"is not ranked; its scores are those of the other{'s' if count > 1 else ''}."
            if count
            else "has no scores."
        )
        for name, count in done.finished.items()
        if not done.whole(name)
    ]


def _measured(name: str, group: str, gain: Difference, metric: Metric) -> str:
    doubt = "" if gain.shown else " (one device)" if _of_one(gain) else " (not significant)"
    return f"{name} on {group} devices {metric.gain_text(gain.mean, gain.margin)}{doubt}"


def _is_loss(gain: Difference, metric: Metric) -> bool:
    # Rounding in means of many accuracies would otherwise warn of -0.00 percent.
    return (round(gain.mean, 4) if metric.share else gain.mean) < 0


def _of_one(gain: Difference) -> bool:
    return math.isinf(gain.margin)


def verdicts(trials: Sequence[Trial], stopped: Stopped | None = None) -> list[str]:
    """Name the best algorithm in each group of devices, and those not significantly different.

    An algorithm that did not finish all seeds is not ranked: the seeds in which it stopped would
    not count against it. stopped: see `completion`.
    """
    done = completion(trials, stopped)
    lines = (_verdict(trials, done, seen=seen, group=group) for seen, group, _ in GROUPS)
    return [line for line in lines if line]


def _verdict(trials: Sequence[Trial], done: Completion, *, seen: bool, group: str) -> str:
    metric, groups = metric_of_trials(trials), by_algorithm(trials)
    means = {
        name: s.mean
        for name, replicates in groups.items()
        if (s := final_spread(replicates, lambda s: s.after, seen=seen)) is not None
    }
    ranked = sorted(filter(done.whole, means), key=lambda name: -metric.merit(means[name]))
    partial = [done.stopped(name) for name in done.finished if not done.whole(name)]
    if not ranked or len(ranked) + len(partial) < LEAST_COMPARED:
        return ""
    best, *others = ranked
    others_by: dict[str, list[str]] = {NEAR: [], BEHIND: [], UNKNOWN: []}
    for name in others:
        # Paired, which removes the large differences between devices, and seeds, from the error.
        gap = compared(groups[best], groups[name], seen=seen)
        others_by[_relation(gap)].append(f"{name} {metric.text(means[name])}")
    parts = [f"{best} {metric.text(means[best])}"]
    parts += [f"{relation}: {', '.join(names)}" for relation, names in others_by.items() if names]
    parts += [f"not ranked: {', '.join(partial)}"] if partial else []
    what = "after adaptation" if metric.share else f"{metric.name} after adaptation"
    return f"On {group} devices, {what}{_over(groups[best])}: {'; '.join(parts)}."


def _relation(gap: Difference | None) -> str:
    if gap is not None and _of_one(gap):
        return UNKNOWN
    return BEHIND if gap is not None and gap.shown else NEAR


def _over(replicates: Replicates) -> str:
    return f", mean of {len(replicates)} seeds" if len(replicates) > 1 else ""
