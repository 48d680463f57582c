"""`grpc.health.v1` for the whole server and, by name, for the inference service.

There is one flag, because both are ready at the same time. A change wakes the callers that watch;
they get the status once more when the server stops.
"""

import threading
from collections.abc import Iterator
from typing import Final

import grpc
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from triplane.proto.errors import NotFound

NAME: Final = "grpc.health.v1.Health"
Answer = health_pb2.HealthCheckResponse


class Health:
    """Whether the server is serving, and the callers that watch this."""

    def __init__(self, *names: str) -> None:
        self._names = frozenset({"", *names})
        self._changed = threading.Condition()
        self._serving = False
        self._closed = False

    def set(self, *, serving: bool) -> None:
        """Change the state and wake every watcher."""
        with self._changed:
            self._serving = serving
            self._changed.notify_all()

    def close(self) -> None:
        """End every watch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Return the state. NotFound for an unknown service."""
        if request.service not in self._names:
            raise NotFound(f"no service {request.service[:64]!r}; here are {sorted(self._names)}")
        return self._answer(request.service)

    def watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        """Yield the state now and after every change, until the caller or the server ends it."""
        context.add_callback(self._wake)
        sent: health_pb2.HealthCheckResponse | None = None
        while context.is_active():
            with self._changed:
                answer = self._answer(request.service)
                if answer == sent:
                    if self._closed:
                        return
                    self._changed.wait()
                    continue
            sent = answer
            yield answer

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._names:
            return Answer(status=Answer.SERVICE_UNKNOWN)
        return Answer(status=Answer.SERVING if self._serving else Answer.NOT_SERVING)
