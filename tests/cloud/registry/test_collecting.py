"""Garbage collection removes what nothing names, and never anything else."""

import asyncio
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cloud.registry.models import QUICK, asked, child, npz, registry_of

from triplane.cloud.registry import Recipe
from triplane.cloud.registry.collecting import MIN_AGE_S, collect
from triplane.cloud.registry.queries import referenced
from triplane.cloud.store import Database
from triplane.proto.errors import InvalidInput, NotFound

DAY_S = 86_400.0


def tomorrow():
    return time.time() + DAY_S


def test_old_blobs_that_nothing_names_go_and_all_others_stay(database, tmp_path):
    async def main():
        async with registry_of(database, tmp_path, command=child(QUICK)) as registry:
            put = registry.blobs.put
            model, samples, labelled = put(b"model"), put(npz(x=[1.0])), put(npz(y=[1]))
            golden, unwanted = put(b"golden"), put(b"unwanted")
            recipe = Recipe(calibration=samples, evaluation=labelled)
            await registry.push(asked(model, recipe=recipe), by="op")
            roots = [referenced, lambda _: {golden}]
            early = await collect(database, registry.blobs, roots, older_than_s=DAY_S)
            gone = await collect(
                database, registry.blobs, roots, older_than_s=MIN_AGE_S, clock=tomorrow
            )
            assert (early, gone) == ((), (unwanted,))
            for kept in (model, samples, labelled, golden):
                registry.blobs.find(kept)
            with pytest.raises(NotFound):
                registry.blobs.find(unwanted)

    asyncio.run(main())


def test_a_blob_collected_before_its_push_is_asked_for_again(database, tmp_path):
    async def main():
        async with registry_of(database, tmp_path, command=child(QUICK)) as registry:
            blob = registry.blobs.put(b"model")
            push = asked(blob)
            registry._conversions.check = collected_meanwhile(database, registry.blobs)
            with pytest.raises(NotFound, match="upload it first"):
                await registry.push(push, by="op")
            assert await registry.models() == []

    asyncio.run(main())


def collected_meanwhile(database, blobs):
    async def check(files):
        await collect(database, blobs, [referenced], older_than_s=MIN_AGE_S, clock=tomorrow)
        return bytes(32)

    return check


def test_unfinished_uploads_go_when_they_are_old(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path, command=child(QUICK)) as registry:
            partial = registry.blobs.partial / bytes(32).hex()
            partial.write_bytes(b"half")
            stranger = registry.blobs.folder / "README"
            stranger.write_text("not a blob")
            os.utime(stranger, (0, 0))
            roots = [referenced]
            await collect(sqlite, registry.blobs, roots, older_than_s=MIN_AGE_S)
            assert partial.exists()
            await collect(sqlite, registry.blobs, roots, older_than_s=MIN_AGE_S, clock=tomorrow)
            assert not partial.exists()
            assert stranger.exists()

    asyncio.run(main())


def test_collection_without_roots_or_age_is_refused(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path, command=child(QUICK)) as registry:
            with pytest.raises(InvalidInput, match="roots of every part"):
                await collect(sqlite, registry.blobs, [], older_than_s=DAY_S)
            with pytest.raises(InvalidInput, match="3600 s"):
                await collect(sqlite, registry.blobs, [referenced], older_than_s=1)

    asyncio.run(main())


@pytest.mark.slow
def test_what_a_version_names_is_never_removed(tmp_path_factory):
    """Any order of uploads, pushes and collections."""

    @given(st.lists(st.tuples(st.sampled_from(["put", "push", "collect"]), st.integers(0, 3))))
    @settings(max_examples=25)
    def holds(steps):
        folder = tmp_path_factory.mktemp("blobs")
        database = Database.open(f"sqlite:///{folder / 'cloud.db'}")
        try:
            asyncio.run(walk(database, folder, steps))
        finally:
            database.close()

    holds()


async def walk(database, folder, steps):
    named: set[bytes] = set()
    async with registry_of(database, folder, command=child(QUICK)) as registry:
        for step, i in steps:
            blob = registry.blobs.put(bytes([i])) if step != "collect" else b""
            if step == "push":
                await registry.push(asked(blob), by="op")
                named.add(blob)
            elif step == "collect":
                gone = await collect(
                    database, registry.blobs, [referenced], older_than_s=DAY_S / 2, clock=tomorrow
                )
                assert not named & set(gone)
            for name in named:
                registry.blobs.find(name)
