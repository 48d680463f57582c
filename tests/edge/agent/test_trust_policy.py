import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.signed.policy import Admission, check_metric, judge
from triplane.proto.signed.refusal import KINDS, AttemptRefused
from triplane.proto.targets import Policy, Rule, SignedTarget, TargetName, in_share

NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
AUTO = TargetName("auto", "digits", 5, "ort-x64")


def policy(share=1.0, floor=0.9):
    return Policy({"digits": Rule(share, "golden/digits", "accuracy", floor)})


@given(node=NAMES, model=NAMES)
def test_a_share_of_one_has_every_node_and_of_nothing_none(node, model):
    assert in_share(node, model, 1.0)
    assert not in_share(node, model, 0.0)


@given(node=NAMES, model=NAMES, a=st.floats(0, 1), b=st.floats(0, 1))
def test_a_larger_share_has_the_nodes_of_a_smaller(node, model, a, b):
    small, large = sorted((a, b))
    assert in_share(node, model, large) or not in_share(node, model, small)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_a_share_has_about_so_many_nodes_and_others_for_another_model(share):
    nodes = [f"node-{i}" for i in range(20_000)]
    sets = [{n for n in nodes if in_share(n, model, share)} for model in ("digits", "letters")]
    for found in sets:
        assert len(found) == pytest.approx(share * 20_000, rel=0.15)
    assert len(sets[0] & sets[1]) == pytest.approx(share * share * 20_000, abs=200)


def test_the_separator_keeps_node_and_model_apart():
    """`ab` + `c` must not be `a` + `bc`: the shares of two models would be one."""
    differs = [in_share(f"n{i}a", "b", 0.5) != in_share(f"n{i}", "ab", 0.5) for i in range(64)]
    assert any(differs)


def test_the_share_is_the_documented_hash():
    """SHA-256("node-1" NUL "digits") begins with this fraction; other tools must agree."""
    fraction = 0xEFEE135367E01AA3 / 2**64
    found = [share / 1000 for share in range(1001) if in_share("node-1", "digits", share / 1000)]
    assert found[0] == pytest.approx(fraction, abs=0.001)


@given(version=st.integers(1, 9), committed=st.integers(0, 9))
def test_auto_goes_up_only_and_release_anywhere(version, committed):
    for role in ("auto", "release"):
        name = TargetName(role, "digits", version, "ort-x64")
        try:
            rule = judge(policy(), name, node="n", committed_version=committed)
        except AttemptRefused as refused:
            assert (role, refused.kind) == ("auto", "floor")
            assert version <= committed
        else:
            assert (rule is None) == (role == "release")
            assert role == "release" or version > committed


def test_refusals_come_with_the_values():
    with pytest.raises(AttemptRefused, match=r"no rule for model 'digits' \(listed: none\)"):
        judge(Policy({}), AUTO, node="n", committed_version=0)
    with pytest.raises(AttemptRefused, match=r"node 'n' is outside the 0\.00% of nodes"):
        judge(policy(share=0.0), AUTO, node="n", committed_version=0)
    with pytest.raises(AttemptRefused, match="version 5 is not above the committed version 7"):
        judge(policy(), AUTO, node="n", committed_version=7)


@pytest.mark.parametrize(("measured", "passes"), [(0.9, True), (1.0, True), (0.8999, False)])
def test_the_floor_itself_passes(measured, passes):
    target = SignedTarget(str(AUTO), 1, bytes(32), {})
    admission = Admission(target, policy().models["digits"], target)
    if passes:
        check_metric(admission, measured)
    else:
        with pytest.raises(AttemptRefused, match=r"accuracy 0\.8999 on golden/digits is below"):
            check_metric(admission, measured)
    check_metric(Admission(target), measured)


def test_an_incident_carries_kind_text_and_time():
    refused = AttemptRefused("freeze", "timestamp 2 expired")
    incident = refused.incident(7.5)
    assert (incident.time_s, incident.kind, incident.text) == (7.5, "freeze", str(refused))
    assert all(text and kind == kind.lower() for kind, text in KINDS.items())
