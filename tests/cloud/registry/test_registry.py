"""Versions, references, aliases and keys, over both databases."""

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import select
from tests.cloud.registry.models import QUICK, WAIT_S, asked, child, model_bytes, registry_of

from triplane.cloud.identity import audit
from triplane.cloud.identity.tables import AUDIT
from triplane.cloud.registry import (
    BundleRecord,
    ConversionRecipe,
    Lineage,
    Reference,
    State,
    queries,
)
from triplane.proto.errors import Conflict, InvalidInput, NotFound
from triplane.unified_ir.runtime.bundle import Bundle as BundleFile

SIGNED = "release/digits@1+ort-x64.bundle"


def quick(database, tmp_path):
    return registry_of(database, tmp_path, command=child(QUICK))


@pytest.mark.slow
def test_a_pushed_model_becomes_a_bundle(database, tmp_path):
    told: list[BundleRecord] = []

    async def main():
        async with registry_of(database, tmp_path) as registry:
            registry.on_bundle(told.append)
            blob = registry.blobs.put(model_bytes(tmp_path))
            version = await registry.push(asked(blob, aliases=("stable",)), by="operator")
            begun = await registry.bundle("digits", 1, "ort-x64")
            async with asyncio.timeout(WAIT_S):
                made = await registry.wait_bundle("digits", 1, "ort-x64")
            now = await registry.version("digits@stable")
            signed = await registry.mark_signed("digits", 1, "ort-x64", SIGNED)
            assert signed == replace(made, signed_path=SIGNED)
            assert (await registry.version("digits")).bundles == (signed,)
            return version, begun, made, registry.blobs.find(made.blob), now

    version, begun, made, path, now = asyncio.run(main())
    assert (version.version, version.aliases, version.created_by) == (1, ("stable",), "operator")
    assert begun.state is State.CONVERTING
    assert made.state is State.READY, made.reason
    bundle = BundleFile.load(path, expected_digest=made.root_digest.hex())
    assert (bundle.name, bundle.version, bundle.target) == ("digits", "1", "ort-x64")
    assert bundle.content_digest == made.content_digest.hex()
    assert bundle.description.model_digest == version.model_digest.hex()
    assert made.needs.runtime == "onnxruntime"
    assert made.needs.memory_bytes == bundle.description.constraints.memory_bytes > 0
    assert told == [made, replace(made, signed_path=SIGNED)]
    assert now.bundles == (made,)
    actions = database.read_now(lambda c: list(c.scalars(select(AUDIT.c.action))))
    assert actions == ["registry.push", "registry.bundle", "registry.signed"]


@pytest.mark.slow
def test_versions_count_from_one_and_references_find_them(database, tmp_path):
    async def main():
        async with quick(database, tmp_path) as registry:
            blobs = [registry.blobs.put(bytes([i])) for i in range(3)]
            made = [await registry.push(asked(blob), by="op") for blob in blobs]
            assert [version.version for version in made] == [1, 2, 3]
            await registry.set_alias("digits", "stable", 2, by="op")
            for reference, number in (
                ("digits", 3), ("digits@latest", 3), ("digits@stable", 2), ("digits@1", 1),
            ):  # fmt: skip
                found = await registry.version(reference)
                assert (found.version, found.blob) == (number, blobs[number - 1])
            assert [v.version for v in await registry.versions("digits")] == [3, 2, 1]
            assert [v.version for v in await registry.versions("digits", size=1, before=3)] == [2]
            (model,) = await registry.models()
            assert (model.name, model.latest, model.aliases) == ("digits", 3, (("stable", 2),))

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "family", "message"),
    [
        ("other", NotFound, "no model 'other'"),
        ("digits@9", NotFound, "newest is 1"),
        ("digits@beta", NotFound, "only latest"),
        ("digits@", InvalidInput, "a name .alias. has 1 to 63 of"),
        ("digits@0", NotFound, "no alias '0'"),
        ("Digits", InvalidInput, "has 1 to 63 of"),
        ("../etc", InvalidInput, "has 1 to 63 of"),
        ("a" * 64, InvalidInput, "has 1 to 63 of"),
        ("digits@stable@1", InvalidInput, "has 1 to 63 of"),
        ("digits@1\n", InvalidInput, "has 1 to 63 of"),
    ],
)
def test_a_reference_to_nothing_is_refused_by_name(sqlite, tmp_path, reference, family, message):
    async def main():
        async with quick(sqlite, tmp_path) as registry:
            await registry.push(asked(registry.blobs.put(b"m")), by="op")
            with pytest.raises(family, match=message):
                await registry.version(reference)

    asyncio.run(main())


