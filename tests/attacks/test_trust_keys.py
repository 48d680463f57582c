"""Attacks by whoever stole a key, or the whole cloud with its online keys."""

import hashlib

import pytest
from tests.attacks.trust_stage import (
    BUNDLE,
    DAY_S,
    GOLDEN,
    bundle_entry,
    forge_chain,
    load,
    newest,
    refusal,
    serve,
    signed_by,
    stage,
)
from tuf.api._payload import TargetFile, Targets
from tuf.api.metadata import Metadata

from triplane.cloud.trust.initial import policy_file
from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.roles import MAX_VERSION, expiry
from triplane.cloud.trust.signing import replace_keys
from triplane.proto.errors import Conflict, InvalidInput
from triplane.proto.signed.policy import check_metric
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.targets import Policy, Rule, in_share

PATH = "release/digits@1+ort-x64.bundle"
AUTO = "auto/digits@2+ort-x64.bundle"
RULE = Rule(share=0.5, golden="golden/digits.npz", metric="accuracy", floor=0.9)
TWO = {"keys": {"release": 2}, "thresholds": {"release": 2}}


@pytest.fixture
def cloud(tmp_path):
    made = stage(tmp_path)
    made.release(bundle_entry(PATH))
    made.allow(digits=RULE)
    return made


INSIDE = next(f"node-{i}" for i in range(99) if in_share(f"node-{i}", "digits", 0.5))
OUTSIDE = next(f"node-{i}" for i in range(99) if not in_share(f"node-{i}", "digits", 0.5))


# One key of two


def test_one_signature_of_two_waits_and_is_shown_to_no_node(tmp_path):
    cloud = stage(tmp_path, **TWO)
    made = cloud.release(bundle_entry(PATH), keys=("release-1",))
    assert (made.published, made.signatures, made.threshold) == (False, 1, 2)
    node = cloud.node()
    assert node.refresh().is_fresh
    with pytest.raises(AttemptRefused, match=r"is not listed by the role release \(version 1\)"):
        node.target(PATH)


def test_one_signature_of_two_is_refused_by_the_node_when_the_cloud_publishes_it(tmp_path):
    cloud = stage(tmp_path, **TWO)
    node = cloud.node()
    half = signed_by(
        cloud.offline, cloud.next_targets("release", [bundle_entry(PATH)]), "release-1"
    )
    forge_chain(cloud, release=half)
    assert node.refresh().is_fresh
    with pytest.raises(
        AttemptRefused, match="1 valid signatures of 2 that the role release"
    ) as refused:
        node.target(PATH)
    assert refused.value.kind == "threshold"


def test_one_key_signing_twice_counts_once(tmp_path):
    cloud = stage(tmp_path, **TWO)
    made = signed_by(
        cloud.offline, cloud.next_targets("release", [bundle_entry(PATH)]), "release-1"
    )
    for _ in range(2):
        found = cloud.repository.submit("release", made.to_bytes())
    assert (found.published, found.signatures) == (False, 1)
    twice = made.to_bytes().replace(b'"signatures":[', b'"signatures":[' + one_signature(made))
    with pytest.raises(InvalidInput, match="Multiple signatures found"):
        cloud.repository.submit("release", twice)


def one_signature(metadata):
    found = next(iter(metadata.signatures.values()))
    return f'{{"keyid":"{found.keyid}","sig":"{found.signature}"}},'.encode()


def test_a_signature_of_another_role_does_not_count(tmp_path):
    cloud = stage(tmp_path, **TWO)
    made = cloud.next_targets("release", [bundle_entry(PATH)])
    with pytest.raises(InvalidInput, match="no signature of release 2 is valid for a key of"):
        cloud.repository.submit(
            "release", signed_by(cloud.offline, made, "targets", "root").to_bytes()
        )


# Paths


def test_a_release_key_may_not_list_auto_targets(cloud):
    made = signed_by(cloud.offline, cloud.next_targets("release", [bundle_entry(AUTO)]), "release")
    with pytest.raises(InvalidInput, match=r"release may list release/\* only, got 'auto/digits@2"):
        cloud.repository.submit("release", made.to_bytes())
    forge_chain(cloud, release=made)
    node = cloud.node()
    assert node.refresh().is_fresh
    with pytest.raises(AttemptRefused, match=r"is not listed by the role auto \(version 1\)"):
        node.target(AUTO)


