"""Push, references, aliases and bundles, over both databases and with real children."""

import asyncio

from sqlalchemy import select
from tests.cloud.registry.models import WAIT_S, asked, model_bytes, registry_of

from triplane.cloud.identity.tables import AUDIT
from triplane.cloud.registry import Bundle, State
from triplane.unified_ir.runtime.bundle import Bundle as BundleFile


def test_a_pushed_model_becomes_a_bundle(database, tmp_path):
    told: list[Bundle] = []

    async def main():
        async with registry_of(database, tmp_path) as registry:
            registry.on_bundle(told.append)
            blob = registry.blobs.put(model_bytes(tmp_path))
            version = await registry.push(asked(blob, aliases=("stable",)), by="operator")
            begun = await registry.bundle("digits", 1, "ort-x64")
            async with asyncio.timeout(WAIT_S):
                made = await registry.wait_bundle("digits", 1, "ort-x64")
            return (
                version,
                begun,
                made,
                registry.blobs.find(made.blob),
                await registry.version("digits@stable"),
            )

    version, begun, made, path, now = asyncio.run(main())
    assert (version.version, version.aliases, version.created_by) == (1, ("stable",), "operator")
    assert begun.state is State.CONVERTING
    assert made.state is State.READY, made.reason
    bundle = BundleFile.load(path, expected_digest=made.root_digest.hex())
    assert (bundle.name, bundle.version, bundle.target) == ("digits", "1", "ort-x64")
    assert bundle.content_digest == made.content_digest.hex()
    assert made.needs.runtime == "onnxruntime"
    assert made.needs.memory_bytes == bundle.description.constraints.memory_bytes > 0
    assert told == [made]
    assert now.bundles == (made,)
    actions = database.read_now(lambda c: list(c.scalars(select(AUDIT.c.action))))
    assert actions == ["registry.push", "registry.bundle"]
