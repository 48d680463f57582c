"""Garbage goes, by the running cloud and by hand; what is named stays, and the log tells."""

import asyncio
import os

import numpy as np
import pytest
from tests.cloud.cli.verbs import answer
from tests.cloud.released import copied, make_released
from tests.support.cloud_process import running, said

from triplane.cloud import server, upkeep
from triplane.cloud.cli.connection import calls
from triplane.cloud.cli.policies import allow
from triplane.cloud.registry.collecting import MIN_AGE_S
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import NotFound

pytestmark = pytest.mark.slow
HALF = "ab" * 32


def write_golden(path, seed):
    """Labelled samples of a policy; every seed has others."""
    np.savez(path, x=np.full((2, 1, 8, 8), seed, np.float32), y=np.zeros(2, int))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return make_released(tmp_path_factory.mktemp("released"))


@pytest.fixture
def home(released, tmp_path, monkeypatch):
    made = copied(released, tmp_path)
    monkeypatch.setenv("TRIPLANE_IDENTITY", str(made.operator))
    return made


def age(blobs):
    """As if everything was uploaded long ago."""
    for path in (*blobs.folder.iterdir(), *blobs.partial.iterdir()):
        if path.is_file():
            os.utime(path, (0, 0))


def garbage(home):
    """A blob that nobody names and half of another; their digests."""
    blobs = BlobFolder(home.blobs)
    name = blobs.put(b"never registered").hex()
    (blobs.partial / HALF).write_bytes(b"half")
    age(blobs)
    return sorted([name, HALF])


def test_by_hand_it_is_shown_first_and_refused_while_the_cloud_runs(home, capsys):
    names = garbage(home)
    words = ("registry", "collect", "--home", home.path)
    told = said(capsys, *words)
    assert all(name in told for name in names)
    assert "2 files, 20 B, would be removed; remove them with --yes" in told
    with running(home.path):
        assert "a running cloud collects by itself" in said(capsys, *words, "--yes", code=3)
    age(BlobFolder(home.blobs))
    assert "at least 3600 s" in said(capsys, *words, "--older-than", "1min", code=2)
    done = answer(*words, "--yes")
    assert sorted(found["sha256"] for found in done["blobs"]) == names
    assert said(capsys, *words) == "nothing to remove\n"
    with running(home.path):
        versions = [answer("registry", "show", f"digits@{n}") for n in (1, 2)]
        assert "registry.collect" in said(capsys, "audit", "ls")
        said(capsys, "audit", "verify")
    kept = {path.name for path in home.blobs.iterdir()}
    for version in versions:
        assert {version["blob"], *(b["blob"] for b in version["bundles"])} <= kept


def test_a_running_cloud_keeps_the_samples_of_its_policy(home, tmp_path):
    write_golden(tmp_path / "golden.npz", 1)

    def set_policy():
        with calls(home.operator) as cloud:
            allow(cloud, model="digits", golden=tmp_path / "golden.npz",
                  floor=0.9, share=1.0, keys=tmp_path / "keys")  # fmt: skip

    async def story():
        async with server.running(home) as cloud:
            await asyncio.to_thread(set_policy)
            names = garbage(home)
            gone = await cloud.collection.collect(MIN_AGE_S)
            assert sorted(found.sha256.hex() for found in gone) == names
            (golden,) = cloud.repository.golden_sets()
            cloud.blobs.find(golden)
            for version in await cloud.registry.versions("digits"):
                cloud.blobs.find(version.blob)
                cloud.blobs.find(version.bundles[0].blob)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_policy_is_refused_whose_samples_are_not_in_the_cloud(home, tmp_path, monkeypatch):
    write_golden(tmp_path / "golden.npz", 2)
    monkeypatch.setattr("triplane.cloud.cli.policies.upload", lambda *_: b"")

    def set_policy():
        with calls(home.operator) as cloud:
            allow(cloud, model="digits", golden=tmp_path / "golden.npz",
                  floor=0.9, share=1.0, keys=tmp_path / "keys")  # fmt: skip

    async def story():
        async with server.running(home) as cloud:
            with pytest.raises(NotFound, match="upload it first"):
                await asyncio.to_thread(set_policy)
            assert cloud.repository.policy().models == {}

    asyncio.run(asyncio.wait_for(story(), 60))


def test_the_cloud_collects_without_being_told(home, monkeypatch):
    monkeypatch.setattr(upkeep, "COLLECT_FIRST_S", 0.0)
    names = garbage(home)
    paths = [home.blobs / names[0], home.blobs / names[1], home.blobs / "partial" / HALF]

    async def story():
        collected = asyncio.Event()
        collect = upkeep.BlobCollection.collect

        async def told(collection, older_than_s):
            found = await collect(collection, older_than_s)
            collected.set()
            return found

        monkeypatch.setattr(upkeep.BlobCollection, "collect", told)
        async with server.running(home):
            await collected.wait()

    asyncio.run(asyncio.wait_for(story(), 60))
    assert not any(path.exists() for path in paths)
