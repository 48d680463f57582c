"""A crash at every operation of a publication, with and without what was not synced."""

import itertools
import shutil

import pytest
from tests.attacks.trust_stage import bundle_entry, newest, signed_by, stage
from tests.cloud.trust.power import FailingDisk, PowerCut

from triplane.cloud.trust import MetadataRepository
from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.signing import replace_keys
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed.trust import Trust

PATH = "release/digits@1+ort-x64.bundle"
NEW = "release/digits@2+ort-x64.bundle"


def lists(node, path):
    try:
        return node.target(path).path == path
    except AttemptRefused as error:
        assert error.kind == "unknown-target"
        return False


def crashes(cloud, change, *, forgets):
    """Run `change` on the repository with a crash at each operation; yield it reopened."""
    kept = cloud.path / "kept"
    shutil.copytree(cloud.path / "metadata", kept)
    for at in itertools.count(1):
        folder = cloud.path / "metadata"
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        disk = FailingDisk(folder, at, forgets=forgets)
        try:
            repository = MetadataRepository(folder, cloud.online, disk, cloud.clock)
            done = change(repository)
        except PowerCut:
            done = None
        disk.restore()
        cloud.repository = cloud.reopened()
        yield at, done
        if not disk.failed:
            return


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [True, False])
def test_a_publication_is_there_whole_or_not_at_all(tmp_path, forgets):
    cloud = stage(tmp_path)
    cloud.release(bundle_entry(PATH))
    made = signed_by(cloud.offline, cloud.next_targets("release", [bundle_entry(NEW)]), "release")
    data, seen = made.to_bytes(), []
    for at, done in crashes(cloud, lambda r: r.submit("release", data), forgets=forgets):
        node = cloud.node(f"node-{at}")
        assert node.refresh().refusals == ()
        assert lists(node, PATH)
        seen.append(lists(node, NEW))
        if done is not None:
            assert seen[-1], "an answered submission is there after the crash"
        assert cloud.repository.submit("release", data).published
        assert node.refresh().is_fresh
        assert lists(node, NEW)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (False, True)
    assert len(seen) > 12


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [True, False])
def test_new_keys_of_the_root_are_taken_whole_or_not_at_all(tmp_path, forgets):
    cloud = stage(tmp_path)
    cloud.release(bundle_entry(PATH))
    names = ("snapshot", "timestamp")
    keys = {role: [KeyFolder(cloud.online).make(f"{role}-2").public_key] for role in names}
    versions = []

    def change(repository):
        return replace_keys(repository, keys, cloud.offline, now_s=cloud.clock())

    for at, done in crashes(cloud, change, forgets=forgets):
        node = cloud.node(f"node-{at}")
        assert node.refresh().refusals == ()
        assert lists(node, PATH)
        versions.append(newest(cloud, "root"))
        assert done is None or versions[-1] == 2
        cloud.repository.keep_fresh(cloud.clock() + 86_400)
        assert node.refresh().is_fresh
    assert versions == sorted(versions)
    assert (versions[0], versions[-1]) == (1, 2)


@pytest.mark.parametrize("forgets", [True, False])
def test_a_first_signature_waits_durably(tmp_path, forgets):
    cloud = stage(tmp_path, keys={"release": 2}, thresholds={"release": 2})
    made = signed_by(
        cloud.offline, cloud.next_targets("release", [bundle_entry(PATH)]), "release-1"
    )
    for _, done in crashes(cloud, lambda r: r.submit("release", made.to_bytes()), forgets=forgets):
        pending = cloud.repository.pending("release")
        assert pending.published is not (pending.signatures == 1)
        if done is not None:
            assert (pending.published, pending.signatures) == (False, 1)
        assert cloud.node("node").refresh().is_fresh


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [True, False])
def test_a_node_that_dies_in_a_refresh_still_refuses_the_past(tmp_path, forgets):
    cloud = stage(tmp_path)
    assert cloud.node().refresh().is_fresh
    old = cloud.repository.get("timestamp.json")
    cloud.release(bundle_entry(PATH))
    kept, folder = tmp_path / "kept", tmp_path / "node"
    shutil.copytree(folder, kept, symlinks=True)
    for at in itertools.count(1):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder, symlinks=True)
        disk = FailingDisk(folder, at, forgets=forgets)
        finished = False
        try:
            node = Trust(folder, cloud.fetch, cloud.clock, disk)
            finished = node.refresh().is_fresh
        except PowerCut:
            pass
        disk.restore()
        if finished:
            cloud.forged["timestamp.json"] = old
            past = cloud.node().refresh()
            assert [refused.kind for refused in past.refusals] == ["rollback"]
            cloud.forged.clear()
        again = cloud.node()
        assert again.refresh().refusals == ()
        assert lists(again, PATH)
        if not disk.failed:
            break
    assert at > 8
