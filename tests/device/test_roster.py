"""A device keeps the newest roster that people signed, and no other."""

import asyncio
import json
import time
from dataclasses import replace

import pytest
from tests.attacks.trust_stage import forge_chain, load, signed_by, stage
from tests.cloud.federation import given
from tests.device.devices import cloud_of, process_of, started
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within

from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.repository import target_file
from triplane.cloud.trust.rosters import change_roster
from triplane.cloud.trust.rotating import rotate
from triplane.device.home import DeviceHome
from triplane.device.roster import current_roster, keep_roster
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Corrupt, Unavailable
from triplane.proto.identity import key_digest
from triplane.proto.roster import MAX_ROSTER_BYTES, ROSTER_PATH, Roster
from triplane.proto.signed.trust import Trust
from triplane.proto.targets import roster_target

SHARD = plans.shard(held_out=6)
ANN, EVE = bytes(32), b"\1" * 32


def said_by(folder, before, *, required=True):
    """What a device says of an honest task. before: gets the stage and the digest of its key."""

    async def story():
        async with staged(folder / "stage") as stage:
            client = client_at(stage, folder / "ann", SHARD)
            home = DeviceHome(folder / "ann")
            if required:
                home.save_settings(replace(client.settings, roster_required=True))
                client = client_at(stage, folder / "ann", SHARD)
            before(stage, key_digest(home.identity.certificate))
            async with serving(client):
                await stage.offer()
                stage.tell(stage.task())
                return await stage.contribution(lease(1))

    return within(story())


def learns(said):
    return said.WhichOneof("outcome") == "update"


def test_a_device_of_the_roster_takes_part_and_knows_the_others(tmp_path):
    said = said_by(tmp_path, lambda stage, digest: stage.signer.enlist(digest, EVE))
    assert learns(said), said.declined
    roster = current_roster(DeviceHome(tmp_path / "ann"), time.time())
    assert roster is not None
    assert len(roster.digests) == 2
    certificate = DeviceHome(tmp_path / "ann").identity.certificate
    assert key_digest(certificate) in roster.digests


def test_a_device_outside_of_the_roster_says_so(tmp_path):
    said = said_by(tmp_path, lambda stage, _: stage.signer.enlist(EVE))
    assert "is not in the roster 2 of 1 device," in said.declined
    assert "triplane cloud roster add ann --keys DIR" in said.declined


def test_a_run_without_a_roster_is_declined_where_its_owner_demands_one(tmp_path):
    said = said_by(tmp_path, lambda *_: None)
    assert "demands a roster of devices" in said.declined
    assert "nobody has signed one" in said.declined


def test_other_devices_take_part_without_a_roster(tmp_path):
    assert learns(said_by(tmp_path, lambda *_: None, required=False))
    assert current_roster(DeviceHome(tmp_path / "ann"), time.time()) is None


def test_an_expired_roster_is_declined(tmp_path):
    said = said_by(tmp_path, lambda stage, digest: stage.signer.enlist(digest, valid_s=0))
    assert "roster 2 expired" in said.declined
    assert "triplane cloud roster renew" in said.declined


@pytest.mark.long
def test_a_device_process_waits_for_the_roster_that_its_owner_demands(tmp_path):
    """It verifies in a process of its own, and its own reads what was kept."""

    async def story():
        async with cloud_of(tmp_path) as cloud:
            process = await process_of(cloud, tmp_path, "ann", 0)
            home = DeviceHome(process.home)
            home.save_settings(replace(home.settings, roster_required=True))
            with started(process):
                request = given.start_request(cohort={"devices": 1})
                run = await cloud.federation.begin(request, by="operator")
                reason = await reason_of(cloud, run.id)
                await cloud.federation.halt(run.id, reason="", by="operator")
                digest = bytes.fromhex(home.enrolled.key)
                await asyncio.to_thread(
                    change_roster,
                    cloud.repository,
                    lambda _: frozenset({digest}),
                    tmp_path / "keys",
                )
                request = given.start_request(cohort={"devices": 1})
                run = await cloud.federation.begin(request, by="operator")
                return reason, await given.ended(cloud, run.id), current_roster(home, time.time())

    reason, run, roster = within(story())
    assert "nobody has signed one" in reason
    assert (run.phase, run.reason) == (pb.Run.DONE, "")
    assert len(roster.digests) == 1


