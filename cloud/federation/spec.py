"""Validation of a run's `Spec` against the tables, and its defaults.

The tables of algorithms and compressions decide which names are valid. A feature that is not built
is refused by name, so nobody relies on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from triplane.cloud.federation.masked_spec import FewestLeft, fill_masking, fill_norm_bound
from triplane.cloud.federation.private_runs import check_rows, fill_noise
from triplane.cloud.registry.names import Reference, check_alias, check_name
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.hyperparameters import FIELDS, set_values, values_of
from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.core.compress import row_of
from triplane.unified_ir.federated.core.learn import MAX_STEPS
from triplane.unified_ir.federated.core.limits import ADAPTIVE
from triplane.unified_ir.federated.core.metric import Scores
from triplane.unified_ir.federated.core.spoilt import MAX_RETURNS

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms import Hyper
    from triplane.unified_ir.federated.algorithms.aggregators import Robustness

MAX_ROUNDS: Final = 1_000_000
MAX_DEVICES: Final = 10_000
"""Largest number of devices that one round asks."""
MAX_SAMPLES: Final = 1_000_000
"""Largest number of samples of one step."""
MAX_SECONDS: Final = 30 * 86_400.0
MAX_SEED: Final = (1 << 63) - 1
RELEASES: Final = ("", "auto")
FLOWER: Final = "flower"
ROUNDING: Final = 1e-9


def with_defaults(asked: pb.Spec) -> pb.Spec:
    """Return the spec with every default filled in. InvalidInput names the first invalid field.

    Imports the algorithms, so call it in a thread. The model's alias is resolved by the registry.
    """
    spec = pb.Spec()
    # A copy: the digest of the request as it was asked decides whether a repetition is the same.
    spec.CopyFrom(asked)
    _refuse_unbuilt(spec)
    Reference.parse(spec.model)
    spec.population = spec.population or "default"
    check_population(spec.population)
    spec.algorithm = spec.algorithm or defaults.ALGORITHM
    _fill_learning(spec)
    _fill_cohort(spec.cohort)
    spec.rounds = _count("rounds", spec.rounds or defaults.ROUNDS, MAX_ROUNDS)
    _count("evaluate_every", spec.evaluate_every, MAX_ROUNDS, least=0)
    _count("seed", spec.seed, MAX_SEED, least=0)
    _fill_compression(spec)
    fill_noise(spec)
    _fill_robustness(spec)
    fill_masking(spec, quorum=least_updates(spec.cohort.devices, spec.cohort.quorum))
    if spec.HasField("noise") or spec.HasField("masking"):
        check_rows(spec, robustness_of(spec))
    fill_norm_bound(spec)
    _fill_scores(spec)
    if spec.alias:
        check_alias(spec.alias)
    return spec


def count_of(devices: int, share: float) -> int:
    """Return a share of devices, rounded up but for its rounding error: 0.07 of 100 is 7."""
    return math.ceil(devices * share - ROUNDING)


def least_updates(devices: int, quorum: float) -> int:
    """Return the least number of updates for a round to count. quorum: share of the devices."""
    return max(1, count_of(devices, quorum))


def fewest_updates(spec: pb.Spec) -> int:
    """Return the fewest updates of which a run with all its defaults makes a state."""
    if spec.HasField("masking"):
        return spec.masking.least
    return least_updates(spec.cohort.devices, spec.cohort.quorum)


def fewest_left(spec: pb.Spec) -> FewestLeft:
    """Return what a masked round of a run needs when some of its groups are left out."""
    limits, cohort = robustness_of(spec), spec.cohort
    return FewestLeft(
        groups=limits.row.least(limits.all_numbers),
        devices=least_updates(cohort.devices, cohort.quorum),
    )


def check_population(name: str) -> None:
    """Raise InvalidInput unless the name can be the name of a population."""
    check_name("population", name)


def hyper_of(spec: pb.Spec) -> Hyper:
    """Return the hyperparameters of a run. InvalidInput: one is unknown, or out of its range."""
    from triplane.unified_ir.federated.algorithms import defaults

    return defaults(spec.algorithm).but(**values_of(spec.hyperparameters))


def robustness_of(spec: pb.Spec) -> Robustness:
    """Return the limits of a run; none for a run that began under a release without limits.

    InvalidInput: one of them is not valid.
    """
    from triplane.unified_ir.federated.algorithms.aggregators import MEAN, UNLIMITED, Robustness

    if not spec.HasField("robustness"):
        return UNLIMITED
    limits = spec.robustness
    return Robustness(
        norm_bound=limits.norm_bound or ADAPTIVE,
        max_examples=limits.max_examples,
        aggregator=limits.aggregator or MEAN,
        numbers=dict(limits.numbers),
        returns=limits.returns if limits.HasField("returns") else MAX_RETURNS,
    )


def _refuse_unbuilt(spec: pb.Spec) -> None:
    if spec.privacy:
        names = ", ".join(name[:40] for name in spec.privacy)
        raise InvalidInput(
            f"privacy is set by the fields masking and noise, and the run requires: {names}; "
            "upgrade the client that starts it"
        )
    if spec.release not in RELEASES:
        raise InvalidInput(f"release is '' or 'auto', got {spec.release[:40]!r}")
    if spec.algorithm == FLOWER:
        raise InvalidInput(
            "the algorithm is the work of devices; name a strategy of Flower separately, as in "
            "--strategy fedavg"
        )


def _fill_learning(spec: pb.Spec) -> None:
    from triplane.unified_ir.federated.algorithms import algorithm

    hyper = hyper_of(spec)
    named = FIELDS | {row.name for row in algorithm(spec.algorithm).hyper}
    set_values(spec.hyperparameters, {name: hyper[name] for name in named & hyper.keys()})
    sampling = spec.sampling
    sampling.steps = _count("steps", sampling.steps or defaults.STEPS, MAX_STEPS)
    sampling.batch_size = _count(
        "batch_size", sampling.batch_size or defaults.BATCH_SIZE, MAX_SAMPLES
    )
    sampling.support = _count("support", sampling.support or defaults.SUPPORT, MAX_SAMPLES)
    sampling.query = _count("query", sampling.query or defaults.QUERY, MAX_SAMPLES)


def _fill_cohort(cohort: pb.Cohort) -> None:
    cohort.devices = _count("devices", cohort.devices or defaults.DEVICES, MAX_DEVICES)
    _share("over_selection", cohort.over_selection, most=10.0)
    cohort.quorum = _share("quorum", cohort.quorum or defaults.QUORUM, most=1.0)
    cohort.deadline_s = _share(
        "deadline_s", cohort.deadline_s or defaults.DEADLINE_S, most=MAX_SECONDS
    )
    cohort.patience_s = _share(
        "patience_s", cohort.patience_s or defaults.PATIENCE_S, most=MAX_SECONDS
    )
    asked = cohort.devices * (1 + cohort.over_selection)
    if asked > MAX_DEVICES:
        raise InvalidInput(f"a round asks at most {MAX_DEVICES} devices, got {asked:.0f}")


def _fill_compression(spec: pb.Spec) -> None:
    row_of(spec.compression)
    if spec.keep and spec.compression != "top-k":
        raise InvalidInput(f"keep needs the compression top-k, got {spec.compression!r}")
    if spec.compression == "top-k":
        spec.keep = _share("keep", spec.keep or defaults.KEEP, most=1.0)


def _fill_robustness(spec: pb.Spec) -> None:
    asked, has_strategy = spec.robustness, spec.HasField("flower")
    if has_strategy and (asked.aggregator not in {"", "mean"} or asked.returns):
        raise InvalidInput(
            "an aggregator and returns are of the cloud's own mean, which the strategy "
            f"{spec.flower.strategy[:40]!r} replaces; leave them or the strategy out"
        )
    asked.SetInParent()
    if has_strategy:
        asked.returns = 0  # a strategy has a memory of its own, which would stay
    elif spec.HasField("masking"):
        if asked.returns:
            raise InvalidInput(
                "a masked run does not return to an earlier state, because the cloud sees no loss "
                "of a device; leave returns out, and look at evaluations"
            )
        asked.returns = 0
    limits = robustness_of(spec)
    fewest = least_updates(spec.cohort.devices, spec.cohort.quorum)
    limits.check_count(fewest, groups=spec.masking.groups or 1)
    spec.robustness.norm_bound, spec.robustness.aggregator = limits.norm_bound, limits.aggregator
    spec.robustness.numbers.update(limits.all_numbers)
    spec.robustness.returns = limits.returns


def _fill_scores(spec: pb.Spec) -> None:
    """Mask the scores of masked runs; where devices add noise, nobody scores unless it is asked."""
    is_masked, has_noise = spec.HasField("masking"), spec.HasField("noise")
    default = Scores.MASKED if is_masked else Scores.CLEAR
    # Epsilon would cover all that such a run tells the cloud, but for its scores.
    default = Scores.OFF if is_masked and has_noise and not spec.evaluate_every else default
    spec.scores = spec.scores or default
    allowed = [x.value for x in Scores if is_masked or x is not Scores.MASKED]
    if spec.scores not in allowed:
        raise InvalidInput(
            f"scores of this run are {', '.join(allowed)} (masked ones need masking), got "
            f"{spec.scores[:40]!r}"
        )
    if spec.scores == Scores.OFF and spec.evaluate_every:
        raise InvalidInput(
            "evaluate_every belongs to a run whose devices score, and scores is off; leave one out"
        )


def _count(name: str, value: int, most: int, *, least: int = 1) -> int:
    if not least <= value <= most:
        raise InvalidInput(f"{name} is {least} to {most} in a run, got {value}")
    return value


def _share(name: str, value: float, *, most: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise InvalidInput(f"{name} is 0 to {most:g} in a run, got {value:g}")
    return value
