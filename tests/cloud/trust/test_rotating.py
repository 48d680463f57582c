"""Other keys for every role: nodes follow, lists are carried on or dropped, none is half done."""

import pytest
from tests.attacks.trust_stage import bundle_entry, load, signed_by, stage
from tuf.api._payload import Targets
from tuf.api.metadata import Metadata

from triplane.cloud.trust import initial
from triplane.cloud.trust.keys import KeyFolder, read_public
from triplane.cloud.trust.repository import target_file
from triplane.cloud.trust.roles import ROLES, Lists, expiry
from triplane.cloud.trust.rotating import rotate
from triplane.cloud.trust.signing import Signer, renew, replace_keys
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from triplane.proto.plan_statement import Least, PlanStatement
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.targets import Rule, plan_target

PATH = "release/digits@1+ort-x64.bundle"
AUTO = "auto/digits@2+ort-x64.bundle"
RULE = Rule(share=1.0, golden="golden/digits", metric="accuracy", floor=0.9)


@pytest.fixture
def cloud(tmp_path):
    """One release and one automatic one, by the first keys."""
    made = stage(tmp_path / "stage")
    made.release(bundle_entry(PATH))
    made.allow(digits=RULE)
    made.sign_auto()
    return made


def folder_of(cloud, role):
    return cloud.online if ROLES[role].keys == "online" else cloud.offline


def other_key(cloud, role):
    return KeyFolder(folder_of(cloud, role)).make_next(role)[1].public_key


def rotated(cloud, role, *keys, **options):
    return rotate(cloud.repository, role, keys, cloud.offline, now_s=cloud.clock(), **options)


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_nodes_follow_to_other_keys_of_any_role_and_keep_what_is_listed(cloud, role):
    node, old = cloud.node(), KeyFolder(folder_of(cloud, role)).path / f"{role}.pem"
    assert node.refresh().is_fresh
    key = other_key(cloud, role)
    made = rotated(cloud, role, key)
    assert made.named.submitted.published
    cloud.repository.keep_fresh()
    if role != "root":  # a node starts at the first root, which the old key signed
        old.unlink()
    for each in (node, cloud.node("late")):
        found = each.refresh()
        assert found.is_fresh, found.refusals
        assert each.target(PATH).path == PATH
        assert each.target(AUTO).path == AUTO
        assert each.policy().models == {"digits": RULE}
    delegator = "root" if role in load(cloud, "root").signed.roles else "targets"
    assert load(cloud, delegator).signed.get_delegated_role(role).keyids == [key.keyid]


@pytest.mark.parametrize("role", ["targets", "release"])
def test_a_rotation_cut_off_in_the_middle_is_ended_by_running_it_again(cloud, role):
    """The new keys are named, and the process is killed before it signs the list again."""
    key = other_key(cloud, role)
    submit = cloud.repository.submit

    def killed(name, data, *auto):
        if name == role:
            raise Unavailable("killed")
        return submit(name, data, *auto)

    cloud.repository.submit = killed
    with pytest.raises(Unavailable):
        rotated(cloud, role, key)
    del cloud.repository.submit
    again = rotated(cloud, role, key)
    assert again.again is not None
    assert again.again.submitted.published
    node = cloud.node()
    assert node.refresh().is_fresh
    assert node.target(PATH).path == PATH
    assert node.policy().models == {"digits": RULE}


def test_after_a_theft_nothing_that_the_old_key_signed_is_carried_on(cloud):
    cloud.release(bundle_entry("release/digits@9+ort-x64.bundle"))
    made = rotated(cloud, "release", other_key(cloud, "release"), lists=Lists.DROPPED)
    assert made.carried == ()
    assert load(cloud, "release").signed.targets == {}
    node = cloud.node()
    assert node.refresh().is_fresh
    with pytest.raises(AttemptRefused, match="is not listed"):
        node.target(PATH)
    with pytest.raises(InvalidInput, match="so it cannot be dropped"):
        rotated(cloud, "targets", other_key(cloud, "targets"), lists=Lists.DROPPED)


