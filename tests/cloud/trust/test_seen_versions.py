"""A signature is never put on top of an older list than the folder of keys has seen."""

import contextlib
import json
import threading

import pytest
from tests.attacks.trust_stage import bundle_entry, stage

from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.repository import MetadataRepository
from triplane.cloud.trust.rotating import rotate
from triplane.cloud.trust.seen_versions import SEEN_FILE, SeenVersions
from triplane.cloud.trust.signing import Signer, renew, replace_keys
from triplane.proto.errors import Corrupt, Unavailable

PATH = "release/digits@1+ort-x64.bundle"
WITHDRAWN = "release/digits@2+ort-x64.bundle"


@pytest.fixture
def cloud(tmp_path):
    return stage(tmp_path / "stage")


class OlderCloud:
    """What an intruder shows who kept a copy of everything at an earlier time."""

    def __init__(self, cloud):
        self.submitted = []
        folder = cloud.path / "copy"
        folder.mkdir()
        for file in cloud.path.glob("metadata/*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        repository = MetadataRepository(folder, cloud.online, clock=cloud.clock)
        self.get, self.pending = repository.get, repository.pending
        self._submit = repository.submit

    def submit(self, role, data, *auto):
        self.submitted.append((role, data))
        return self._submit(role, data, *auto)


def sign(cloud, targets, where=None):
    signer = Signer(where or cloud.repository, cloud.offline, "release")
    return signer.sign(None, {t.path: t for t in targets}, cloud.clock())


def test_an_older_list_gets_no_signature(cloud):
    sign(cloud, [bundle_entry(PATH), bundle_entry(WITHDRAWN)])
    older = OlderCloud(cloud)
    sign(cloud, [bundle_entry(PATH)])
    with pytest.raises(Corrupt, match=r"shows release 2, and the keys in .* have seen release 3"):
        renew(older, "release", cloud.offline, now_s=cloud.clock())
    assert not older.submitted


def test_what_another_signer_published_counts_once_it_was_seen(cloud):
    older = OlderCloud(cloud)
    cloud.release(bundle_entry(PATH))  # with a copy of the keys elsewhere
    Signer(cloud.repository, cloud.offline, "release")
    with pytest.raises(Corrupt, match="shows release 1, and the keys in"):
        Signer(older, cloud.offline, "release")


@pytest.mark.parametrize("role", ["targets", "root"])
def test_older_metadata_that_decides_about_keys_is_refused_for_every_role_below(cloud, role):
    older = OlderCloud(cloud)
    if role == "root":
        replace_keys(cloud.repository, {}, cloud.offline, now_s=cloud.clock())
    else:
        renew(cloud.repository, role, cloud.offline, now_s=cloud.clock())
    with pytest.raises(Corrupt, match=f"shows {role} 1, and the keys in"):
        Signer(older, cloud.offline, "release")


def test_an_older_root_is_not_renewed(cloud):
    older = OlderCloud(cloud)
    replace_keys(cloud.repository, {}, cloud.offline, now_s=cloud.clock())
    with pytest.raises(Corrupt, match="shows root 1, and the keys in"):
        replace_keys(older, {}, cloud.offline, now_s=cloud.clock())


def test_an_older_list_is_not_carried_over_to_new_keys(cloud):
    sign(cloud, [bundle_entry(PATH), bundle_entry(WITHDRAWN)])
    older = OlderCloud(cloud)
    sign(cloud, [bundle_entry(PATH)])
    _, key = KeyFolder(cloud.offline).make_next("release")
    with pytest.raises(Corrupt, match="shows release 2"):
        rotate(older, "release", [key.public_key], cloud.offline, now_s=cloud.clock())
    assert not older.submitted


def test_after_a_backup_the_signer_says_so_and_goes_on(cloud):
    cloud.release(bundle_entry(PATH))
    restored = OlderCloud(cloud)
    for _ in range(2):
        renew(cloud.repository, "targets", cloud.offline, now_s=cloud.clock())
        sign(cloud, [bundle_entry(PATH)])
    seen = json.loads((cloud.offline / SEEN_FILE).read_bytes())
    (versions,) = seen.values()
    assert versions == {"root": 1, "targets": 3, "release": 4}
    for role, newest in (("targets", 3), ("release", 4)):
        for past in (0, newest - 1):
            with pytest.raises(Corrupt, match=f"keys renew --role {role} --past {newest} "):
                renew(restored, role, cloud.offline, past=past, now_s=cloud.clock())
        for _ in range(3):
            done = renew(restored, role, cloud.offline, past=newest, now_s=cloud.clock())
        assert done.submitted.version > newest
        renew(restored, role, cloud.offline, now_s=cloud.clock())


def test_one_folder_serves_several_clouds(cloud, tmp_path):
    """The root beside the keys is that of one; another one's versions are not compared with it."""
    for _ in range(3):
        sign(cloud, [bundle_entry(PATH)])
    other = stage(tmp_path / "other")
    (other.offline / SEEN_FILE).write_bytes((cloud.offline / SEEN_FILE).read_bytes())
    assert renew(
        other.repository, "release", other.offline, now_s=other.clock()
    ).submitted.published


def test_two_signers_at_the_same_time_lose_nothing_of_each_other(tmp_path, monkeypatch):
    """One folder with the keys of two clouds; both have read the file before either writes it."""
    read, both = SeenVersions._read, threading.Barrier(2)
    signers = [SeenVersions(tmp_path, root) for root in (b"one", b"other")]

    def slow(signer):
        known = read(signer)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return known

    monkeypatch.setattr(SeenVersions, "_read", slow)
    threads = [threading.Thread(target=s.note, args=({"root": 2},)) for s in signers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads((tmp_path / SEEN_FILE).read_bytes())) == 2


def test_a_folder_that_cannot_be_written_signs_nothing(cloud, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied")

    older = OlderCloud(cloud)
    monkeypatch.setattr("triplane.cloud.trust.seen_versions.write_atomic", fail)
    with pytest.raises(Unavailable, match="make the folder writable"):
        renew(older, "release", cloud.offline, now_s=cloud.clock())
    assert not older.submitted


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"a": 1}', b'{"a": {"release": "2"}}', b'{"a": {"release": -1}}']
)
def test_a_damaged_file_is_named(cloud, data):
    (cloud.offline / SEEN_FILE).write_bytes(data)
    with pytest.raises(Corrupt, match=r"seen\.json cannot be read; take it from the second copy"):
        renew(cloud.repository, "release", cloud.offline, now_s=cloud.clock())


def test_a_file_that_cannot_be_opened_is_named(cloud):
    (cloud.offline / SEEN_FILE).mkdir()
    with pytest.raises(Corrupt, match=r"seen\.json cannot be read; take it from the second copy"):
        renew(cloud.repository, "release", cloud.offline, now_s=cloud.clock())
