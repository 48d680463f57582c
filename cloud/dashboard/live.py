"""The running cloud as the dashboard's source."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Final

from triplane.cloud.dashboard.rows import MOST_ROWS
from triplane.cloud.dashboard.source import NodeIncident
from triplane.cloud.federation.federation import Federation
from triplane.cloud.fleet.fleet import LiveFleet
from triplane.cloud.fleet.servicer import FleetServicer
from triplane.cloud.fleet.state import warnings
from triplane.cloud.registry import encoding
from triplane.cloud.registry.registry import Registry
from triplane.cloud.trust.expiring import due
from triplane.cloud.trust.repository import MetadataRepository
from triplane.proto.federation_pb2 import Run
from triplane.proto.fleet_pb2 import Node, Rollout
from triplane.proto.registry_pb2 import Version

ACTOR: Final = "dashboard"
"""Actor in the audit log: the name of the token's holder is unknown."""
WHOLE_ROLLOUTS: Final = 3
"""Number of newest rollouts shown with their nodes, besides all that have not ended."""
MOST_MODELS: Final = 25
VERSIONS_EACH: Final = 5
MOST_WARNINGS: Final = 5


class CloudSource:
    """See `DashboardSource`.

    wire: converts nodes and rollouts to messages, with live data of streams.
    """

    def __init__(
        self,
        fleet: LiveFleet,
        wire: FleetServicer,
        registry: Registry,
        federation: Federation,
        repository: MetadataRepository,
    ) -> None:
        self._fleet, self._wire, self._registry = fleet, wire, registry
        self._federation, self._repository = federation, repository

    async def nodes(self) -> Sequence[Node]:
        """See `DashboardSource`."""
        return [self._wire.node(node) for node in self._fleet.nodes()]

    async def rollouts(self) -> Sequence[Rollout]:
        """See `DashboardSource`."""
        records = await self._fleet.rollouts(MOST_ROWS["rollouts"])
        for i, record in enumerate(records):
            # Heads come without nodes. Nodes of old rollouts are left out, since a fleet may have
            # thousands.
            if i < WHOLE_ROLLOUTS or not record.is_ended:
                records[i] = await self._fleet.rollout(record.rollout.id)
        return [self._wire.rollout(record) for record in records]

    async def runs(self) -> Sequence[Run]:
        """See `DashboardSource`."""
        newest = (await self._federation.runs())[: MOST_ROWS["runs"]]
        return [await self._federation.run(run.id) for run in newest]

    async def versions(self) -> Sequence[Version]:
        """See `DashboardSource`; the newest few of each model."""
        versions = [
            version
            for model in (await self._registry.models())[:MOST_MODELS]
            for version in await self._registry.versions(model.name, size=VERSIONS_EACH)
        ]
        newest = sorted(versions, key=lambda version: -version.created_s)
        return [encoding.version(version) for version in newest]

    async def incidents(self) -> Sequence[NodeIncident]:
        """See `DashboardSource`."""
        return [NodeIncident(*row) for row in await self._fleet.incidents(MOST_ROWS["incidents"])]

    async def due(self) -> Sequence[str]:
        """See `DashboardSource`."""
        versions = self._repository.versions()
        sentences = (
            f"node {node.name}: {text}"
            for node in self._fleet.nodes()
            for text in warnings(node, versions)
        )
        # Limited: after a restore from a backup every node has a warning.
        return [*due(self._repository.expiries(), time.time()), *islice(sentences, MOST_WARNINGS)]

    async def pause(self, rollout_id: str, reason: str) -> Rollout:
        """See `DashboardSource`."""
        return self._wire.rollout(await self._fleet.pause(rollout_id, reason=reason, by=ACTOR))

    async def resume(self, rollout_id: str, reason: str) -> Rollout:
        """See `DashboardSource`."""
        return self._wire.rollout(await self._fleet.resume(rollout_id, reason=reason, by=ACTOR))

    async def abort(self, rollout_id: str, reason: str, *, revert: bool) -> Rollout:
        """See `DashboardSource`."""
        record = await self._fleet.abort(rollout_id, reason=reason, revert=revert, by=ACTOR)
        return self._wire.rollout(record)