async def reason_of(cloud, run_id):
    """Why the one device of a run declined."""
    while True:
        moved = cloud.federation.moved
        run = await cloud.federation.run(run_id)
        why = [text for member in run.members for text in (member.reason, str(member.why))]
        if any("roster" in text for text in why):
            return " ".join(why)
        await moved.wait()


# Below, a thief holds the online keys of the cloud, and the link.


@pytest.fixture
def cloud(tmp_path):
    return stage(tmp_path / "cloud")


@pytest.fixture
def home(tmp_path):
    made = DeviceHome(tmp_path / "ann")
    made.make()
    return made


def enlisted(cloud, *digests, **options):
    return change_roster(
        cloud.repository,
        lambda _: frozenset(digests),
        cloud.offline,
        now_s=cloud.clock(),
        **options,
    ).roster


def kept(cloud, home):
    """The roster of the device after it looked for one."""
    trust = cloud.node("device")
    freshness = trust.refresh()
    assert freshness.is_fresh, freshness.refusals
    keep_roster(home, trust)
    return current_roster(home, cloud.clock())


def with_stolen_new_keys(cloud, **changed):
    """Forge metadata after snapshot and timestamp got new keys, which the thief has as well."""
    for role in ("snapshot", "timestamp"):
        _, key = KeyFolder(cloud.online).make_next(role)
        rotate(cloud.repository, role, [key.public_key], cloud.offline, now_s=cloud.clock())
        (cloud.online / f"{role}-2.pem").replace(cloud.online / f"{role}.pem")
    forge_chain(cloud, **changed)


def test_an_older_roster_is_refused_even_where_metadata_has_forgotten_its_version(cloud, home):
    """New keys of snapshot and timestamp, which the thief has as well, begin to count anew."""
    old = enlisted(cloud, ANN, EVE)
    plans_before = load(cloud, "plans")
    new = enlisted(cloud, ANN)
    assert kept(cloud, home) == new
    with_stolen_new_keys(cloud, plans=plans_before)
    with pytest.raises(Corrupt, match="roster 2 is older than roster 3") as refused:
        kept(cloud, home)
    assert old.version == 2
    assert "somebody shows it an old list" in str(refused.value)


def test_a_list_from_before_the_roster_does_not_withdraw_it(cloud, home):
    first = load(cloud, "plans")
    enlisted(cloud, ANN)
    kept(cloud, home)
    with_stolen_new_keys(cloud, plans=first)
    with pytest.raises(Corrupt, match="the list of plans 1 is older than roster 2"):
        kept(cloud, home)


def test_a_list_that_does_not_verify_does_not_withdraw_the_roster(cloud, home):
    roster = enlisted(cloud, ANN)
    kept(cloud, home)
    forged = cloud.next_targets("plans")
    forged.signed.targets = {}
    forge_chain(cloud, plans=signed_by(cloud.online, forged, "auto"))
    with pytest.raises(
        Corrupt, match=r"refuses the roster .* 0 valid signatures of 1 that the role plans"
    ):
        kept(cloud, home)
    cloud.forged.clear()
    cloud.repository.overtake(cloud.node("device").versions())
    enlisted(cloud, ANN)
    assert kept(cloud, home).version > roster.version


def test_a_withdrawn_roster_counts_no_longer_and_its_number_is_kept(cloud, home):
    enlisted(cloud, ANN)
    kept(cloud, home)
    made = cloud.next_targets("plans")
    made.signed.targets = {}
    cloud.repository.submit("plans", signed_by(cloud.offline, made, "plans").to_bytes())
    assert kept(cloud, home) is None
    assert json.loads(home.roster_file.read_bytes())["version"] == 3


def test_a_withdrawn_roster_does_not_come_back(cloud, home):
    enlisted(cloud, ANN)
    kept(cloud, home)
    with_roster = load(cloud, "plans")
    made = cloud.next_targets("plans")
    made.signed.targets = {}
    cloud.repository.submit("plans", signed_by(cloud.offline, made, "plans").to_bytes())
    assert kept(cloud, home) is None
    with_stolen_new_keys(cloud, plans=with_roster)
    with pytest.raises(Corrupt, match="roster 2 is older than the list of plans 3"):
        kept(cloud, home)
    cloud.forged.clear()
    cloud.repository.overtake(cloud.node("device").versions())
    enlisted(cloud, EVE)
    assert kept(cloud, home).digests == {EVE}


