"""Garbage collection removes what nothing names, and never anything else."""

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field, replace

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.trust_stage import Stage, load, signed_by, stage
from tests.cloud.registry.models import QUICK, asked, child, npz, registry_of
from tuf.api._payload import TargetFile

from triplane.cloud.registry import ConversionRecipe, Registry, State
from triplane.cloud.registry.collecting import MIN_AGE_S, Stored, claim, collect, unwanted
from triplane.cloud.registry.queries import referenced
from triplane.cloud.roots import roots_of
from triplane.cloud.store import METADATA, Database
from triplane.cloud.trust.repository import golden_sets
from triplane.cloud.trust.roles import expiry
from triplane.proto.errors import Conflict, InvalidInput, NotFound

DAY_S = 86_400.0


def tomorrow():
    return time.time() + DAY_S


def test_old_blobs_that_nothing_names_go_and_all_others_stay(database, tmp_path):
    async def main():
        async with registry_of(database, tmp_path, command=child(QUICK)) as registry:
            put = registry.blobs.put
            model, samples, labelled = put(b"model"), put(npz(x=[1.0])), put(npz(y=[1]))
            golden, unwanted = put(b"golden"), put(b"unwanted")
            recipe = ConversionRecipe(calibration=samples, evaluation=labelled)
            await registry.push(asked(model, recipe=recipe), by="op")
            roots = [referenced, lambda _: {golden}]
            early = await collect(database, registry.blobs, roots, older_than_s=DAY_S)
            gone = await collect(
                database, registry.blobs, roots, older_than_s=MIN_AGE_S, clock=tomorrow
            )
            assert (early, [found.sha256 for found in gone]) == ((), [unwanted])
            assert [(found.size, found.last_s > 0) for found in gone] == [(len(b"unwanted"), True)]
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


def test_what_would_go_is_told_and_stays(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path, command=child(QUICK)) as registry:
            name = registry.blobs.put(b"unwanted")
            told: list[Stored] = []
            (found,) = await unwanted(
                sqlite, registry.blobs, [referenced], older_than_s=MIN_AGE_S, clock=tomorrow
            )
            assert found.sha256 == name
            registry.blobs.find(name)
            for _ in range(2):
                await collect(
                    sqlite, registry.blobs, [referenced], older_than_s=MIN_AGE_S, clock=tomorrow,
                    on_removed=lambda _, removed: told.extend(removed),
                )  # fmt: skip
            assert told == [found]

    asyncio.run(main())


def test_a_claimed_blob_stays_until_it_is_named(sqlite, tmp_path):
    """Seen as old by a collection, claimed by a policy, then looked at again by the collection."""

    async def main():
        async with registry_of(sqlite, tmp_path, command=child(QUICK)) as registry:
            blobs = registry.blobs
            name = aged(blobs, b"samples")

            def claimed_meanwhile(_):
                os.utime(blobs.path(name))
                return set()

            roots = [claimed_meanwhile]
            assert await collect(sqlite, blobs, roots, older_than_s=MIN_AGE_S) == ()
            os.utime(blobs.path(name), (0, 0))
            await claim(sqlite, blobs, {name})
            assert await collect(sqlite, blobs, [referenced], older_than_s=MIN_AGE_S) == ()
            with pytest.raises(NotFound, match="upload it first"):
                await claim(sqlite, blobs, {bytes(32)})

    asyncio.run(main())


def aged(blobs, data):
    """A blob that was uploaded long ago."""
    name = blobs.put(data)
    os.utime(blobs.path(name), (0, 0))
    return name


def test_a_bundle_whose_file_was_collected_before_its_row_is_not_called_ready(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path, command=child(QUICK)) as registry:
            await registry.push(asked(registry.blobs.put(b"model")), by="op")

            async def lost(bundle):
                return replace(bundle, state=State.READY, blob=bytes(32), size=1), b""

            registry._make = lost
            made = await registry.wait_bundle("digits", 1, "ort-x64")
            assert (made.state, made.reason) == (
                State.FAILED,
                "its file was collected meanwhile",
            )

    asyncio.run(main())


