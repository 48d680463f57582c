"""Any single changed byte is refused or means the same; python-tuf itself is the oracle."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.attacks.trust_stage import BUNDLE, Stage, bundle_entry, newest, stage
from tuf.api import exceptions as errors
from tuf.api.metadata import Metadata
from tuf.ngclient.updater import Updater

from triplane.cloud.trust.signing import replace_keys
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.signed.metadata import Fetcher
from triplane.proto.signed.refusal import KINDS, AttemptRefused
from triplane.proto.signed.trust import Trust

PATH = "release/digits@1+ort-x64.bundle"
ROLES = ("root", "timestamp", "snapshot", "targets", "release")


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """A second root, so that a node follows one over the link."""
    made = stage(tmp_path_factory.mktemp("bytes"))
    made.release(bundle_entry(PATH))
    made.bootstrap = made.repository.get("1.root.json")
    replace_keys(made.repository, {}, made.offline, now_s=made.clock())
    return made


def name_of(cloud, role):
    return "timestamp.json" if role == "timestamp" else f"{newest(cloud, role)}.{role}.json"


def ours(cloud: Stage):
    """(kind of refusal or None, the loaded metadata) of a new node."""
    folder = cloud.path / "ours"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "bootstrap.json").write_bytes(cloud.bootstrap)
    node = Trust(folder, cloud.fetch, cloud.clock)
    found = node.refresh()
    if found.refusals:
        return found.refusals[-1].kind, {}
    assert found.is_fresh
    try:
        node.target(PATH)
    except AttemptRefused as refused:
        return refused.kind, {}
    assert node._client is not None
    trusted = node._client._trusted_set
    return None, {role: trusted[role] for role in ROLES}


def theirs(cloud: Stage):
    """Whether python-tuf's own client, as it comes, takes it."""
    folder = cloud.path / "theirs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    client = Updater(str(folder), "m/", fetcher=Named(cloud.fetch), bootstrap=cloud.bootstrap)
    try:
        client.refresh()
        return client.get_targetinfo(PATH) is not None
    except (errors.RepositoryError, errors.DownloadError):
        return False


class Named(Fetcher):
    def _fetch(self, url):
        return super()._fetch(url.removeprefix("m/"))


def check(cloud, role, data):
    """Refused, by us as by python-tuf, or read as just what was signed."""
    name = name_of(cloud, role)
    genuine = Metadata.from_bytes(cloud.repository.get(name)).signed
    cloud.forged = {name: data}
    try:
        kind, loaded = ours(cloud)
        assert (kind is None) == theirs(cloud)
    finally:
        cloud.forged = {}
    if kind is None:
        assert loaded[role] == genuine
    else:
        assert kind in KINDS
    return kind


@pytest.mark.slow
@given(role=st.sampled_from(ROLES), at=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_any_changed_byte_is_refused_or_means_the_same(cloud, role, at, mask):
    data = bytearray(cloud.repository.get(name_of(cloud, role)))
    data[int(at * len(data))] ^= mask
    check(cloud, role, bytes(data))


@pytest.mark.slow
@given(
    role=st.sampled_from(ROLES),
    at=st.floats(0, 1),
    text=st.sampled_from([b" ", b"\n", b"0", b"{}", b",", b'"', b"\\u0000", b"1e999", b"\xff"]),
)
def test_any_inserted_text_is_refused_or_means_the_same(cloud, role, at, text):
    data = cloud.repository.get(name_of(cloud, role))
    place = int(at * len(data))
    check(cloud, role, data[:place] + text + data[place:])


@pytest.mark.slow
@given(role=st.sampled_from(ROLES), at=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_refused(cloud, role, at):
    data = cloud.repository.get(name_of(cloud, role))
    assert check(cloud, role, data[: int(at * len(data))]) is not None


EVERY_BYTE = (
    pytest.param("timestamp", marks=pytest.mark.long),
    pytest.param("root", marks=pytest.mark.deep),
)


@pytest.mark.parametrize("role", EVERY_BYTE)
def test_every_byte_of_the_files_that_no_digest_pins(cloud, role):
    data = cloud.repository.get(name_of(cloud, role))
    harmless = 0
    for at in range(len(data)):
        mask = 0x20 if chr(data[at]).isalpha() else 0x01
        changed = data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
        if check(cloud, role, changed) is None:
            harmless += 1
            assert changed.lower() == data.lower(), "a hexadecimal digit of a signature"
    assert harmless > 0


def test_a_changed_byte_anywhere_in_the_bundle_is_refused(cloud, tmp_path):
    node = Trust(cloud.path / "bundles", cloud.fetch, cloud.clock)
    (cloud.path / "bundles" / "bootstrap.json").write_bytes(cloud.bootstrap)
    assert node.refresh().is_fresh
    target, blobs = node.target(PATH), BlobFolder(tmp_path / "blobs")
    for at in range(len(BUNDLE)):
        changed = BUNDLE[:at] + bytes([BUNDLE[at] ^ 1]) + BUNDLE[at + 1 :]
        damaged = pytest.raises(Corrupt, match="the bytes received have the digest")
        with blobs.receive(target.sha256, target.length) as incoming, damaged:
            incoming.take(changed)
    with blobs.receive(target.sha256, target.length) as incoming:
        incoming.write(BUNDLE[:-1])
        with pytest.raises(InvalidInput, match="15 of 16 bytes are here"):
            incoming.finish()
        with pytest.raises(InvalidInput, match="has 16 bytes; 2 more after 15"):
            incoming.write(BUNDLE[-1:] + b"\0")
        incoming.write(BUNDLE[-1:])
        assert incoming.finish().read_bytes() == BUNDLE