def test_after_a_refusal_another_roster_of_the_same_number_is_refused_too(cloud, home):
    enlisted(cloud, ANN)
    kept(cloud, home)
    forged = cloud.next_targets("plans")
    forge_chain(cloud, plans=signed_by(cloud.online, forged, "auto"))
    with pytest.raises(Corrupt, match="0 valid signatures of 1"):
        kept(cloud, home)
    cloud.forged.clear()
    cloud.repository.overtake(cloud.node("device").versions())
    forged = cloud.next_targets("plans")
    forged.signed.targets[ROSTER_PATH] = target_file(
        roster_target(Roster(2, int(cloud.clock()) + 9, frozenset({EVE})))
    )
    forge_chain(cloud, plans=signed_by(cloud.offline, forged, "plans"))
    with pytest.raises(Corrupt, match="roster 2 lists other devices than when"):
        kept(cloud, home)


def test_another_roster_of_the_same_number_is_refused(cloud, home):
    enlisted(cloud, ANN)
    kept(cloud, home)
    forged = cloud.next_targets("plans")
    forged.signed.targets[ROSTER_PATH] = target_file(
        roster_target(Roster(2, int(cloud.clock()) + 9, frozenset({EVE})))
    )
    forge_chain(cloud, plans=signed_by(cloud.offline, forged, "plans"))
    with pytest.raises(Corrupt, match="roster 2 lists other devices than when"):
        kept(cloud, home)


@pytest.mark.parametrize("key", ["auto", "snapshot"])
def test_a_roster_that_a_key_of_the_cloud_signed_is_refused(cloud, home, key):
    forged = cloud.next_targets("plans")
    forged.signed.targets[ROSTER_PATH] = target_file(
        roster_target(Roster(2, 1 << 31, frozenset({EVE})))
    )
    forge_chain(cloud, plans=signed_by(cloud.online, forged, key))
    with pytest.raises(Corrupt, match=r"refuses the roster of devices: .*plans.* signature"):
        kept(cloud, home)


def test_the_role_auto_cannot_list_a_roster(cloud, home):
    forged = cloud.next_targets("auto")
    forged.signed.targets[ROSTER_PATH] = target_file(
        roster_target(Roster(2, 1 << 31, frozenset({EVE})))
    )
    forge_chain(cloud, auto=signed_by(cloud.online, forged, "auto"))
    assert kept(cloud, home) is None


def test_a_roster_that_is_too_large_is_refused(cloud, home):
    """Signed by the right key, as by a signer with another program."""
    forged = cloud.next_targets("plans")
    entry = target_file(roster_target(Roster(2, 1 << 31, frozenset({EVE}))))
    text = entry.unrecognized_fields["custom"]["text"].replace("}", " " * MAX_ROSTER_BYTES + "}")
    entry = type(entry).from_data(ROSTER_PATH, text.encode(), ["sha256"])
    entry.unrecognized_fields["custom"] = {"text": text}
    forged.signed.targets[ROSTER_PATH] = entry
    forge_chain(cloud, plans=signed_by(cloud.offline, forged, "plans"))
    with pytest.raises(Corrupt, match="at most 20000 devices in"):
        kept(cloud, home)


def test_a_roster_expires_on_the_device_without_the_cloud(cloud, home):
    enlisted(cloud, ANN, valid_s=60)
    assert kept(cloud, home).digests == {ANN}
    with pytest.raises(Corrupt, match="has expired"):
        current_roster(home, cloud.clock() + 60)


def test_a_failed_link_changes_nothing(cloud, home):
    roster = enlisted(cloud, ANN)
    kept(cloud, home)

    def away(_):
        raise Unavailable("no link")

    trust = Trust(cloud.path / "device", away, cloud.clock)
    with pytest.raises(Unavailable, match="refresh first"):
        keep_roster(home, trust)
    assert current_roster(home, cloud.clock()) == roster


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"{}", b'{"version": 1, "text": "x", "refused": ""}']
)
def test_a_damaged_file_is_named_and_no_roster_is_taken(cloud, home, data):
    home.roster_file.write_bytes(data)
    with pytest.raises(Corrupt, match=r"roster\.json cannot be read.*remove it"):
        current_roster(home, 0.0)
    enlisted(cloud, ANN)
    with pytest.raises(Corrupt, match=r"roster\.json cannot be read"):
        kept(cloud, home)
