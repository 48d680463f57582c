"""What callers of a real cloud try, with certificates and without, and what it says to them.

After each attack an honest node reports and is heard, and an operator sees the fleet.
"""

import asyncio
import contextlib
import hashlib
import io
import threading
import zipfile
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
import pytest
from google.protobuf import json_format
from tests.attacks.cases import Case
from tests.attacks.trust_stage import bundle_entry, signed_by
from tests.cloud.nodes import CAPABILITY, enrolled
from tests.cloud.registry.models import model_bytes
from tests.cloud.released import copied, make_released
from tests.faults.fleet import wait_until
from tuf.api._payload import Targets
from tuf.api.metadata import Metadata

from triplane.cloud import sessions
from triplane.cloud.home import Home
from triplane.cloud.identity.rights import PrincipalRole
from triplane.cloud.server import Cloud, running
from triplane.cloud.trust.keys import KeyFolder
from triplane.proto import enrolment_pb2, identity_pb2, metadata_pb2, registry_pb2, session_pb2
from triplane.proto import fleet_pb2 as pb
from triplane.proto import transfer_pb2 as transfer
from triplane.proto.channels import connect, connect_aio
from triplane.proto.enrolment_pb2_grpc import EnrolmentStub, RenewalStub
from triplane.proto.errors import TriplaneError
from triplane.proto.fleet_pb2_grpc import FleetStub
from triplane.proto.identity import IdentityFolder, Token, certificate_request, mac, new_key
from triplane.proto.identity_pb2_grpc import IdentityStub
from triplane.proto.metadata_pb2_grpc import MetadataStub
from triplane.proto.registry_pb2_grpc import RegistryStub
from triplane.proto.session_pb2_grpc import SessionStub
from triplane.proto.status import remote_errors
from triplane.proto.stream import new_epoch
from triplane.proto.transfer_pb2_grpc import TransferStub

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
KEY = b"16 random bytes."


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return make_released(tmp_path_factory.mktemp("released"))


@dataclass
class Scene:
    """A running cloud, channels to it by name, and a node that does nothing wrong."""

    cloud: Cloud
    home: Home
    folder: Any
    stack: AsyncExitStack
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def node(self, name, **labels):
        """An enrolled node that may misbehave."""
        return await enrolled(self.cloud, self.folder, name, **labels)

    def channel(self, identity):
        """A channel of an identity, closed with the scene."""
        if identity.name not in self.channels:
            self.channels[identity.name] = connect_aio(identity)
            self.stack.push_async_callback(self.channels[identity.name].close)
        return self.channels[identity.name]

    @property
    def operator(self):
        """The operator's channel."""
        return self.channel(IdentityFolder(self.home.operator))

    async def stream(self, identity):
        """A raw stream after its greeting."""
        call = SessionStub(self.channel(identity)).Open()
        await call.write(session_pb2.Frame(hello=session_pb2.Hello(epoch=new_epoch())))
        assert (await call.read()).WhichOneof("body") == "welcome"
        return call

    async def report(self, node, report):
        """Send a report on a new stream; returns once it is acknowledged or refused."""
        call = await self.stream(node.identity)
        await call.write(session_pb2.Frame(number=1, report=report))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (frame := await call.read()) is not grpc.aio.EOF:
                if frame.acknowledged:
                    call.cancel()
                    return "acknowledged"
        return await ended(call)

    async def deploy(self, **options):
        given = {"reference": "digits@1", "selector": "all", "key": b"k", "role": "release"}
        return await FleetStub(self.operator).Deploy(pb.DeployRequest(**given | options))

    async def watched(self, rollout, until):
        """The first state of a rollout for which `until` holds."""
        async for found in FleetStub(self.operator).WatchRollout(pb.GetRolloutRequest(id=rollout)):
            if until(found):
                return found
        raise AssertionError(found)


