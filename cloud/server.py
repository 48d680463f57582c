"""The cloud process: every part of it over one database, on three ports, until it is stopped.

Start continues what a killed process left: registry, rollouts, and enrolments that the fleet does
not know yet. Stop says goodbye to every node, drains calls, then closes what they used. A process
that is killed instead loses nothing that it acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import sqlalchemy as sa
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as health  # type: ignore[import-untyped]

from triplane.cloud import trust
from triplane.cloud.dashboard import application
from triplane.cloud.dashboard.live import CloudSource
from triplane.cloud.dashboard.page import Page
from triplane.cloud.federation.federation import Federation
from triplane.cloud.federation.plan_signing import PlanSignatures
from triplane.cloud.federation.servicer import FederationServicer
from triplane.cloud.fleet.fleet import LiveFleet
from triplane.cloud.fleet.node_peer import NodePeer
from triplane.cloud.fleet.registry_bundles import RegistryBundles
from triplane.cloud.fleet.servicer import FleetServicer
from triplane.cloud.home import LOCAL, PORTS, Home, open_database
from triplane.cloud.identity import audit
from triplane.cloud.identity.auth_interceptor import AuthInterceptor, caller
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.principals import Labels, Principals
from triplane.cloud.identity.reflection import reflection_handlers
from triplane.cloud.identity.rights import PrincipalRole
from triplane.cloud.identity.servicers import EnrolmentServicer, IdentityServicer, RenewalServicer
from triplane.cloud.identity.tables import TOKENS
from triplane.cloud.registry import Conversions, Registry, RegistryServicer
from triplane.cloud.registry.collecting import claim
from triplane.cloud.releasing import Releasing, check_release
from triplane.cloud.sessions import SessionPeer, Sessions, SessionServicer
from triplane.cloud.tasks import BackgroundTasks
from triplane.cloud.upkeep import BlobCollection, MetadataUpkeep, OperatorIdentity
from triplane.proto import enrolment_pb2_grpc as enrolment_grpc
from triplane.proto import federation_pb2_grpc as federation_grpc
from triplane.proto import fleet_pb2_grpc as fleet_grpc
from triplane.proto import identity_pb2_grpc as identity_grpc
from triplane.proto import metadata_pb2_grpc as metadata_grpc
from triplane.proto import registry_pb2_grpc as registry_grpc
from triplane.proto import session_pb2_grpc as session_grpc
from triplane.proto import signals
from triplane.proto import transfer_pb2_grpc as transfer_grpc
from triplane.proto.blobs import BlobFolder
from triplane.proto.calls import UNSEEN_CALLS
from triplane.proto.channels import server_credentials, server_options
from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.proto.logs import say_ready
from triplane.proto.transfer import TransferServicer

logger = logging.getLogger(__name__)

DRAIN_S: Final = 10.0
STOP_S: Final = 30.0
"""Time to end children, sessions and database after calls were drained."""
GOODBYE_S: Final = 2.0
# Anyone may call the enrolment port, so its limits are far below those of the main port.
ENROL_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 << 10),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.max_concurrent_streams", 8),
    *UNSEEN_CALLS,
)
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "", "localhost", LOCAL})  # noqa: S104 - compared


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudOptions:
    """Options of the process. A port of 0 takes a free one, which the ready line names."""

    home: Path
    host: str = "0.0.0.0"  # noqa: S104 - nodes come from outside
    port: int = 8443
    enrol_port: int = 8444
    dashboard_port: int = 8445
    drain_s: float = DRAIN_S
    log_level: str = "warning"
    json: bool = True

    def __post_init__(self) -> None:
        if self.port and self.port == self.enrol_port:
            raise InvalidInput(
                f"the main port and the enrolment port must differ, both are {self.port}; choose "
                "--port or --enrol-port (a port that is not stated is that of the last start)"
            )


class Cloud:
    """One running cloud. Conflict: another process runs on the same home."""

    def __init__(
        self,
        home: Home,
        *,
        host: str = LOCAL,
        port: int = 0,
        enrol_port: int = 0,
        dashboard_port: int = 0,
        drain_s: float = DRAIN_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._home, self._host, self._clock = home, host, clock
        self._asked = {"main": port, "enrol": enrol_port, "dashboard": dashboard_port}
        self._drain_s = drain_s
        self._stack = AsyncExitStack()
        self._tasks = BackgroundTasks()
        self.port = self.enrol_port = self.dashboard_port = 0

    @property
    def ports(self) -> dict[str, int]:
        """The three ports, by the names of their options."""
        return {name: getattr(self, name) for name in PORTS}

    @property
    def address(self) -> str:
        """HOST:PORT for people on this machine."""
        return _host_port(self._local, self.port)

    @property
    def enrol_address(self) -> str:
        """HOST:PORT of the enrolment port, where tokens are exchanged for certificates."""
        return _host_port(self._local, self.enrol_port)

    @property
    def dashboard(self) -> str:
        """The URL of the dashboard."""
        return f"http://{LOCAL}:{self.dashboard_port}"

    @property
    def _local(self) -> str:
        return LOCAL if self._host in _EVERYWHERE else self._host

    async def start(self) -> None:
        """Serve on all ports. Unavailable: a port is in use."""
        try:
            await self._start()
        # Also when cancelled: release the ports and the database that were opened so far.
        except BaseException:
            await self._stack.aclose()
            raise

    async def stop(self) -> None:
        """Drain and end everything, in the reverse order of its start."""
        await self._stack.aclose()

    async def _start(self) -> None:
        home, push = self._home, self._stack.push_async_callback
        hosts = home.hosts()
        authority = Authority.load(home.authority)
        # In a thread: opening may wait seconds for the lock of a process that was just killed.
        self.database = await asyncio.to_thread(open_database, home)
        # The stack runs in reverse order: the database closes last, after everything that uses it.
        push(asyncio.to_thread, self.database.close)
        self.principals = Principals(self.database, authority, self._clock)
        self.auth = AuthInterceptor(self.principals)
        self.repository = await asyncio.to_thread(
            trust.MetadataRepository, home.metadata, home.keys, clock=self._clock
        )
        self.blobs = BlobFolder(home.blobs)
        self.registry = Registry(
            self.database, self.blobs, Conversions(home.conversions), clock=self._clock
        )
        push(self.registry.stop)
        await self.registry.start()
        self.bundles = RegistryBundles(self.registry, self.repository)
        self.fleet = LiveFleet(self.database, self.bundles, clock=self._clock)
        push(self.fleet.stop)
        push(self._tasks.stop)
        await self.fleet.start()
        # Before any port opens: nodes that connect must be known to the fleet.
        await self._reconcile()
        self.upkeep = MetadataUpkeep(
            self.repository, self.registry, self.database, self._tasks, self._clock
        )
        await self.upkeep.note_signed()
        self.sessions = Sessions(clock=self._clock)
        self.node_peer = NodePeer(self.fleet, self.sessions)
        # Before the ports open: a device that reconnects must find its leases and settlements.
        await self._start_federation()
        self._connect_parts()
        # After the parts are connected, so that no caller meets a half-started cloud.
        await self._serve_main(authority)
        await self._serve_enrolment(authority, hosts)
        await self._serve_dashboard()
        self._tasks.spawn(self.releasing.run(), "releases of results")
        self.upkeep.start()
        self.collection = BlobCollection(self.database, self.blobs, self.repository, self._clock)
        self._tasks.spawn(self.collection.run(), "blob collection")
        operator = OperatorIdentity(home, self.principals, self._clock)
        await asyncio.to_thread(operator.record_address, self.address)
        self._tasks.spawn(operator.run(), "first operator's certificate")

    async def _start_federation(self) -> None:
        folder = self._home.federation
        self.federation = Federation(
            self.database, self.blobs, self.registry, folder, strategies=self._home.strategies,
            send=self.sessions.send, may_release=partial(check_release, self.repository),
            signatures=PlanSignatures(self.repository, self.blobs), clock=self._clock,
        )  # fmt: skip
        self.releasing = Releasing(self.federation, self.fleet)
        self._stack.push_async_callback(self.federation.stop)
        await self.federation.start()

    def _connect_parts(self) -> None:
        loop = asyncio.get_running_loop()
        self.registry.on_bundle(lambda _: self.fleet.nudge())

        def publish() -> None:
            self.fleet.nudge()
            self.upkeep.note_publication()
            self.federation.note_published()

        def published(_: str) -> None:
            # The repository calls from a worker thread, and the event loop owns fleet and upkeep.
            loop.call_soon_threadsafe(publish)

        self.repository.on_published(published)
        self.fleet.on_report(
            lambda name, report: self.upkeep.note_seen(
                name, report.metadata_versions, report.metadata_sha256
            )
        )
        self.federation.devices.on_offer(
            lambda name, offer: self.upkeep.note_seen(
                name, offer.metadata_versions, offer.metadata_sha256
            )
        )
        self.auth.on_revoked(self._revoked)

    def _revoked(self, name: str) -> None:
        self.sessions.revoke(name)
        # In the background; if the process dies first, `_reconcile` does it at the next start.
        self._tasks.spawn(self.fleet.remove_node(name, "revoked"), "revocation")

    async def _reconcile(self) -> None:
        """Add and remove nodes that were enrolled or revoked without the fleet's knowledge."""
        known = {node.name for node in self.fleet.nodes()}
        for who in await self.principals.all():
            if who.revoked and who.name in known:
                await self.fleet.remove_node(who.name, "revoked")
            elif not who.revoked and who.name not in known:
                await self._joined(who.name, who.role, {})

    async def _joined(self, name: str, role: PrincipalRole, labels: Labels) -> None:
        if role is PrincipalRole.NODE:
            await self.fleet.add_node(name, labels or await self._invited_with(name))

    async def _invited_with(self, name: str) -> Labels:
        """Return the labels of the token by which the name enrolled, while the token is stored."""
        query = sa.select(TOKENS.c.labels).where(
            TOKENS.c.name == name, TOKENS.c.certificate.is_not(None)
        )
        stored = await self.database.read(lambda connection: connection.scalar(query))
        labels: Labels = json.loads(stored) if stored else {}
        return labels

    # Ports

    async def _serve_main(self, authority: Authority) -> None:
        server = grpc.aio.server(interceptors=[self.auth], options=server_options())
        ours = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(ours, server)
        self._add_services(server)
        server.add_generic_rpc_handlers(reflection_handlers())
        tls = self._home.tls
        credentials = server_credentials(
            authority.pem, (tls / "server.pem").read_bytes(), (tls / "server.key").read_bytes()
        )
        self.port = _bound(
            lambda address: server.add_secure_port(address, credentials),
            self._host,
            self._asked["main"],
        )
        await server.start()
        # In reverse: report NOT_SERVING, say goodbye to sessions, then drain the other calls.
        self._stack.push_async_callback(server.stop, self._drain_s)
        self._stack.push_async_callback(self.sessions.stop, GOODBYE_S)
        self._stack.push_async_callback(ours.enter_graceful_shutdown)
        await ours.set("", health_pb2.HealthCheckResponse.SERVING)

    def _add_services(self, server: grpc.aio.Server) -> None:
        self._wire = FleetServicer(self.fleet, self.sessions, _name, self.repository.versions)
        claimed = partial(claim, self.database, self.blobs)
        sessions = SessionServicer(self.sessions, self._session_caller)
        metadata = trust.MetadataServicer(self.repository, self._submitted, claimed)
        transfer = TransferServicer(self.blobs, self._may_read, self._may_write)
        identity = IdentityServicer(
            self.principals,
            self.database,
            self.auth,
            lambda: _host_port(self._home.hosts()[0], self.enrol_port),
        )
        federation = FederationServicer(self.federation, _name)
        fleet_grpc.add_FleetServicer_to_server(self._wire, server)
        session_grpc.add_SessionServicer_to_server(sessions, server)
        federation_grpc.add_FederationServicer_to_server(federation, server)
        registry_grpc.add_RegistryServicer_to_server(RegistryServicer(self.registry, _name), server)
        metadata_grpc.add_MetadataServicer_to_server(metadata, server)
        transfer_grpc.add_TransferServicer_to_server(transfer, server)
        identity_grpc.add_IdentityServicer_to_server(identity, server)
        enrolment_grpc.add_RenewalServicer_to_server(RenewalServicer(self.principals), server)

    async def _serve_enrolment(self, authority: Authority, hosts: tuple[str, ...]) -> None:
        server = grpc.aio.server(options=ENROL_OPTIONS)
        address = _host_port(hosts[0], self.port)
        enrolment_grpc.add_EnrolmentServicer_to_server(
            EnrolmentServicer(self.principals, authority, address, self._joined), server
        )
        self.enrol_port = _bound(server.add_insecure_port, self._host, self._asked["enrol"])
        await server.start()
        self._stack.push_async_callback(server.stop, self._drain_s)

    async def _serve_dashboard(self) -> None:
        token = self._home.dashboard_token.read_text().strip()
        app = application(
            CloudSource(self.fleet, self._wire, self.registry, self.federation, self.repository),
            token=token,
        )
        try:
            # Only on the loopback interface: the page has no login, and changes need a token.
            listener = socket.create_server((LOCAL, self._asked["dashboard"]))
        except OSError as error:
            raise _taken(f"{LOCAL}:{self._asked['dashboard']}") from error
        self._stack.callback(listener.close)
        self.dashboard_port = listener.getsockname()[1]
        page = Page(app)
        serving = asyncio.create_task(page.serve([listener]), name="dashboard")

        async def stop() -> None:
            page.should_exit = True
            await app.state.feed.close()
            await asyncio.wait([serving], timeout=GOODBYE_S)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

        self._stack.push_async_callback(stop)

    # Rights to files, sessions, and the audit of submissions

    async def _may_read(self, blob: bytes) -> None:
        who = caller()
        if who.role is PrincipalRole.NODE:
            await self.bundles.check_readable(self.fleet.node(who.name), blob)
        elif who.role is PrincipalRole.DEVICE:
            self.federation.devices.check_readable(who.name, blob)
        # People may read every blob. A lost one is reported with the way to restore it.
        elif await asyncio.to_thread(self.blobs.is_lost, blob):
            raise NotFound(
                f"the cloud's copy of the file {blob.hex()[:16]}... is lost or damaged; push the "
                "same file again: triplane registry push MODEL.tpm --name NAME"
            )

    async def _may_write(self, sha256: bytes, size: int) -> BlobFolder:
        who = caller()
        if who.role is PrincipalRole.DEVICE:
            return await self.federation.devices.folder_for(who.name, sha256, size)
        return self.blobs

    def _session_caller(self) -> tuple[str, SessionPeer]:
        who = caller()
        return (
            who.name,
            self.federation.devices if who.role is PrincipalRole.DEVICE else self.node_peer,
        )

    async def _submitted(self, role: str, submitted: trust.Submitted) -> None:
        who, now_s = caller().name, self._clock()
        details = {
            "version": submitted.version,
            "published": submitted.published,
            "signatures": submitted.signatures,
            "threshold": submitted.threshold,
        }
        await self.database.write(
            lambda connection: audit.record(
                connection, time_s=now_s, actor=who, action="metadata.submit", subject=role,
                details=details,
            )
        )  # fmt: skip
        if submitted.published:
            await self.upkeep.note_signed()


