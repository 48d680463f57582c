"""A roster shown and signed against a real cloud process, with the devices that it enrolled."""

import hashlib

import pytest
from tests.cloud.cli.verbs import answer
from tests.support.cloud_process import running, said

from triplane.cloud.home import Home
from triplane.proto.identity import enrol, key_digest

pytestmark = pytest.mark.long

STRANGER = hashlib.sha256(b"a device that was not enrolled yet").hexdigest()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("roster")


@pytest.fixture(scope="module")
def cloud(place):
    answer("cloud", "init", "--home", place / "home", "--offline-keys", place / "keys")
    home = Home(place / "home")
    with running(home.path):
        yield home


@pytest.fixture(scope="module")
def devices(cloud, place):
    """The digest of the key of each device."""
    return {name: enrolled(cloud, place / name, "device") for name in ("ann", "bob")}


def enrolled(cloud, folder, role):
    who = ("--identity", cloud.operator)
    made = answer("cloud", "token", "--role", role, "--name", folder.name, *who)
    identity = enrol(made["token"], made["enrol_address"], folder)
    return key_digest(identity.certificate).hex()


@pytest.fixture
def people(cloud, devices, monkeypatch):
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(cloud.operator))
    return devices


def roster(verb, place, *options, code=0):
    keys = ("--keys", place / "keys")
    return answer("cloud", "roster", verb, *options, *keys, code=code)


def test_a_roster_is_shown_before_it_is_signed_and_then_by_name(people, place, capsys):
    assert "no roster; sign one" in said(capsys, "cloud", "roster", "show")
    dry = roster("add", place, "--all", "--dry-run")
    assert [(d["name"], d["key"]) for d in dry["added"]] == sorted(
        people.items(), key=lambda item: item[1]
    )
    assert not dry["signed"]
    assert roster("show", place)["version"] == 0
    done = roster("add", place, "ann", STRANGER)
    assert done["submitted"]["published"]
    assert {d["name"] for d in done["added"]} == {"ann", ""}
    shown = roster("show", place)
    assert (shown["version"], shown["devices"]) == (done["version"], 2)
    assert {d["name"]: d["listed"] for d in shown["enrolled"]} == {"ann": True, "bob": False}
    assert shown["unknown"] == [STRANGER]
    text = said(capsys, "cloud", "roster", "show")
    assert f"roster {done['version']} of 2 devices, valid until" in text
    assert people["bob"] in text
    assert "listed keys of no enrolled device: 1" in text
    removed = roster("remove", place, "--gone")
    assert [d["key"] for d in removed["removed"]] == [STRANGER]
    renewed = roster("renew", place, "--valid", "10d")
    assert renewed["devices"] == 1
    assert renewed["version"] > removed["version"]
    assert renewed["expires_s"] < removed["expires_s"]


def test_only_devices_can_be_named_or_added(cloud, people, place):
    enrolled(cloud, place / "camera", "node")
    for name in ("camera", "operator", "nobody", STRANGER[:63]):
        said = roster("add", place, name, code=2)
        assert "no enrolled device" in said["error"]["message"], said
    assert "camera" not in [d["name"] for d in roster("show", place)["enrolled"]]


def test_digests_come_from_a_file_of_ones_own(people, place):
    lines = ["# of the vendor", "", f"{STRANGER}  box 7", people["bob"].upper()]
    file = place / "fleet.txt"
    file.write_text("\n".join(lines))
    added = roster("add", place, "--file", file, "--dry-run")["added"]
    assert {d["key"] for d in added} == {STRANGER, people["bob"]}
    file.write_text("\n".join([*lines, "ab12"]))
    said = roster("add", place, "--file", file, code=2)
    assert "fleet.txt:5: a line begins with a digest" in said["error"]["message"]


def test_what_is_not_listed_cannot_be_removed(people, place):
    roster("add", place, "ann")
    said = roster("remove", place, "bob", code=2)
    assert f"does not list {people['bob']} of bob" in said["error"]["message"]
    assert "name the devices" in roster("remove", place, code=2)["error"]["message"]
    assert "name the devices" in roster("add", place, code=2)["error"]["message"]
