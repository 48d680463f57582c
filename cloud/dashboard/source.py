"""The interface between the dashboard and the cloud: what it shows and may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triplane.proto.federation_pb2 import Run
from triplane.proto.fleet_pb2 import Incident, Node, Rollout
from triplane.proto.registry_pb2 import Version


@dataclass(frozen=True, slots=True)
class NodeIncident:
    """An incident and the node that reported it."""

    node: str
    incident: Incident


class DashboardSource(Protocol):
    """The cloud as the dashboard sees it. Answers are complete and come quickly."""

    async def nodes(self) -> Sequence[Node]:
        """Return all nodes."""

    async def rollouts(self) -> Sequence[Rollout]:
        """Return the newest rollouts with their nodes, newest first."""

    async def versions(self) -> Sequence[Version]:
        """Return the newest versions of all models with their bundles."""

    async def runs(self) -> Sequence[Run]:
        """Return the newest federated runs with their rounds, newest first."""

    async def incidents(self) -> Sequence[NodeIncident]:
        """Return the newest incidents of all nodes."""

    async def due(self) -> Sequence[str]:
        """Return a sentence for each signature to renew and each node with a warning."""

    async def pause(self, rollout_id: str, reason: str) -> Rollout:
        """Do as `triplane rollout pause`; raises the error families."""

    async def resume(self, rollout_id: str, reason: str) -> Rollout:
        """Do as `triplane rollout resume`."""

    async def abort(self, rollout_id: str, reason: str, *, revert: bool) -> Rollout:
        """Do as `triplane rollout abort`."""
