"""The gRPC server: protocol, health and reflection on one port, and how it stops.

To stop, it becomes not ready, ends streams between two messages and refuses new calls. Calls in
progress may finish within the grace period; then it closes the port, threads, models and metrics.
"""

import logging
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha.reflection import ReflectionServicer  # type: ignore[import-untyped]

from triplane.edge.serving import health
from triplane.edge.serving.executors import Behaviour, BoundedExecutor, Routes
from triplane.edge.serving.health import Health
from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.memory import RequestMemory
from triplane.edge.serving.metrics import MetricsServer, ServingCollector
from triplane.edge.serving.receiving import Receiving
from triplane.edge.serving.reflection import private_pool
from triplane.edge.serving.repository import Repository
from triplane.edge.serving.running import Runs
from triplane.edge.serving.seats import Seats
from triplane.edge.serving.sending import Sending
from triplane.edge.serving.service import Service
from triplane.edge.serving.turns import Turns
from triplane.edge.serving.wire import WIRE_NAME, Wire
from triplane.proto.calls import UNSEEN_CALLS
from triplane.proto.errors import NotFound, Unavailable

logger = logging.getLogger(__name__)

HEALTH_RECEIVING: Final = 64
WATCHERS: Final = 64  # callers that wait for a change of health
SPARE_THREADS: Final = 8  # for streams that find no seat and are refused
QUIET_S: Final = 0.05  # without a call: callers know that calls are refused
QUIET_AT_MOST_S: Final = 1.0  # longest delay of the end by callers that do not stop
QUIET_STEP_S: Final = 0.005
MAX_CONNECTIONS: Final = 4096
RESERVED: Final = 256  # descriptors for files, listeners, pipes, the metrics page and gRPC
MAX_METADATA_BYTES: Final = 16 << 10
MAX_STREAMS_PER_CONNECTION: Final = 512
HANDSHAKE_MS: Final = 5_000  # a connection without a handshake is closed after this time
ALIVE_EVERY_MS: Final = 60_000  # a silent connection gets a ping after this time
ALIVE_WITHIN_MS: Final = 20_000  # and is closed, with its streams, if it does not answer in time
IDLE_MS: Final = 300_000  # a connection without a call is closed; clients reconnect by themselves
# One service under two names: both versions have the same messages.
REFLECTION_NAMES: Final = (
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)


def _executors(limits: ServingLimits) -> tuple[BoundedExecutor, ...]:
    inside = limits.threads + limits.queued_calls
    threads = {  # of each executor, and how many of them may wait for a request
        "infer": (inside + 2 * limits.receiving, limits.receiving),
        "stream": (limits.streams + SPARE_THREADS, SPARE_THREADS),
        "control": (2 * limits.control_calls, limits.control_calls),
        "health": (2 * HEALTH_RECEIVING, HEALTH_RECEIVING),
        "watch": (WATCHERS + SPARE_THREADS, SPARE_THREADS),
    }
    return tuple(
        BoundedExecutor(name, threads=most, receiving=receiving)
        for name, (most, receiving) in threads.items()
    )


def _grpc_options(limits: ServingLimits) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.per_message_decompression", 0),  # see compression.py
        ("grpc.max_send_message_length", -1),  # bounded by ServingLimits.response_bytes
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        *UNSEEN_CALLS,
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", ALIVE_EVERY_MS),
        ("grpc.http2.ping_timeout_ms", ALIVE_WITHIN_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_allowed_incoming_connections", max_connections()),
    )


