"""A roster is signed by people, with numbers that rise, beside the plans of the same role."""

import hashlib
import shutil

import pytest
from tests.attacks.trust_stage import stage

from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.repository import target_file
from triplane.cloud.trust.roles import Lists
from triplane.cloud.trust.rosters import ROSTER_S, change_roster
from triplane.cloud.trust.rotating import rotate
from triplane.cloud.trust.signing import Overtaken, Signer
from triplane.proto.errors import Conflict, InvalidInput, NotFound
from triplane.proto.plan_statement import Least, PlanStatement
from triplane.proto.roster import ROSTER_PATH, Roster
from triplane.proto.targets import plan_target, roster_target

ANN, BOB, EVE = (hashlib.sha256(name).digest() for name in (b"ann", b"bob", b"eve"))
PLAN = plan_target(
    "plans",
    PlanStatement(
        model="tiny", version=1, model_digest="0" * 64, digest="ab" * 32, algorithm="fedavg",
        hyperparameters={}, tensors=("w",), least=Least(),
    ),
    length=7,
    sha256=bytes(32),
)  # fmt: skip


def adding(*digests):
    return lambda before: before | set(digests)


def changed(cloud, change, keys=None, **options):
    keys = keys or cloud.offline
    return change_roster(cloud.repository, change, keys, now_s=cloud.clock(), **options)


@pytest.fixture
def cloud(tmp_path):
    return stage(tmp_path / "stage")


@pytest.fixture
def two(tmp_path):
    """A cloud whose plans need two signers, and the folder of each."""
    cloud = stage(tmp_path / "stage", keys={"plans": 2}, thresholds={"plans": 2})
    folders = [tmp_path / name for name in ("plans-1", "plans-2")]
    for folder in folders:
        folder.mkdir()
        for file in ("root.json", f"{folder.name}.pem"):
            shutil.copy(cloud.offline / file, folder)
    return cloud, *folders


def test_a_roster_is_read_by_everybody_who_verifies_the_list_of_plans(cloud):
    done = changed(cloud, adding(ANN, BOB))
    assert done.before is None
    assert done.signing.submitted.published
    assert done.roster.digests == {ANN, BOB}
    assert done.roster.expires_s == cloud.clock() + ROSTER_S
    assert cloud.repository.roster() == done.roster
    node = cloud.node()
    assert node.refresh().is_fresh
    assert node.roster() == done.roster


def test_its_versions_rise_also_after_the_list_was_dropped(cloud):
    first = changed(cloud, adding(ANN)).roster
    second = changed(cloud, adding(BOB)).roster
    assert (first.version, second.version) == (2, 3)
    _, key = KeyFolder(cloud.offline).make_next("plans")
    rotate(
        cloud.repository, "plans", [key.public_key], cloud.offline, lists=Lists.DROPPED,
        now_s=cloud.clock(),
    )  # fmt: skip
    assert cloud.repository.roster() is None
    third = changed(cloud, adding(ANN))
    assert third.before is None
    assert third.roster.version == 5


def test_plans_and_the_roster_stay_when_the_other_is_signed(cloud):
    signer = Signer(cloud.repository, cloud.offline, "plans")
    signer.sign(None, {PLAN.path: target_file(PLAN)}, cloud.clock())
    roster = changed(cloud, adding(ANN)).roster
    assert cloud.repository.find_plan("ab" * 32) == PLAN
    signer = Signer(cloud.repository, cloud.offline, "plans")
    signer.sign(None, signer.published(), cloud.clock())
    assert cloud.repository.roster() == roster


def test_a_roster_that_has_expired_is_none(cloud):
    assert "roster" not in cloud.repository.expiries()
    changed(cloud, adding(ANN), valid_s=60)
    assert cloud.repository.expiries()["roster"] == cloud.clock() + 60
    cloud.clock.now_s += 60
    assert cloud.repository.roster() is None


def test_the_second_signer_signs_what_the_first_did(two):
    cloud, one, other = two
    first = changed(cloud, adding(ANN), one)
    assert not first.signing.submitted.published
    assert cloud.repository.roster() is None
    cloud.clock.now_s += 3600
    second = changed(cloud, adding(ANN), other)
    assert second.signing.submitted.published
    assert cloud.repository.roster() == first.roster == second.roster


def test_the_second_signer_does_not_sign_other_devices_of_the_first(two):
    cloud, one, other = two
    changed(cloud, adding(ANN, EVE), one)
    second = changed(cloud, adding(ANN), other)
    assert not second.signing.submitted.published
    assert second.signing.submitted.signatures == 1


def test_a_roster_is_not_signed_beside_plans_that_nobody_checked_here(two):
    cloud, one, other = two
    Signer(cloud.repository, one, "plans").sign(None, {PLAN.path: target_file(PLAN)}, cloud.clock())
    with pytest.raises(Conflict, match="1 plans wait for signatures") as refused:
        changed(cloud, adding(ANN), other)
    assert not isinstance(refused.value, Overtaken)
    both = changed(cloud, adding(ANN), one)  # who has checked the plan
    assert not both.signing.submitted.published


def test_a_change_that_makes_no_sense_is_the_signers_error(cloud):
    def change(_):
        raise NotFound("nobody")

    with pytest.raises(NotFound, match="nobody"):
        changed(cloud, change)


@pytest.mark.parametrize(("version", "digests"), [(1, {BOB}), (3, {BOB}), (9, {ANN})])
def test_a_roster_that_devices_would_refuse_is_not_published(cloud, version, digests):
    first = changed(cloud, adding(ANN)).roster
    changed(cloud, adding(EVE))
    signer = Signer(cloud.repository, cloud.offline, "plans")
    assert (first.version, signer.version) == (2, 3)
    entry = target_file(roster_target(Roster(version, 1 << 31, frozenset(digests))))
    with pytest.raises(InvalidInput, match="has a version of 4 to 4, got"):
        signer.sign(None, {ROSTER_PATH: entry}, cloud.clock())
