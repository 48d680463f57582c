"""The pipeline of an update: every pair of rows composes or is refused by name."""

import itertools
import math

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.algorithms.aggregators import AGGREGATORS, BUCKETING, MEAN
from triplane.unified_ir.federated.core import pipeline
from triplane.unified_ir.federated.core.compress import COMPRESSIONS, Compressor
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.core.pipeline import PIPELINE, STAGES, check, pipeline_row
from triplane.unified_ir.federated.privacy.accountant import MAX_MULTIPLIER, MIN_MULTIPLIER
from triplane.unified_ir.federated.privacy.central import MAX_BANDS
from triplane.unified_ir.federated.privacy.clipping import MAX_NORM, MIN_NORM, clip, l2_norm
from triplane.unified_ir.federated.privacy.distributed import MAX_HONEST

CLIPS = ("clip-fixed", "clip-adaptive")
NOISES = ("noise-central", "noise-correlated", "noise-distributed")
ROBUST = ("median", "trimmed-mean", "krum", "multi-krum", "bucketing", "centred-clip")
NAMES = tuple(row.name for row in PIPELINE)

REFUSED = {
    frozenset(pair): reason
    for pairs, reason in (
        ([("clip-adaptive", "noise-correlated")], "only fits if the norm stays the same"),
        (itertools.product(NOISES[:2], ["mask"]), "cannot clip updates that it does not see"),
        ([("control-variates", "mask")], "8 bits are too few"),
        ([("int8", "mask")], "8-bit encoding of its own"),
        ([("top-k", "mask")], "which entries a device picked"),
        (itertools.product(("int8", "top-k"), NOISES[:2]), "may exceed the norm"),
        (itertools.product(("int8", "top-k"), ["noise-distributed"]), "integers of the masked"),
        ([("noise-correlated", "noise-distributed")], "cannot take it back"),
        (itertools.product(NOISES, ["by-examples"]), "sum of weights"),
        (itertools.product(NOISES, ["buffers"]), "variance negative"),
        (itertools.product(NOISES, ["control-variates"]), "control variates, which grow"),
        (itertools.product(NOISES[:2], ROBUST), "calibrated to a sum"),
        (itertools.product(ROBUST, ["mask"]), "no device's update, only sums"),
        (itertools.product((*NOISES, "mask", "group-sums"), ["flower-strategy"]), "every device's"),
        (itertools.product((*NOISES, "mask"), ["flower-app"]), "not bound to the tensors"),
        (itertools.product(("int8", "top-k"), ["flower-app"]), "reply is not compressed"),
    )
    for pair in pairs
}
"""What two rows refuse in each other, beside two rows of one stage. Everything else composes."""
NEEDED = {
    **{name: {"clip": "clip-fixed"} for name in NOISES},
    "noise-distributed": {"clip": "clip-fixed", "mask": "mask"},
    "group-sums": {"mask": "mask", "aggregate": "median"},
}
"""The rows that each row needs, which a run gets where the pair has none of that stage."""


def values(name):
    least = {p.name: int(p.least) if p.whole else p.least for p in pipeline_row(name).parameters}
    # Without noise in the bits, adaptive clipping composes with no other noise.
    return least | ({"bit_noise": 1.0} if "bit_noise" in least else {})


def demanded(*names):
    return {name: values(name) for name in names}


def completed(pair):
    """The pair with what its rows need."""
    rows = list(pair)
    for name in pair:
        for stage, needed in NEEDED.get(name, {}).items():
            if stage not in {pipeline_row(row).stage for row in rows}:
                rows.append(needed)
    return rows


def expected_reason(rows):
    """Why these rows are refused: the first pair of the table above, or two of one stage."""
    lifted = {frozenset((name, "mask")) for name in ROBUST} if "group-sums" in rows else set()
    pairs = [frozenset(pair) for pair in itertools.combinations(rows, 2)]
    reasons = [REFUSED[pair] for pair in pairs if pair in REFUSED and pair not in lifted]
    stages = [pipeline_row(row).stage for row in rows]
    return reasons or (["a run has one row of"] if len(set(stages)) < len(stages) else [])


def test_the_table_is_consistent():
    assert len(set(NAMES)) == len(NAMES)
    for row in PIPELINE:
        assert row.stage in STAGES
        assert set(row.needs) <= set(pipeline.WITHOUT)
        assert set(row.refuses) <= {*NAMES, *STAGES}
        assert set(row.unless) <= set(row.refuses)
        assert set(row.unless.values()) <= set(STAGES)
        assert set(row.needs) == set(NEEDED.get(row.name, {}))
    compressions = {row.name for row in PIPELINE if row.stage == "compress"}
    assert compressions == set(COMPRESSIONS) - {""}


def test_every_robust_aggregator_has_a_row():
    """The core of a run does not import their table, so the names are here twice."""
    rows = {row.name for row in PIPELINE if row.stage == "aggregate"} - {"flower-strategy"}
    assert rows == {*AGGREGATORS, BUCKETING} - {MEAN} == set(ROBUST)


@pytest.mark.parametrize("name", NAMES)
def test_each_row_alone_runs_or_names_what_it_needs(name):
    if name in NEEDED:
        with pytest.raises(InvalidInput, match=f"'{name}' does not compose with .*: "):
            check(demanded(name))
    check(demanded(*completed([name])))


