"""`triplane.fleet.v1.Fleet`: decodes, calls, encodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Final

from triplane.cloud.fleet.fleet import LiveFleet
from triplane.cloud.fleet.messages import REASONS_BYTES, node_message, rollout_message, truncated
from triplane.cloud.fleet.selector import Selector
from triplane.cloud.fleet.state import FleetNode, RolloutRecord
from triplane.cloud.sessions import Sessions
from triplane.proto import fleet_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.fleet_pb2_grpc import FleetServicer as Wire
from triplane.proto.status import status_of_aio

MAX_NODES: Final = 1000
DEFAULT_NODES: Final = 100
PAGE_BYTES: Final = 2 << 20
"""Largest size of the nodes in one answer, half of a message's limit; `next` continues."""
MAX_ROLLOUTS: Final = 500
DEFAULT_ROLLOUTS: Final = 50
WATCH_PERIOD_S: Final = 0.2
"""Shortest time between two messages to a watcher; states in between are skipped."""
WATCH_IDLE_S: Final = 5.0
"""Longest time between two looks at a watched rollout: connections change without an event."""


class FleetServicer(Wire):
    """caller: returns the name that makes the call. metadata_versions: the cloud's, by role."""

    def __init__(
        self,
        fleet: LiveFleet,
        sessions: Sessions,
        caller: Callable[[], str],
        metadata_versions: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._fleet, self._sessions, self._caller = fleet, sessions, caller
        self._metadata_versions = metadata_versions

    def node(self, node: FleetNode) -> pb.Node:
        """Return the message of a node, including whether its stream is open."""
        message = node_message(
            node,
            connected=self._sessions.is_connected(node.name),
            metadata_versions=self._metadata_versions(),
        )
        message.last_seen_s = max(node.last_seen_s, self._sessions.last_seen_s(node.name))
        return message

    def rollout(self, record: RolloutRecord) -> pb.Rollout:
        """Return the message of a rollout, including which streams are open."""
        return rollout_message(record, self._sessions.is_connected)

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesResponse:
        """See fleet.proto."""
        async with status_of_aio(context):
            size = _page(request.page_size, DEFAULT_NODES, MAX_NODES)
            selector = Selector.parse(request.selector or "all")
            matching = (
                node
                for node in self._fleet.nodes()
                if node.name > request.after and selector.matches(node.labels)
            )
            return self._page(matching, size)

    def _page(self, nodes: Iterator[FleetNode], size: int) -> pb.ListNodesResponse:
        """Return as many nodes as asked for and as fit into a message, but at least one."""
        page, page_bytes = pb.ListNodesResponse(), 0
        for node in nodes:
            message = self.node(node)
            page_bytes += message.ByteSize()
            if page.nodes and (len(page.nodes) == size or page_bytes > PAGE_BYTES):
                page.next = page.nodes[-1].name
                return page
            page.nodes.append(message)
        return page

    async def GetNode(self, request: pb.GetNodeRequest, context: Any) -> pb.Node:
        """See fleet.proto."""
        async with status_of_aio(context):
            return self.node(self._fleet.node(request.name))

    async def SetLabels(self, request: pb.SetLabelsRequest, context: Any) -> pb.Node:
        """See fleet.proto."""
        async with status_of_aio(context):
            put, remove = dict(request.set), list(request.remove)
            by = self._caller()
            return self.node(
                await self._fleet.set_labels(request.name, put=put, remove=remove, by=by)
            )

    async def Cordon(self, request: pb.CordonRequest, context: Any) -> pb.Node:
        """See fleet.proto."""
        async with status_of_aio(context):
            cordoned, by = request.cordoned, self._caller()
            return self.node(await self._fleet.cordon(request.name, cordoned=cordoned, by=by))

    async def Deploy(self, request: pb.DeployRequest, context: Any) -> pb.Rollout:
        """See fleet.proto."""
        async with status_of_aio(context):
            return self.rollout(await self._fleet.deploy(request, by=self._caller()))

    async def ListRollouts(
        self, request: pb.ListRolloutsRequest, context: Any
    ) -> pb.ListRolloutsResponse:
        """See fleet.proto."""
        async with status_of_aio(context):
            size = _page(request.page_size, DEFAULT_ROLLOUTS, MAX_ROLLOUTS)
            records = await self._fleet.rollouts(size)
            rollouts = [self.rollout(record) for record in records]
            for rollout in rollouts:
                # Reasons are as long as people and nodes write them; 500 of them could exceed a
                # message.
                rollout.reason = truncated(rollout.reason, REASONS_BYTES // len(rollouts))
            return pb.ListRolloutsResponse(rollouts=rollouts)

    async def GetRollout(self, request: pb.GetRolloutRequest, context: Any) -> pb.Rollout:
        """See fleet.proto."""
        async with status_of_aio(context):
            return self.rollout(await self._fleet.rollout(request.id))

    async def WatchRollout(
        self, request: pb.GetRolloutRequest, context: Any
    ) -> AsyncIterator[pb.Rollout]:
        """See fleet.proto."""
        async with status_of_aio(context):
            rollout_id = (await self._fleet.rollout(request.id)).rollout.id
            sent: pb.Rollout | None = None
            while True:
                # Taken before reading, so that a change between the read and the wait is not
                # missed.
                moved = self._fleet.moved
                record = await self._fleet.rollout(rollout_id)
                now = self.rollout(record)
                if now != sent:
                    yield now
                    sent = now
                if record.is_ended:
                    return
                await asyncio.sleep(WATCH_PERIOD_S)
                await _heard(moved)

    async def Pause(self, request: pb.ChangeRolloutRequest, context: Any) -> pb.Rollout:
        """See fleet.proto."""
        async with status_of_aio(context):
            by = self._caller()
            return self.rollout(await self._fleet.pause(request.id, reason=request.reason, by=by))

    async def Resume(self, request: pb.ChangeRolloutRequest, context: Any) -> pb.Rollout:
        """See fleet.proto."""
        async with status_of_aio(context):
            by = self._caller()
            return self.rollout(await self._fleet.resume(request.id, reason=request.reason, by=by))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.Rollout:
        """See fleet.proto."""
        async with status_of_aio(context):
            record = await self._fleet.abort(
                request.id, reason=request.reason, revert=request.revert, by=self._caller()
            )
            return self.rollout(record)


async def _heard(moved: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(WATCH_IDLE_S):
            await moved.wait()
    except TimeoutError:
        return


def _page(asked: int, default: int, most: int) -> int:
    if asked > most:
        raise InvalidInput(f"a page has at most {most} entries, got {asked}")
    return asked or default
