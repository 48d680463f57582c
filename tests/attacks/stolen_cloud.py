"""A cloud that was taken over, speaking the real wire, and the real node that believes it.

The thief has the cloud's folder: server key, authority, online signing keys, database. He has not
the offline keys; where a case needs what people signed, it is signed with them beforehand.
"""

import asyncio
import hashlib
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any

import grpc.aio
import numpy as np
import tritonclient.grpc as triton
from tests.attacks.trust_stage import Clock, Stage, signed_by
from tests.faults.fleet import Node, Process, free_port, wait_until
from tuf.api._payload import TargetFile

from triplane.cloud.fleet.values import RolloutState
from triplane.cloud.home import Home
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.rights import PrincipalRole
from triplane.cloud.server import Cloud
from triplane.cloud.trust import MetadataRepository
from triplane.cloud.trust.initial import policy_file
from triplane.edge.home import NodeHome, NodeSettings
from triplane.proto import fleet_pb2, metadata_pb2, transfer_pb2
from triplane.proto.channels import connect, server_credentials
from triplane.proto.errors import InvalidInput, NotFound, TriplaneError
from triplane.proto.identity import enrol
from triplane.proto.metadata_pb2_grpc import MetadataServicer, add_MetadataServicer_to_server
from triplane.proto.session_pb2_grpc import SessionServicer, add_SessionServicer_to_server
from triplane.proto.signed.metadata import fetch_over
from triplane.proto.signed.trust import bootstrap
from triplane.proto.status import status_of_aio
from triplane.proto.stream import ServerSession, new_epoch
from triplane.proto.targets import Policy, TargetName, bundle_target
from triplane.proto.transfer_pb2_grpc import TransferServicer, add_TransferServicer_to_server
from triplane.unified_ir.runtime import Bundle

MODEL, TARGET = "digits", "ort-x64"
WAIT_S = 60.0
PATIENCE_S = 1.0
X = np.random.default_rng(7).random((64, 1, 8, 8), np.float32)


class Loop:
    """An event loop in a thread of its own."""

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="cloud's loop")
        self._thread.start()
        return self

    def do(self, coroutine, timeout_s=WAIT_S):
        """Run a coroutine there; its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    async def _finish(self):
        # A cancelled call may end after its server; if its loop drops it, gRPC's thread stays.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*rest, return_exceptions=True)
        await self.loop.shutdown_default_executor()

    def __exit__(self, *_):
        self.do(self._finish())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


@contextmanager
def honest_cloud(home, **ports):
    """The cloud itself, in a thread; yields it and a way to call it."""
    with Loop() as loop:

        async def make():
            cloud = Cloud(home, **ports)
            await cloud.start()
            return cloud

        cloud = loop.do(make())
        try:
            yield cloud, loop.do
        finally:
            loop.do(cloud.stop())


class RealNode(Node):
    """Supervisor, agent and serving of an enrolled home, as processes."""

    def __init__(self, name, folder, token, cloud):
        self.name, self.home, self.port = name, folder / name, free_port()
        home = NodeHome(self.home)
        home.make()
        identity = enrol(token, cloud.enrol_address, home.identity.path)
        with connect(identity) as channel:
            bootstrap(home.trust, fetch_over(channel))
        home.save_settings(
            NodeSettings(
                port=self.port,
                metrics_port=free_port(),
                probation_s=0.2,
                patience_s=PATIENCE_S,
            )
        )
        self.supervisor = Process(
            [sys.executable, "-m", "triplane.edge.supervisor", self.home],
            folder / f"{name}.log",
        )

    def answers(self):
        """What an application gets from it: the version that answered, and the logits."""
        with triton.InferenceServerClient(f"127.0.0.1:{self.port}") as client:
            tensor = triton.InferInput("x", X.shape, "FP32")
            tensor.set_data_from_numpy(X)
            answer = client.infer(MODEL, [tensor], client_timeout=10)
            return answer.get_response().model_version, answer.as_numpy("logits")


async def honestly(data, offset):
    """The chunks of a blob as the cloud sends them."""
    for at in range(offset, len(data), 1 << 20):
        yield transfer_pb2.DownloadChunk(size=len(data), data=data[at : at + (1 << 20)])


class StolenCloud(SessionServicer, MetadataServicer, TransferServicer):
    """The thief's server: tells any document, serves `stage.forged` metadata and `files`, his way.

    manner: (bytes, offset) -> chunks. reports: everything the node said to him.
    """

    def __init__(self, home, port, stage, files):
        self.stage, self.files, self.manner = stage, files, honestly
        self.reports = []
        self._home, self._address = home, f"127.0.0.1:{port}"
        self._said = threading.Condition()
        self._session = ServerSession(new_epoch(), self._take, heartbeat_s=1.0)
        self._number = 1_000_000
        self._loop = Loop()
        self._server = None

    def __enter__(self):
        self._loop.__enter__()
        self._loop.do(self._start())
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Be gone."""
        if self._server is not None:
            self._loop.do(self._server.stop(0))
            self._loop.__exit__()
            self._server = None

    async def _start(self):
        tls = self._home.tls
        self._server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)]
        )
        add_SessionServicer_to_server(self, self._server)
        add_MetadataServicer_to_server(self, self._server)
        add_TransferServicer_to_server(self, self._server)
        credentials = server_credentials(
            Authority.load(self._home.authority).pem,
            (tls / "server.pem").read_bytes(),
            (tls / "server.key").read_bytes(),
        )
        assert self._server.add_secure_port(self._address, credentials)
        await self._server.start()

    # The thief's orders

    def tell(self, *assignments):
        """Give the node a document with a higher number than any before."""
        self._number += 1
        desired = fleet_pb2.Desired(number=self._number, assignments=assignments)
        self._loop.loop.call_soon_threadsafe(self._session.send, desired)

    def hear(self, wanted, what, wait_s=WAIT_S):
        """The first thing that `wanted(report)` finds in a report, also in one of before."""
        until, seen = time.monotonic() + wait_s, 0
        with self._said:
            while True:
                for report in self.reports[seen:]:
                    if found := wanted(report):
                        return found
                seen = len(self.reports)
                left_s = until - time.monotonic()
                assert self._said.wait(left_s), (what, self.reports[-1:])

    # The wire

    async def _take(self, report):
        with self._said:
            self.reports.append(report)
            self._said.notify_all()

    async def Open(self, request_iterator, context):  # type: ignore[override]
        frames = aiter(request_iterator)
        await self._session.serve(await anext(frames), frames, context.write)

    async def Get(self, request, context):
        async with status_of_aio(context):
            data = await asyncio.to_thread(self.stage.fetch, request.name)
            return metadata_pb2.GetResponse(metadata=data)

    async def Download(self, request, context):
        async with status_of_aio(context):
            if request.sha256 not in self.files:
                raise NotFound(f"no blob {request.sha256.hex()}")
            async for chunk in self.manner(self.files[request.sha256], request.offset):
                yield chunk

    async def _none(self, request, context):
        async with status_of_aio(context):
            raise InvalidInput("the thief does not answer this")

    Submit = GetPending = Stat = Upload = _none