@pytest.mark.slow
def test_the_same_key_gives_the_same_version(database, tmp_path):
    async def main():
        async with quick(database, tmp_path) as registry:
            push = asked(registry.blobs.put(b"m"), aliases=("b", "a"))
            first = await registry.push(push, by="op")
            assert await registry.push(push, by="op") == first
            answers = await asyncio.gather(*[
                registry.push(asked(push.blob, key=bytes(16)), by="op") for _ in range(8)
            ])  # fmt: skip
            assert {version.version for version in answers} == {2}
            for other in (
                replace(push, blob=registry.blobs.put(b"n")),
                replace(push, model="other"),
                replace(push, aliases=("a",)),
                replace(push, recipe=ConversionRecipe(entry="evaluate")),
                replace(push, lineage=Lineage(note="x")),
            ):
                with pytest.raises(Conflict, match="digits@1 with other content"):
                    await registry.push(other, by="op")
            assert len(await registry.versions("digits")) == 2

    asyncio.run(main())


def test_an_alias_moves_and_goes(database, tmp_path):
    async def main():
        async with quick(database, tmp_path) as registry:
            for data in (b"1", b"2"):
                await registry.push(asked(registry.blobs.put(data), aliases=("new",)), by="op")
            assert (await registry.version("digits@new")).version == 2
            assert (await registry.version("digits@1")).aliases == ()
            moved = await registry.set_alias("digits", "new", 1, by="op")
            assert moved.aliases == (("new", 1),)
            assert (await registry.set_alias("digits", "new", 0, by="op")).aliases == ()
            with pytest.raises(NotFound, match="newest is 2"):
                await registry.set_alias("digits", "new", 3, by="op")
            for name in ("latest", "7"):
                with pytest.raises(InvalidInput, match="an alias is neither"):
                    await registry.set_alias("digits", name, 1, by="op")

    asyncio.run(main())


def test_what_was_not_uploaded_or_has_no_parent_is_not_registered(database, tmp_path):
    async def main():
        async with quick(database, tmp_path) as registry:
            blob = registry.blobs.put(b"m")
            for push, message in (
                (asked(bytes(32)), "upload it first"),
                (asked(blob, recipe=ConversionRecipe(calibration=bytes(32))), "upload it first"),
                (asked(blob, lineage=Lineage(parent="digits@1")), "no model 'digits'"),
            ):
                with pytest.raises(NotFound, match=message):
                    await registry.push(push, by="op")
            assert await registry.models() == []
            first = await registry.push(asked(blob), by="op")
            child = await registry.push(asked(blob, lineage=Lineage(parent=str(first))), by="op")
            assert child.lineage.parent == "digits@1"

    asyncio.run(main())
    count = database.read_now(lambda c: len(c.execute(select(AUDIT)).all()))
    assert count == 2, "a refused push was audited as done"


def test_a_push_whose_audit_fails_did_not_happen(database, tmp_path, monkeypatch):
    def refuse(connection, *fields):
        raise Conflict("the log is closed")

    async def main():
        async with quick(database, tmp_path) as registry:
            monkeypatch.setattr(audit, "record", refuse)
            with pytest.raises(Conflict, match="the log is closed"):
                await registry.push(asked(registry.blobs.put(b"m")), by="op")
            assert await registry.models() == []

    asyncio.run(main())