def test_an_auto_key_may_not_list_release_targets(cloud):
    other = "release/digits@9+ort-x64.bundle"
    made = signed_by(cloud.online, cloud.next_targets("auto", [bundle_entry(other)]), "auto")
    with pytest.raises(InvalidInput, match=r"auto may list auto/\* only"):
        cloud.repository.submit("auto", made.to_bytes())
    forge_chain(cloud, auto=made)
    node = cloud.node()
    assert node.refresh().is_fresh
    with pytest.raises(AttemptRefused, match=r"is not listed by the role release \(version 2\)"):
        node.target(other)


def test_an_auto_key_may_not_sign_the_release_role(cloud):
    other = "release/digits@9+ort-x64.bundle"
    made = signed_by(cloud.online, cloud.next_targets("release", [bundle_entry(other)]), "auto")
    forge_chain(cloud, release=made)
    node = cloud.node()
    assert node.refresh().is_fresh
    with pytest.raises(
        AttemptRefused, match=r"3\.release\.json \(version 3\) has 0 valid signatures"
    ) as refused:
        node.target(other)
    assert refused.value.kind == "signature"


def test_fields_that_contradict_the_path_are_refused_on_both_sides(cloud):
    entry = bundle_entry("release/digits@7+ort-x64.bundle")
    entry.unrecognized_fields["custom"]["model"] = "letters"
    made = signed_by(cloud.offline, cloud.next_targets("release", [entry]), "release")
    with pytest.raises(InvalidInput, match="custom fields contradict the path"):
        cloud.repository.submit("release", made.to_bytes())
    forge_chain(cloud, release=made)
    node = cloud.node()
    assert node.refresh().is_fresh
    with pytest.raises(AttemptRefused, match="custom fields contradict the path") as refused:
        node.target(entry.path)
    assert refused.value.kind == "wrong-target"


def test_a_bundle_counts_only_where_its_own_role_lists_it(cloud):
    """Not even the offline targets role releases in the place of the release role."""
    other = "release/digits@9+ort-x64.bundle"
    made = cloud.next_targets("targets", [bundle_entry(other)])
    forge_chain(cloud, targets=signed_by(cloud.offline, made, "targets"))
    node = cloud.node()
    assert node.refresh().is_fresh
    with pytest.raises(AttemptRefused, match="is not listed by the role release") as refused:
        node.target(other)
    assert refused.value.kind == "unknown-target"


# The policy


def test_a_policy_signed_by_the_online_keys_is_refused(cloud):
    node = cloud.node(INSIDE)
    assert node.refresh().is_fresh
    wide = cloud.next_targets("targets")
    wide.signed.targets["policy.json"] = policy_file(Policy({"letters": RULE}))
    forged = signed_by(cloud.online, wide, "auto", "snapshot", "timestamp")
    with pytest.raises(InvalidInput, match="no signature of targets 3 is valid"):
        cloud.repository.submit("targets", forged.to_bytes())
    forge_chain(cloud, targets=forged)
    found = refusal(node)
    assert found.kind == "signature"
    assert "0 valid signatures of 1 that the role targets needs" in found.text
    assert set(node.policy().models) == {"digits"}


def test_a_policy_whose_text_was_exchanged_is_refused(cloud):
    """Even under a good signature the entry's digest and its text must agree."""
    made = cloud.next_targets("targets")
    text = Policy({"letters": RULE}).text()
    made.signed.targets["policy.json"].unrecognized_fields["custom"] = {"text": text}
    signed = signed_by(cloud.offline, made, "targets")
    with pytest.raises(InvalidInput, match="does not match"):
        cloud.repository.submit("targets", signed.to_bytes())
    forge_chain(cloud, targets=signed)
    node = cloud.node()
    assert node.refresh().is_fresh
    with pytest.raises(AttemptRefused, match=r"policy\.json cannot be read: Observed"):
        node.policy()


# The stolen auto key, end to end: what it can do


def test_a_stolen_auto_key_reaches_a_node_inside_the_share_with_a_newer_version(cloud):
    cloud.sign_auto()
    node = cloud.node(INSIDE)
    assert node.refresh().is_fresh
    admitted = node.admit(AUTO, node=INSIDE, committed_version=1)
    assert admitted.target.sha256 == hashlib.sha256(BUNDLE).digest()
    assert admitted.rule == RULE
    assert admitted.golden.sha256 == hashlib.sha256(GOLDEN).digest()
    check_metric(admitted, 0.9)