@pytest.mark.parametrize("pair", list(itertools.combinations(NAMES, 2)), ids="+".join)
def test_every_pair_composes_or_is_refused_with_its_reason(pair):
    for order in (pair, pair[::-1]):
        rows = completed(order)
        reasons = expected_reason(rows)
        if not reasons:
            check(demanded(*rows))
            continue
        with pytest.raises(InvalidInput) as refusal:
            check(demanded(*rows))
        assert any(reason in str(refusal.value) for reason in reasons)
        if frozenset(pair) in REFUSED and reasons == [REFUSED[frozenset(pair)]]:
            assert all(repr(name) in str(refusal.value) for name in pair)


def test_what_the_pairs_above_are():
    refused = [p for p in itertools.combinations(NAMES, 2) if expected_reason(completed(p))]
    assert len(refused) < len(list(itertools.combinations(NAMES, 2))) * 0.6
    for pair in (
        ("mask", "clip-fixed"),
        ("mask", "clip-adaptive"),
        ("noise-distributed", "clip-adaptive"),
        ("mask", "noise-distributed"),
        ("mask", "by-examples"),
        ("mask", "buffers"),
        ("median", "group-sums"),
        ("median", "clip-fixed"),
        ("noise-central", "clip-adaptive"),
        ("flower-app", "clip-fixed"),
        ("flower-app", "flower-strategy"),
    ):
        assert not expected_reason(completed(pair)), pair


def test_robust_aggregates_work_on_sums_of_groups_with_noise_of_devices():
    check(demanded("clip-fixed", "noise-distributed", "mask", "group-sums", "krum"))
    with pytest.raises(InvalidInput, match="calibrated to a sum"):
        check(demanded("clip-fixed", "noise-central", "krum"))


@pytest.mark.parametrize("name", ["int8", "top-k"])
def test_compression_with_error_feedback_exceeds_the_clipping_norm(name):
    """So noise that is calibrated to that norm would not cover it."""
    compressor, norms = Compressor(name, keep=0.1), []
    remainder: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(2)
    for round_ in range(20):
        update = {"w": rng.normal(size=1000)}
        clip(update, 1.0)
        arrays, remainder = compressor.pack(update, remainder, Draws(1, round_, "a", "test"))
        norms.append(l2_norm(compressor.unpack(arrays)))
    assert max(norms) > 1.001


def test_distributed_noise_relies_on_no_more_devices_than_a_sum_has():
    rows = demanded("clip-fixed", "noise-distributed", "mask")
    rows["mask"]["least_cohort"] = rows["noise-distributed"]["honest"] = 20
    check(rows)
    rows["noise-distributed"]["honest"] = 21
    with pytest.raises(InvalidInput, match=r"21 honest devices .* as few as 20 devices"):
        check(rows)


@pytest.mark.parametrize("bit_noise", [0.0, 0.5])
def test_clipping_bits_without_enough_noise_are_refused(bit_noise):
    rows = demanded("clip-adaptive", "noise-central")
    rows["noise-central"]["noise_multiplier"] = 1.0
    rows["clip-adaptive"]["bit_noise"] = bit_noise
    with pytest.raises(InvalidInput, match=f"bit_noise {bit_noise:g} .* above half"):
        check(rows)
    rows["clip-adaptive"]["bit_noise"] = 0.6
    check(rows)


@pytest.mark.parametrize("bit_noise", [0.0, 1.0])
def test_masked_clipping_bits_need_enough_noise_beside_noise_of_devices_only(bit_noise):
    rows = demanded("clip-adaptive", "noise-distributed", "mask")
    rows["noise-distributed"]["noise_multiplier"] = 2.0
    rows["clip-adaptive"]["bit_noise"] = bit_noise
    with pytest.raises(InvalidInput, match=f"bit_noise {bit_noise:g} .* above half"):
        check(rows)
    del rows["noise-distributed"]
    check(rows)


def test_the_limits_are_those_of_the_work():
    def limits(row, name):
        (parameter,) = (p for p in pipeline_row(row).parameters if p.name == name)
        return parameter.least, parameter.most

    for row in NOISES:
        assert limits(row, "noise_multiplier") == (MIN_MULTIPLIER, MAX_MULTIPLIER)
    for row in CLIPS:
        assert limits(row, "norm") == (MIN_NORM, MAX_NORM)
    assert limits("noise-correlated", "separation")[1] == MAX_BANDS
    assert limits("noise-distributed", "honest")[1] == MAX_HONEST


@pytest.mark.parametrize("parameters", [None, 3, [], "norm", {1: 2, "norm": 1.0}])
def test_parameters_of_another_kind_are_refused(parameters):
    with pytest.raises(InvalidInput, match="has the parameters"):
        check({"clip-fixed": parameters})


def test_nothing_demanded_is_allowed():
    check({})


@pytest.mark.parametrize("name", ["encryption", "noise", "", "x" * 10_000])
def test_unknown_rows_are_refused_with_the_list(name):
    with pytest.raises(InvalidInput, match="it has clip-fixed, clip-adaptive") as refusal:
        check({name: {}})
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize("row", [row for row in PIPELINE if row.parameters], ids=lambda r: r.name)
def test_parameters_are_complete_and_in_range(row):
    for parameter in row.parameters:
        for bad in (parameter.most * 2 + 1, -1, math.nan, "1", None, True):
            with pytest.raises(InvalidInput, match=f"{parameter.name} of '{row.name}' is a"):
                check({row.name: values(row.name) | {parameter.name: bad}})
    with pytest.raises(InvalidInput, match=f"'{row.name}' has the parameters"):
        check({row.name: {}})
    with pytest.raises(InvalidInput, match="has the parameters"):
        check({row.name: values(row.name) | {"other": 1}})


def test_a_whole_parameter_takes_integers_only():
    with pytest.raises(InvalidInput, match="least_cohort of 'mask' is an integer from 3"):
        check({"mask": {"least_cohort": 3.5}})
