"""`triplane.registry.v1.Registry` over grpc.aio: decode, call, encode."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from triplane.cloud.registry import encoding
from triplane.cloud.registry.registry import Registry
from triplane.proto import registry_pb2 as pb
from triplane.proto.registry_pb2_grpc import RegistryServicer as Wire
from triplane.proto.status import status_of_aio

ANSWER_S: Final = 0.5
"""Part of a caller's deadline reserved for sending the answer; a tenth of a short deadline."""


class RegistryServicer(Wire):
    """caller: returns the name that makes the current call, for versions and the audit log."""

    def __init__(self, registry: Registry, caller: Callable[[], str]) -> None:
        self._registry, self._caller = registry, caller

    async def Push(self, request: pb.PushRequest, context: Any) -> pb.Version:
        """See `registry.proto`."""
        async with status_of_aio(context):
            version = await self._registry.push(encoding.push(request), by=self._caller())
            return encoding.version(version)

    async def GetVersion(self, request: pb.GetVersionRequest, context: Any) -> pb.Version:
        """See `registry.proto`."""
        async with status_of_aio(context):
            return encoding.version(await self._registry.version(request.reference))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        """See `registry.proto`."""
        async with status_of_aio(context):
            return pb.ListModelsResponse(
                models=[encoding.model(model) for model in await self._registry.models()]
            )

    async def ListVersions(
        self, request: pb.ListVersionsRequest, context: Any
    ) -> pb.ListVersionsResponse:
        """See `registry.proto`."""
        async with status_of_aio(context):
            versions = await self._registry.versions(
                request.model, size=request.page_size, before=request.before
            )
            return pb.ListVersionsResponse(versions=[encoding.version(each) for each in versions])

    async def SetAlias(self, request: pb.SetAliasRequest, context: Any) -> pb.Model:
        """See `registry.proto`."""
        async with status_of_aio(context):
            return encoding.model(
                await self._registry.set_alias(
                    request.model, request.alias, request.version, by=self._caller()
                )
            )

    async def GetBundle(self, request: pb.GetBundleRequest, context: Any) -> pb.Bundle:
        """See `registry.proto`; answers CONVERTING shortly before the deadline."""
        async with status_of_aio(context):
            version = await self._registry.version(request.reference)
            key = version.model, version.version, request.target
            # Before the caller's deadline, so that it gets the state and can ask again instead of
            # an error.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_patience_s(context.time_remaining())):
                    return encoding.bundle(await self._registry.wait_bundle(*key))
            return encoding.bundle(await self._registry.bundle(*key))


def _patience_s(remaining_s: float | None) -> float | None:
    if remaining_s is None:
        return None
    return remaining_s - min(ANSWER_S, remaining_s / 10)
