import shutil
import threading
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.attacks.trust_stage import (
    DAY_S,
    bundle_entry,
    load,
    newest,
    signed_by,
    stage,
)
from tuf.api._payload import DelegatedRole, Delegations, Targets
from tuf.api.metadata import Metadata

from triplane.cloud.trust import MetadataRepository
from triplane.cloud.trust.initial import policy_file
from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.repository import KEPT_VERSIONS, MAX_OVERTAKEN
from triplane.cloud.trust.roles import MAX_METADATA_BYTES, moment
from triplane.cloud.trust.signing import renew, replace_keys
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.targets import Policy, Rule

PATH = "release/digits@1+ort-x64.bundle"
NEW = "release/digits@2+ort-x64.bundle"
RULE = Rule(share=0.5, golden="golden/digits.npz", metric="accuracy", floor=0.9)


@pytest.fixture
def cloud(tmp_path):
    return stage(tmp_path)


@pytest.fixture
def two(tmp_path):
    return stage(tmp_path, keys={"release": 3}, thresholds={"release": 2})


def files(cloud):
    folder = cloud.path / "metadata"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def signed(cloud, *keys, targets=(PATH,), role="release"):
    made = cloud.next_targets(role, [bundle_entry(path) for path in targets])
    return signed_by(cloud.offline, made, *(keys or (role,)))


# What is refused changes nothing


def edit_release(**fields):
    def change(made):
        for name, value in fields.items():
            setattr(made.signed, name, value)

    return change


def drop_digest(made):
    made.signed.targets[PATH].hashes = {"md5": "0" * 32}


def delegate(made):
    role = DelegatedRole("more", ["0" * 64], 1, terminating=True, paths=["release/*"])
    made.signed.delegations = Delegations({}, {"more": role})


def far(made):
    made.signed.expires = moment(made.signed.expires.timestamp() + 2 * DAY_S)


def past(made):
    made.signed.expires = moment(made.signed.expires.timestamp() - 365 * DAY_S)


def add(path):
    def change(made):
        made.signed.targets[path] = bundle_entry(PATH)

    return change


def no_custom(made):
    made.signed.targets[PATH].unrecognized_fields = {}


REFUSED = {
    "version ahead": (edit_release(version=7), "so the next is 2, got 7"),
    "expires too late": (far, "within 365 days"),
    "expired": (past, "expires after now"),
    "no sha256": (drop_digest, "a target has one hash, SHA-256"),
    "delegates": (delegate, "release must not delegate"),
    "other prefix": (add("auto/digits@1+ort-x64.bundle"), r"release may list release/\* only"),
    "no version": (add("release/digits+ort-x64.bundle"), "a bundle's target path is"),
    "version 0": (add("release/digits@0+ort-x64.bundle"), "a bundle's target path is"),
    "folder inside": (add("release/a/digits@1+x.bundle"), "a bundle's target path is"),
    "climbing": (add("release/../auto/digits@1+x.bundle"), "a bundle's target path is"),
    "capitals": (add("release/Digits@1+x.bundle"), "a bundle's target path is"),
    "new line": (add("release/digits@1+x.bundle\n"), "a bundle's target path is"),
    "other digits": (add("release/digits@٣+x.bundle"), "a bundle's target path is"),
    "no fields": (no_custom, "custom fields are"),
}


def test_a_version_that_was_overtaken_is_a_conflict_that_signing_again_resolves(cloud):
    made = cloud.next_targets("release", [bundle_entry(PATH)])
    made.signed.version = 1
    before = files(cloud)
    with pytest.raises(Conflict, match="so the next is 2, got 1; fetch the newest"):
        cloud.repository.submit("release", signed_by(cloud.offline, made, "release").to_bytes())
    assert files(cloud) == before


