"""What is signed is known where people look, without a rollout that looks for it."""

import asyncio
import secrets

import pytest
import sqlalchemy as sa
from tests.cloud.registry.models import asked, registry_of
from tests.cloud.released import copied, make_released

from triplane.cloud.home import open_database
from triplane.cloud.identity import audit
from triplane.cloud.registry import queries, tables
from triplane.cloud.registry.values import BundleRecord, State
from triplane.cloud.server import running
from triplane.proto.targets import TargetName, bundle_target

PATHS = ["release/digits@1+ort-x64.bundle", "release/digits@2+ort-x64.bundle"]
WAIT_S = 60


def signed(bundle, role="release", **changes):
    """The published target of a bundle, as `note_signed` takes it."""
    said = {
        "length": bundle.size,
        "sha256": bundle.blob,
        "model_digest": bytes(32),
        "content_digest": bundle.content_digest,
    }
    name = TargetName(role, bundle.model, bundle.version, bundle.target)
    return {(name.model, name.version, name.target): bundle_target(name, **(said | changes))}


@pytest.fixture
def told(sqlite, tmp_path):
    """Run a story over a registry that holds one finished bundle."""

    async def main(story):
        async with registry_of(sqlite, tmp_path) as registry:
            blob = secrets.token_bytes(32)
            made = BundleRecord(
                model="digits", version=1, target="ort-x64", state=State.READY,
                blob=blob, size=9, content_digest=bytes(32),
            )  # fmt: skip
            await sqlite.write(lambda connection: _inserted(connection, made))
            await story(registry, made)

    return lambda story: asyncio.run(asyncio.wait_for(main(story), WAIT_S))


def _inserted(connection, made):
    digest = bytes(32)
    queries.insert(connection, asked(digest), digest=digest, size=1, now_s=1.0, by="op")
    queries.start(connection, made.model, made.version, made.target)
    queries.finish(connection, made)


async def path_of(registry):
    version = await registry.version("digits@1")
    return version.bundles[0].signed_path


def test_a_published_signature_is_noted_once_and_told(told):
    async def story(registry, made):
        heard: list[BundleRecord] = []
        registry.on_bundle(heard.append)
        first = await registry.note_signed(signed(made))
        again = await registry.note_signed(signed(made))
        assert [bundle.signed_path for bundle in first] == PATHS[:1]
        assert again == []
        assert heard == first
        assert await path_of(registry) == PATHS[0]

    told(story)


def test_a_signature_noticed_at_two_places_is_one_audited_event(told, sqlite):
    async def story(registry, made):
        heard: list[BundleRecord] = []
        registry.on_bundle(heard.append)
        # The publication and the look of a waiting rollout, which read the bundle before it.
        await registry.note_signed(signed(made))
        again = await registry.mark_signed(*made.key, PATHS[0])
        assert again.signed_path == PATHS[0]
        events = await sqlite.read(lambda c: audit.page(c, 1))
        assert [e.action for e in events].count("registry.signed") == 1
        assert len(heard) == 1

    told(story)


def test_a_signature_of_other_bytes_is_none(told):
    async def story(registry, made):
        assert await registry.note_signed(signed(made, sha256=bytes(32))) == []
        assert await registry.note_signed(signed(made, length=8)) == []
        assert await path_of(registry) == ""

    told(story)


def test_a_signature_that_ended_with_its_key_is_taken_back(told):
    async def story(registry, made):
        await registry.note_signed(signed(made))
        (changed,) = await registry.note_signed({})
        assert (changed.signed_path, await path_of(registry)) == ("", "")

    told(story)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return make_released(tmp_path_factory.mktemp("released"))


async def paths(home):
    async with running(home) as cloud:
        versions = await cloud.registry.versions("digits")
        return sorted(bundle.signed_path for v in versions for bundle in v.bundles)


@pytest.mark.slow
def test_whoever_signs_is_answered_after_the_registry_knows(released, tmp_path):
    home = copied(released, tmp_path)
    database = open_database(home)
    try:
        query = sa.select(tables.BUNDLES.c.signed_path)
        found = database.read_now(lambda connection: list(connection.scalars(query)))
    finally:
        database.close()
    assert sorted(found) == PATHS


@pytest.mark.slow
def test_a_cloud_killed_between_publishing_and_noting_notes_it_when_it_starts(released, tmp_path):
    home = copied(released, tmp_path)
    database = open_database(home)
    forget = tables.BUNDLES.update().values(signed_path="")
    try:
        database.write_now(lambda connection: connection.execute(forget))
    finally:
        database.close()
    assert asyncio.run(asyncio.wait_for(paths(home), WAIT_S)) == PATHS
