"""Which runs can be masked, and what the defaults of masking are."""

import pytest
from tests.cloud.federation.given import spec

from triplane.cloud.federation.journal import plan_of
from triplane.cloud.federation.masked_spec import MAX_MASKED_COHORT, masking_text
from triplane.cloud.federation.spec import fewest_updates, with_defaults
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput


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
        ({"robustness": {"norm_bound": ""}}, "needs a norm bound .*got 'adaptive'"),
        ({"robustness": {"norm_bound": "off"}}, "needs a norm bound .*got 'off'"),
        ({"robustness": {"norm_bound": "1e30"}}, "from 1e-06 to 1e"),
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
