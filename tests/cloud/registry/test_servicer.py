"""The registry over a real grpc.aio server: what a client sends, gets, and is refused."""

import asyncio
import contextlib
import secrets

import grpc
import pytest
from tests.cloud.registry.models import QUICK, WAIT_S, child, model_bytes, registry_of

from triplane.cloud.registry import RegistryServicer
from triplane.proto import registry_pb2 as pb
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.registry_pb2_grpc import RegistryStub, add_RegistryServicer_to_server
from triplane.proto.status import remote_errors

HANG = child("import sys; sys.stdin.read()")


@contextlib.asynccontextmanager
async def served(database, tmp_path, **options):
    """(stub, registry) on a port of this test's own."""
    async with registry_of(database, tmp_path, **options) as registry:
        server = grpc.aio.server()
        add_RegistryServicer_to_server(RegistryServicer(registry, lambda: "ada"), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield RegistryStub(channel), registry
        finally:
            await server.stop(0)


def push(blob, **fields):
    return pb.PushRequest(**{"model": "digits", "blob": blob, "key": secrets.token_bytes(16),
                             **fields})  # fmt: skip


@pytest.mark.slow
def test_a_model_is_pushed_shown_and_converted(sqlite, tmp_path):
    async def main():
        async with served(sqlite, tmp_path) as (stub, registry):
            blob = registry.blobs.put(model_bytes(tmp_path))
            lineage = pb.Lineage(note="first")
            pushed = await stub.Push(push(blob, aliases=["stable"], lineage=lineage))
            bundle = await stub.GetBundle(
                pb.GetBundleRequest(reference="digits@stable", target="ort-x64"), timeout=WAIT_S
            )
            shown = await stub.GetVersion(pb.GetVersionRequest(reference="digits"))
            return blob, pushed, bundle, shown

    blob, pushed, bundle, shown = asyncio.run(main())
    assert (pushed.version, pushed.blob, pushed.created_by) == (1, blob, "ada")
    assert (pushed.recipe.entry, pushed.lineage.source) == ("predict", "push")
    assert (pushed.lineage.note, list(pushed.aliases)) == ("first", ["stable"])
    assert len(pushed.model_digest) == len(bundle.root_digest) == len(bundle.blob) == 32
    assert (bundle.state, bundle.reason) == (pb.Bundle.READY, "")
    assert bundle.needs.runtime == "onnxruntime"
    assert bundle.needs.opset == 21
    assert list(shown.bundles) == [bundle]


@pytest.mark.slow
def test_lists_and_aliases_go_over_the_wire(sqlite, tmp_path):
    async def main():
        async with served(sqlite, tmp_path, command=child(QUICK)) as (stub, registry):
            for data in (b"1", b"2", b"3"):
                await stub.Push(push(registry.blobs.put(data)))
            model = await stub.SetAlias(
                pb.SetAliasRequest(model="digits", alias="stable", version=2)
            )
            listed = await stub.ListModels(pb.ListModelsRequest())
            page = await stub.ListVersions(
                pb.ListVersionsRequest(model="digits", page_size=2, before=3)
            )
            return model, listed, page

    model, listed, page = asyncio.run(main())
    assert list(listed.models) == [model]
    assert (model.name, model.versions, model.latest) == ("digits", 3, 3)
    assert [(alias.name, alias.version) for alias in model.aliases] == [("stable", 2)]
    assert [(v.version, list(v.aliases)) for v in page.versions] == [(2, ["stable"]), (1, [])]


@pytest.mark.slow
def test_an_answer_leaves_before_the_deadline_though_the_conversion_lasts(sqlite, tmp_path):
    async def main():
        async with served(sqlite, tmp_path, command=child(QUICK)) as (stub, registry):
            await stub.Push(push(registry.blobs.put(b"model")))
        async with served(sqlite, tmp_path, command=HANG) as (stub, _):
            request = pb.GetBundleRequest(reference="digits", target="ort-x64")
            return await stub.GetBundle(request, timeout=2)

    assert asyncio.run(main()).state == pb.Bundle.CONVERTING


@pytest.mark.slow
def test_refusals_arrive_as_their_family(sqlite, tmp_path):
    async def main():
        async with served(sqlite, tmp_path) as (stub, registry):
            blob = registry.blobs.put(b"no model")
            for call, family, message in (
                (stub.Push(push(blob)), Corrupt, "digits.tpm"),
                (stub.Push(push(bytes(32))), NotFound, "upload it first"),
                (stub.Push(push(blob, key=b"")), InvalidInput, "16 random bytes"),
                (stub.Push(push(blob, model="../x")), InvalidInput, "has 1 to 63 of"),
                (stub.Push(push(blob, recipe=pb.Recipe(max_accuracy_drop=-1))), InvalidInput,
                 "0 to 100"),
                (stub.GetVersion(pb.GetVersionRequest(reference="x")), NotFound, "no model"),
                (stub.ListVersions(pb.ListVersionsRequest(model="x")), NotFound, "no model"),
                (stub.ListVersions(pb.ListVersionsRequest(model="x", page_size=1001)),
                 InvalidInput, "1 to 1000"),
                (stub.GetBundle(pb.GetBundleRequest(reference="x", target="ort-x64")), NotFound,
                 "no model"),
            ):  # fmt: skip
                with pytest.raises(family, match=message), remote_errors():
                    await call

    asyncio.run(main())


def test_a_used_key_with_other_content_is_a_conflict(sqlite, tmp_path):
    async def main():
        async with served(sqlite, tmp_path, command=child(QUICK)) as (stub, registry):
            first = await stub.Push(push(registry.blobs.put(b"1"), key=bytes(16)))
            again = await stub.Push(push(registry.blobs.put(b"1"), key=bytes(16)))
            assert first == again
            with pytest.raises(Conflict, match="other content"), remote_errors():
                await stub.Push(push(registry.blobs.put(b"2"), key=bytes(16)))

    asyncio.run(main())
