"""Control of the server by the node's agent: repository calls on a Unix socket.

The socket is in a folder that only the node's user may enter. It serves calls of the protocol under
their own names: load and unload, index, statistics, readiness. A load switches a model to the
bundle at `path` without a failed call; a load that fails changes nothing.
"""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from triplane.edge.serving.bundles import open_bundle
from triplane.edge.serving.repository import Repository
from triplane.edge.serving.service import Service
from triplane.edge.serving.wire import WIRE_NAME
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput, Unavailable
from triplane.proto.status import status_of
from triplane.unified_ir.runtime.session import SessionOptions

THREADS: Final = 4
MESSAGE_BYTES: Final = 1 << 20
MAX_SOCKET_CHARS: Final = 100
"""Longest path of a socket; Linux allows 107 bytes."""

Method = Callable[[Any], Message]


class Control:
    """Listens from construction until `close`. Unavailable if the path cannot be used."""

    def __init__(
        self, socket: Path, repository: Repository, service: Service, *, session: SessionOptions
    ) -> None:
        if len(os.fsencode(socket)) > MAX_SOCKET_CHARS:
            raise InvalidInput(
                f"a Unix socket's path has at most {MAX_SOCKET_CHARS} bytes, got {socket}; choose "
                "a shorter home"
            )
        self._repository, self._session = repository, session
        self._socket = socket
        methods: dict[str, tuple[type[Message], Method]] = {
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, self.load),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, self.unload),
            "RepositoryIndex": (pb.RepositoryIndexRequest, service.RepositoryIndex),
            "ModelStatistics": (pb.ModelStatisticsRequest, service.ModelStatistics),
            "ServerReady": (pb.ServerReadyRequest, service.ServerReady),
        }
        handlers = {name: _handler(*row) for name, row in methods.items()}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="control")
        self._server = grpc.server(
            self._pool,
            handlers=[grpc.method_handlers_generic_handler(WIRE_NAME, handlers)],
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ),
        )
        if socket.is_socket():
            socket.unlink()  # of a killed server; the lock of the home excludes another one
        try:
            self._server.add_insecure_port(f"unix:{socket}")
        except RuntimeError as error:
            self._pool.shutdown()
            raise Unavailable(f"cannot listen on {socket}: {error}") from error
        self._server.start()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._server.stop(1.0).wait()
        self._pool.shutdown()
        with contextlib.suppress(FileNotFoundError):
            self._socket.unlink()

    def load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Serve the bundle at `path` in place of all versions of its model."""
        path = _text(request.parameters, "path")
        digest = _text(request.parameters, "digest")
        servable = open_bundle(Path(path), options=self._session, expected_digest=digest)
        if servable.name != request.model_name:
            raise InvalidInput(
                f"the bundle holds {servable.name!r}, the request names {request.model_name!r}"
            )
        self._repository.switch(servable)
        return pb.RepositoryModelLoadResponse()

    def unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        """Stop serving all versions of a model. NotFound."""
        self._repository.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()


def _text(parameters: Any, name: str) -> str:
    text = parameters[name].string_param if name in parameters else ""
    if not text:
        raise InvalidInput(f"a load needs the parameter {name!r} as string_param")
    return str(text)


def _handler(message_class: type[Message], method: Method) -> "grpc.RpcMethodHandler[Any, Any]":
    def behaviour(data: bytes, context: grpc.ServicerContext) -> bytes:
        with status_of(context):
            message = message_class()
            try:
                message.ParseFromString(data)
            except DecodeError as error:
                raise InvalidInput(f"not a {message_class.__name__}") from error
            return method(message).SerializeToString()

    return grpc.unary_unary_rpc_method_handler(behaviour, None, None)
