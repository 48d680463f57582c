"""Attacks by whoever holds the link between a node and the cloud, without any key."""

import json

import pytest
from tests.attacks.trust_stage import (
    DAY_S,
    Clock,
    bundle_entry,
    edited,
    newest,
    refusal,
    signed_by,
    stage,
)
from tuf.api.metadata import Metadata

from triplane.proto.errors import Unavailable
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed.trust import Trust, bootstrap

PATH = "release/digits@1+ort-x64.bundle"
OTHER = "release/digits@2+ort-x64.bundle"


@pytest.fixture
def link(tmp_path):
    made = stage(tmp_path)
    made.release(bundle_entry(PATH))
    return made


def files(link):
    names = [f"{newest(link, role)}.{role}.json" for role in ("snapshot", "targets", "release")]
    return ["timestamp.json", *names]


def test_an_honest_link_gives_the_signed_target(link):
    node = link.node()
    assert node.refresh().is_fresh
    target = node.target(PATH)
    assert (target.length, target.name.model, target.name.version) == (16, "digits", 1)


@pytest.mark.parametrize("at", range(4))
def test_a_flipped_signature_digit_is_refused_in_each_file(link, at):
    node, name = link.node(), files(link)[at]
    genuine = link.repository.get(name)

    def flip(document):
        sig = document["signatures"][0]["sig"]
        document["signatures"][0]["sig"] = ("1" if sig[0] != "1" else "2") + sig[1:]

    link.forged[name] = edited(genuine, flip)
    with pytest.raises(AttemptRefused, match=r"valid signatures|damaged or forged") as refused:
        raise_refusal(node)
    assert refused.value.kind == "signature"


@pytest.mark.parametrize("at", range(4))
def test_a_changed_field_is_refused_in_each_file(link, at):
    node, name = link.node(), files(link)[at]

    def extend(document):
        document["signed"]["expires"] = "2099-01-01T00:00:00Z"

    link.forged[name] = edited(link.repository.get(name), extend)
    with pytest.raises(AttemptRefused, match=name) as refused:
        raise_refusal(node)
    assert refused.value.kind == "signature"


def raise_refusal(node):
    """Refresh, and look up the target, as an agent does; raise what is refused."""
    found = node.refresh()
    if found.refusals:
        raise found.refusals[-1]
    node.target(PATH)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff" * 40, b"[" * 4000, b'{"a":1e999}']
)
def test_bytes_that_are_no_metadata_are_named_malformed(link, data):
    node = link.node()
    link.forged["timestamp.json"] = data
    assert refusal(node).kind == "malformed"


def test_a_key_nobody_named_signs_nothing(link, tmp_path):
    node = link.node()
    stranger = stage(tmp_path / "stranger")
    link.forged["timestamp.json"] = stranger.repository.get("timestamp.json")
    found = refusal(node)
    assert found.kind == "signature"
    assert "0 valid signatures of 1 that the role timestamp needs" in found.text


def test_a_root_of_strangers_is_not_followed(link, tmp_path):
    node = link.node()
    stranger = stage(tmp_path / "stranger")
    root = Metadata.from_bytes(stranger.repository.get("root.json"))
    root.signed.version = 2
    link.forged["2.root.json"] = signed_by(stranger.offline, root, "root").to_bytes()
    found = refusal(node)
    assert found.kind == "signature"
    assert "2.root.json" in found.text


def test_an_old_timestamp_is_a_rollback(link):
    old = link.repository.get("timestamp.json")
    node = link.node()
    link.release(bundle_entry(OTHER))
    assert node.refresh().is_fresh
    link.forged["timestamp.json"] = old
    found = refusal(node)
    assert found.kind == "rollback"
    assert "timestamp.json says version 2, older than what was verified before" in found.text


def test_a_rollback_is_remembered_over_a_restart(link):
    old = link.repository.get("timestamp.json")
    link.release(bundle_entry(OTHER))
    assert link.node().refresh().is_fresh
    link.forged["timestamp.json"] = old
    assert refusal(link.node()).kind == "rollback"


def test_an_old_snapshot_is_no_part_of_the_new_publication(link):
    node = link.node()
    old = link.repository.get(f"{newest(link, 'snapshot')}.snapshot.json")
    link.release(bundle_entry(OTHER))
    link.forged[f"{newest(link, 'snapshot')}.snapshot.json"] = old
    found = refusal(node)
    assert found.kind == "mix-and-match"
    assert "is genuine (version 2), but not the file that verified metadata names" in found.text


def test_an_old_release_file_is_no_part_of_the_new_publication(link):
    node = link.node()
    old = link.repository.get("2.release.json")
    link.release(bundle_entry(OTHER))
    link.forged["3.release.json"] = old
    assert node.refresh().is_fresh
    with pytest.raises(
        AttemptRefused, match=r"3\.release\.json is genuine \(version 2\)"
    ) as refused:
        node.target(OTHER)
    assert refused.value.kind == "mix-and-match"


def test_new_release_metadata_does_not_go_with_an_old_snapshot(link):
    """The old publication is served whole, but for the release file."""
    node = link.node()
    held = {name: link.repository.get(name) for name in files(link)}
    link.release(bundle_entry(OTHER))
    held["2.release.json"] = link.repository.get("3.release.json")
    link.forged.update(held)
    assert node.refresh().is_fresh
    with pytest.raises(AttemptRefused, match="is genuine") as refused:
        node.target(OTHER)
    assert refused.value.kind == "mix-and-match"


