"""Nodes on their session streams: desired documents out, reports in."""

from __future__ import annotations

from triplane.cloud.fleet.fleet import LiveFleet
from triplane.cloud.fleet.messages import desired_message
from triplane.cloud.sessions import Sessions
from triplane.proto.errors import InvalidInput
from triplane.proto.fleet_pb2 import Report
from triplane.proto.stream import Message


class NodePeer:
    """The `SessionPeer` of nodes; sends each document that changes."""

    def __init__(self, fleet: LiveFleet, sessions: Sessions) -> None:
        self._fleet = fleet
        fleet.on_desired(lambda node: sessions.send(node.name, desired_message(node)))

    def greeting(self, name: str) -> Message:
        """See `SessionPeer`."""
        return desired_message(self._fleet.node(name))

    async def take(self, name: str, message: Message) -> None:
        """See `SessionPeer`."""
        if not isinstance(message, Report):
            raise InvalidInput("a node sends reports; other messages are the cloud's")
        await self._fleet.report(name, message)

    def left(self, name: str) -> None:
        """See `SessionPeer`."""