# and what it cannot


def test_a_stolen_auto_key_does_not_get_below_the_metric_floor(cloud):
    cloud.sign_auto()
    node = cloud.node(INSIDE)
    node.refresh()
    admitted = node.admit(AUTO, node=INSIDE, committed_version=1)
    for measured in (0.8999, float("nan")):
        with pytest.raises(AttemptRefused, match=r"is below the policy's floor 0\.9000") as refused:
            check_metric(admitted, measured)
        assert refused.value.kind == "metric"


def test_a_stolen_auto_key_does_not_reach_a_node_outside_the_share(cloud):
    cloud.sign_auto()
    node = cloud.node(OUTSIDE)
    node.refresh()
    with pytest.raises(AttemptRefused, match=r"outside the 50\.00% of nodes") as refused:
        node.admit(AUTO, node=OUTSIDE, committed_version=1)
    assert refused.value.kind == "share"


def test_a_stolen_cloud_does_not_rename_a_node_into_the_share(cloud):
    """The cloud issues certificates, so it can give a node a name of its choice at a renewal."""
    cloud.sign_auto()
    node = cloud.node(OUTSIDE)
    node.refresh()
    assert node.admit(PATH, node=OUTSIDE, committed_version=0).rule is None
    for again in (node, cloud.node(OUTSIDE)):
        again.refresh()
        with pytest.raises(
            AttemptRefused, match=f"this node was '{OUTSIDE}' and is called"
        ) as refused:
            again.admit(AUTO, node=INSIDE, committed_version=1)
        assert refused.value.kind == "share"


def test_a_stolen_auto_key_does_not_send_a_node_back(cloud):
    cloud.sign_auto()
    node = cloud.node(INSIDE)
    node.refresh()
    for committed in (2, 3):
        with pytest.raises(AttemptRefused, match="is not above the committed version") as refused:
            node.admit(AUTO, node=INSIDE, committed_version=committed)
        assert refused.value.kind == "floor"


def test_people_may_send_a_node_back(cloud):
    node = cloud.node(OUTSIDE)
    node.refresh()
    admitted = node.admit(PATH, node=OUTSIDE, committed_version=5)
    assert (admitted.rule, admitted.target.name.version) == (None, 1)


def test_a_stolen_auto_key_does_not_release_a_model_that_is_not_listed(cloud):
    with pytest.raises(Conflict, match="no rule for model 'letters'"):
        cloud.sign_auto("letters", 1)
    path = "auto/letters@1+ort-x64.bundle"
    made = signed_by(cloud.online, cloud.next_targets("auto", [bundle_entry(path)]), "auto")
    forge_chain(cloud, auto=made)
    node = cloud.node(INSIDE)
    assert node.refresh().is_fresh
    with pytest.raises(
        AttemptRefused, match=r"no rule for model 'letters' \(listed: digits\)"
    ) as refused:
        node.admit(path, node=INSIDE, committed_version=0)
    assert refused.value.kind == "policy"


def test_a_stolen_auto_key_cannot_lend_its_own_golden_set(cloud):
    """The golden set is the one that the offline role lists, whatever `auto` says."""
    made = cloud.next_targets("auto", [bundle_entry(AUTO)])
    fake = TargetFile.from_data(RULE.golden, b"easy samples", ["sha256"])
    made.signed.targets[RULE.golden] = fake
    forge_chain(cloud, auto=signed_by(cloud.online, made, "auto"))
    node = cloud.node(INSIDE)
    assert node.refresh().is_fresh
    admitted = node.admit(AUTO, node=INSIDE, committed_version=1)
    assert admitted.golden.sha256 == hashlib.sha256(GOLDEN).digest()


def test_a_stolen_auto_key_is_worthless_once_the_targets_role_names_another(cloud):
    cloud.sign_auto()
    other = KeyFolder(cloud.online).make("auto-2").public_key
    made = cloud.next_targets("targets")
    (old,) = made.signed.get_delegated_role("auto").keyids
    made.signed.revoke_key(old, "auto")
    made.signed.add_key(other, "auto")
    cloud.repository.submit("targets", signed_by(cloud.offline, made, "targets").to_bytes())
    node = cloud.node(INSIDE)
    assert node.refresh().is_fresh
    with pytest.raises(
        AttemptRefused, match="0 valid signatures of 1 that the role auto"
    ) as refused:
        node.target(AUTO)
    assert refused.value.kind == "signature"
    cloud.sign_auto(version=3)
    assert node.refresh().is_fresh
    assert node.target("auto/digits@3+ort-x64.bundle").name.version == 3


