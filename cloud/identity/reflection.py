"""gRPC reflection of the main port, for tools such as grpcurl: every service with a row of rights.

Both versions of the protocol are served, because newer tools try v1 first. Who may use it is a row
like any other: the schemas are public, but machines need no list of services and methods.
"""

from collections.abc import Iterable

import grpc
from grpc_reflection.v1alpha import reflection_pb2 as pb  # type: ignore[import-untyped]
from grpc_reflection.v1alpha.reflection import aio  # type: ignore[import-untyped]

from triplane.cloud.identity.rights import REFLECTION, RIGHTS


def reflection_handlers() -> list[grpc.GenericRpcHandler]:
    """Return a handler for each version of the protocol, for an aio server."""
    servicer = aio.ReflectionServicer(service_names=services(RIGHTS))
    answer = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=pb.ServerReflectionRequest.FromString,
        response_serializer=pb.ServerReflectionResponse.SerializeToString,
    )
    return [
        grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": answer})
        for name in services(REFLECTION)
    ]


def services(methods: Iterable[str]) -> list[str]:
    """Return the services of methods such as "/package.Service/Method", each once, sorted."""
    return sorted({method.split("/")[1] for method in methods})
