"""The chain that signers and the repository verify, link by link."""

import pytest
from tests.attacks.trust_stage import (
    bundle_entry,
    edited,
    load,
    pinned,
    serve,
    signed_by,
    stage,
)

from triplane.cloud.trust.chain import MAX_ROTATIONS, newest_root, read
from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.signing import replace_keys
from triplane.proto.errors import Corrupt

PATH = "release/digits@1+ort-x64.bundle"


@pytest.fixture
def cloud(tmp_path):
    made = stage(tmp_path)
    made.release(bundle_entry(PATH))
    return made


def chain(cloud):
    return read(cloud.fetch, newest_root(cloud.fetch, cloud.fetch("1.root.json")))


def test_an_honest_chain_says_what_is_signed(cloud):
    found = chain(cloud)
    assert [found.is_signed(role) for role in ("targets", "release", "auto")] == [True] * 3
    assert list(found.targets["release"].signed.targets) == [PATH]


@pytest.mark.parametrize("keys", [("root",), ("root-2",)])
def test_a_root_must_be_signed_by_the_one_before_and_by_itself(cloud, keys):
    new = KeyFolder(cloud.offline).make("root-2").public_key
    replace_keys(cloud.repository, {"root": [new]}, cloud.offline, now_s=cloud.clock())
    assert newest_root(cloud.fetch, cloud.fetch("1.root.json")).signed.version == 2
    half = signed_by(cloud.offline, load(cloud, "root"), *keys)
    cloud.forged["2.root.json"] = half.to_bytes()
    with pytest.raises(Corrupt, match=r"2\.root\.json is not signed as its delegator requires"):
        newest_root(cloud.fetch, cloud.fetch("1.root.json"))


def test_the_trusted_root_itself_must_be_signed(cloud):
    def drop(document):
        document["signatures"] = []

    with pytest.raises(Corrupt, match="the trusted root is not signed"):
        newest_root(cloud.fetch, edited(cloud.fetch("1.root.json"), drop))


@pytest.mark.slow
def test_a_root_under_another_number_and_roots_without_end_are_refused(cloud):
    root = cloud.fetch("1.root.json")
    cloud.forged["2.root.json"] = root
    with pytest.raises(Corrupt, match=r"2\.root\.json says version 1"):
        newest_root(cloud.fetch, root)
    following = load(cloud, "root")
    for version in range(2, MAX_ROTATIONS + 3):
        following.signed.version = version
        made = signed_by(cloud.offline, following, "root")
        cloud.forged[f"{version}.root.json"] = made.to_bytes()
    with pytest.raises(Corrupt, match=f"more than {MAX_ROTATIONS} roots follow"):
        newest_root(cloud.fetch, root)


@pytest.mark.parametrize("role", ["timestamp", "snapshot"])
def test_online_roles_must_be_signed_by_the_keys_of_the_root(cloud, role):
    """Pinned as it should be, by a good signature of the wrong key."""
    snapshot, timestamp = load(cloud, "snapshot"), load(cloud, "timestamp")
    snapshot.signed.version += 1
    serve(cloud, snapshot, timestamp)
    wrong = {"snapshot": snapshot, "timestamp": timestamp}[role]
    name = "timestamp.json" if role == "timestamp" else "3.snapshot.json"
    cloud.forged[name] = signed_by(cloud.online, wrong, "auto").to_bytes()
    if role == "snapshot":
        timestamp.signed.snapshot_meta = pinned(3, cloud.forged[name])
        made = signed_by(cloud.online, timestamp, "timestamp")
        cloud.forged["timestamp.json"] = made.to_bytes()
    with pytest.raises(Corrupt, match=f"{role}.* is not signed as its delegator requires"):
        chain(cloud)


def test_a_role_signed_by_nobody_who_may_is_told_not_refused(cloud):
    """After a rotation of its keys a role waits for its people; the rest goes on."""
    made = cloud.next_targets("targets")
    (old,) = made.signed.get_delegated_role("release").keyids
    made.signed.revoke_key(old, "release")
    made.signed.add_key(KeyFolder(cloud.offline).make("release-2").public_key, "release")
    cloud.repository.submit("targets", signed_by(cloud.offline, made, "targets").to_bytes())
    assert not chain(cloud).is_signed("release")
    cloud.repository = cloud.reopened()
    assert cloud.repository.find_signed("digits", 1, "ort-x64") is None
    again = signed_by(cloud.offline, cloud.next_targets("release"), "release-2")
    assert cloud.repository.submit("release", again.to_bytes()).published
    assert chain(cloud).is_signed("release")
    assert cloud.repository.find_signed("digits", 1, "ort-x64").path == PATH


def test_a_missing_pin_is_refused(cloud):
    snapshot, timestamp = load(cloud, "snapshot"), load(cloud, "timestamp")
    snapshot.signed.version += 1
    del snapshot.signed.meta["auto.json"]
    serve(cloud, snapshot, timestamp)
    with pytest.raises(Corrupt, match=r"snapshot 3 does not pin auto\.json"):
        chain(cloud)