class StolenHome(Stage):
    """The metadata of a cloud's home, with the thief's keys and those that people keep."""

    @property
    def online(self):
        return self.path / "home" / "keys"

    @property
    def offline(self):
        return self.path / "keys"


class Lab:
    """The folder of a cloud with digits@1 and digits@2 released; thief and node come to it.

    first, second: their bundles. answers: what the node said before any attack.
    """

    first: Any
    second: Any
    ports: dict[str, int]
    node: Any
    answers: Any

    def __init__(self, folder):
        self.folder, self.home = folder, Home(folder / "home")
        self.files = {}
        self.stage = self.reopened()
        self.version = 10
        self.manner = honestly

    def reopened(self):
        repository = MetadataRepository(self.home.metadata, self.home.keys)
        return StolenHome(self.folder, Clock(), repository)

    def add(self, data):
        """Have the thief serve these bytes."""
        self.files[hashlib.sha256(data).digest()] = data
        return data

    def entry(self, path, data):
        """A targets entry that says of a bundle what is true of it, as far as it can be read."""
        self.add(data)
        model_digest = content_digest = bytes(32)
        (file := self.folder / "entry.bundle").write_bytes(data)
        try:
            bundle = Bundle.load(file)
            content_digest = bytes.fromhex(bundle.content_digest)
            model_digest = bytes.fromhex(bundle.description.model_digest)
        except TriplaneError:  # hostile bytes need no true digests
            pass
        target = bundle_target(
            TargetName.parse(path),
            length=len(data),
            sha256=hashlib.sha256(data).digest(),
            model_digest=model_digest,
            content_digest=content_digest,
        )
        hashes = {"sha256": target.sha256.hex()}
        return TargetFile(target.length, hashes, path, {"custom": dict(target.custom)})

    def released(self, path, data):
        """Have people sign it, both of them."""
        made = self.stage.release(self.entry(path, data), keys=("release-1", "release-2"))
        assert made.published
        return path

    def by_auto(self, path, data):
        """Have the thief sign it with the cloud's own auto key; the cloud would publish it so."""
        made = self.stage.next_targets("auto", [self.entry(path, data)])
        signed = signed_by(self.stage.online, made, "auto")
        assert self.stage.repository.submit("auto", signed.to_bytes()).published
        return path

    def allow(self, rules, goldens):
        """Have people sign a policy with its golden sets."""
        made = self.stage.next_targets("targets")
        made.signed.targets = {"policy.json": policy_file(Policy(rules))}
        for path, data in goldens.items():
            made.signed.targets[path] = TargetFile.from_data(path, self.add(data), ["sha256"])
        signed = signed_by(self.stage.offline, made, "targets")
        assert self.stage.repository.submit("targets", signed.to_bytes()).published

    def be_honest(self):
        """Undo what the thief prepared: metadata again of higher versions than he stamped."""
        self.manner = honestly
        if self.stage.forged:
            self.stage.forged.clear()
            self.republish()

    def republish(self):
        """The next versions of what people and the auto key signed."""
        for _ in range(2):
            self.stage.release(keys=("release-1", "release-2"))


def enrolled_node(cloud, do, folder, name="node-a"):
    """A node as an operator lets it in."""
    invited = do(
        cloud.principals.invite("operator", PrincipalRole.NODE, name=name, labels={"site": "lab"})
    )
    return RealNode(name, folder, invited.token, cloud)


def deployed(cloud, do, node, reference):
    """Roll a version out to the node and wait until it is committed."""
    request = fleet_pb2.DeployRequest(
        reference=reference, selector="all", key=reference.encode(), role="release"
    )
    wait_until(lambda: cloud.fleet.node(node.name).report, "the first report", WAIT_S)
    rollout = do(cloud.fleet.deploy(request, by="operator")).rollout.id

    def is_done():
        return do(cloud.fleet.rollout(rollout)).rollout.state is RolloutState.DONE

    wait_until(is_done, f"the end of {reference}", WAIT_S)
    assert node.committed(MODEL) == int(reference.partition("@")[2])
