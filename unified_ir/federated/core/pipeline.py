"""What an update passes between a device and a sum, as rows: `clip | compress | noise | mask`.

Each row states its parameters with their limits, which stages it needs, and what it refuses, by
name and with the reason. `check` judges the rows that a run demands before the run starts: two rows
compose unless one of them refuses the other. What only meets the pipeline has rows as well: how
devices are weighted, how updates are aggregated, who does a device's work, what an update holds.

Data only: the rows' work is in `compress`, in `triplane.unified_ir.federated.privacy`, and where
updates are masked and aggregated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from triplane.proto.errors import InvalidInput

STAGES: Final = (
    "clip",
    "compress",
    "noise",
    "mask",
    "weight",
    "aggregate",
    "groups",
    "work",
    "state",
)
"""Kinds of rows. A run has at most one row of each; the first four are the pipeline, in order."""
WITHOUT: Final = {
    "clip": "updates of any norm",
    "mask": "updates in the clear",
    "aggregate": "the mean of updates",
}
"""What a run has where it demands no row of a stage."""


@dataclass(frozen=True, slots=True)
class RowParameter:
    """A number of a row and its range. whole: it is an integer."""

    name: str
    least: float
    most: float
    whole: bool = False

    def check(self, row: str, value: object) -> None:
        """Raise InvalidInput unless `value` is in the range."""
        kinds: tuple[type, ...] = (int,) if self.whole else (int, float)
        if type(value) not in kinds or not self.least <= value <= self.most:  # type: ignore[operator]
            kind = "an integer" if self.whole else "a number"
            raise InvalidInput(
                f"{self.name} of {row!r} is {kind} from {self.least:g} to {self.most:g}, got "
                f"{str(value)[:40]}"
            )


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """One way to do a stage.

    needs: stages of which the run must have a row, each with the reason.
    refuses: rows and stages that it does not compose with, each with the reason.
    unless: a stage whose row lifts the refusal of another stage.
    """

    name: str
    stage: str
    summary: str
    parameters: tuple[RowParameter, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    unless: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, other: PipelineRow, stages: Collection[str]) -> str | None:
        """Return why this row does not compose with `other` in a run of `stages`, or None."""
        for key in (other.name, other.stage):
            if key in self.refuses and self.unless.get(key) not in stages:
                return self.refuses[key]
        return None


_CLIPPED: Final = {
    "clip": "noise hides a contribution of bounded norm only; add clip-fixed or clip-adaptive"
}
_NOISE_OF_SUMS: Final = (
    "noise is calibrated to a sum of clipped updates, and one device may move this aggregate by "
    "more than its share of a sum"
)
_DATA_IN_WEIGHTS: Final = (
    "the sum of weights depends on how many examples devices have and would be published without "
    "noise; weight all devices equally"
)
_NEGATIVE_VARIANCE: Final = (
    "buffers are running statistics, and noise may turn a variance negative; train a model "
    "without buffers, for example with group normalization, or freeze them"
)
_PER_DEVICE: Final = (
    "the cloud sees no device's update, only sums; take the mean, form groups whose sums it "
    "combines (--groups), or leave masking out"
)
_APP: Final = (
    "what a Flower ClientApp returns is not bound to the tensors of a plan; use an algorithm of "
    "Triplane, or let the app clip and add noise itself"
)
_STRATEGY: Final = (
    "a strategy of Flower computes the next state from every device's update; use an algorithm of "
    "Triplane, or a strategy with its own noise"
)
_COMPRESSED: Final = (
    "what compression sends may exceed the norm to which the update was clipped, because it rounds "
    "and adds what earlier updates lost; drop the compression"
)
_UNSEEN: Final = (
    "the cloud cannot clip updates that it does not see, and the integers of masked updates are "
    "longer than what was clipped, so its noise would not cover them; let devices add the noise "
    "(noise distributed), or leave masking out"
)
_CONTROL: Final = (
    "updates of SCAFFOLD carry control variates, which grow with a device's gradients and are not "
    "clipped with its change; choose fedavg, fedprox or fedadam"
)
_NOISY: Final = {
    "weight": _DATA_IN_WEIGHTS,
    "control-variates": _CONTROL,
    "state": _NEGATIVE_VARIANCE,
}
_ROBUST: Final = {
    "mask": _PER_DEVICE,
    "noise-central": _NOISE_OF_SUMS,
    "noise-correlated": _NOISE_OF_SUMS,
}
_NORM: Final = RowParameter("norm", 1e-6, 1e6)
_MULTIPLIER: Final = RowParameter("noise_multiplier", 1e-3, 1e6)


def _robust(name: str, summary: str) -> PipelineRow:
    """Return the row of an aggregator; its numbers are declared and checked where it is."""
    return PipelineRow(name, "aggregate", summary, refuses=_ROBUST, unless={"mask": "groups"})


PIPELINE: Final[tuple[PipelineRow, ...]] = (
    PipelineRow(
        "clip-fixed",
        "clip",
        "scales an update down to an L2 norm over all its tensors",
        (_NORM,),
    ),
    PipelineRow(
        "clip-adaptive",
        "clip",
        "lets the norm follow a quantile of the updates' norms; its bits get noise and are charged",
        (
            _NORM,
            RowParameter("quantile", 0.01, 0.99),
            RowParameter("rate", 0.001, 1.0),
            RowParameter("bit_noise", 0.0, 1e6),
        ),
        refuses={
            "noise-correlated": "a round takes back noise of earlier rounds, which only fits if "
            "the norm stays the same; use clip-fixed",
        },
    ),
    PipelineRow(
        "int8",
        "compress",
        "8 bits an entry, stochastic rounding, error feedback",
        refuses={"mask": "masking has an 8-bit encoding of its own; drop the compression"},
    ),
    PipelineRow(
        "top-k",
        "compress",
        "the largest entries only, error feedback",
        (RowParameter("keep", 1e-6, 1.0),),
        refuses={
            "mask": "masked updates are added entry by entry, and which entries a device picked "
            "would tell about its data; drop the compression"
        },
    ),
    PipelineRow(
        "noise-central",
        "noise",
        "the cloud adds independent Gaussian noise to each sum",
        (_MULTIPLIER,),
        needs=_CLIPPED,
        refuses={**_NOISY, "compress": _COMPRESSED, "mask": _UNSEEN},
    ),
    PipelineRow(
        "noise-correlated",
        "noise",
        "the cloud adds noise that later rounds partly take back; devices rest between two uses",
        (_MULTIPLIER, RowParameter("separation", 2, 1000, whole=True)),
        needs=_CLIPPED,
        refuses={
            **_NOISY,
            "compress": _COMPRESSED,
            "mask": _UNSEEN,
            "noise-distributed": "a device of this round does not know the noise that others added "
            "in earlier rounds, so it cannot take it back; use one of the two",
        },
    ),
    PipelineRow(
        "noise-distributed",
        "noise",
        "each device adds discrete noise to its masked integers, enough for the fewest honest ones",
        (_MULTIPLIER, RowParameter("honest", 2, 10_000, whole=True)),
        needs={
            **_CLIPPED,
            "mask": "one device's share of the noise hides it only within a masked sum; add mask",
        },
        refuses={
            **_NOISY,
            "noise-correlated": "a device of this round does not know the noise that others added "
            "in earlier rounds, so it cannot take it back; use one of the two",
            "compress": "its noise is added to the integers of the masked encoding; drop the "
            "compression",
        },
    ),
    PipelineRow(
        "mask",
        "mask",
        "the cloud learns sums of updates only (SecAgg+)",
        (RowParameter("least_cohort", 3, 10_000, whole=True),),
    ),
    PipelineRow("by-examples", "weight", "updates count by the number of a device's examples"),
    _robust("median", "coordinate-wise median of updates"),
    _robust("trimmed-mean", "mean without the extreme values"),
    _robust("krum", "the update nearest to its neighbours"),
    _robust("multi-krum", "mean of the updates nearest to their neighbours"),
    _robust("bucketing", "a robust aggregate of means of random buckets"),
    _robust("centred-clip", "mean of updates clipped around the last aggregate"),
    PipelineRow(
        "flower-strategy",
        "aggregate",
        "a strategy of Flower computes the next state",
        refuses={"mask": _STRATEGY, "noise": _STRATEGY, "groups": _STRATEGY},
    ),
    PipelineRow(
        "group-sums",
        "groups",
        "random groups of a cohort are masked apart; an aggregator sees their sums",
        (RowParameter("groups", 2, 1000, whole=True),),
        needs={
            "mask": "groups are masked apart; unmasked updates are grouped by bucketing",
            "aggregate": "sums of groups serve a robust aggregator; demand one, or drop group-sums",
        },
    ),
    PipelineRow(
        "flower-app",
        "work",
        "a ClientApp of Flower does a device's work",
        refuses={
            "noise": _APP,
            "mask": _APP,
            "compress": "a ClientApp's reply is not compressed; drop the compression or the app",
        },
    ),
    PipelineRow(
        "control-variates",
        "state",
        "updates carry changes of control variates, as of SCAFFOLD",
        refuses={
            "mask": "control variates of SCAFFOLD would be clipped to the norm of an update, and 8 "
            "bits are too few for them; choose another algorithm"
        },
    ),
    PipelineRow("buffers", "state", "updates carry float buffers, as of batch normalization"),
)
_ROWS: Final[Mapping[str, PipelineRow]] = {row.name: row for row in PIPELINE}


def pipeline_row(name: str) -> PipelineRow:
    """Return the row of that name; InvalidInput lists the existing ones."""
    if name not in _ROWS:
        raise InvalidInput(
            f"an update's pipeline has no row {name[:80]!r}; it has {', '.join(_ROWS)}"
        )
    return _ROWS[name]


def check(demanded: Mapping[str, Mapping[str, object]]) -> None:
    """Raise InvalidInput unless a run can have these rows together.

    demanded: parameters of each row by its name; every parameter must have a value in its range.
    The message names the two rows and the reason.
    """
    rows = [pipeline_row(name) for name in demanded]
    for row in rows:
        _check_parameters(row, demanded[row.name])
    stages = {row.stage: row for row in rows}
    # By pairs before by stages: a refusal of two rows of one stage has a better reason.
    for row in rows:
        for other in rows:
            if (reason := row.refusal(other, stages)) is not None:
                raise InvalidInput(f"{row.name!r} does not compose with {other.name!r}: {reason}")
    for row in rows:
        _check_stages(row, stages)
    _check_noise({row.stage: demanded[row.name] for row in rows})


def _check_noise(values: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise InvalidInput if parameters of clipping and masking, by stage, do not fit the noise."""
    if (noise := values.get("noise")) is None:
        return
    multiplier, bit_noise = noise["noise_multiplier"], values["clip"].get("bit_noise")
    if bit_noise is not None and 2 * bit_noise <= multiplier:
        raise InvalidInput(
            f"bit_noise {bit_noise:g} of 'clip-adaptive' has to be above half of noise_multiplier "
            f"{multiplier:g}, or the clipping bits alone would spend the epsilon of a round"
        )
    if "honest" in noise and noise["honest"] > (cohort := values["mask"]["least_cohort"]):
        raise InvalidInput(
            f"'noise-distributed' relies on the noise of {noise['honest']} honest devices and "
            f"'mask' reveals sums of as few as {cohort} devices; raise least_cohort or lower honest"
        )


def _check_stages(row: PipelineRow, stages: Mapping[str, PipelineRow]) -> None:
    other = stages[row.stage]
    if other is not row:
        raise InvalidInput(
            f"a run has one row of {row.stage!r}, got {row.name!r} and {other.name!r}; drop one"
        )
    for stage, reason in row.needs.items():
        if stage not in stages:
            raise InvalidInput(f"{row.name!r} does not compose with {WITHOUT[stage]}: {reason}")


def _check_parameters(row: PipelineRow, values: object) -> None:
    names = [parameter.name for parameter in row.parameters]
    if not isinstance(values, Mapping) or set(values) != set(names):
        raise InvalidInput(
            f"the row {row.name!r} has the parameters {names}, got {str(values)[:80]}"
        )
    for parameter in row.parameters:
        parameter.check(row.name, values[parameter.name])