BLOBS = {
    "versions.blob",
    "versions.calibration",
    "versions.evaluation",
    "bundles.blob",
    "federation_runs.slots",
}
NO_BLOBS = {
    "audit.digest",
    "audit.previous",
    "bundles.content_digest",
    "bundles.root_digest",
    "certificate_keys.sha256",  # of public keys
    "federation_runs.asked",
    "federation_small_states.sha256",  # of bytes in the same row
    "federation_small_updates.sha256",  # the same
    "tokens.key",
    "versions.model_digest",
    "versions.push_digest",
}


def test_every_column_of_a_digest_is_known_as_a_root_or_as_none():
    """A table that begins to name blobs goes red here before the collector loses one."""
    columns = {
        f"{table.name}.{column.name}"
        for table in METADATA.tables.values()
        for column in table.columns
        if isinstance(column.type, sa.LargeBinary) and column.type.length == 32
    }
    assert columns == BLOBS | NO_BLOBS


@pytest.mark.slow
def test_what_anything_names_is_never_removed(tmp_path_factory):
    """Any order of uploads, pushes, policies and collections, also at the same time."""
    step = st.tuples(st.sampled_from(["put", "push", "allow", "forbid", "wait"]), st.integers(0, 3))

    @given(st.lists(st.tuples(step, st.booleans()), max_size=12))
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
    cloud = stage(folder / "stage", keys={"targets": 2}, thresholds={"targets": 2})
    async with registry_of(database, folder, command=child(QUICK)) as registry:
        world = World(database, registry, cloud)
        for (step, i), is_joined in steps:
            doing = [getattr(world, step)(bytes([i]))]
            await asyncio.gather(*doing, *([world.collect()] if is_joined else []))
            await world.collect()
            for name in world.must_stay():
                registry.blobs.find(name)


@dataclass
class World:
    """What people do. Every blob is old from the start, so only its name keeps it."""

    database: Database
    registry: Registry
    cloud: Stage
    pushed: set[bytes] = field(default_factory=set)

    def must_stay(self):
        """Named by a version, by the published policy, or by one that waits for signatures."""
        pending = self.cloud.repository.pending("targets").metadata
        published = load(self.cloud, "targets").to_bytes()
        return self.pushed | golden_sets(pending) | golden_sets(published)

    async def put(self, data):
        aged(self.registry.blobs, data)

    async def push(self, data):
        name = aged(self.registry.blobs, data)
        with contextlib.suppress(NotFound):  # collected first: the pusher uploads it again
            await self.registry.push(asked(name), by="op")
            self.pushed.add(name)

    async def allow(self, data):
        await self._sign(data, "targets-1", "targets-2")

    async def wait(self, data):
        """One of two people signs; the other may never."""
        with contextlib.suppress(Conflict):
            await self._sign(data, "targets-1")

    async def forbid(self, data):
        made = self._next()
        made.signed.targets.pop(f"golden/{data.hex()}", None)
        self._submit(made, "targets-1", "targets-2")

    async def collect(self):
        roots = roots_of(self.cloud.repository)
        gone = await collect(self.database, self.registry.blobs, roots, older_than_s=MIN_AGE_S)
        assert not self.must_stay() & {found.sha256 for found in gone}

    async def _sign(self, data, *keys):
        """As `policy set` and the servicer do: upload, claim, submit."""
        name = aged(self.registry.blobs, data)
        made, path = self._next(), f"golden/{data.hex()}"
        made.signed.targets[path] = TargetFile.from_data(path, data, ["sha256"])
        with contextlib.suppress(NotFound):  # collected first: the signer uploads it again
            await claim(self.database, self.registry.blobs, {name})
            self._submit(made, *keys)
            os.utime(self.registry.blobs.path(name), (0, 0))

    def _next(self):
        made = load(self.cloud, "targets")
        made.signed.version += 1
        made.signed.expires = expiry("targets", self.cloud.clock())
        return made

    def _submit(self, made, *keys):
        signed = signed_by(self.cloud.offline, made, *keys)
        self.cloud.repository.submit("targets", signed.to_bytes())