async def ended(call):
    """How a call ended, as text."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return f"{(await call.code()).name}: {await call.details()}"


async def refused(awaitable):
    """What a call was refused with, as text."""
    try:
        answer = await awaitable
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    except TriplaneError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"it was not refused: {answer}")


@asynccontextmanager
async def scene(home, folder):
    async with running(home) as cloud, AsyncExitStack() as stack:
        yield Scene(cloud, home, folder, stack)


def saying(report):
    """A node that says this of itself."""

    async def attack(scene):
        return await scene.report(await scene.node("liar"), report)

    return attack


def claim(attempt=1):
    """A report of success with digits@1."""
    report = pb.Report(number=1, capability=CAPABILITY, serving_up=True)
    report.models.add(
        model="digits", version=1, attempt=attempt, state=pb.COMMITTED, committed_version=1
    )
    return report


async def outsider(scene):
    """Success is told for a rollout that is of other nodes."""
    honest = await scene.node("honest", site="lab")
    liar = await scene.node("liar", site="other")
    await scene.report(honest, pb.Report(capability=CAPABILITY))
    rollout = await scene.deploy(selector="site=lab")
    assert await scene.report(liar, claim()) == "acknowledged"
    found = await scene.watched(rollout.id, lambda r: r.state == pb.Rollout.RUNNING)
    assert [node.name for node in found.nodes] == ["honest"]
    return found.reason


async def hasty(scene):
    """Success is told before there was anything to succeed with; then the node's wave opens."""
    honest, liar = await scene.node("honest"), await scene.node("liar")
    await scene.report(honest, pb.Report(capability=CAPABILITY))
    await scene.report(liar, claim())
    waves = [pb.Wave(nodes=1), pb.Wave(nodes=2)]
    rollout = await scene.deploy(waves=waves)
    await scene.watched(rollout.id, lambda r: r.nodes[0].state == pb.ASSIGNED)
    await scene.report(liar, claim(attempt=7))
    await scene.report(honest, claim())
    found = await scene.watched(rollout.id, lambda r: r.wave == 1 and r.reason)
    assert found.state == pb.Rollout.RUNNING
    return found.reason


async def ordering(scene):
    """A node sends what only the cloud sends."""
    liar = await scene.node("liar")
    call = await scene.stream(liar.identity)
    await call.write(session_pb2.Frame(number=1, desired=pb.Desired(number=9)))
    return await ended(call)


async def saying_nothing(scene):
    """A node opens its stream, and that is all."""
    liar = await scene.node("liar")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "HELLO_S", 0.3)
        return await ended(SessionStub(scene.channel(liar.identity)).Open())


async def steering(scene):
    liar = await scene.node("liar")
    call = FleetStub(scene.channel(liar.identity)).Deploy(pb.DeployRequest(reference="digits@1"))
    return await refused(call)


async def reading(scene):
    """A node asks for a bundle that nobody assigned to it."""
    liar = await scene.node("liar")
    version = await scene.cloud.registry.version("digits@1")
    request = transfer.DownloadRequest(sha256=version.bundles[0].blob)
    return await ended(TransferStub(scene.channel(liar.identity)).Download(request))


def on(**changed):
    """A node of this capability is the only one of a rollout."""

    async def attack(scene):
        usual = json_format.MessageToDict(CAPABILITY, preserving_proto_field_name=True)
        capability = json_format.ParseDict(usual | changed, pb.Capability())
        odd = await scene.node("odd")
        await scene.report(odd, pb.Report(capability=capability))
        rollout = await scene.deploy()
        found = await scene.watched(rollout.id, lambda r: r.state == pb.Rollout.FAILED)
        assert not scene.cloud.fleet.node("odd").held
        return found.reason

    return attack


async def renewing(scene):
    """A node renews its certificate as fast as it can: each renewal adds rows for good."""
    liar = await scene.node("liar")
    stub = RenewalStub(scene.channel(liar.identity))
    request = enrolment_pb2.RenewRequest(request=certificate_request(new_key()))
    for _ in range(8):
        await stub.Renew(request)
    return await refused(stub.Renew(request))


# Tokens