def test_after_a_theft_of_its_key_the_cloud_does_not_sign_the_automatic_list_again(cloud):
    thief = "auto/digits@7+ort-x64.bundle"
    cloud.sign_auto(version=7)
    key = other_key(cloud, "auto")
    rotated(cloud, "auto", key, lists=Lists.DROPPED)
    cloud.repository.keep_fresh()
    assert load(cloud, "auto").signed.targets == {}
    assert cloud.reopened().find_signed("digits", 7, "ort-x64") is None
    for node in (cloud.node(), cloud.node("late")):
        assert node.refresh().is_fresh
        for path in (thief, AUTO):
            with pytest.raises(AttemptRefused, match="is not listed"):
                node.target(path)
    cloud.sign_auto(version=8)
    assert cloud.repository.find_signed("digits", 8, "ort-x64")


def test_what_was_stolen_is_not_replaced_before_the_cloud_has_the_new_key(cloud, tmp_path):
    """Otherwise the list would wait for the key, and then be signed again."""
    elsewhere = KeyFolder(tmp_path / "elsewhere").make("auto").public_key
    with pytest.raises(NotFound, match="has no key of the role auto"):
        rotated(cloud, "auto", elsewhere, lists=Lists.DROPPED)
    assert cloud.repository.versions()["targets"] == 2


def test_a_list_that_neither_the_new_nor_the_former_keys_signed_is_not_carried_on(cloud, tmp_path):
    elsewhere = KeyFolder(tmp_path / "elsewhere").make("release").public_key
    assert rotated(cloud, "release", elsewhere).again is None, "its holder signs anew"
    cloud.allow(digits=RULE)
    here = other_key(cloud, "release")
    with pytest.raises(Conflict, match="drop it, then sign what you know again"):
        rotated(cloud, "release", here)
    made = rotated(cloud, "release", here, lists=Lists.DROPPED)
    assert made.again is not None
    assert cloud.node().refresh().is_fresh


def test_three_keys_and_a_threshold_are_given_to_a_role(cloud):
    keys = [other_key(cloud, "release") for _ in range(3)]
    made = rotated(cloud, "release", *keys, threshold=2)
    assert made.again is not None
    assert made.again.submitted.published
    assert made.carried == (PATH,)
    pending = cloud.repository.pending("release")
    assert (pending.signatures, pending.threshold) == (3, 2)
    with pytest.raises(InvalidInput, match="a threshold is 1 to the number of keys, 3, got 4"):
        rotated(cloud, "release", *keys, threshold=4)
    with pytest.raises(InvalidInput, match="roles are root, targets"):
        rotated(cloud, "nobody", *keys)


def test_a_root_that_waits_is_signed_along_by_the_next_holder(tmp_path):
    cloud = stage(tmp_path / "stage", keys={"root": 2}, thresholds={"root": 2})
    first, second = (tmp_path / name for name in ("first", "second"))
    for number, folder in enumerate((first, second), 1):
        folder.mkdir()
        for name in ("root.json", f"root-{number}.pem"):
            (folder / name).write_bytes((cloud.offline / name).read_bytes())
    waits = replace_keys(cloud.repository, {}, first, now_s=cloud.clock())
    assert (waits.submitted.published, waits.submitted.signatures) == (False, 1)
    cloud.clock.now_s += 3600
    done = replace_keys(cloud.repository, {}, second, now_s=cloud.clock())
    assert (done.submitted.published, done.submitted.signatures) == (True, 2)
    assert cloud.node().refresh().is_fresh


def test_a_rotation_without_the_deciding_key_changes_nothing(cloud, tmp_path):
    key = other_key(cloud, "release")
    before = cloud.repository.get("timestamp.json")
    (cloud.offline / "targets.pem").unlink()
    with pytest.raises(NotFound, match="has no key of the role targets"):
        rotated(cloud, "release", key)
    assert cloud.repository.get("timestamp.json") == before


def test_a_role_with_other_keys_is_renewed_by_them(cloud):
    rotated(cloud, "release", other_key(cloud, "release"))
    (cloud.offline / "release.pem").unlink()
    done = renew(cloud.repository, "release", cloud.offline, now_s=cloud.clock())
    assert done.submitted.published
    assert set(load(cloud, "release").signed.targets) == {PATH}


