"""What signers, clouds and devices read of a signed plan is read in one way."""

import json
from dataclasses import replace

import pytest

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.plan_statement import (
    MAX_TENSORS,
    Least,
    LeastMasking,
    PlanName,
    PlanPolicy,
    PlanRule,
    PlanStatement,
    is_plan,
)
from triplane.proto.signed_fields import PLANS
from triplane.proto.targets import plan_target, read_target

DIGEST = "ab" * 32
PATH = f"plans/{DIGEST}.plan"
STATEMENT = PlanStatement(
    model="digits",
    version=3,
    model_digest="cd" * 32,
    digest=DIGEST,
    algorithm="maml+adam",
    hyperparameters={"lr": 0.05, "inner_steps": 3},
    tensors=("0.bias", "0.weight"),
    least=Least(3, 8, 2),
)


def test_a_statement_is_read_as_it_was_written():
    target = plan_target(PLANS, STATEMENT, length=7, sha256=bytes(32))
    again = read_target(target.path, 7, {"sha256": bytes(32).hex()}, dict(target.custom))
    assert again.statement == STATEMENT
    assert again.path == PATH


def test_the_least_of_held_out_samples_is_written_only_where_it_demands_something():
    assert "least_held_out" not in STATEMENT.custom()
    stricter = replace(STATEMENT, least=replace(STATEMENT.least, held_out=4))
    assert stricter.custom()["least_held_out"] == 4
    assert PlanStatement.read(PATH, stricter.custom()) == stricter
    assert stricter.conditions == "3 devices, 8 samples in a step, 2 steps, 4 samples in a score"


def test_a_rule_may_demand_held_out_samples_in_a_score():
    policy = PlanPolicy({"digits": replace(RULE, least=Least(held_out=4))})
    assert PlanPolicy.parse(policy.text()) == policy
    said = policy.refusal(replace(STATEMENT, algorithm="maml"))
    assert "must demand at least 4 held-out samples in a score, got 1" in said


@pytest.mark.parametrize(
    "path",
    [
        f"plans/{DIGEST}", f"plans/{DIGEST[:-1]}.plan", f"plans/{DIGEST.upper()}.plan",
        f"release/{DIGEST}.plan", f"plans/../{DIGEST}.plan", f"plans/{DIGEST}.plan\n",
        "plans/x.plan",
    ],
)  # fmt: skip
def test_a_path_that_is_spelled_otherwise_is_no_plan(path):
    with pytest.raises(InvalidInput, match=r"a plan's target path is ROLE/DIGEST\.plan"):
        PlanName.parse(path)


def test_golden_sets_and_bundles_are_no_plans_whatever_their_names():
    assert not is_plan("golden/x.plan")
    assert not is_plan("release/x.plan")
    assert is_plan(f"auto/{DIGEST}.plan")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "Digits"), ("model", 3), ("version", 0), ("version", True), ("version", "3"),
        ("model_digest", "cd"), ("content_digest", "cd" * 32), ("algorithm", "a b"),
        ("hyperparameters", {}), ("hyperparameters", "[]"), ("hyperparameters", '{"lr": NaN}'),
        ("hyperparameters", '{"lr": true}'), ("hyperparameters", "{" * 5000),
        ("hyperparameters", '{"lr": 1' + "0" * 400 + "}"), ("hyperparameters", '{"lr": 1e999}'),
        ("tensors", "w"), ("tensors", ["b", "a"]), ("tensors", ["a", "a"]), ("tensors", [1]),
        ("tensors", ["a b"]), ("tensors", ["a" * 201]), ("least_devices", 0),
        ("tensors", [str(n) for n in range(MAX_TENSORS + 1)]), ("least_batch", 1.0),
        ("least_steps", 1_000_001), ("least_held_out", 0), ("least_held_out", True),
    ],
)  # fmt: skip
def test_a_statement_with_a_wrong_field_is_corrupt(key, value):
    custom = STATEMENT.custom() | {key: value}
    with pytest.raises(Corrupt, match=key.removeprefix("least_")):
        PlanStatement.read(PATH, custom)


@pytest.mark.parametrize("custom", [None, {}, [], STATEMENT.custom() | {"more": 1}])
def test_a_statement_has_exactly_its_fields(custom):
    with pytest.raises(Corrupt, match="custom fields are"):
        PlanStatement.read(PATH, custom)


MASKED = replace(STATEMENT, masking=LeastMasking(0.1, 1e-9))


def test_a_statement_that_demands_masking_is_read_as_it_was_written():
    assert PlanStatement.read(PATH, MASKED.custom()) == MASKED
    listed = replace(STATEMENT, masking=LeastMasking(0.1, 1e-9, roster=True))
    assert PlanStatement.read(PATH, listed.custom()) == listed
    assert "roster" not in MASKED.custom()["masking"], "as earlier releases wrote and read it"
    assert "masking" not in STATEMENT.custom(), "statements of earlier releases stay valid"


