"""The first root of signed metadata that a device trusts."""

import asyncio

import pytest
from tests.cloud.federation import given
from tests.device.devices import cloud_of, token_for
from tests.support.deadlines import within

from triplane.device import FederatedClient
from triplane.device.home import BOOTSTRAP, DeviceHome
from triplane.proto.errors import Conflict, Corrupt
from triplane.proto.identity import key_digest
from triplane.proto.signed import enrolling, trust

pytestmark = pytest.mark.slow


def client_in(folder, name="ann"):
    return FederatedClient(folder / name, given.shard(0), population=given.POPULATION)


def enrolled(folder, story):
    async def whole():
        async with cloud_of(folder) as cloud:
            return await story(cloud)

    return within(whole())


def test_a_device_keeps_the_clouds_root_from_its_enrolment(tmp_path):
    async def story(cloud):
        client = client_in(tmp_path)
        token = await token_for(cloud, "ann")
        await asyncio.to_thread(client.enrol, token, cloud.enrol_address)
        assert (
            cloud.repository.get("root.json")
            == (tmp_path / "ann" / "trust" / BOOTSTRAP).read_bytes()
        )

    enrolled(tmp_path, story)
    assert trust.BOOTSTRAP == BOOTSTRAP


@pytest.mark.long
def test_a_device_keeps_its_key_when_its_certificate_is_renewed(tmp_path):
    """A roster that people signed lists the key."""

    async def story(cloud):
        client, home = client_in(tmp_path), DeviceHome(tmp_path / "ann")
        token = await token_for(cloud, "ann")
        await asyncio.to_thread(client.enrol, token, cloud.enrol_address)
        before, key = home.identity.certificate, home.enrolled.key
        await asyncio.to_thread(home.renew)
        after = home.identity.certificate
        assert after.serial_number != before.serial_number
        assert home.enrolled.key == key == key_digest(after).hex()
        (known,) = [p for p in await cloud.principals.all() if p.name == "ann"]
        assert known.key_sha256.hex() == key

    enrolled(tmp_path, story)


def test_a_device_without_a_root_gets_it_with_the_used_token(tmp_path):
    """As after an interruption, or when it was enrolled by an earlier release."""

    async def story(cloud):
        client = client_in(tmp_path)
        token = await token_for(cloud, "ann")
        for _ in range(2):
            await asyncio.to_thread(client.enrol, token, cloud.enrol_address)
            (tmp_path / "ann" / "trust" / BOOTSTRAP).unlink()
        await asyncio.to_thread(client.enrol, token, cloud.enrol_address)
        with pytest.raises(Conflict, match="stays ann, enrolled before"):
            await asyncio.to_thread(client.enrol, token, cloud.enrol_address)

    enrolled(tmp_path, story)


def test_a_root_brought_by_hand_must_lead_to_the_clouds_metadata(tmp_path):
    async def story(cloud):
        token = await token_for(cloud, "ann")
        given.make_home(tmp_path / "other")
        other = tmp_path / "other" / "keys" / "root.json"
        with pytest.raises(Corrupt, match=r"does not follow from .*root\.json"):
            await asyncio.to_thread(
                client_in(tmp_path).enrol, token, cloud.enrol_address, root=other
            )
        assert not (tmp_path / "ann" / "trust" / BOOTSTRAP).exists()
        ours = tmp_path / "keys" / "root.json"
        await asyncio.to_thread(client_in(tmp_path).enrol, token, cloud.enrol_address, root=ours)

    enrolled(tmp_path, story)


def test_a_root_brought_by_hand_replaces_the_one_that_a_cloud_gave_before(tmp_path):
    """The owner enrols again with the root of the offline keys, because the first may be false."""

    async def story(cloud):
        client = client_in(tmp_path)
        token = await token_for(cloud, "ann")
        await asyncio.to_thread(client.enrol, token, cloud.enrol_address)
        given.make_home(tmp_path / "other")
        stored = tmp_path / "ann" / "trust" / BOOTSTRAP
        stored.write_bytes((tmp_path / "other" / "keys" / "root.json").read_bytes())
        token = await token_for(cloud, "ann-2")
        ours = tmp_path / "keys" / "root.json"
        await asyncio.to_thread(client.enrol, token, cloud.enrol_address, root=ours)
        assert stored.read_bytes() == ours.read_bytes()

    enrolled(tmp_path, story)


def test_a_home_of_one_cloud_takes_no_token_of_another_even_without_a_root(tmp_path):
    """As a home that an earlier release enrolled: its updates and personal state stay its own."""

    async def story(cloud):
        client = client_in(tmp_path)
        token = await token_for(cloud, "ann")
        await asyncio.to_thread(client.enrol, token, cloud.enrol_address)
        (tmp_path / "ann" / "trust" / BOOTSTRAP).unlink()
        (tmp_path / "second").mkdir()
        async with cloud_of(tmp_path / "second") as second:
            token = await token_for(second, "ann")
            with pytest.raises(Conflict, match="is a device of another cloud"):
                await asyncio.to_thread(client.enrol, token, second.enrol_address)

    enrolled(tmp_path, story)


def test_a_device_that_was_killed_after_it_had_its_root_has_its_settings(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*arguments):
        fetch_root(*arguments)
        raise Killed

    async def story(cloud):
        token = await token_for(cloud, "ann")
        monkeypatch.setattr(enrolling, "fetch_root", kill)
        with pytest.raises(Killed):
            await asyncio.to_thread(client_in(tmp_path).enrol, token, cloud.enrol_address)
        with pytest.raises(Conflict, match="stays ann, enrolled before"):
            await asyncio.to_thread(client_in(tmp_path).enrol, token, cloud.enrol_address)
        assert DeviceHome(tmp_path / "ann").settings.population == given.POPULATION

    fetch_root = enrolling.fetch_root
    enrolled(tmp_path, story)
