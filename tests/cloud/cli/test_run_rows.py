"""Rows of a run's tables, as people read them."""

from typing import Any

import pytest

from triplane.cloud.cli.runs import headline, masking_lines, member_row, round_row, run_text
from triplane.cloud.cli.text import record
from triplane.proto.federation_pb2 import (
    Cohort,
    MaskedRounds,
    Member,
    Noise,
    Round,
    Run,
    Score,
    Spec,
    Spread,
)
from triplane.unified_ir.federated.core.metric import LOSS


def test_scores_of_a_device_are_shown_once_it_was_scored():
    score = Score(samples=10, before=0.5, after=0.75)
    rows = [member_row(Member(device="d", connected=True, score=s)) for s in (score, None)]
    assert [row[4:6] for row in rows] == [("50.0%", "75.0%"), ("", "")]


def test_losses_of_a_device_are_numbers_and_not_percent():
    score = Score(samples=10, before=2.5, after=0.75)
    row = member_row(Member(device="d", connected=True, score=score), LOSS)
    assert row[4:6] == ("2.5", "0.75")


MASKED: dict[str, Any] = {
    "before": Spread(mean=0.5, masked=True),
    "after": Spread(mean=0.75, masked=True),
}


def test_of_masked_scores_the_mean_is_shown_and_no_device():
    round_ = Round(number=2, evaluates=True, **MASKED)
    assert round_row(round_)[-1] == "50.0% (masked) -> 75.0% (masked)"
    run = Run(id="0" * 16, spec=Spec(model="m@1", scores="masked"), members=[Member(device="d")])
    assert run_text(run).splitlines()[-1].count("masked") == 2
    plain = Spread(mean=0.5, worst=0.0, worst_tenth=0.0)
    assert round_row(Round(evaluates=True, before=plain, after=plain))[-1].count("tenth 0.0%") == 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"scores": "off"}, "devices do not score"),
        ({"scores": "clear", "masking": MaskedRounds(least=3)}, "the cloud sees each device's"),
        ({"scores": "masked", "noise": Noise(epsilon=1.0)}, "epsilon does not cover scores"),
    ],
)
def test_the_first_line_says_what_scores_tell(fields, text):
    run = Run(id="0" * 16, spec=Spec(model="m@1", **fields))
    assert text in headline(run)
    for other in ("devices do not score", "the cloud sees each device's", "epsilon does not"):
        assert (other in headline(run)) == (other in text)


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (Round(number=1, evaluates=True, counted=2, closed_s=2.0), False),
        (Round(number=1, evaluates=True, given_up="2 devices of 3", closed_s=2.0), True),
        (Round(number=1, counted=3, closed_s=2.0), True),
    ],
)
def test_a_result_that_nobody_scored_is_named(last, says):
    run = Run(id="0" * 16, phase=Run.DONE, spec=Spec(model="m@1", scores="clear"), rounds=[last])
    assert ("no device scored the result" in headline(run)) is says


def test_a_run_names_its_metric_in_json_only_if_it_is_not_accuracy():
    assert "metric" not in record(Run(id="0" * 16))
    assert record(Run(id="0" * 16, metric="loss"))["metric"] == "loss"


def test_a_masked_run_says_what_its_masking_holds():
    masking = MaskedRounds(least=6, lost_share=0.1, colluding_share=0.1, failure=1e-6)
    run = Run(id="0" * 16, spec=Spec(model="m@1", masking=masking, cohort=Cohort(devices=10)))
    lines = masking_lines(run)
    assert lines[0].startswith("masking for 10 devices: every device shares its secrets with all")
    assert "over 6 or more devices, after 6 of them have signed" in lines[1]
    assert "at most 1 devices are lost and at most 1 collude" in lines[2]
    assert "masked: the cloud learns sums over 6 or more devices" in headline(run)
    assert run_text(run).splitlines()[1:5] == lines
    run.spec.ClearField("masking")
    assert masking_lines(run) == []
    assert "masked" not in headline(run)


def test_a_masked_run_in_groups_says_what_a_group_is():
    masking = MaskedRounds(least=4, lost_share=0.1, colluding_share=0.1, failure=1e-6, groups=5)
    spec = Spec(model="m@1", masking=masking, cohort=Cohort(devices=30))
    spec.robustness.aggregator = "median"
    run = Run(id="0" * 16, spec=spec)
    lines = masking_lines(run)
    assert lines[0].startswith("masking for groups of 6 of 30 devices: ")
    combined = "a hash of all keys forms 5 groups, and median combines their means; "
    assert f"{combined}a group that fails is left out" in lines
    assert "the cloud learns sums over 4 or more devices, in 5 groups" in headline(run)
    reason = "group 2 of 5: too few"
    round_ = Round(number=1, asked=30, counted=24, closed_s=2.0, opened_s=1.0, left_out=reason)
    assert round_row(round_)[-1] == "left out: group 2 of 5: too few"
    round_.norm_bound = 0.25
    assert round_row(round_)[-1] == "norm bound 0.25, left out: group 2 of 5: too few"
