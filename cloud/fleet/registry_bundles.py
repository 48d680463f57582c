"""Bundles for rollouts from the registry, signatures from the metadata, and who may read what."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from triplane.cloud.fleet.capability import BundleNeeds
from triplane.cloud.fleet.state import FleetNode
from triplane.cloud.fleet.values import BundleFailed, BundleReady, Limit
from triplane.cloud.registry.names import Reference
from triplane.cloud.registry.registry import Registry
from triplane.cloud.registry.values import BundleRecord, State
from triplane.cloud.trust.repository import MetadataRepository
from triplane.proto.errors import Conflict, InvalidInput, NotFound, Unavailable
from triplane.proto.messages import value_from
from triplane.proto.signed_fields import AUTO, RELEASE
from triplane.proto.targets import SignedTarget, TargetName


class RegistryBundles:
    """See `fleet.Bundles`. A signed target counts only if it is the registry's own bundle."""

    def __init__(self, registry: Registry, repository: MetadataRepository) -> None:
        self._registry, self._repository = registry, repository

    async def resolve(self, reference: str) -> tuple[str, int]:
        """See `fleet.Bundles`."""
        parsed = Reference.parse(reference)
        version = await self._registry.version(reference)
        return parsed.model, version.version

    async def look(
        self, model: str, version: int, target: str, role: str
    ) -> BundleReady | BundleFailed | None:
        """See `fleet.Bundles`."""
        bundle = await self._registry.bundle(model, version, target)
        if bundle.state is State.CONVERTING:
            return None
        if bundle.state is State.FAILED:
            return BundleFailed(target, bundle.reason)
        try:
            signed = await self._signed(bundle, role)
        except Conflict as error:
            return BundleFailed(target, str(error))
        needs = value_from(BundleNeeds, bundle.needs)
        if signed is None:
            return BundleReady(target, needs)
        # The node would refuse other bytes than the signed ones, so do not even assign them.
        if (signed.sha256, signed.length) != (bundle.blob, bundle.size):
            return BundleFailed(
                target,
                f"{signed.path} is signed with other bytes than the registry's bundle; "
                "push a new version",
            )
        if bundle.signed_path != signed.path:
            await self._registry.mark_signed(model, version, target, signed.path)
        return BundleReady(target, needs, signed.path, bundle.blob.hex())

    async def limit(self, model: str, version: int, role: str) -> Limit | None:
        """See `fleet.Bundles`. None without a rule of the policy, which `look` then reports."""
        rule = self._repository.policy().models.get(model)
        if role != AUTO or rule is None:
            return None
        signed = await asyncio.to_thread(self._repository.signed_bundles)
        released = {
            target
            for (of, number, target), target_file in signed.items()
            if (of, number) == (model, version) and target_file.name.role == RELEASE
        }
        return Limit(rule.share, frozenset(released))

    async def _signed(self, bundle: BundleRecord, role: str) -> SignedTarget | None:
        signed = await asyncio.to_thread(
            self._repository.find_signed, bundle.model, bundle.version, bundle.target
        )
        if signed is not None and signed.name.role in {role, RELEASE}:
            return signed
        if role != AUTO:
            return None
        version = await self._registry.version(f"{bundle.model}@{bundle.version}")
        return await asyncio.to_thread(
            self._repository.sign_auto,
            bundle.model,
            bundle.version,
            bundle.target,
            length=bundle.size,
            sha256=bundle.blob,
            model_digest=version.model_digest,
            content_digest=bundle.content_digest,
        )

    async def check_readable(self, node: FleetNode, blob: bytes) -> None:
        """Raise NotFound unless the blob is a bundle of the node, or samples that judge one."""
        held = node.held.values()
        # Also versions that it may return to: it fetches them again if its own file is damaged.
        paths = {p for h in held for p in (h.path, h.good_path, h.back_path) if p}
        names = [TargetName.parse(path) for path in sorted(paths)]
        models = {name.model for name in names if name.role == AUTO}
        if models and blob in await asyncio.to_thread(self._goldens, models):
            return
        for name in names:
            try:
                bundle = await self._registry.bundle(name.model, name.version, name.target)
            except (NotFound, InvalidInput):
                continue
            if bundle.blob == blob and bundle.state is State.READY:
                return
            if bundle.blob == blob:
                raise Unavailable(_not_here(bundle))
        raise NotFound(
            f"no blob {blob.hex()[:16]}... is assigned to node {node.name}; nodes read only "
            "bundles that are assigned to them"
        )

    def _goldens(self, models: set[str]) -> set[bytes]:
        """Return the digests of the samples by which the published policy judges these models."""
        rules = self._repository.policy().models
        paths = {rules[model].golden for model in models if model in rules}
        stamp = self._signed_part("timestamp.json")
        snapshot = self._signed_part(f"{stamp['meta']['snapshot.json']['version']}.snapshot.json")
        top = self._signed_part(f"{snapshot['meta']['targets.json']['version']}.targets.json")
        listed = top["targets"]
        return {bytes.fromhex(listed[p]["hashes"]["sha256"]) for p in paths if p in listed}

    def _signed_part(self, name: str) -> Any:
        return json.loads(self._repository.get(name))["signed"]


def _not_here(bundle: BundleRecord) -> str:
    if bundle.state is State.CONVERTING:
        return f"the cloud lost its file of {bundle} and is making it again; try again later"
    return f"the cloud lost its file of {bundle}: {bundle.reason}"
