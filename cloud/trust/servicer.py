"""`triplane.metadata.v1.Metadata` over a repository: decode, call, encode."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from triplane.cloud.trust.repository import MetadataRepository, Submitted, golden_sets
from triplane.cloud.trust.roles import Lists
from triplane.proto import metadata_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.messages import message_from
from triplane.proto.metadata_pb2_grpc import MetadataServicer as Servicer
from triplane.proto.status import status_of_aio

TARGETS: Final = "targets"
Recorded = Callable[[str, Submitted], Awaitable[None]]
"""Called with every accepted submission (role, outcome) before it is answered."""

Claimed = Callable[[set[bytes]], Awaitable[None]]
"""Called with the files that a submission begins to name; raises unless all were uploaded."""

_Context = grpc.aio.ServicerContext[Any, Any]


class MetadataServicer(Servicer):
    """Serves a repository on a grpc.aio server; its disk work runs in threads."""

    def __init__(
        self,
        repository: MetadataRepository,
        recorded: Recorded,
        claimed: Claimed,
    ) -> None:
        self._repository, self._recorded, self._claimed = repository, recorded, claimed

    async def Get(self, request: pb.GetRequest, context: _Context) -> pb.GetResponse:
        """See metadata.proto."""
        async with status_of_aio(context):
            data = await asyncio.to_thread(self._repository.get, request.name)
            return pb.GetResponse(metadata=data)

    async def Submit(self, request: pb.SubmitRequest, context: _Context) -> pb.SubmitResponse:
        """See metadata.proto."""
        async with status_of_aio(context):
            if request.role == TARGETS:
                # Claim first: garbage collection must not remove samples between the check and the
                # publication.
                await self._claimed(await asyncio.to_thread(self._new_samples, request.metadata))
            auto = Lists.DROPPED if request.drop_auto else Lists.CARRIED
            submitted = await asyncio.to_thread(
                self._repository.submit, request.role, request.metadata, auto
            )
            await self._recorded(request.role, submitted)
            return message_from(pb.SubmitResponse, submitted)

    def _new_samples(self, metadata: bytes) -> set[bytes]:
        try:
            return golden_sets(metadata) - self._repository.golden_sets()
        except Corrupt as error:
            raise InvalidInput(str(error)) from error

    async def GetPending(
        self, request: pb.GetPendingRequest, context: _Context
    ) -> pb.GetPendingResponse:
        """See metadata.proto."""
        async with status_of_aio(context):
            pending = await asyncio.to_thread(self._repository.pending, request.role)
            return message_from(pb.GetPendingResponse, pending)