@pytest.mark.parametrize("case", REFUSED)
def test_release_metadata_that_breaks_a_rule_changes_nothing(cloud, case):
    change, text = REFUSED[case]
    made = cloud.next_targets("release", [bundle_entry(PATH)])
    change(made)
    before = files(cloud)
    with pytest.raises(InvalidInput, match=text):
        cloud.repository.submit("release", signed_by(cloud.offline, made, "release").to_bytes())
    assert files(cloud) == before


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[" * 100_000, b"\xff", b"1" * 5000, b'{"signed":{}}']
)
@pytest.mark.parametrize("role", ["root", "targets", "release", "auto"])
def test_bytes_that_are_no_metadata_change_nothing(cloud, role, data):
    before = files(cloud)
    with pytest.raises(InvalidInput, match="is not TUF metadata"):
        cloud.repository.submit(role, data)
    with pytest.raises(InvalidInput, match=f"at most {MAX_METADATA_BYTES} bytes"):
        cloud.repository.submit(role, bytes(MAX_METADATA_BYTES + 1))
    assert files(cloud) == before


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "", "../root", "golden"])
def test_only_roles_that_people_sign_are_submitted(cloud, role):
    with pytest.raises(InvalidInput, match="metadata is submitted for one of"):
        cloud.repository.submit(role, b"{}")
    with pytest.raises(InvalidInput, match="metadata is submitted for one of"):
        cloud.repository.pending(role)


def test_metadata_of_another_role_is_refused(cloud):
    root = cloud.repository.get("root.json")
    with pytest.raises(InvalidInput, match="is of type 'root', not 'targets'"):
        cloud.repository.submit("release", root)


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_make_submit_fail_otherwise_than_by_name(shared, data):
    with pytest.raises(TriplaneError):
        shared.repository.submit("release", data)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return stage(tmp_path_factory.mktemp("shared"))


def widen(made):
    made.signed.delegations.roles["auto"].paths = ["auto/*", "release/*"]


def weaken(made):
    made.signed.delegations.roles["release"].threshold = 2


def hidden(made):
    made.signed.targets[PATH] = bundle_entry(PATH)


def unlisted(made):
    made.signed.targets["policy.json"] = policy_file(Policy({"digits": RULE}))


def no_policy(made):
    del made.signed.targets["policy.json"]


def backtracking(made):
    made.signed.delegations.roles["release"].terminating = False


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (widen, "targets delegates exactly"),
        (weaken, "release needs its threshold of 2 met by different keys"),
        (hidden, r"targets lists policy\.json, plans\.json and golden/NAME, got 'release/digits@1"),
        (unlisted, r"golden sets that targets does not list: \['golden/digits\.npz'\]"),
        (no_policy, r"lists no policy\.json"),
        (backtracking, "the delegation of release must be terminating"),
    ],
)
def test_targets_metadata_that_breaks_a_rule_changes_nothing(cloud, change, text):
    made = cloud.next_targets("targets")
    change(made)
    before = files(cloud)
    with pytest.raises(InvalidInput, match=text):
        cloud.repository.submit("targets", signed_by(cloud.offline, made, "targets").to_bytes())
    assert files(cloud) == before


@pytest.mark.parametrize("others", [0, 1])
def test_one_key_under_two_ids_does_not_make_two(cloud, tmp_path, others):
    made = cloud.next_targets("targets")
    role = made.signed.get_delegated_role("release")
    key = made.signed.delegations.keys[role.keyids[0]]
    twin = type(key)("f" * 64, key.keytype, key.scheme, dict(key.keyval))
    made.signed.add_key(twin, "release")
    for i in range(others):
        made.signed.add_key(KeyFolder(tmp_path / "more").make(f"{i}").public_key, "release")
    role.threshold = 2
    text = f"it names {2 + others} key ids for {1 + others} different keys"
    with pytest.raises(InvalidInput, match=text):
        cloud.repository.submit("targets", signed_by(cloud.offline, made, "targets").to_bytes())


# Signatures


