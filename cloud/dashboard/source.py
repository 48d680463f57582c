"""The interface between the dashboard and the cloud: what the page shows and may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triplane.proto.federation_pb2 import Run
from triplane.proto.fleet_pb2 import Incident, Node, Rollout
from triplane.proto.registry_pb2 import Version


@dataclass(frozen=True, slots=True)
class NodeIncident:
    """An incident with its node."""

    node: str
    incident: Incident


class Source(Protocol):
    """The cloud as the dashboard sees it. Every answer is whole; nothing is awaited for long."""

    async def nodes(self) -> Sequence[Node]:
        """All nodes."""
        ...

    async def rollouts(self) -> Sequence[Rollout]:
        """The newest rollouts with their nodes, newest first."""
        ...

    async def versions(self) -> Sequence[Version]:
        """The newest versions of all models with their bundles."""
        ...

    async def runs(self) -> Sequence[Run]:
        """The newest federated runs with their rounds, newest first."""
        ...

    async def incidents(self) -> Sequence[NodeIncident]:
        """The newest incidents of all nodes."""
        ...

    async def due(self) -> Sequence[str]:
        """Return a sentence for each signature to renew and each contradicting node."""
        ...

    async def pause(self, rollout_id: str, reason: str) -> Rollout:
        """As `triplane rollout pause`; raises the families."""
        ...

    async def resume(self, rollout_id: str, reason: str) -> Rollout:
        """As `triplane rollout resume`."""
        ...

    async def abort(self, rollout_id: str, reason: str, *, revert: bool) -> Rollout:
        """As `triplane rollout abort`."""
        ...
