"""`triplane.federation.v1.Federation`: decodes, calls, encodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from triplane.cloud.federation.federation import Federation
from triplane.proto import federation_pb2 as pb
from triplane.proto.federation_pb2_grpc import FederationServicer as Wire
from triplane.proto.status import status_of_aio

WATCH_PERIOD_S: Final = 0.1
"""Least time between two messages to a watcher; states in between are skipped."""
OVER: Final = frozenset({pb.Run.DONE, pb.Run.FAILED})


class FederationServicer(Wire):
    """caller: returns the name that makes the current call."""

    def __init__(self, federation: Federation, caller: Callable[[], str]) -> None:
        self._federation, self._caller = federation, caller

    async def Start(self, request: pb.StartRequest, context: Any) -> pb.Run:
        """See federation.proto."""
        async with status_of_aio(context):
            return await self._federation.begin(request, by=self._caller())

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        """See federation.proto."""
        async with status_of_aio(context):
            return pb.ListRunsResponse(runs=await self._federation.runs())

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.Run:
        """See federation.proto."""
        async with status_of_aio(context):
            return await self._federation.run(request.id)

    async def WatchRun(self, request: pb.GetRunRequest, context: Any) -> AsyncIterator[pb.Run]:
        """See federation.proto."""
        async with status_of_aio(context):
            run_id = (await self._federation.run(request.id)).id
            sent: pb.Run | None = None
            while True:
                # Taken before reading: a change between the read and the wait then ends the wait at
                # once.
                moved = self._federation.moved
                now = await self._federation.run(run_id)
                if now != sent:
                    yield now
                    sent = now
                if now.phase in OVER:
                    return
                # A slow watcher gets fewer messages instead of a growing queue of old states.
                await asyncio.sleep(WATCH_PERIOD_S)
                await moved.wait()

    async def Stop(self, request: pb.ChangeRunRequest, context: Any) -> pb.Run:
        """See federation.proto."""
        async with status_of_aio(context):
            by = self._caller()
            return await self._federation.halt(request.id, reason=request.reason, by=by)

    async def Resume(self, request: pb.ChangeRunRequest, context: Any) -> pb.Run:
        """See federation.proto."""
        async with status_of_aio(context):
            by = self._caller()
            return await self._federation.resume(request.id, reason=request.reason, by=by)