def test_signatures_of_several_people_are_merged(two):
    made = signed(two, "release-1")
    found = two.repository.submit("release", made.to_bytes())
    assert (found.published, found.signatures, found.threshold) == (False, 1, 2)
    two.repository = two.reopened()
    waiting = two.repository.pending("release")
    assert (waiting.published, waiting.signatures) == (False, 1)
    second = signed_by(two.offline, Metadata.from_bytes(waiting.metadata), "release-3")
    found = two.repository.submit("release", second.to_bytes())
    assert (found.published, found.signatures, found.version) == (True, 2, 2)
    assert two.repository.pending("release").published
    assert not (two.path / "metadata" / "pending" / "release.json").exists()
    assert two.repository.find_signed("digits", 1, "ort-x64").path == PATH


def test_signatures_of_strangers_are_dropped(two, tmp_path):
    made = signed(two, "release-1")
    made.sign(KeyFolder(tmp_path / "stranger").make("x"), append=True)
    two.repository.submit("release", made.to_bytes())
    kept = Metadata.from_bytes(two.repository.pending("release").metadata)
    assert len(kept.signatures) == 1
    assert len(made.signatures) == 2


def test_fewer_signatures_do_not_displace_more(tmp_path):
    three = stage(tmp_path, keys={"release": 3}, thresholds={"release": 3})
    three.repository.submit("release", signed(three, "release-1", "release-2").to_bytes())
    other = Metadata[Targets].from_bytes(three.repository.pending("release").metadata)
    other.signed.targets = {NEW: bundle_entry(NEW)}
    with pytest.raises(Conflict, match="waits with 2 of 3 signatures, this one has 1"):
        three.repository.submit("release", signed_by(three.offline, other, "release-3").to_bytes())
    as_many = signed_by(three.offline, other, "release-3", "release-1").to_bytes()
    assert not three.repository.submit("release", as_many).published
    assert NEW.encode() in three.repository.pending("release").metadata


def test_a_published_version_again_is_answered_not_refused(cloud):
    data = signed(cloud).to_bytes()
    told: list[str] = []
    cloud.repository.on_published(told.append)
    for _ in range(2):
        found = cloud.repository.submit("release", data)
        assert (found.published, found.version) == (True, 2)
    assert newest(cloud, "release") == 2
    assert told == ["release", "release"]


def test_what_waits_is_forgotten_when_another_version_is_published(two):
    two.repository.submit("release", signed(two, "release-1", targets=(NEW,)).to_bytes())
    published = Metadata[Targets].from_bytes(two.repository.get("1.release.json"))
    published.signed.version, published.signed.targets = 2, {PATH: bundle_entry(PATH)}
    made = signed_by(two.offline, published, "release-2", "release-3")
    assert two.repository.submit("release", made.to_bytes()).published
    assert two.repository.pending("release").published
    assert two.repository.find_signed("digits", 2, "ort-x64") is None


# Reading


def test_release_goes_before_auto(cloud):
    made = cloud.next_targets("targets")
    made.signed.targets["policy.json"] = policy_file(Policy({"digits": RULE}))
    made.signed.targets[RULE.golden] = bundle_entry(PATH)
    made.signed.targets[RULE.golden].path = RULE.golden
    cloud.repository.submit("targets", signed_by(cloud.offline, made, "targets").to_bytes())
    assert cloud.repository.policy().models == {"digits": RULE}
    assert cloud.repository.find_signed("digits", 2, "ort-x64") is None
    cloud.sign_auto()
    assert cloud.repository.find_signed("digits", 2, "ort-x64").path.startswith("auto/")
    cloud.release(bundle_entry(NEW))
    assert cloud.repository.find_signed("digits", 2, "ort-x64").path == NEW
    version = newest(cloud, "auto")
    cloud.sign_auto()
    assert newest(cloud, "auto") == version, "the same target again publishes nothing"
    with pytest.raises(Conflict, match="is signed with other content; push a new version"):
        cloud.repository.sign_auto(
            "digits", 2, "ort-x64", length=1, sha256=bytes(32), model_digest=b"\1" * 32,
            content_digest=bytes(32),
        )  # fmt: skip