def _name() -> str:
    return caller().name


def _bound(bind: Callable[[str], int], host: str, port: int) -> int:
    address = _host_port(host, port)
    try:
        return bind(address)
    except RuntimeError as error:
        raise _taken(address) from error


def _host_port(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _taken(address: str) -> Unavailable:
    return Unavailable(
        f"cannot listen on {address}: the port is in use, or the address is not this machine's. Is "
        "another cloud running? Choose others with --port, --enrol-port, --dashboard-port (0: any "
        "free one)"
    )


@contextlib.asynccontextmanager
async def running(home: Home, **options: Any) -> AsyncIterator[Cloud]:
    """Yield a running cloud, which is stopped at the end of the block."""
    cloud = Cloud(home, **options)
    await cloud.start()
    try:
        yield cloud
    finally:
        await cloud.stop()


def run(options: CloudOptions) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once."""
    asyncio.run(_serve(options))


async def _serve(options: CloudOptions) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    async with running(
        Home(options.home),
        host=options.host,
        port=options.port,
        enrol_port=options.enrol_port,
        dashboard_port=options.dashboard_port,
        drain_s=options.drain_s,
    ) as cloud:
        await asyncio.to_thread(Home(options.home).record_ports, **cloud.ports)
        # hurry_s=0: a second signal ends the process at once, which loses nothing acknowledged.
        termination = signals.Termination(
            lambda: loop.call_soon_threadsafe(stopped.set),
            limit_s=options.drain_s + STOP_S,
            hurry_s=0.0,
        )
        try:
            _announce(options, cloud)
            await stopped.wait()
            logger.info("draining", extra={"seconds_at_most": options.drain_s})
        finally:
            termination.request()
    logger.info("stopped")


def _announce(options: CloudOptions, cloud: Cloud) -> None:
    ready = {
        "home": str(options.home),
        "host": options.host,
        **cloud.ports,
        "dashboard": cloud.dashboard,
    }
    say_ready(json.dumps(ready) if options.json else _ready_text(options.host, cloud))


def _ready_text(host: str, cloud: Cloud) -> str:
    if host in {"0.0.0.0", "::"}:  # noqa: S104  # only compared; nobody can call such an address
        where = f"cloud on port {cloud.port} (mutual TLS), enrolment on port {cloud.enrol_port}"
        return f"{where}, both on all addresses of this machine, dashboard {cloud.dashboard}"
    return (
        f"cloud on {_host_port(host, cloud.port)} (mutual TLS), enrolment on "
        f"{_host_port(host, cloud.enrol_port)}, dashboard {cloud.dashboard}"
    )