def test_a_frozen_link_makes_the_node_stale_after_a_day(link):
    node = link.node()
    held = link.repository.get("timestamp.json")
    assert node.refresh().is_fresh
    link.clock.now_s += DAY_S + 1
    link.repository.keep_fresh()
    link.forged["timestamp.json"] = held
    found = refusal(node)
    assert found.kind == "freeze"
    assert "timestamp 2 expired" in found.text
    with pytest.raises(AttemptRefused, match=r"expired 1 s ago; the node goes on serving"):
        node.target(PATH)


def test_a_clock_set_back_does_not_unfreeze(link):
    held = link.repository.get("timestamp.json")
    link.clock.now_s += 2 * DAY_S
    link.repository.keep_fresh()
    assert link.node().refresh().is_fresh
    link.forged["timestamp.json"] = held
    back = Clock(link.clock() - 2 * DAY_S)
    found = Trust(link.path / "node", link.fetch, back).refresh()
    assert not found.is_fresh
    assert [refused.kind for refused in found.refusals] == ["clock", "rollback"]
    assert "it was set back, and expiry is judged by the later time" in found.refusals[0].text


def test_a_clock_set_back_does_not_make_the_known_metadata_valid_again(link):
    node = link.node()
    assert node.refresh().is_fresh
    held = link.repository.get("timestamp.json")
    link.clock.now_s += 3 * DAY_S
    link.forged["timestamp.json"] = held
    assert refusal(node).kind == "freeze"
    back = Clock(link.clock() - 3 * DAY_S)
    found = Trust(link.path / "node", link.fetch, back).refresh()
    assert [refused.kind for refused in found.refusals] == ["clock", "freeze"]


@pytest.mark.parametrize(
    ("name", "size"),
    [("timestamp.json", 16 << 10), ("2.root.json", 128 << 10), ("2.snapshot.json", 64 << 10)],
)
def test_endless_data_stops_at_the_limit_of_the_file(link, name, size):
    node = link.node()
    link.forged[name] = b" " * (size + 1)
    found = refusal(node)
    assert found.kind == "endless-data"
    assert f"{name} has {size + 1} bytes, more than its limit" in found.text


def test_endless_roots_stop_at_the_signature(link):
    node = link.node()
    root = link.repository.get("root.json")
    for version in range(2, 400):
        link.forged[f"{version}.root.json"] = root
    found = refusal(node)
    assert found.kind == "rollback"
    assert "2.root.json says version 1, the next root is 2" in found.text


def test_a_silent_link_is_no_incident_while_the_known_metadata_holds(link):
    node = link.node()
    assert node.refresh().is_fresh

    def silent(name):
        raise Unavailable("no answer within 30 s")

    node._fetcher._get = silent
    found = node.refresh()
    assert (found.is_fresh, found.refusals) == (True, ())
    assert "no answer within 30 s" in str(found.error)
    link.clock.now_s += 2 * DAY_S
    assert refusal(node).kind == "freeze"


def test_a_publication_between_two_files_is_no_incident(link):
    node = link.node()
    before = link.repository.get("timestamp.json")
    link.release(bundle_entry(OTHER))
    old_snapshot = link.repository.get("2.snapshot.json")
    link.forged |= {"timestamp.json": before, "2.snapshot.json": old_snapshot[:-1]}
    once = iter([True])

    def fetch(name):
        data = link.fetch(name)
        if name == "2.snapshot.json" and next(once, False):
            link.forged.clear()
        return data

    node._fetcher._get = fetch
    found = node.refresh()
    assert (found.is_fresh, found.refusals) == (True, ())


def test_the_first_root_must_be_signed_by_itself(link, tmp_path):
    def shorten(document):
        document["signatures"] = []

    link.forged["root.json"] = edited(link.repository.get("root.json"), shorten)
    with pytest.raises(AttemptRefused, match="not signed by itself: root was signed by 0/1 keys"):
        bootstrap(tmp_path / "new", link.fetch)
    assert not (tmp_path / "new" / "bootstrap.json").exists()
    link.forged["root.json"] = b" " * (200 << 10)
    with pytest.raises(AttemptRefused, match="204800 bytes"):
        bootstrap(tmp_path / "new", link.fetch)


def test_a_second_bootstrap_does_not_replace_the_first(link, tmp_path):
    node = link.node()
    stranger = stage(tmp_path / "stranger")
    bootstrap(link.path / "node", stranger.fetch)
    assert node.refresh().is_fresh


@pytest.mark.parametrize(
    "path", ["../../etc/passwd", "release/../auto/x", "", "release/", "a" * 5000]
)
def test_a_path_that_is_no_target_is_not_listed(link, path):
    node = link.node()
    node.refresh()
    with pytest.raises(AttemptRefused, match="is not listed") as refused:
        node.target(path)
    assert refused.value.kind == "unknown-target"


def test_json_with_a_key_twice_is_read_as_what_was_signed(link):
    """Whatever reading the parser takes, the signature covers just that reading."""
    node = link.node()
    genuine = link.repository.get("timestamp.json")
    document = json.loads(genuine)
    signed = json.dumps(document["signed"])
    twice = signed[:-1] + ', "version": 9}'
    link.forged["timestamp.json"] = genuine.replace(
        json.dumps(document["signed"], separators=(",", ":"), sort_keys=True).encode(),
        twice.encode(),
    )
    assert link.forged["timestamp.json"] != genuine
    assert refusal(node).kind == "signature"