def test_the_public_half_of_a_key_is_handed_over_as_a_file(tmp_path):
    folder = KeyFolder(tmp_path / "keys")
    made = folder.make("alex").public_key
    file = folder.write_public("alex")
    assert read_public(file) == made
    assert b"PRIVATE" not in file.read_bytes()
    assert [folder.make_next("root")[0].name for _ in range(2)] == ["root-2.pem", "root-3.pem"]
    for name, data in {
        "other.pub": b"no key",
        "private.pub": (tmp_path / "keys/alex.pem").read_bytes(),
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(Corrupt, match=name):
            read_public(tmp_path / name)


def older(folder, monkeypatch):
    """Metadata as an earlier release made it, without the role plans."""
    for name in ("ROLES", "DELEGATED"):
        table = getattr(initial, name)
        is_dict = isinstance(table, dict)
        kept = [row for row in (table.values() if is_dict else table) if row.name != "plans"]
        monkeypatch.setattr(initial, name, {r.name: r for r in kept} if is_dict else tuple(kept))
    made = stage(folder)
    monkeypatch.undo()
    return made


def test_a_cloud_of_an_earlier_release_gets_the_role_plans(tmp_path, monkeypatch):
    cloud = older(tmp_path / "cloud", monkeypatch)
    device, digest = cloud.node("device"), "ab" * 32
    assert "plans" not in cloud.repository.versions()
    assert device.refresh().is_fresh
    with pytest.raises(AttemptRefused, match="is not listed: nobody has signed plans yet"):
        device.plan(digest, by_people=True)
    with pytest.raises(AttemptRefused, match="is not listed by the role auto"):
        device.plan(digest, by_people=False)
    with pytest.raises(NotFound, match="triplane cloud keys rotate plans --keys DIR"):
        Signer(cloud.repository, cloud.offline, "plans")
    with pytest.raises(InvalidInput, match="triplane cloud keys rotate plans --keys DIR"):
        cloud.repository.submit("plans", plans_of(cloud, 1).to_bytes())
    _, key = KeyFolder(cloud.offline).make_next("plans")
    done = rotate(cloud.repository, "plans", [key.public_key], cloud.offline)
    assert done.named.submitted.published
    assert done.again is not None
    assert done.again.submitted.published
    assert cloud.repository.versions()["plans"] == 1
    assert cloud.reopened().versions()["plans"] == 1
    assert device.refresh().is_fresh
    with pytest.raises(AttemptRefused, match="is not listed by the role plans"):
        device.plan(digest, by_people=True)
    signer = Signer(cloud.repository, cloud.offline, "plans")
    signer.sign(None, {PLAN.path: target_file(PLAN)})
    assert device.refresh().is_fresh
    assert device.plan(digest, by_people=True) == PLAN


def test_a_role_that_is_named_but_has_not_signed_yet_lists_nothing(tmp_path, monkeypatch):
    """The new key is with another person, who signs later."""
    cloud = older(tmp_path / "cloud", monkeypatch)
    key = KeyFolder(tmp_path / "other").make("plans").public_key
    done = rotate(cloud.repository, "plans", [key], cloud.offline)
    assert (done.named.submitted.published, done.again) == (True, None)
    device = cloud.node("device")
    assert device.refresh().is_fresh
    with pytest.raises(AttemptRefused, match="nobody has signed plans yet"):
        device.plan("ab" * 32, by_people=True)
    assert cloud.repository.pending("plans").metadata == b""
    assert cloud.repository.keep_fresh() > 0


def test_the_delegation_to_plans_stays(tmp_path):
    cloud = stage(tmp_path)
    made = cloud.next_targets("targets")
    del made.signed.delegations.roles["plans"]
    made = signed_by(cloud.offline, made, "targets")
    with pytest.raises(InvalidInput, match="targets must keep its delegation to plans"):
        cloud.repository.submit("targets", made.to_bytes())


def plans_of(cloud, version):
    return Metadata(Targets(version=version, expires=expiry("plans", cloud.clock())))


PLAN = plan_target(
    "plans",
    PlanStatement(
        model="tiny", version=1, model_digest="0" * 64, digest="ab" * 32, algorithm="fedavg",
        hyperparameters={}, tensors=("w",), least=Least(),
    ),
    length=7,
    sha256=bytes(32),
)  # fmt: skip