@pytest.mark.parametrize(
    "text",
    [
        None, {}, "{}", "[]", "null", '{"colluding_share": 0.1}', '{"failure": 1e-6}',
        '{"colluding_share": 1, "failure": 0.1}', '{"colluding_share": -0.1, "failure": 0.1}',
        '{"colluding_share": 0.1, "failure": 0}', '{"colluding_share": NaN, "failure": 0.1}',
        '{"colluding_share": 0.1, "failure": 0.1, "more": 1}', '{"colluding_share": "0"}',
        '{"colluding_share": 0.1, "failure": 0.1, "roster": 2}', '{"roster": 1}',
        '{"colluding_share": 0.1, "failure": 0.1, "roster": true}',
    ],
)  # fmt: skip
def test_a_demand_for_masking_that_is_not_one_is_corrupt(text):
    """It must never be read as no demand."""
    with pytest.raises(Corrupt, match=PATH):
        PlanStatement.read(PATH, STATEMENT.custom() | {"masking": text})
    rules = {"format": 1, "models": {"digits": rule_fields() | {"masking": text}}}
    with pytest.raises(InvalidInput, match="plan policy of digits"):
        PlanPolicy.parse(json.dumps(rules))


def rule_fields():
    return json.loads(PlanPolicy({"digits": RULE}).text())["models"]["digits"]


@pytest.mark.parametrize(
    ("masking", "reason"),
    [
        (None, "must demand masking, and updates are in the clear"),
        (LeastMasking(0.05, 1e-6), "a share of at least 0.1 colluding devices, got 0.05"),
        (LeastMasking(0.1, 1e-3), "a probability of at most 1e-06, got 0.001"),
        (LeastMasking(0.2, 1e-9), ""),
    ],
)
def test_a_policy_may_demand_masking(masking, reason):
    policy = PlanPolicy({"digits": replace(RULE, masking=LeastMasking(0.1))})
    assert PlanPolicy.parse(policy.text()) == policy
    said = policy.refusal(replace(STATEMENT, algorithm="maml", masking=masking))
    assert (reason in said) if reason else said == ""


def test_a_policy_may_demand_a_roster():
    policy = PlanPolicy({"digits": replace(RULE, masking=LeastMasking(0.1, roster=True))})
    assert PlanPolicy.parse(policy.text()) == policy
    without, with_one = (
        policy.refusal(replace(STATEMENT, algorithm="maml", masking=LeastMasking(0.1, roster=r)))
        for r in (False, True)
    )
    assert "it must demand a signed roster of devices" in without
    assert with_one == ""


def test_the_stricter_of_two_demands_counts():
    listed = LeastMasking(0.0, 1e-3, roster=True)
    assert LeastMasking(0.1, 1e-3).stricter(listed) == LeastMasking(0.1, 1e-3, roster=True)
    assert LeastMasking(0.1, 1e-3).stricter(LeastMasking(0.0, 1e-9)) == LeastMasking(0.1, 1e-9)


RULE = PlanRule(("fed*", "maml"), ("*.weight", "0.bias", "odd[0]?"), Least(2, 2, 1))


def test_a_policy_is_read_as_it_was_written():
    policy = PlanPolicy({"digits": RULE})
    assert PlanPolicy.parse(policy.text()) == policy


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"algorithm": "reptile"}, "of digits: the algorithm reptile is not one of fed*, maml"),
        ({"tensors": ("1.bias",)}, "tensors leave a device that no pattern allows: 1.bias"),
        ({"tensors": ("odd[0]?",)}, ""),
        ({"tensors": ("odd0x",)}, "no pattern allows: odd0x"),
        ({"least": Least(1, 8, 1)}, "must demand at least 2 devices in a round, got 1"),
        ({"model": "letters"}, "it has no rule for model 'letters' (listed: digits)"),
    ],
)
def test_a_policy_says_why_it_does_not_allow_a_plan(changes, reason):
    statement = replace(STATEMENT, **{"algorithm": "maml", **changes})
    said = PlanPolicy({"digits": RULE}).refusal(statement)
    assert (reason in said) if reason else said == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensors": []}, "tensors are 1 to 4096 patterns"),
        ({"algorithms": "maml"}, "algorithms are 1 to 4096 patterns"),
        ({"least_batch": -1}, "least batch is 1 to 1000000, got -1"),
        ({"more": 1}, "a rule has"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_refused_by_the_model_and_the_field(changes, reason):
    document = json.loads(PlanPolicy({"digits": RULE}).text())
    document["models"]["digits"] |= changes
    with pytest.raises(InvalidInput, match=rf"plan policy of digits: {reason}"):
        PlanPolicy.parse(json.dumps(document))
