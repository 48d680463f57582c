"""Which runs can be masked, and what the defaults of masking are."""

import pytest
from tests.cloud.federation.given import spec

from triplane.cloud.federation.journal import plan_of
from triplane.cloud.federation.masked_encoding import round_encoding
from triplane.cloud.federation.masked_spec import (
    MAX_MASKED_COHORT,
    FewestLeft,
    follows_updates,
    least_and_honest,
    masking_text,
)
from triplane.cloud.federation.spec import fewest_left, fewest_updates, with_defaults
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking.fields import MaskedField

OWN = pb.Noise(epsilon=8.0, clip=0.5, placement="distributed")


def masked(devices=3, *, masking=None, robustness=None, quorum=0.8, **fields):
    return spec(
        masking=masking or pb.MaskedRounds(),
        robustness=pb.Robustness(**({"norm_bound": "2"} | (robustness or {}))),
        cohort={"devices": devices, "quorum": quorum},
        **fields,
    )


@pytest.mark.parametrize(
    ("devices", "quorum", "least"), [(3, 1.0, 3), (4, 0.5, 3), (10, 0.8, 6), (100, 0.3, 30)]
)
def test_defaults_demand_more_than_half_of_the_devices_or_the_quorum(devices, quorum, least):
    filled = with_defaults(masked(devices, quorum=quorum))
    values = filled.masking
    assert (values.least, values.lost_share, values.colluding_share) == (least, 0.1, 0.1)
    assert (values.failure, values.phase_s) == (1e-6, 30.0)
    assert filled.robustness.returns == 0
    assert fewest_updates(filled) == least
    plan = plan_of(filled)
    assert (plan.least, plan.phase_s) == (least, 30.0)
    assert plan.quorum >= least


def test_three_devices_of_three_are_masked_without_losses_or_colluders():
    zero = pb.MaskedRounds(lost_share=0.0, colluding_share=0.0)
    filled = with_defaults(masked(3, masking=zero, quorum=1.0))
    assert filled.masking.HasField("lost_share")
    assert "masking for 3 devices" in masking_text(filled)
    assert "at most 0 collude" in masking_text(filled)
    assert "each step after learning takes at most 30 s" in masking_text(filled)


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({}, "masked"),
        ({"scores": "clear"}, "clear"),
        ({"scores": "off"}, "off"),
        ({"noise": OWN}, "off"),
        ({"noise": OWN, "evaluate_every": 2}, "masked"),
        ({"noise": OWN, "scores": "masked"}, "masked"),
    ],
)
def test_scores_of_a_masked_run_are_masked_and_with_noise_off(fields, scores):
    robustness = {"norm_bound": ""} if "noise" in fields else None
    filled = with_defaults(masked(20, robustness=robustness, **fields))
    assert (filled.scores, plan_of(filled).scores) == (scores, scores)
    assert with_defaults(filled) == filled


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scores": "masked"}, "scores of this run are clear, off .* got 'masked'"),
        ({"scores": "hidden"}, "scores of this run are clear, off .* got 'hidden'"),
        ({"scores": "off", "evaluate_every": 2}, "scores is off; leave one out"),
    ],
)
def test_scores_that_a_run_cannot_have_are_refused(fields, message):
    with pytest.raises(InvalidInput, match=message):
        with_defaults(spec(**fields))


@pytest.mark.parametrize(
    ("norm_bound", "filled", "first"),
    [("", "adaptive:4", 4.0), ("adaptive", "adaptive:4", 4.0), ("adaptive:0.25", None, 0.25)],
)
def test_the_bound_of_a_masked_run_follows_the_updates_from_its_start(norm_bound, filled, first):
    made = with_defaults(masked(robustness={"norm_bound": norm_bound}))
    assert made.robustness.norm_bound == filled or norm_bound
    assert follows_updates(made)
    assert plan_of(made).clip == first
    assert with_defaults(made) == made
    encoding = round_encoding(made, parameters=50, buffers=3, cap=4, seed=1)
    assert (encoding.message.norm, encoding.message.bit_share) == (first, 0.5)
    assert encoding.parsed.fields[-1] == MaskedField(2, 2)


