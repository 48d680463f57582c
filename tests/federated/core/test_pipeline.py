"""The pipeline of an update: every pair of rows composes or is refused by name."""

import itertools
import math

import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core import pipeline
from triplane.unified_ir.federated.core.compress import COMPRESSIONS
from triplane.unified_ir.federated.core.pipeline import PIPELINE, STAGES, check, pipeline_row

CLIPS = ("clip-fixed", "clip-adaptive")
NOISES = ("noise-central", "noise-correlated", "noise-distributed")
ROBUST = ("median", "trimmed-mean", "krum", "multi-krum", "bucketing", "centred-clipping")
NAMES = tuple(row.name for row in PIPELINE)

REFUSED = {
    frozenset(pair): reason
    for pairs, reason in (
        ([("clip-adaptive", "noise-correlated")], "only fits if the norm stays the same"),
        ([("int8", "mask")], "8-bit encoding of its own"),
        ([("top-k", "mask")], "which entries a device picked"),
        (itertools.product(("int8", "top-k"), ["noise-distributed"]), "integers of the masked"),
        ([("noise-correlated", "noise-distributed")], "cannot take it back"),
        (itertools.product(NOISES, ["by-examples"]), "sum of weights"),
        (itertools.product(NOISES, ["buffers"]), "variance negative"),
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
    return {p.name: int(p.least) if p.whole else p.least for p in pipeline_row(name).parameters}


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
        ("mask", "clip-adaptive"),
        ("mask", "noise-central"),
        ("mask", "noise-correlated"),
        ("mask", "by-examples"),
        ("mask", "buffers"),
        ("int8", "noise-central"),
        ("median", "group-sums"),
        ("median", "clip-fixed"),
        ("noise-distributed", "clip-adaptive"),
        ("flower-app", "clip-fixed"),
        ("flower-app", "flower-strategy"),
    ):
        assert not expected_reason(completed(pair)), pair


def test_robust_aggregates_work_on_sums_of_groups_with_noise_of_devices():
    check(demanded("clip-fixed", "noise-distributed", "mask", "group-sums", "krum"))
    with pytest.raises(InvalidInput, match="calibrated to a sum"):
        check(demanded("clip-fixed", "noise-central", "mask", "group-sums", "krum"))


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
