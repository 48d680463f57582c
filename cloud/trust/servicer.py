"""`triplane.metadata.v1.Metadata` over a repository: decode, call, encode."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from triplane.cloud.trust.repository import Repository, Submitted
from triplane.proto import metadata_pb2 as pb
from triplane.proto.metadata_pb2_grpc import MetadataServicer as Servicer
from triplane.proto.status import status_of_aio

Recorded = Callable[[str, Submitted], Awaitable[None]]
"""Told of every accepted submission (role, what became of it) before it is answered."""

_Context = grpc.aio.ServicerContext[Any, Any]


async def _unrecorded(role: str, submitted: Submitted) -> None:
    """For servers without an audit log."""


class MetadataServicer(Servicer):
    """Serves a repository on a grpc.aio server; its disk work runs in threads."""

    def __init__(self, repository: Repository, recorded: Recorded = _unrecorded) -> None:
        self._repository, self._recorded = repository, recorded

    async def Get(self, request: pb.GetRequest, context: _Context) -> pb.GetResponse:
        """See metadata.proto."""
        async with status_of_aio(context):
            data = await asyncio.to_thread(self._repository.get, request.name)
            return pb.GetResponse(metadata=data)

    async def Submit(self, request: pb.SubmitRequest, context: _Context) -> pb.SubmitResponse:
        """See metadata.proto."""
        async with status_of_aio(context):
            made = await asyncio.to_thread(self._repository.submit, request.role, request.metadata)
            await self._recorded(request.role, made)
            return pb.SubmitResponse(
                published=made.published,
                signatures=made.signatures,
                threshold=made.threshold,
                version=made.version,
            )

    async def GetPending(
        self, request: pb.GetPendingRequest, context: _Context
    ) -> pb.GetPendingResponse:
        """See metadata.proto."""
        async with status_of_aio(context):
            found = await asyncio.to_thread(self._repository.pending, request.role)
            return pb.GetPendingResponse(
                metadata=found.metadata,
                published=found.published,
                signatures=found.signatures,
                threshold=found.threshold,
            )