def max_connections() -> int:
    """Return the limit of connections: `MAX_CONNECTIONS`, or fewer if descriptors are scarce."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - min(RESERVED, soft // 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files. With `client_ca`, callers need a certificate that it has signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files. NotFound names one that cannot be read."""
        pair = _read(self.key), _read(self.cert)
        if self.client_ca is None:
            return grpc.ssl_server_credentials([pair])
        return grpc.ssl_server_credentials([pair], _read(self.client_ca), True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NotFound(f"cannot read the TLS file {path}: {error.strerror}") from error


def _cancelled(context: grpc.ServicerContext, _: Unavailable) -> bool:
    context.cancel()
    return True


class Server:
    """Serves a repository from construction until `stop`. Unavailable if a port is taken.

    `port` and `metrics_port` become the ones that were chosen for 0. Without a metrics port there
    is no metrics page.
    """

    def __init__(
        self,
        repository: Repository,
        *,
        limits: ServingLimits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        metrics_port: int | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.repository = repository
        self._limits = limits = limits or ServingLimits()
        self.service = Service(repository, limits)
        self._health = Health(WIRE_NAME)
        self._memory = RequestMemory(limits.request_bytes, self._refused)
        self._receiving = Receiving(self._memory, limits.message_bytes, limits.receive_s)
        self._runs = Runs()
        self._turns = Turns(limits.threads, limits.queued_calls, self._refused)
        self._executors = _executors(limits)
        self._by_certificate = tls is not None and tls.client_ca is not None
        self._metrics: MetricsServer | None = None
        self._hurried = threading.Event()
        self._grpc = self._build()
        try:
            if metrics_port is not None:
                collector = ServingCollector(repository, self.service.unattributed, self._executors)
                self._metrics = MetricsServer(collector, host, metrics_port)
            # Last, because a bound port is freed only by a server that was started.
            self.port = self._bind(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", tls)
        except BaseException:
            self.stop(0)
            raise
        self.metrics_port = self._metrics.port if self._metrics else None
        self._grpc.start()
        self.service.ready = True
        self._health.set(serving=True)

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait up to `grace_s` for those in progress, then free everything."""
        until_s = time.monotonic() + grace_s
        self.service.ready = False
        self._health.set(serving=False)
        self._routes.refuse_new()
        self._health.close()
        self._receiving.end_rests()
        self._wait_until_quiet(until_s)
        self._grpc.stop(max(0.0, until_s - time.monotonic())).wait()
        for executor in self._executors:
            executor.shutdown()
        self._receiving.close()
        self._runs.close()
        if self._metrics:
            self._metrics.close()
            self._metrics = None
        self.repository.close()

    def cancel(self) -> None:
        """End a `stop` that is waiting, by cancelling the calls in progress."""
        self._hurried.set()
        self._grpc.stop(None)

    def _wait_until_quiet(self, until_s: float) -> None:
        """Wait until no call is in progress and callers know that new ones are refused.

        The port is closed after that, because grpc answers a call that arrives while it closes with
        CANCELLED, which callers do not retry. A refusal is UNAVAILABLE, which they retry.
        """
        quiet_until_s = min(until_s, time.monotonic() + QUIET_AT_MOST_S)
        while not self._hurried.wait(QUIET_STEP_S):
            now = time.monotonic()
            if any(executor.held for executor in self._executors[:2]):
                quiet_until_s = min(until_s, now + QUIET_AT_MOST_S)
            elif now - self._routes.last_call_s > QUIET_S:
                return
            if now > quiet_until_s:
                return

    def _build(self) -> grpc.Server:
        infer, streams, control, health_checks, watches = self._executors
        wire = self._wire()
        self._routes = routes = Routes(control, (control, health_checks), self._refused)
        routes.add(
            WIRE_NAME,
            wire.methods(infer=infer, streams=streams, control=control, health=health_checks),
        )
        request = health_pb2.HealthCheckRequest
        check = wire.unary(health_checks, request, self._health.check)
        watchers = Seats("watchers of health", WATCHERS, end=_cancelled, on_refusal=self._refused)
        watch = wire.server_stream(watches, watchers, request, self._health.watch)
        routes.add(
            health.NAME,
            {"Check": (health_checks, check, False), "Watch": (watches, watch, True)},
        )
        reflect = self._reflection(wire)
        for name in REFLECTION_NAMES:
            routes.add(name, {"ServerReflectionInfo": (streams, reflect, True)})
        return grpc.server(
            control,
            handlers=[routes],
            options=_grpc_options(self._limits),
            # Beyond all executors, grpc itself refuses calls (RESOURCE_EXHAUSTED) without a thread.
            maximum_concurrent_rpcs=sum(executor.capacity for executor in self._executors),
        )

    def _wire(self) -> Wire:
        limits = self._limits
        seats = Seats(
            "streams", limits.streams, end=self._receiving.end_rest, on_refusal=self._refused
        )
        return Wire(
            service=self.service,
            receiving=self._receiving,
            runs=self._runs,
            sending=Sending(self._receiving, limits, self._refused),
            turns=self._turns,
            seats=seats,
            memory=self._memory,
            limits=limits,
            by_certificate=self._by_certificate,
        )

    def _reflection(self, wire: Wire) -> Behaviour:
        pool = private_pool([health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR])
        names = WIRE_NAME, health.NAME, *REFLECTION_NAMES
        servicer = ReflectionServicer(names, pool=pool)
        return wire.dialogue(reflection_pb2.ServerReflectionRequest, servicer.ServerReflectionInfo)

    def _bind(self, address: str, tls: Tls | None) -> int:
        try:
            if tls is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            files = ", or the TLS files hold no certificate with its key" if tls else ""
            raise Unavailable(
                f"the address {address} is in use or not of this machine{files}; "
                "choose another port, or 0 for any"
            ) from error

    def _refused(self) -> None:
        self.service.unattributed.failed(grpc.StatusCode.UNAVAILABLE.name, 0)
