"""The agent's calls to the serving process: its repository methods on a Unix socket."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from triplane.proto import open_inference_pb2 as pb
from triplane.proto.status import error_from

SERVICE: Final = "inference.GRPCInferenceService"
LOAD_S: Final = 120.0
"""Time for load, probe and warm-up, and for the drain of the old version."""
ASK_S: Final = 5.0

M = TypeVar("M", bound=Message)


class Seam:
    """Calls the serving process. Raises the families; Unavailable while it is down."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{socket}",
            options=(
                # A restarted server has a new socket at the same path; short backoffs find it
                # within a second.
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.min_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 500),
            ),
        )

    def load(self, model: str, path: Path, digest: str) -> None:
        """Serve the bundle at `path` with this root digest in place of the model's others."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        request.parameters["path"].string_param = str(path)
        request.parameters["digest"].string_param = digest
        self._call("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse, LOAD_S)

    def unload(self, model: str) -> None:
        """Stop serving a model. NotFound if it is not served."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        self._call("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse, LOAD_S)

    def versions(self) -> dict[str, str]:
        """Return the ready version of each model."""
        request = pb.RepositoryIndexRequest(ready=True)
        index = self._call("RepositoryIndex", request, pb.RepositoryIndexResponse, ASK_S)
        return {entry.name: entry.version for entry in index.models}

    def calls(self, model: str) -> tuple[int, int]:
        """Return how many calls of a model's ready version succeeded and failed."""
        request = pb.ModelStatisticsRequest(name=model)
        statistics = self._call("ModelStatistics", request, pb.ModelStatisticsResponse, ASK_S)
        totals = [version.inference_stats for version in statistics.model_stats]
        return sum(t.success.count for t in totals), sum(t.fail.count for t in totals)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _call(self, method: str, request: Message, answer: type[M], timeout_s: float) -> M:
        stub: Callable[..., Any] = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        try:
            response = stub(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from(error) from error
        assert isinstance(response, answer)
        return response
