"""Rows of a run's tables, as people read them."""

from triplane.cloud.cli.runs import member_row
from triplane.cloud.cli.text import record
from triplane.proto.federation_pb2 import Member, Run, Score
from triplane.unified_ir.federated.core.metric import LOSS


def test_scores_of_a_device_are_shown_once_it_was_scored():
    score = Score(samples=10, before=0.5, after=0.75)
    rows = [member_row(Member(device="d", connected=True, score=s)) for s in (score, None)]
    assert [row[4:6] for row in rows] == [("50.0%", "75.0%"), ("", "")]


def test_losses_of_a_device_are_numbers_and_not_percent():
    score = Score(samples=10, before=2.5, after=0.75)
    row = member_row(Member(device="d", connected=True, score=score), LOSS)
    assert row[4:6] == ("2.5", "0.75")


def test_a_run_names_its_metric_in_json_only_if_it_is_not_accuracy():
    assert "metric" not in record(Run(id="0" * 16))
    assert record(Run(id="0" * 16, metric="loss"))["metric"] == "loss"