def enrol_call(scene, channel, token, request):
    return EnrolmentStub(channel).Enrol(
        enrolment_pb2.EnrolRequest(token_id=token.id, request=request, mac=mac(token.key, request))
    )


@asynccontextmanager
async def enrolment(scene, name="late"):
    invited = await scene.cloud.principals.invite("operator", PrincipalRole.NODE, name=name)
    async with grpc.aio.insecure_channel(scene.cloud.enrol_address) as channel:
        yield channel, Token.parse(invited.token)


async def replayed(scene):
    """Whoever saw a used token tries it with a key of his own."""
    async with enrolment(scene) as (channel, token):
        await enrol_call(scene, channel, token, certificate_request(new_key()))
        return await refused(enrol_call(scene, channel, token, certificate_request(new_key())))


async def replayed_at_once(scene):
    """Eight machines with one token at the same instant: one of them gets in."""
    async with enrolment(scene) as (channel, token):
        calls = [
            enrol_call(scene, channel, token, certificate_request(new_key())) for _ in range(8)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        lost = [a.details() for a in answers if isinstance(a, grpc.aio.AioRpcError)]
        assert len(lost) == len(calls) - 1
        (text,) = set(lost)
        return str(text)


async def replayed_request(scene):
    """A recorded enrolment is sent again after the name was revoked."""
    async with enrolment(scene) as (channel, token):
        request = certificate_request(new_key())
        await enrol_call(scene, channel, token, request)
        await scene.cloud.principals.revoke("operator", "late", "lost")
        return await refused(enrol_call(scene, channel, token, request))


# Revocation


async def revoke(scene, name):
    request = identity_pb2.RevokeRequest(name=name, reason="stolen")
    await IdentityStub(scene.operator).Revoke(request)


async def revoked_call(scene):
    thief = await scene.node("thief")
    channel = scene.channel(thief.identity)
    assert (await IdentityStub(channel).WhoAmI(identity_pb2.WhoAmIRequest())).name == "thief"
    await revoke(scene, "thief")
    return await refused(IdentityStub(channel).WhoAmI(identity_pb2.WhoAmIRequest()))


async def revoked_stream(scene):
    thief = await scene.node("thief")
    call = await scene.stream(thief.identity)
    await revoke(scene, "thief")
    return await ended(call)


async def revoked_meanwhile(scene):
    """The stream opens just when the name is revoked: it was looked up before that."""
    thief, holder = await scene.node("thief"), scene.cloud.principals.holder
    once = iter([True])

    async def slow(serial, name, key=b""):
        found = await holder(serial, name)
        if name == "thief" and next(once, False):
            await revoke(scene, "thief")
        return found

    scene.cloud.principals.holder = slow
    return await ended(SessionStub(scene.channel(thief.identity)).Open())


async def revoked_upload(scene):
    """An operator's machine was stolen in the middle of an upload."""
    invited = await scene.cloud.principals.invite("operator", PrincipalRole.OPERATOR, name="thief")
    async with grpc.aio.insecure_channel(scene.cloud.enrol_address) as channel:
        token, key = Token.parse(invited.token), new_key()
        made = await enrol_call(scene, channel, token, certificate_request(key))
    identity = saved(scene, made.certificate, key)
    data = bytes(3 << 20)
    sha256, is_revoked = hashlib.sha256(data).digest(), threading.Event()

    def chunks():
        yield transfer.UploadChunk(sha256=sha256, size=len(data), data=data[: 1 << 20])
        is_revoked.wait(DEADLINE_S)
        yield transfer.UploadChunk(data=data[1 << 20 : 2 << 20])
        yield transfer.UploadChunk(data=data[2 << 20 :])

    def upload():
        with connect(identity) as channel, remote_errors():
            return TransferStub(channel).Upload(chunks())

    uploading = asyncio.create_task(asyncio.to_thread(upload))
    await asyncio.to_thread(
        wait_until, lambda: scene.cloud.blobs.stored(sha256, len(data)).stored, "the first bytes"
    )
    await revoke(scene, "thief")
    is_revoked.set()
    text = await refused(uploading)
    assert not scene.cloud.blobs.has(sha256)
    return text


def saved(scene, certificate, key):
    from cryptography import x509

    from triplane.proto.identity import certificate_pem, key_pem

    identity = IdentityFolder(scene.folder / "thief")
    identity.save(
        authority=IdentityFolder(scene.home.operator).authority_pem,
        certificate=certificate_pem(x509.load_der_x509_certificate(certificate)),
        key=key_pem(key),
        cloud=scene.cloud.address,
    )
    return identity


# Names


def pushing(**fields):
    async def attack(scene):
        blob = scene.cloud.blobs.put(model_bytes(scene.folder))
        given = {"model": "digits", "blob": blob, "key": KEY, **fields}
        return await refused(
            RegistryStub(scene.operator).Push(registry_pb2.PushRequest(**given), timeout=50)
        )

    return attack


def calling(stub, method, request):
    async def attack(scene):
        return await refused(getattr(stub(scene.operator), method)(request))

    return attack


async def labelled_token(scene):
    request = identity_pb2.CreateTokenRequest(
        role=identity_pb2.NODE, name="late", labels={"../../x": "y"}
    )
    return await refused(IdentityStub(scene.operator).CreateToken(request))


# Files


def pushed(data):
    """An uploaded file is pushed as a model."""

    async def attack(scene):
        blob = scene.cloud.blobs.put(data())
        request = registry_pb2.PushRequest(model="digits", blob=blob, key=KEY)
        return await refused(RegistryStub(scene.operator).Push(request, timeout=50))

    return attack


def deflated():
    """64 MiB of zeros in a zip of 64 KiB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("manifest.pb", bytes(64 << 20))
    return file.getvalue()


async def bomb_of_samples(scene):
    """Calibration samples that claim to unfold to a terabyte."""
    file = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 32, 1, 8, 8)}
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, header)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("x.npy", head.getvalue() + bytes(1 << 20))
    recipe = registry_pb2.Recipe(
        quantize="int8", calibration=scene.cloud.blobs.put(file.getvalue())
    )
    return await pushing(recipe=recipe)(scene)


async def flipped_upload(scene):
    data = bytes(1000)
    call = TransferStub(scene.operator).Upload()
    sha256 = hashlib.sha256(data).digest()
    await call.write(transfer.UploadChunk(sha256=sha256, size=1000, data=b"\1" + data[1:]))
    await call.done_writing()
    return await refused(call)


async def endless_upload(scene):
    call = TransferStub(scene.operator).Upload()
    await call.write(transfer.UploadChunk(sha256=bytes(32), size=1000))
    # No write may meet the refusal: grpc.aio then tells INTERNAL in place of the status.
    for _ in range(2):
        await call.write(transfer.UploadChunk(data=bytes(1000)))
    return await refused(call)


async def unknown_key(scene):
    """Release metadata of a key that no role names is submitted by who may submit."""
    data = scene.cloud.repository.pending("release").metadata
    made = Metadata[Targets].from_bytes(data)
    made.signed.version += 1
    made.signed.targets["release/digits@9+ort-x64.bundle"] = bundle_entry(
        "release/digits@9+ort-x64.bundle"
    )
    KeyFolder(scene.folder / "stranger").make("release")
    signed = signed_by(scene.folder / "stranger", made, "release").to_bytes()
    request = metadata_pb2.SubmitRequest(role="release", metadata=signed)
    return await refused(MetadataStub(scene.operator).Submit(request))


REPORTS, RIGHTS = "cloud/fleet/reports.py", "cloud/identity/auth_interceptor.py"
TOKENS, ROLLOUT = "cloud/identity/principals.py", "cloud/fleet/rollout.py"
FITTING, NAMES = "proto/fitting.py", "cloud/registry/names.py"
BLOBS, CHECKS = "proto/blobs.py", "cloud/trust/repository.py"
USED = "this token was used already; request a new one with `triplane cloud token`"


def model_report(**fields):
    return pb.Report(models=[pb.ModelReport(model="digits", **fields)])


# fmt: off
CASES = [
    Case("forged report", "success of a rollout that the node is not in", ROLLOUT,
         "wave 1: 0 of 1 node committed, 1 needed", outsider, ""),
    Case("forged report", "success with a version that the node was not given", ROLLOUT,
         "wave 2: 0 of 1 node committed, 1 needed", hasty, ""),
    Case("forged report", "a version that no registry has", REPORTS,
         "version is at most 1000000000 in a report, got 2147483648",
         saying(model_report(version=1 << 31)), ""),
    Case("forged report", "a state that does not exist", REPORTS,
         "node state 77 is unknown to this cloud",
         saying(model_report(state=77)), ""),
    Case("forged report", "a time outside the calendar", REPORTS,
         "incident.time_s is 0 to 253402300799 seconds in a report, got 1e+300",
         saying(pb.Report(incidents=[pb.Incident(time_s=1e300)])), ""),
    Case("forged report", "a text that a database cannot store", REPORTS,
         "incident.text must not contain a NUL character",
         saying(pb.Report(incidents=[pb.Incident(text="a\0b")])), ""),
    Case("forged report", "a document that only the cloud sends", "cloud/fleet/node_peer.py",
         "a node sends reports; other messages are the cloud's", ordering, ""),
    Case("forged report", "an order to the fleet", RIGHTS,
         "'liar' is a node and may not call Deploy; that is for: operator", steering, ""),
    Case("endless data", "a report of 2 MB", REPORTS,
         "size of the report in bytes is at most 1048576 in a report, got ...",
         saying(pb.Report(serving_address="x" * 2_000_000)), ""),
    Case("slow retrieval", "a stream that is opened and never used", "cloud/sessions.py",
         "UNAVAILABLE: no hello came within 0.3 s of the stream's opening", saying_nothing, ""),
    Case("endless data", "an upload that continues after its end", BLOBS,
         "blob 0000000000000000... has 1000 bytes; 1000 more after 1000 were sent",
         endless_upload, ""),
    Case("endless data", "renewals of a certificate, one after the other", TOKENS,
         "'liar' got 9 certificates within 3600 s, its first and 8 renewals", renewing, ""),
    Case("flipped byte", "an upload with one other byte", BLOBS,
         "the bytes received have the digest ...; they were dropped, send it again from the "
         "start", flipped_upload, ""),
    Case("unknown key", "metadata signed by a key that no role names", CHECKS,
         "no signature of release ... is valid for a key of the role; signed by key ids: ...",
         unknown_key, ""),
    Case("wrong hardware", "a bundle of a newer opset than the node's runtime", FITTING,
         "no node can take digits@1: ort-x64: needs opset 21, the node's runtime knows opsets to "
         "11", on(max_opset=11), ""),
    Case("wrong hardware", "a bundle for a newer runtime", FITTING,
         "ort-x64: needs onnxruntime ..., the node has 1.2.0", on(runtime_version="1.2.0"), ""),
    Case("wrong hardware", "a bundle for another runtime", FITTING,
         "ort-x64: needs the runtime onnxruntime, the node has tflite", on(runtime="tflite"), ""),
    Case("wrong hardware", "a bundle that needs more memory", FITTING,
         "ort-x64: needs ... bytes of memory, the node has 1", on(memory_bytes=1), ""),
    Case("wrong hardware", "a machine that the converter has no target for", FITTING,
         "no node can take digits@1: the node takes no target of the converter",
         on(targets=[]), ""),
    Case("another's file", "a bundle that was not assigned to the node",
         "cloud/fleet/registry_bundles.py",
         "no blob ... is assigned to node liar; nodes read only bundles that are assigned to them",
         reading, ""),
    Case("replayed token", "a used token with another key", TOKENS, USED, replayed, ""),
    Case("replayed token", "eight machines with one token at once", TOKENS, USED,
         replayed_at_once, ""),
    Case("replayed token", "a recorded enrolment of a name that was revoked", TOKENS,
         "the token is unknown, expired or used, or its secret is wrong; request a new one",
         replayed_request, ""),
    Case("revoked certificate", "a new call", RIGHTS,
         "UNAUTHENTICATED: the certificate of 'thief' is revoked, replaced or not of this cloud; "
         "enrol with a new token", revoked_call, ""),
    Case("revoked certificate", "a live stream", RIGHTS,
         "UNAUTHENTICATED: the certificate of 'thief' was revoked", revoked_stream, ""),
    Case("revoked certificate", "a stream that opens at the moment of the revocation", RIGHTS,
         "UNAUTHENTICATED: the certificate of 'thief' is revoked, replaced or not of this cloud",
         revoked_meanwhile, ""),
    Case("revoked certificate", "an upload that had begun", RIGHTS,
         "the certificate of 'thief' was revoked", revoked_upload, ""),
    Case("path traversal", "the name of a model", NAMES,
         "a name (model) has 1 to 63 of a-z, 0-9, '.', '_', '-' and begins with a letter or "
         "digit, got '../../x'", pushing(model="../../x"), ""),
    Case("path traversal", "an alias", NAMES,
         "a name (alias) has 1 to 63 of a-z, 0-9, '.', '_', '-' and begins with a letter or "
         "digit, got '../../x'", pushing(aliases=["../../x"]), ""),
    Case("path traversal", "a target of the converter", "unified_ir/convert/targets.py",
         "no target '../../etc/passwd'; this version converts for ...",
         calling(RegistryStub, "GetBundle", registry_pb2.GetBundleRequest(
             reference="digits@1", target="../../etc/passwd")), ""),
    Case("path traversal", "a metadata file", CHECKS,
         "metadata files are timestamp.json, root.json and VERSION.ROLE.json, got "
         "'../keys/auto.pem'",
         calling(MetadataStub, "Get", metadata_pb2.GetRequest(name="../keys/auto.pem")), ""),
    Case("path traversal", "the name of a blob", BLOBS,
         "a blob is named by 32 bytes of SHA-256, got 15",
         calling(TransferStub, "Stat", transfer.StatRequest(sha256=b"../../../passwd")), ""),
    Case("path traversal", "the name of a node", "proto/identity.py",
         "a name has 1 to 63 of a-z, 0-9, '.', '_', '-' and begins with a letter or digit, got "
         "'../../x'",
         calling(IdentityStub, "CreateToken", identity_pb2.CreateTokenRequest(
             role=identity_pb2.NODE, name="../../x")), ""),
    Case("path traversal", "a label of a token", "proto/documents.py",
         "a label's key is 1 to 63 of a-z, 0-9, '.', '_', '-', '/', got '../../x'",
         labelled_token, ""),
    Case("zip bomb", "a compressed model file", "unified_ir/files/container.py",
         "manifest: its bytes or its header are damaged", pushed(deflated), ""),
    Case("zip bomb", "calibration samples that claim a terabyte", "unified_ir/files/npz.py",
         "x announces 1099511627776 bytes as float32(4294967296, 1, 8, 8); at most 1073741824 "
         "bytes are read", bomb_of_samples, ""),
]
# fmt: on


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_hostile_caller_is_refused_by_name_and_honest_ones_are_served(released, tmp_path, case):
    async def story():
        async with asyncio.timeout(DEADLINE_S), scene(copied(released, tmp_path), tmp_path) as made:
            said = await case.do(made)
            case.check(said)
            await still_serves(made)

    asyncio.run(story())


async def still_serves(scene):
    witness = await scene.node("witness")
    assert await scene.report(witness, pb.Report(capability=CAPABILITY)) == "acknowledged"
    listed = await FleetStub(scene.operator).ListNodes(pb.ListNodesRequest())
    assert "witness" in {node.name for node in listed.nodes}