# The stolen cloud: its online keys


def test_a_stolen_cloud_cannot_drop_or_roll_back_what_people_signed(cloud):
    node = cloud.node()
    cloud.release(bundle_entry("release/digits@2+ort-x64.bundle"))
    assert node.refresh().is_fresh
    old = Metadata[Targets].from_bytes(cloud.repository.get("2.release.json"))
    forge_chain(cloud, release=old)
    found = refusal(node)
    assert found.kind == "rollback"
    assert "release.json version 2, got 3" in found.text
    cloud.forged.clear()
    snapshot, timestamp = load(cloud, "snapshot"), load(cloud, "timestamp")
    snapshot.signed.version += 2
    timestamp.signed.version += 2
    del snapshot.signed.meta["release.json"]
    serve(cloud, snapshot, timestamp)
    found = refusal(node)
    assert found.kind == "rollback"
    assert "New snapshot is missing info for 'release.json'" in found.text


def test_a_stolen_cloud_cannot_use_the_version_numbers_up(cloud):
    node = cloud.node()
    assert node.refresh().is_fresh
    snapshot, timestamp = load(cloud, "snapshot"), load(cloud, "timestamp")
    timestamp.signed.version = MAX_VERSION
    snapshot.signed.version += 1
    serve(cloud, snapshot, timestamp)
    found = refusal(node)
    assert found.kind == "fast-forward"
    assert f"timestamp jumps from version 3 to {MAX_VERSION}" in found.text
    cloud.forged.clear()
    assert node.refresh().is_fresh


def test_fast_forwarded_nodes_recover_when_the_root_names_other_keys(cloud):
    node = cloud.node()
    assert node.refresh().is_fresh
    snapshot, timestamp = load(cloud, "snapshot"), load(cloud, "timestamp")
    snapshot.signed.version += 900_000
    timestamp.signed.version += 900_000
    serve(cloud, snapshot, timestamp)
    assert node.refresh().is_fresh  # believed: the keys are the cloud's own
    cloud.forged.clear()
    cloud.repository.keep_fresh(cloud.clock() + DAY_S)
    assert refusal(node).kind == "rollback"
    names = ("snapshot", "timestamp")
    keys = {role: [KeyFolder(cloud.online).make(f"{role}-2").public_key] for role in names}
    done = replace_keys(cloud.repository, keys, cloud.offline, now_s=cloud.clock())
    assert done.submitted.published
    found = node.refresh()
    assert (found.is_fresh, found.refusals) == (True, ())
    assert load(cloud, "timestamp").signed.version == 1
    assert cloud.node().refresh().is_fresh
    assert cloud.reopened().get("timestamp.json") == cloud.repository.get("timestamp.json")


def test_a_stolen_cloud_cannot_make_a_root(cloud):
    node = cloud.node()
    root = load(cloud, "root")
    root.signed.version, root.signed.expires = 2, expiry("root", cloud.clock())
    keys = KeyFolder(cloud.online).signers().values()
    for signer in keys:
        root.signed.add_key(signer.public_key, "targets")
    forged = signed_by(cloud.online, root, "auto", "snapshot", "timestamp")
    with pytest.raises(InvalidInput, match="no signature of root 2 is valid"):
        cloud.repository.submit("root", forged.to_bytes())
    cloud.forged["2.root.json"] = forged.to_bytes()
    found = refusal(node)
    assert (found.kind, "2.root.json" in found.text) == ("signature", True)


def test_a_root_signed_by_the_new_keys_only_is_refused(cloud):
    node = cloud.node()
    root = load(cloud, "root")
    new = KeyFolder(cloud.path / "thief").make("root")
    root.signed.version = 2
    for keyid in list(root.signed.roles["root"].keyids):
        root.signed.revoke_key(keyid, "root")
    root.signed.add_key(new.public_key, "root")
    forged = signed_by(cloud.path / "thief", root, "root").to_bytes()
    assert not cloud.repository.submit("root", forged).published
    assert newest(cloud, "root") == 1
    cloud.forged["2.root.json"] = forged
    assert refusal(node).kind == "signature"
