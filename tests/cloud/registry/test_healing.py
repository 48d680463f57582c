"""Files that a disk lost or damaged: bundles are made again, conversions are tried again."""

import asyncio
import os
from dataclasses import replace

import pytest
from tests.cloud.registry.makers import maker
from tests.cloud.registry.models import WAIT_S, asked, child, model_bytes, registry_of

from triplane.cloud.registry import BundleRecord, State
from triplane.proto.errors import Conflict

KEY = ("digits", 1, "ort-x64")


def remove(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[:5])


def flip(path):
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


DAMAGES = [remove, truncate, flip]


async def made_of(registry):
    async with asyncio.timeout(WAIT_S):
        return await registry.wait_bundle(*KEY)


async def push(registry, data=b"a model file"):
    return await registry.push(asked(registry.blobs.put(data)), by="op")


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_lost_or_damaged_bundle_is_made_again(sqlite, tmp_path, damage, restart):
    async def lose():
        async with registry_of(sqlite, tmp_path, command=maker()) as registry:
            await push(registry)
            made = await made_of(registry)
            await registry.mark_signed(*KEY, "release/digits@1+ort-x64.bundle")
            damage(registry.blobs.path(made.blob))
            if not restart:
                await check(registry, made)
            return made

    async def check(registry, made):
        before = (await registry.version("digits@1")).bundles[0]
        assert before.state is State.CONVERTING, "it is shown as ready and is not there"
        again = await made_of(registry)
        assert again == replace(made, signed_path="release/digits@1+ort-x64.bundle")
        assert not registry.blobs.drop_damaged(made.blob)
        assert registry.blobs.has(made.blob)
        assert (await registry.version("digits@1")).bundles == (again,)

    made = asyncio.run(lose())

    async def main():
        async with registry_of(sqlite, tmp_path, command=maker()) as registry:
            await check(registry, made)

    if restart:
        asyncio.run(main())


@pytest.mark.slow
def test_a_real_bundle_is_made_again_byte_for_byte(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path) as registry:
            await push(registry, model_bytes(tmp_path))
            made = await made_of(registry)
            assert made.state is State.READY, made.reason
            registry.blobs.path(made.blob).unlink()
            assert await made_of(registry) == made
            assert registry.blobs.has(made.blob)

    asyncio.run(main())


def test_a_bundle_can_be_made_again_more_often_than_a_conversion_may_die(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path, command=maker()) as registry:
            await push(registry)
            made = await made_of(registry)
            for _ in range(5):
                registry.blobs.path(made.blob).unlink()
                assert await made_of(registry) == made

    asyncio.run(main())


def test_a_bundle_made_again_with_other_bytes_says_so_with_the_way_out(database, tmp_path):
    async def before():
        async with registry_of(database, tmp_path, command=maker()) as registry:
            await push(registry)
            made = await made_of(registry)
            registry.blobs.path(made.blob).unlink()
            return made

    made = asyncio.run(before())

    async def after():
        async with registry_of(database, tmp_path, command=maker(b"other")) as registry:
            again = await made_of(registry)
            assert again.state is State.FAILED
            assert made.blob.hex()[:16] in again.reason
            assert "as a new version" in again.reason
            assert "triplane registry push" in again.reason
            with pytest.raises(Conflict, match="FAILED"):
                await registry.mark_signed(*KEY, "x")

    asyncio.run(after())

    async def mended():
        async with registry_of(database, tmp_path, command=maker()) as registry:
            await push(registry)  # the same file: what failed before may be tried again
            assert await made_of(registry) == made

    asyncio.run(mended())


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_a_stored_model_is_named_as_such_and_not_blamed_on_the_file(
    sqlite, tmp_path, damage
):
    async def main():
        async with registry_of(sqlite, tmp_path, command=maker()) as registry:
            version = await push(registry)
            path = registry.blobs.path(version.blob)
            damage(path)
            for _ in range(5):
                failed = await made_of(registry)
                assert failed.state is State.FAILED
                assert "the cloud's copy of the model file is" in failed.reason
                assert "push the same file again" in failed.reason
            registry.blobs.put(b"a model file")
            shown = (await registry.version("digits@1")).bundles[0]
            assert shown.state is State.CONVERTING, "the failure outlives its cause"
            made = await made_of(registry)
            assert made.state is State.READY, made.reason

    asyncio.run(main())


def test_damage_that_keeps_size_and_time_of_the_model_is_found_before_a_conversion(
    sqlite, tmp_path
):
    async def main():
        async with registry_of(sqlite, tmp_path, command=maker()) as registry:
            version = await push(registry)
            path = registry.blobs.path(version.blob)
            assert not registry.blobs.drop_damaged(version.blob)
            before = path.stat()
            flip(path)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            failed = await made_of(registry)
            assert "the cloud's copy of the model file is" in failed.reason

    asyncio.run(main())


def test_a_conversion_that_the_file_was_blamed_for_is_tried_again_after_a_push(database, tmp_path):
    """A cloud of an earlier release wrote such failures for files that its disk had damaged."""
    refuses = child(
        "import json, sys; order = json.loads(sys.stdin.readline());"
        "told = {'done': {'model_digest': '00' * 32}} if order['do'] == 'check' else"
        " {'refused': 'Corrupt', 'text': 'its header is damaged'}; print(json.dumps(told))"
    )

    async def before():
        async with registry_of(database, tmp_path, command=refuses) as registry:
            await push(registry)
            assert (await made_of(registry)).reason == "its header is damaged"

    asyncio.run(before())

    async def after():
        async with registry_of(database, tmp_path, command=maker()) as registry:
            assert (await made_of(registry)).state is State.FAILED
            assert (await push(registry)).version == 2
            assert (await made_of(registry)).state is State.READY

    asyncio.run(after())


def test_a_conversion_begins_again_once_while_many_ask(sqlite, tmp_path):
    async def main():
        async with registry_of(sqlite, tmp_path, command=maker()) as registry:
            await push(registry)
            made = await made_of(registry)
            told: list[BundleRecord] = []
            registry.on_bundle(told.append)
            registry.blobs.path(made.blob).unlink()
            assert await asyncio.gather(*[made_of(registry) for _ in range(8)]) == [made] * 8
            assert told == [made]

    asyncio.run(main())