def test_only_a_finished_bundle_is_signed(database, tmp_path):
    async def main():
        async with quick(database, tmp_path) as registry:
            told: list[BundleRecord] = []
            registry.on_bundle(told.append)
            await registry.push(asked(registry.blobs.put(b"m")), by="op")
            with pytest.raises(NotFound, match="no bundle"):
                await registry.mark_signed("digits", 1, "ort-x64", SIGNED)
            with pytest.raises(NotFound, match="no target 'toaster'"):
                await registry.bundle("digits", 1, "toaster")
            with pytest.raises(NotFound, match="newest is 1"):
                await registry.bundle("digits", 2, "ort-x64")
            failed = await registry.wait_bundle("digits", 1, "ort-x64")
            with pytest.raises(Conflict, match="is FAILED; only a finished"):
                await registry.mark_signed("digits", 1, "ort-x64", SIGNED)
            assert told == [failed]

    asyncio.run(main())


def test_a_bundle_that_ended_never_changes(database, tmp_path):
    async def main():
        async with quick(database, tmp_path) as registry:
            await registry.push(asked(registry.blobs.put(b"m")), by="op")
        key = ("digits", 1, "ort-x64")
        made = BundleRecord(
            model="digits", version=1, target="ort-x64", state=State.READY, blob=b"a"
        )
        await database.write(lambda c: queries.start(c, *key))
        await database.write(lambda c: queries.finish(c, made))
        late = replace(made, state=State.FAILED, blob=b"b", reason="late")
        await database.write(lambda c: queries.finish(c, late))
        assert await database.read(lambda c: queries.bundle(c, *key)) == made

    asyncio.run(main())


def test_a_listener_that_fails_keeps_nobody_else_from_hearing(sqlite, tmp_path, caplog):
    heard: list[BundleRecord] = []

    def fail(_):
        raise ValueError("not today")

    async def main():
        async with quick(sqlite, tmp_path) as registry:
            registry.on_bundle(fail)
            registry.on_bundle(heard.append)
            await registry.push(asked(registry.blobs.put(b"m")), by="op")
            return await registry.wait_bundle("digits", 1, "ort-x64")

    assert heard == [asyncio.run(main())]
    assert "a listener failed" in caplog.messages


@pytest.mark.parametrize(
    "fields",
    [
        {"key": b"short"}, {"blob": b"short"}, {"model": "Digits"}, {"model": ""},
        {"aliases": ("latest",)}, {"aliases": ("7",)}, {"aliases": ("a b",)},
        {"aliases": tuple(f"a{i}" for i in range(17))},
    ],
)  # fmt: skip
def test_a_push_that_breaks_a_rule_is_no_push(fields):
    with pytest.raises(InvalidInput):
        asked(**{"blob": bytes(32), **fields})


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConversionRecipe(quantize="int4"),
        lambda: ConversionRecipe(quantize="int8"),
        lambda: ConversionRecipe(calibration=b"x"),
        lambda: ConversionRecipe(entry=""),
        lambda: ConversionRecipe(entry="a\0b"),
        lambda: ConversionRecipe(max_accuracy_drop=float("nan")),
        lambda: ConversionRecipe(max_accuracy_drop=-1.0),
        lambda: Lineage(parent="digits"),
        lambda: Lineage(parent="digits@stable"),
        lambda: Lineage(note="x" * 3000),
        lambda: Lineage(note="\0"),
    ],
)
def test_a_recipe_or_lineage_that_breaks_a_rule_is_refused(make):
    with pytest.raises(InvalidInput):
        make()


def test_a_reference_is_written_as_it_is_read():
    for text in ("digits@3", "digits@stable", "digits@latest"):
        assert str(Reference.parse(text)) == text