def test_a_fixed_bound_of_a_masked_run_is_stored_as_before_and_asks_for_no_bits():
    made = with_defaults(masked(robustness={"norm_bound": "2"}))
    assert not follows_updates(made)
    assert plan_of(made).clip == 0
    encoding = round_encoding(made, parameters=50, buffers=3, cap=4, seed=1)
    assert (
        encoding.message.SerializeToString()
        == pb.MaskingEncoding(norm=2.0, buffer_norm=2.0, bits=8, cap=4, seed=1).SerializeToString()
    )
    assert len(encoding.parsed.fields) == 3


def test_a_start_is_refused_where_updates_are_in_the_clear():
    with pytest.raises(InvalidInput, match="'adaptive:2' has a start, which only masked rounds"):
        with_defaults(spec(robustness=pb.Robustness(norm_bound="adaptive:2")))


def test_a_run_in_the_clear_has_no_fields_of_masking():
    filled = with_defaults(spec())
    assert not filled.HasField("masking")
    assert plan_of(filled).least == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"devices": 2}, "3 to 1000 devices, and devices is 2; set --devices"),
        ({"devices": MAX_MASKED_COHORT + 1}, "3 to 1000 devices"),
        ({"masking": pb.MaskedRounds(least=4)}, "least cohort"),
        ({"masking": pb.MaskedRounds(least=2)}, "3 <= least cohort"),
        ({"masking": pb.MaskedRounds(lost_share=1.5)}, r"in \[0, 1\)"),
        ({"masking": pb.MaskedRounds(colluding_share=0.9)}, "at least 5 devices"),
        (
            {"masking": pb.MaskedRounds(lost_share=0.5)},
            r"3 devices of which 1 are lost \(lost share 0.5\) has fewer than the 3 whose sum",
        ),
        (
            {"devices": 10, "masking": pb.MaskedRounds(least=3, lost_share=0.5)},
            "cannot tolerate 5 lost and 1 colluding of 10",
        ),
        (
            {
                "devices": 10,
                "quorum": 0.7,
                "masking": pb.MaskedRounds(least=3, lost_share=0.3, colluding_share=0.2),
            },
            "only 7 of 10 devices, by its quorum and least cohort: masking cannot tolerate 2 lost",
        ),
        ({"masking": pb.MaskedRounds(phase_s=-1)}, "phase_s is above 0"),
        ({"masking": pb.MaskedRounds(phase_s=float("nan"))}, "phase_s is above 0"),
        ({"robustness": {"norm_bound": "off"}}, "needs a norm bound .*got 'off'"),
        ({"robustness": {"norm_bound": "1e30"}}, "from 1e-06 to 1e"),
        ({"robustness": {"norm_bound": "adaptive:1e30"}}, "from 1e-06 to 1e"),
        ({"robustness": {"norm_bound": "adaptive:0"}}, "got 'adaptive:0'; in masked rounds also"),
        ({"robustness": {"norm_bound": "adaptive:off"}}, "in masked rounds also"),
        ({"robustness": {"returns": 1}}, "does not return to an earlier state"),
        ({"devices": 5, "robustness": {"aggregator": "median"}}, "'median' does not compose"),
        (
            {"devices": 9, "quorum": 1.0, "robustness": {"aggregator": "bucketing+krum"}},
            "'bucketing' does not compose",
        ),
        ({"compression": "int8"}, "'int8' does not compose with 'mask': masking has an 8-bit"),
        ({"compression": "top-k"}, "'top-k' does not compose"),
        ({"flower": pb.Flower(strategy="fedavg")}, "'flower-strategy' does not compose"),
        ({"flower": pb.Flower(strategy="fedavg", app=True)}, "'flower-strategy' does not compose"),
        ({"algorithm": "scaffold"}, "'control-variates' does not compose with 'mask'.* SCAFFOLD"),
    ],
)
def test_what_cannot_be_masked_is_refused_by_name(fields, message):
    with pytest.raises(InvalidInput, match=message):
        with_defaults(masked(**fields))


