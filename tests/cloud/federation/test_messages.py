"""Runs as people see them."""

from dataclasses import asdict

from tests.cloud.federation.masked import masked_request

from triplane.cloud.cli.text import plain
from triplane.cloud.federation import journal
from triplane.cloud.federation.journal import Prepared, RunRecord
from triplane.cloud.federation.messages import run_message
from triplane.cloud.federation.run_projection import follow
from triplane.cloud.federation.spec import with_defaults
from triplane.unified_ir.federated.core.masked_step import MaskedStep, StepAnswer
from triplane.unified_ir.federated.core.run import NEWEST_RULES, Exchanged, Joined, Masked
from triplane.unified_ir.federated.masking.parameters import choose_parameters

NAMES = tuple(f"d{i}" for i in range(8))


def begun():
    """A masked run of eight devices, which have joined."""
    spec = with_defaults(masked_request(8, cohort={"deadline_s": 600.0}).spec)
    prepared = Prepared(
        plan="aa" * 32, plan_digest="d", state="bb" * 32, roles={"w": "parameter"},
        weighting="examples", server="sgd", since_s=0.0, rules=NEWEST_RULES,
    )  # fmt: skip
    record = RunRecord(
        number=0, id="ab" * 8, key=bytes(16), asked=journal.asked_digest(spec), spec=spec,
        started_s=1.0, started_by="op", prepared=prepared,
    )  # fmt: skip
    projection = journal.first_projection(record)
    for name in NAMES:
        projection, _ = follow(projection, Joined(at_s=3600.0, device=name, examples=9))
    return record, projection


def answered(projection, names, at_s):
    round_ = projection.state.round
    for name in names:
        lease = next(x.id for x in round_.leases if x.device == name)
        answer = StepAnswer(step=round_.masked.step, blob=name, size=1)
        event = Masked(at_s=at_s, device=name, lease=lease, answer=answer)
        projection, _ = follow(projection, event)
    return projection


def reason(record, projection):
    return run_message(record, projection, rounds=False).reason


def test_a_masked_run_has_the_parameters_of_its_masking_and_another_run_none():
    record, projection = begun()
    shown = plain(run_message(record, projection, rounds=False))
    chosen = choose_parameters(8, least=3, lost_share=0.1, colluding_share=0.0, failure=1e-6)
    assert shown["masking"] == {
        "devices": 8, "neighbours": 7, "threshold": 4, "quorum": 5, "least": 3, "lost": 0,
        "colluding": 0, "failure": 1e-6, "cohort": 8, "colluding_cohort": 0,
    }  # fmt: skip
    assert shown["masking"].items() <= asdict(chosen).items()
    assert shown["spec"]["masking"]["phase_s"] == 20.0
    record.spec.ClearField("masking")
    assert "masking" not in plain(run_message(record, projection, rounds=False))


def test_a_masked_round_says_which_step_waits_for_whom_and_since_when():
    record, projection = begun()
    assert reason(record, projection) == (
        "since 01:00:00 UTC, and for at most 600 s, the step keys waits for 8 of 8 devices: "
        "d0, d1, d2, d3, d4, ..."
    )
    projection = answered(projection, NAMES, 3700.0)
    assert reason(record, projection) == "the answers of 8 devices to the step keys are taken"
    keys = Exchanged(at_s=3700.0, number=1, attempt=0, step=MaskedStep.KEYS, refused={})
    projection, _ = follow(projection, keys)
    assert reason(record, answered(projection, NAMES[1:], 3701.0)) == (
        "since 01:01:40 UTC, and for at most 500 s, the step shares waits for 1 of 8 devices: d0"
    )
