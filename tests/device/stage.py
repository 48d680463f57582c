"""A cloud that may say anything: it speaks the wire over mutual TLS and sends what a test wants."""

import asyncio
import contextlib
import hashlib
import time
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from tests.cloud.federation.given import POPULATION
from tests.federated.core import plans
from tests.support.masked_rounds import SAMPLING
from tests.support.plan_signatures import PlanSigner

from triplane.cloud.identity.authority import Authority
from triplane.cloud.trust import MetadataServicer
from triplane.device import FederatedClient
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.channels import server_credentials, server_options
from triplane.proto.credentials import IdentityFolder
from triplane.proto.identity import certificate_pem, certificate_request, key_pem, new_key
from triplane.proto.metadata_pb2_grpc import add_MetadataServicer_to_server
from triplane.proto.session_pb2_grpc import SessionServicer, add_SessionServicer_to_server
from triplane.proto.status import status_of_aio
from triplane.proto.stream import ServerSession, new_epoch
from triplane.proto.transfer import TransferServicer
from triplane.proto.transfer_pb2_grpc import add_TransferServicer_to_server
from triplane.unified_ir.federated.core.files import write_state
from triplane.unified_ir.federated.core.learn import shared
from triplane.unified_ir.runtime import write_plan

RUN = "0123456789abcdef"


class Stage(SessionServicer):
    """One session, whoever calls. heard: contributions and offers in order."""

    def __init__(self, folder, authority, port=0):
        self.folder, self.authority, self.port = folder, authority, port
        self.blobs = BlobFolder(folder / "blobs")
        self.signer = PlanSigner(folder / "signed")
        self.signed = set()
        self.epoch = new_epoch()
        self.session = ServerSession(self.epoch, self._take, heartbeat_s=1.0)
        self.heard = []
        self.moved = asyncio.Condition()

    async def _take(self, message):
        async with self.moved:
            self.heard.append(message)
            self.moved.notify_all()

    async def Open(self, request_iterator, context):  # type: ignore[override]
        async with status_of_aio(context):
            first = await anext(aiter(request_iterator))
            await self.session.serve(first, aiter(request_iterator), context.write)

    def tell(self, *tasks, settled=()):
        """Send a work document."""
        self.session.send(pb.Work(tasks=tasks, settled=settled))

    async def heeded(self, document):
        """Send a document; returns when the device has handled and acknowledged it."""
        link = self.session._link
        assert link is not None
        link.freed.clear()
        self.session.send(document)
        await link.freed.wait()

    async def offer(self):
        return await self._until(lambda m: isinstance(m, pb.Offer))

    async def contribution(self, lease):
        """The newest contribution to a lease, once there is one."""
        return await self._until(lambda m: isinstance(m, pb.Contribution) and m.lease == lease)

    async def _until(self, holds):
        async with self.moved:
            await self.moved.wait_for(lambda: any(map(holds, self.heard)))
        return next(m for m in reversed(self.heard) if holds(m))

    def put(self, path):
        sha256 = self.blobs.put_file(path)
        return pb.Blob(sha256=sha256, size=path.stat().st_size)

    def plan(self, *, sign=True, **changes):
        """The blob of a plan, and its root digest. sign: whether people have signed it."""
        path = self.folder / "made.plan"
        digest = write_plan(path, plans.spec(**changes))
        if sign and digest not in self.signed:
            self.signer.sign(path)
            self.signed.add(digest)
        return self.put(path), digest

    def state(self, digest, roles=plans.ROLES, **changes):
        path = self.folder / "made.state"
        tensors = {n: x for n, x in plans.state().items() if n in shared(plans.ROLES)} | changes
        write_state(path, tensors, roles, plan=digest)
        return self.put(path)

    def task(self, number=1, **changes):
        """An honest task to learn, but for `changes`."""
        made = {}
        if not {"plan", "state"} <= changes.keys():
            made["plan"], digest = self.plan()
            made["state"] = self.state(digest)
        fields = {
            **made,
            "run": RUN,
            "round": 1,
            "lease": lease(number),
            "sampling": SAMPLING,
            "seed": 7,
            "deadline_s": 60.0,
        }
        if not {"evaluate", "flower"} & changes.keys():
            fields["learn"] = pb.Learn()
        return pb.Task(**{**fields, **changes})


def lease(number):
    return hashlib.sha256(str(number).encode()).digest()[:16]


@asynccontextmanager
async def staged(folder, port=0, *, kind=Stage):
    """A running stage; the same folder has the same authority and blobs."""
    folder.mkdir(exist_ok=True)
    if (folder / "ca.key").exists():
        authority = Authority.load(folder)
    else:
        authority = Authority.make(folder, "stage", time.time())
    key = new_key()
    certificate = authority.issue_server(key.public_key(), ["127.0.0.1"], time.time())
    stage = kind(folder, authority)
    server = grpc.aio.server(options=server_options())
    add_SessionServicer_to_server(stage, server)
    add_TransferServicer_to_server(TransferServicer(stage.blobs), server)
    metadata = MetadataServicer(stage.signer.repository, _unused, _unused)
    add_MetadataServicer_to_server(metadata, server)
    credentials = server_credentials(authority.pem, certificate_pem(certificate), key_pem(key))
    stage.port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    await server.start()
    try:
        yield stage
    finally:
        await server.stop(0)


async def _unused(*_):
    raise AssertionError("nobody submits metadata here")


def client_at(stage, home, shard, *, name="ann", **options):
    """A client that is enrolled at the stage by this name."""
    client = FederatedClient(home, shard, population=POPULATION, **options)
    home.mkdir(exist_ok=True)
    stage.signer.trusted_by(home)
    key = new_key()
    made = stage.authority.issue(certificate_request(key), name, time.time())
    IdentityFolder(home / "identity").save(
        authority=stage.authority.pem,
        certificate=certificate_pem(made),
        key=key_pem(key),
        cloud=f"127.0.0.1:{stage.port}",
    )
    return client


@asynccontextmanager
async def serving(client):
    """The client at work on this loop."""
    task = asyncio.create_task(client.serve())
    try:
        yield client
    finally:
        client.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await task
