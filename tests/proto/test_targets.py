import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.targets import (
    MAX_POLICY_BYTES,
    MAX_TARGET_BYTES,
    Policy,
    Rule,
    TargetName,
    bundle_target,
    read_target,
)

NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
RULE = Rule(0.25, "golden/digits", "accuracy", 0.9)


@given(
    role=st.sampled_from(["release", "auto"]),
    model=NAMES,
    version=st.integers(1, 999_999_999),
    target=NAMES,
)
def test_a_name_is_read_back_from_its_path(role, model, version, target):
    name = TargetName(role, model, version, target)
    assert TargetName.parse(str(name)) == name


@given(st.text(max_size=60) | st.from_regex(r"(release|auto)/.*@.*\+.*\.bundle", fullmatch=True))
def test_a_path_has_one_spelling_or_is_refused(path):
    try:
        assert str(TargetName.parse(path)) == path
    except InvalidInput as error:
        assert "a bundle's target path is" in str(error)


def test_a_bundle_target_is_read_as_it_was_written():
    name = TargetName("auto", "digits", 3, "ort-x64")
    made = bundle_target(
        name, length=5, sha256=b"\1" * 32, model_digest=b"\2" * 32, content_digest=b"\3" * 32
    )
    assert made.name == name
    again = read_target(made.path, made.length, {"sha256": made.sha256.hex()}, dict(made.custom))
    assert again == made


GOOD = bundle_target(
    TargetName("release", "digits", 3, "ort-x64"),
    length=5,
    sha256=bytes(32),
    model_digest=bytes(32),
    content_digest=bytes(32),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length", 0), ("length", -1), ("length", True), ("length", 5.0), ("length", "5"),
        ("length", MAX_TARGET_BYTES + 1),
        ("hashes", {}), ("hashes", {"sha256": "0" * 63}), ("hashes", {"sha256": 0}),
        ("hashes", {"sha256": "A" * 64}), ("hashes", {"sha256": "0" * 64, "md5": "0" * 32}),
        ("custom", None), ("custom", []), ("custom", {}), ("custom", {**GOOD.custom, "more": 1}),
        ("custom", {**GOOD.custom, "version": "3"}), ("custom", {**GOOD.custom, "version": 3.0}),
        ("custom", {**GOOD.custom, "version": 4}), ("custom", {**GOOD.custom, "model": "x"}),
        ("custom", {**GOOD.custom, "model_digest": None}),
        ("custom", {**GOOD.custom, "content_digest": "0" * 64 + "\n"}),
    ],
)  # fmt: skip
def test_an_entry_that_is_not_as_documented_is_refused(field, value):
    fields = {"length": 5, "hashes": {"sha256": "0" * 64}, "custom": dict(GOOD.custom)}
    with pytest.raises(Corrupt, match=r"release/digits@3\+ort-x64\.bundle: "):
        read_target(GOOD.path, **{**fields, field: value})


SHARES = st.floats(0, 1)


@given(
    st.dictionaries(
        NAMES,
        st.builds(Rule, SHARES, NAMES.map("golden/{}".format), st.just("accuracy"), SHARES),
        max_size=4,
    )
)
def test_a_policy_is_read_as_it_was_written(models):
    policy = Policy(models)
    assert Policy.parse(policy.text()) == policy
    assert Policy.parse(policy.text()).text() == policy.text()


def rule(**fields):
    text = {"share": 0.25, "golden": "golden/digits", "metric": "accuracy", "floor": 0.9}
    return json.dumps({"format": 1, "models": {"digits": text | fields}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a policy is a JSON object"),
        ("[" * 100_000, "a policy is a JSON object"),
        ("[]", 'a policy is {"format": 1'),
        ('{"format": 1}', 'a policy is {"format": 1'),
        ('{"format": 2, "models": {}}', "a policy has format 1, got 2"),
        ('{"format": true, "models": {}}', "a policy has format 1, got True"),
        ('{"format": 1, "models": {}, "models": {"x": 1}}', "a key is repeated"),
        ('{"format": 1, "models": []}', "at most 1000 models, by name"),
        ('{"format": 1, "models": {"Digits": {}}}', "a model's name matches"),
        ('{"format": 1, "models": {"digits": {}}}', "policy of digits: a rule has"),
        (rule(more=1), "policy of digits: a rule has"),
        (rule(share=1.01), "share is 0 to 1, got 1.01"),
        (rule(share=-1), "share is 0 to 1"),
        (rule(share=True), "share is 0 to 1"),
        (rule(share="1"), "share is 0 to 1"),
        (rule(share=float("nan")), "share is 0 to 1, got nan"),
        (rule(share=10**400), "share is 0 to 1"),
        (rule(floor=float("inf")), "floor is 0 to 1, got inf"),
        (rule(golden="digits"), "golden is golden/NAME"),
        (rule(golden="golden/../x"), "golden is golden/NAME"),
        (rule(metric=["accuracy"]), "metric is one of"),
        (rule() + " " * MAX_POLICY_BYTES, f"at most {MAX_POLICY_BYTES} bytes"),
        ("\ud800", "a policy is a JSON object"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_refused_by_name(text, message):
    with pytest.raises(InvalidInput) as refused:
        Policy.parse(text)
    assert message in str(refused.value)


@given(st.text(max_size=100) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
).map(json.dumps))  # fmt: skip
def test_no_text_fails_otherwise_than_by_name(text):
    with pytest.raises(InvalidInput):
        Policy.parse(text)