def test_superseded_files_stay_for_nodes_in_a_refresh_and_then_go(cloud):
    for version in range(2, 4 + KEPT_VERSIONS):
        cloud.release(bundle_entry(f"release/digits@{version}+ort-x64.bundle"))
    latest = newest(cloud, "release")
    assert cloud.repository.get(f"{latest - KEPT_VERSIONS + 1}.release.json")
    with pytest.raises(NotFound, match="there is no metadata file"):
        cloud.repository.get(f"{latest - KEPT_VERSIONS}.release.json")
    assert cloud.repository.get("1.root.json") == cloud.repository.get("root.json")


def test_a_root_that_was_not_published_is_not_served(cloud):
    (cloud.path / "metadata" / "2.root.json").write_bytes(cloud.repository.get("root.json"))
    with pytest.raises(NotFound, match="the newest root is 1"):
        cloud.repository.get("2.root.json")


def test_damaged_metadata_is_named_at_the_start(cloud):
    file = cloud.path / "metadata" / "1.snapshot.json"
    file.write_bytes(file.read_bytes().replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(Corrupt, match=r"1\.snapshot\.json is not the pinned file"):
        cloud.reopened()


@pytest.mark.slow
def test_readers_never_see_a_mix_while_versions_are_published(cloud):
    """Nodes refresh as fast as they can beside a signer; none ever refuses anything."""
    stop, found = threading.Event(), []

    def refresh():
        node = cloud.node(threading.current_thread().name)
        while not stop.is_set():
            found.extend(node.refresh().refusals)

    threads = [threading.Thread(target=refresh, name=f"node-{i}") for i in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 12):
        cloud.release(bundle_entry(f"release/digits@{version}+ort-x64.bundle"))
    stop.set()
    for thread in threads:
        thread.join()
    assert found == []


# Time


def test_online_roles_are_signed_again_after_a_quarter_of_their_time(cloud):
    start, versions = cloud.clock(), []
    for hours in (0, 5.9, 6, 11.9, 12.1, 24 * 1.76, 24 * 92):
        cloud.clock.now_s = start + hours * 3600
        due = cloud.repository.keep_fresh()
        assert due > cloud.clock()
        roles = ("timestamp", "snapshot", "auto", "release")
        versions.append(tuple(load(cloud, role).signed.version for role in roles))
    assert versions == [
        (1, 1, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1), (2, 1, 1, 1), (3, 1, 1, 1), (4, 2, 1, 1),
        (5, 3, 2, 1),
    ]  # fmt: skip
    assert cloud.node().refresh().is_fresh


def test_a_cloud_that_slept_longer_than_everything_lasts_is_fresh_again(cloud):
    cloud.clock.now_s += 30 * DAY_S
    cloud.repository = cloud.reopened()
    assert not cloud.node().refresh().is_fresh
    cloud.repository.keep_fresh()
    assert cloud.node().refresh().is_fresh
    ends = cloud.repository.expiries()
    assert ends["timestamp"] == cloud.clock() + timedelta(days=1).total_seconds()


# A backup that was restored


def restored(cloud, tmp_path, later):
    """The cloud after `later` happened, its node saw it, and the backup from before came back."""
    backup = tmp_path / "backup"
    node = cloud.node()
    assert node.refresh().is_fresh
    shutil.copytree(cloud.path / "metadata", backup)
    later()
    assert node.refresh().is_fresh
    shutil.rmtree(cloud.path / "metadata")
    backup.rename(cloud.path / "metadata")
    cloud.repository = cloud.reopened()
    return node


def test_a_restored_cloud_counts_on_from_what_its_nodes_have_seen(cloud, tmp_path):
    cloud.allow(digits=RULE)
    node = restored(cloud, tmp_path, lambda: [cloud.sign_auto(version=n) for n in (2, 3, 4)])
    assert node.refresh().refusals[0].kind == "rollback"
    seen = node.versions()
    assert cloud.repository.overtake(seen)
    ours = cloud.repository.versions()
    assert all(ours[role] > seen[role] for role in ("timestamp", "snapshot", "auto"))
    assert node.refresh().is_fresh
    assert not cloud.repository.is_behind(node.versions(), node.digest())
    assert cloud.reopened().versions() == ours


def test_a_number_that_was_used_twice_is_noticed_by_its_content(cloud, tmp_path):
    node = restored(cloud, tmp_path, lambda: cloud.release(bundle_entry(PATH)))
    cloud.release(bundle_entry(NEW))
    assert node.refresh().is_fresh, "the number is the same, so it keeps what it has"
    assert cloud.repository.is_behind(node.versions(), node.digest())
    assert cloud.repository.overtake(node.versions())
    assert node.refresh().is_fresh
    assert node.target(NEW).sha256
    with pytest.raises(AttemptRefused, match="is not listed"):
        node.target(PATH)


def test_what_people_signed_after_the_backup_is_signed_past_its_number(cloud, tmp_path):
    cloud.release(bundle_entry(PATH))
    node = restored(cloud, tmp_path, lambda: cloud.release(bundle_entry(NEW)))
    seen = node.versions()
    cloud.repository.overtake(seen)
    assert not node.refresh().is_fresh
    while cloud.repository.versions()["release"] <= seen["release"]:
        renew(cloud.repository, "release", cloud.offline, now_s=cloud.clock())
    assert node.refresh().is_fresh
    assert node.target(PATH).sha256
    with pytest.raises(AttemptRefused, match="is not listed"):
        node.target(NEW)


def test_a_node_that_lies_about_versions_cannot_use_the_numbers_up(cloud):
    before = cloud.repository.versions()
    lie = {"timestamp": before["timestamp"] + MAX_OVERTAKEN + 1, "snapshot": 1 << 30, "other": 7}
    assert not cloud.repository.overtake(lie)
    assert cloud.repository.versions() == before


# Keys


def test_a_root_that_names_online_keys_the_cloud_has_not_is_refused(cloud, tmp_path):
    elsewhere = KeyFolder(tmp_path / "elsewhere").make("timestamp").public_key
    before = files(cloud)
    with pytest.raises(NotFound, match="has no key of the role timestamp"):
        replace_keys(
            cloud.repository, {"timestamp": [elsewhere]}, cloud.offline, now_s=cloud.clock()
        )
    assert files(cloud) == before


def test_the_root_key_itself_is_replaced_when_both_sign(cloud):
    node = cloud.node()
    key = KeyFolder(cloud.offline).make("root-2").public_key
    done = replace_keys(cloud.repository, {"root": [key]}, cloud.offline, now_s=cloud.clock())
    assert done.submitted.published
    assert node.refresh().is_fresh
    (cloud.offline / "root.pem").unlink()
    again = replace_keys(cloud.repository, {}, cloud.offline, now_s=cloud.clock())
    assert (again.submitted.published, again.submitted.version) == (True, 3)
    assert node.refresh().is_fresh
    assert cloud.reopened().get("root.json") == cloud.repository.get("3.root.json")


def test_keys_are_files_only_their_owner_can_read(cloud):
    for folder, count in ((cloud.online, 3), (cloud.offline, 4)):
        assert folder.stat().st_mode & 0o777 == 0o700
        found = sorted(folder.glob("*.pem"))
        assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
        assert len(KeyFolder(folder).signers()) == len(found) == count
    with pytest.raises(Conflict, match="a key is never replaced"):
        KeyFolder(cloud.online).make("auto")
    (cloud.online / "auto.pem").write_bytes(b"no key")
    with pytest.raises(Corrupt, match=r"auto\.pem is not a private key"):
        KeyFolder(cloud.online).signers()


def test_a_second_set_of_metadata_is_not_made_over_the_first(cloud):
    with pytest.raises(Conflict, match="has metadata already"):
        stage(cloud.path)


@pytest.mark.parametrize("keys", [{"release": 17}, {"release": 0}, {"nobody": 1}])
def test_numbers_of_keys_that_make_no_sense_are_refused(tmp_path, keys):
    with pytest.raises(InvalidInput):
        stage(tmp_path, keys=keys)
    assert not (tmp_path / "metadata").exists()
    assert isinstance(stage(tmp_path).repository, MetadataRepository)
