"""What the metadata lets the automatic role do, as rollouts hear it."""

import asyncio
import hashlib
from typing import Any, cast

import pytest
from tests.attacks.trust_stage import GOLDEN, bundle_entry, stage
from tests.cloud.registry.makers import maker
from tests.cloud.registry.models import asked, registry_of

from triplane.cloud.fleet.registry_bundles import RegistryBundles
from triplane.cloud.fleet.state import FleetNode, NodeAssignment
from triplane.cloud.fleet.values import Limit
from triplane.cloud.store import Database
from triplane.proto.errors import NotFound, Unavailable
from triplane.proto.targets import Rule


def test_the_policys_share_limits_automatic_releases_but_not_what_people_signed(tmp_path):
    made = stage(tmp_path)
    supply = RegistryBundles(cast("Any", None), made.repository)

    def limit(version, role):
        return asyncio.run(supply.limit("digits", version, role))

    assert limit(2, "auto") is None  # no rule: that is said when the bundle is looked at
    made.allow(digits=Rule(0.25, "golden/digits", "accuracy", 0.9))
    made.release(bundle_entry("release/digits@2+ort-x64.bundle"))
    made.sign_auto("digits", 3)
    assert limit(2, "auto") == Limit(0.25, frozenset({"ort-x64"}))
    assert limit(3, "auto") == Limit(0.25)
    assert limit(3, "release") is None


def test_a_node_waits_for_a_bundle_that_the_cloud_lost_and_makes_again(tmp_path):
    path = "release/digits@1+ort-x64.bundle"
    node = FleetNode(name="n1", held={"digits": NodeAssignment(version=1, path=path)})

    database = Database.open(f"sqlite:///{tmp_path / 'cloud.db'}")

    async def main():
        async with registry_of(database, tmp_path, command=maker()) as registry:
            supply = RegistryBundles(registry, cast("Any", None))
            await registry.push(asked(registry.blobs.put(b"a model file")), by="op")
            made = await registry.wait_bundle("digits", 1, "ort-x64")
            await supply.check_readable(node, made.blob)
            registry.blobs.path(made.blob).write_bytes(b"damaged")
            with pytest.raises(Unavailable, match="making it again; try again later"):
                await supply.check_readable(node, made.blob)
            await registry.wait_bundle("digits", 1, "ort-x64")
            await supply.check_readable(node, made.blob)
            assert registry.blobs.has(made.blob)

    try:
        asyncio.run(main())
    finally:
        database.close()


def test_a_node_of_an_automatic_model_reads_the_samples_that_judge_it_and_no_others(tmp_path):
    made = stage(tmp_path)
    made.allow(digits=Rule(0.25, "golden/digits", "accuracy", 0.9))
    bundles = RegistryBundles(cast("Any", NoBundles()), made.repository)
    samples = hashlib.sha256(GOLDEN).digest()

    def node(model, role):
        path = f"{role}/{model}@2+ort-x64.bundle"
        return FleetNode(name="n1", held={model: NodeAssignment(version=2, path=path)})

    asyncio.run(bundles.check_readable(node("digits", "auto"), samples))
    for other in (node("digits", "release"), node("letters", "auto")):
        with pytest.raises(NotFound, match="nodes read only bundles that are assigned to them"):
            asyncio.run(bundles.check_readable(other, samples))


class NoBundles:
    """A registry that has none yet."""

    async def bundle(self, model, version, target):
        raise NotFound(f"no bundle of {model}@{version}")
