"""The metric by which the model of a device is scored on its held-out samples.

A model whose `evaluate` returns `accuracy` is scored by it. Any other model is scored by its loss,
of which a lower value is better. The metric follows from the model alone, so the wire and stored
scores are numbers without a name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from triplane.proto.errors import InvalidInput

LOSS_BITS: Final = 12
"""Significant bits of a loss that leaves a device."""
MOST_LOSS: Final = 2.0**127


class Scores(StrEnum):
    """How the devices of a run score: each to the cloud, as a masked mean, or not at all."""

    CLEAR = "clear"
    MASKED = "masked"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. share: its values are in [0, 1] and shown in percent."""

    name: str
    lower_is_better: bool
    share: bool

    def merit(self, score: float) -> float:
        """Return a number that is larger for a better score."""
        return -score if self.lower_is_better else score

    def gain(self, score: float, other: float) -> float:
        """Return by how much `score` is better than `other`; negative if it is worse."""
        return self.merit(score) - self.merit(other)

    def admits(self, score: float) -> bool:
        """Return whether a device can have this score."""
        return 0.0 <= score <= 1.0 if self.share else math.isfinite(score)

    def reported(self, score: float, samples: int) -> float:
        """Return a score as it leaves a device: a share in whole samples, a loss to 12 bits.

        So a graph cannot answer with all digits of a number in a sample. InvalidInput: it is not in
        [0, 1], or a loss of at most 2^127.
        """
        if not self.admits(score) or abs(score) > MOST_LOSS:
            values = "in [0, 1]" if self.share else f"finite and at most {MOST_LOSS:.2g}"
            raise InvalidInput(f"the {self.name} of a device is {values}, got {score}")
        if self.share:
            return round(score * samples) / samples
        mantissa, exponent = math.frexp(score)
        return math.ldexp(round(math.ldexp(mantissa, LOSS_BITS)), exponent - LOSS_BITS)

    def text(self, score: float) -> str:
        """Format as "93.1" percent, or "0.3122"."""
        return f"{100 * score:.1f}" if self.share else f"{score:.4g}"

    def gain_text(self, mean: float, error: float) -> str:
        """Format a gain and its error as "+1.25 ± 0.40" points of percent, or "+0.012 ± 0.003".

        An infinite error, that of a single pair, is left out.
        """
        gain = f"{100 * mean:+.2f}" if self.share else f"{mean:+.3g}"
        if math.isinf(error):
            return gain
        return f"{gain} ± {100 * error:.2f}" if self.share else f"{gain} ± {error:.2g}"

    def text_with_unit(self, score: float) -> str:
        """Format as "93.1%", or "0.3122"."""
        return f"{score:.1%}" if self.share else f"{score:.4g}"


ACCURACY: Final = Metric("accuracy", lower_is_better=False, share=True)
LOSS: Final = Metric("loss", lower_is_better=True, share=False)
METRICS: Final[Mapping[str, Metric]] = {row.name: row for row in (ACCURACY, LOSS)}


def metric_of(results: Collection[str]) -> Metric:
    """Return the metric of a model by the names of the results of its `evaluate`.

    InvalidInput: there is neither an accuracy nor a loss.
    """
    for metric in METRICS.values():
        if metric.name in results:
            return metric
    raise InvalidInput(f"`evaluate` must return 'accuracy' or 'loss', got {sorted(results)}")


def metric_named(name: str) -> Metric:
    """Return the metric of that name; "" is accuracy, as older releases have no name."""
    name = name or ACCURACY.name
    if name not in METRICS:
        raise InvalidInput(f"no metric {name[:40]!r}; there are {', '.join(METRICS)}")
    return METRICS[name]