def grouped(devices=20, groups=5, aggregator="median", norm_bound="2", masking=None, **fields):
    return masked(
        devices, masking=pb.MaskedRounds(groups=groups, **(masking or {})), quorum=1.0,
        robustness={"aggregator": aggregator, "norm_bound": norm_bound}, **fields,
    )  # fmt: skip


def test_groups_are_cohorts_of_their_own():
    filled = with_defaults(grouped())
    assert (filled.masking.groups, filled.masking.least) == (5, 4)
    assert fewest_updates(filled) == 4, "what owners and signers compare with"
    assert plan_of(filled).least == 20, "a round needs the least of each group"
    assert least_and_honest(filled) == (4, 2), "both colluders may be in one group"
    text = masking_text(filled)
    assert "masking for groups of 4 of 20 devices" in text
    assert "a hash of all keys forms 5 groups, and median combines their means" in text
    assert fewest_left(filled) == FewestLeft(groups=3, devices=20)


def test_a_round_in_groups_begins_with_what_the_colluders_of_a_group_demand():
    request = grouped(30, groups=5)
    request.cohort.quorum = 0.8
    filled = with_defaults(request)
    assert (filled.masking.least, plan_of(filled).quorum, plan_of(filled).least) == (5, 24, 25)
    assert with_defaults(filled) == filled


def test_one_group_is_a_cohort_without_groups():
    filled = with_defaults(masked(10, masking=pb.MaskedRounds(groups=1)))
    assert filled == with_defaults(masked(10))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aggregator": "mean"}, "'group-sums' does not compose with the mean of updates"),
        ({"groups": 7}, "7 groups of 20 devices have 2 devices, and the sum of fewer than 3"),
        (
            {"masking": {"least": 5}},
            "5 groups of 20 devices have 4 devices, and the sum of fewer than 5 may not be",
        ),
        (
            {"masking": {"least": 5}},
            r"Ask more devices \(--devices\), or form fewer groups \(--groups\)",
        ),
        ({"groups": 4, "aggregator": "krum"}, "krum with byzantine 1 needs at least 5 sums of"),
        ({"groups": 2}, "median needs at least 3 sums of groups in each round; a round may have 2"),
        (
            {"masking": {"lost_share": 0.3}},
            "a group of 4 devices of which 1 are lost .* fewer than the 4 whose sum",
        ),
        (
            {"devices": 15, "masking": {"colluding_share": 0.2}},
            r"at least 5 devices in each group \(with 3 colluding\), got 3; form fewer groups",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused_by_name(fields, message):
    with pytest.raises(InvalidInput, match=message):
        with_defaults(grouped(**fields))


def test_a_cohort_of_each_size_that_a_round_may_have_can_be_masked():
    request = grouped(300, groups=8, masking={"colluding_share": 0.1, "lost_share": 0.1})
    with_defaults(request)
    request.cohort.quorum = 248 / 300
    # Groups of 31 tolerate no loss; those of 34 have to tolerate 3, one too many.
    message = "a round may have only 265 of 300 devices.* 3 lost and 27 colluding of 34 devices"
    with pytest.raises(InvalidInput, match=message):
        with_defaults(request)
    request.cohort.quorum = 288 / 300
    with_defaults(request)


def test_devices_add_noise_for_the_fewest_honest_ones_of_a_group():
    noise = pb.Noise(placement="distributed", epsilon=8, clip=0.5, delta=1e-5)
    options = {"masking": {"colluding_share": 0.05}, "norm_bound": ""}
    filled = with_defaults(grouped(30, noise=noise, **options))
    assert least_and_honest(filled) == (4, 2)
    assert "enough while 2 devices of a sum are honest" in masking_text(filled)
    central = pb.Noise(placement="central", epsilon=8, clip=0.5, delta=1e-5)
    with pytest.raises(InvalidInput, match="'noise-central' does not compose with 'mask'"):
        with_defaults(grouped(30, noise=central, **options))
