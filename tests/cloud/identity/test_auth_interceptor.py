import asyncio
import contextlib
import gc
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from triplane.cloud.identity.audit import AuditRecord, verify
from triplane.cloud.identity.auth_interceptor import AuthInterceptor, _written
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.principals import Principals
from triplane.cloud.identity.rights import RIGHTS, PrincipalRole
from triplane.cloud.identity.servicers import EnrolmentServicer, IdentityServicer, RenewalServicer
from triplane.proto import (
    enrolment_pb2,
    federation_pb2,
    fleet_pb2,
    identity_pb2,
    metadata_pb2,
    registry_pb2,
    session_pb2,
    transfer_pb2,
)
from triplane.proto.channels import connect, connect_aio, server_credentials, server_options
from triplane.proto.enrolment_pb2_grpc import (
    add_EnrolmentServicer_to_server,
    add_RenewalServicer_to_server,
)
from triplane.proto.errors import Conflict, Corrupt, InvalidInput
from triplane.proto.identity import (
    IdentityFolder,
    Token,
    certificate_pem,
    certificate_request,
    enrol,
    key_pem,
    new_key,
    renew,
)
from triplane.proto.identity_pb2_grpc import IdentityStub, add_IdentityServicer_to_server
from triplane.proto.session_pb2 import Frame, Hello
from triplane.proto.session_pb2_grpc import (
    SessionServicer,
    SessionStub,
    add_SessionServicer_to_server,
)
from triplane.proto.status import error_from

NOW_S = 1_790_000_000.0
S = grpc.StatusCode
OPEN_PORT = {
    "/triplane.enrolment.v1.Enrolment/GetAuthority",
    "/triplane.enrolment.v1.Enrolment/Enrol",
}


class Echo(SessionServicer):
    """A stream that answers each frame until it is ended."""

    async def Open(self, request_iterator, context):
        async for frame in request_iterator:
            yield frame


@dataclass
class Cloud:
    authority: Authority
    principals: Principals
    auth: AuthInterceptor
    address: str
    enrolment: str
    folder: object
    joined: list

    def operator(self):
        """The identity folder of an operator."""
        return self.person("boss", PrincipalRole.OPERATOR)

    def person(self, name, role):
        key = new_key()
        certificate = self.principals.admit_now(certificate_request(key), name, role)
        folder = IdentityFolder(self.folder / name)
        folder.save(
            authority=self.authority.pem,
            certificate=certificate_pem(certificate),
            key=key_pem(key),
            cloud=self.address,
        )
        return folder


class Clock:
    def __init__(self):
        import time

        self.ahead_s = 0.0
        self._time = time.time

    def __call__(self):
        return self._time() + self.ahead_s


@contextlib.asynccontextmanager
async def running(database, folder, clock):
    ca = folder / "ca"
    ca.mkdir()
    authority = Authority.make(ca, "test cloud", clock())
    principals = Principals(database, authority, clock)
    auth = AuthInterceptor(principals)
    server_key = new_key()
    certificate = authority.issue_server(
        server_key.public_key(), ["localhost", "127.0.0.1"], clock()
    )
    server = grpc.aio.server(interceptors=[auth], options=server_options())
    add_IdentityServicer_to_server(IdentityServicer(principals, database, auth), server)
    add_RenewalServicer_to_server(RenewalServicer(principals), server)
    add_SessionServicer_to_server(Echo(), server)
    credentials = server_credentials(
        authority.pem, certificate_pem(certificate), key_pem(server_key)
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    address = f"127.0.0.1:{port}"
    joined = []

    async def on_join(name, role, labels):
        joined.append((name, role, dict(labels)))

    open_server = grpc.aio.server(options=server_options())
    add_EnrolmentServicer_to_server(
        EnrolmentServicer(principals, authority, address, on_join), open_server
    )
    open_port = open_server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await open_server.start()
    try:
        yield Cloud(authority, principals, auth, address, f"127.0.0.1:{open_port}", folder, joined)
    finally:
        await server.stop(0)
        await open_server.stop(0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def play(database, tmp_path, clock):
    """Runs a coroutine function of a running cloud."""

    def run(story):
        async def main():
            async with running(database, tmp_path, clock) as cloud:
                return await asyncio.wait_for(story(cloud), 120)

        return asyncio.run(main())

    return run


def who(folder):
    with connect(folder) as channel:
        try:
            return IdentityStub(channel).WhoAmI(identity_pb2.WhoAmIRequest(), timeout=10)
        except grpc.RpcError as error:
            return error.code(), error.details()


async def apart(function, *args, **options):
    """A blocking client, beside the server's loop."""
    return await asyncio.to_thread(function, *args, **options)


def test_a_node_enrols_by_token_and_is_known_by_its_certificate(play, tmp_path):
    async def story(cloud):
        made = await cloud.principals.invite("boss", PrincipalRole.NODE, labels={"site": "factory"})
        folder = await apart(enrol, made.token, cloud.enrolment, tmp_path / "node")
        found = await apart(who, folder)
        assert (found.name, found.role) == (made.name, identity_pb2.NODE)
        assert cloud.joined == [(made.name, PrincipalRole.NODE, {"site": "factory"})]
        assert (tmp_path / "node" / "key.pem").stat().st_mode & 0o777 == 0o600
        assert not list((tmp_path / "node").glob(".enrol-*"))

    play(story)


def test_a_token_enrols_one_key_and_the_same_one_again(play, tmp_path):
    async def story(cloud):
        made = await cloud.principals.invite("boss", PrincipalRole.NODE)
        token = Token.parse(made.token)
        from triplane.proto.identity import mac

        request = certificate_request(new_key())
        first = await cloud.principals.enrol(token.id, request, mac(token.key, request))
        again = await cloud.principals.enrol(token.id, request, mac(token.key, request))
        assert first.certificate == again.certificate
        other = certificate_request(new_key())
        with pytest.raises(Conflict, match="used already"):
            await cloud.principals.enrol(token.id, other, mac(token.key, other))

    play(story)


def test_unknown_forged_and_expired_tokens_are_refused_alike(play, tmp_path, clock):
    async def story(cloud):
        made = await cloud.principals.invite("boss", PrincipalRole.NODE, valid_s=60)
        genuine = Token.parse(made.token)
        request = certificate_request(new_key())
        texts = set()
        for token_id, mac_bytes in ((bytes(16), bytes(32)), (genuine.id, bytes(32))):
            with pytest.raises(InvalidInput) as caught:
                await cloud.principals.enrol(token_id, request, mac_bytes)
            texts.add(str(caught.value))
        clock.ahead_s = 120
        from triplane.proto.identity import mac

        with pytest.raises(InvalidInput) as caught:
            await cloud.principals.enrol(genuine.id, request, mac(genuine.key, request))
        assert len(texts | {str(caught.value)}) == 1

    play(story)


def test_an_authority_that_is_not_pinned_is_refused(play, tmp_path):
    async def story(cloud):
        other = tmp_path / "other"
        other.mkdir()
        foreign = Token.make(Authority.make(other, "other", 1e9).der)
        with pytest.raises(Corrupt, match="it pins the authority"):
            await apart(enrol, str(foreign), cloud.enrolment, tmp_path / "node")
        assert not (tmp_path / "node" / "cert.pem").exists()

    play(story)


def test_a_certificate_of_another_authority_does_not_connect(play, tmp_path):
    async def story(cloud):
        other = tmp_path / "other"
        other.mkdir()
        authority = Authority.make(other, "other", 1.79e9)
        key = new_key()
        forged = authority.issue(certificate_request(key), "boss", 1.79e9)
        folder = IdentityFolder(tmp_path / "forged")
        folder.save(
            authority=cloud.authority.pem,
            certificate=certificate_pem(forged),
            key=key_pem(key),
            cloud=cloud.address,
        )
        code, _ = await apart(who, folder)
        assert code is S.UNAVAILABLE  # TLS ends it before any call

    play(story)


def test_a_certificate_that_was_never_recorded_is_refused(play, tmp_path):
    async def story(cloud):
        key = new_key()
        certificate = cloud.authority.issue(certificate_request(key), "boss", 1.79e9)
        folder = IdentityFolder(tmp_path / "unrecorded")
        folder.save(
            authority=cloud.authority.pem,
            certificate=certificate_pem(certificate),
            key=key_pem(key),
            cloud=cloud.address,
        )
        code, text = await apart(who, folder)
        assert code in {S.UNAUTHENTICATED, S.UNAVAILABLE}, text

    play(story)


@pytest.mark.slow
def test_revocation_refuses_calls_and_ends_live_streams(play):
    async def story(cloud):
        boss = cloud.operator()
        node = cloud.person("node-1", PrincipalRole.NODE)
        async with connect_aio(node) as channel:
            call = SessionStub(channel).Open()
            await call.write(Frame(hello=Hello()))
            await call.read()
            heard: list[str] = []
            cloud.auth.on_revoked(heard.append)
            async with connect_aio(boss) as operators:
                await IdentityStub(operators).Revoke(identity_pb2.RevokeRequest(name="node-1"))
            assert await asyncio.wait_for(call.code(), 60.0) is S.UNAUTHENTICATED
            assert "was revoked" in await call.details()
            assert heard == ["node-1"]
        code, text = await apart(who, node)
        assert code is S.UNAUTHENTICATED
        assert "enrol with a new token" in text

    play(story)


def test_renewal_gives_a_new_key_and_the_old_one_soon_ends(play, clock, tmp_path):
    async def story(cloud):
        node = cloud.person("node-1", PrincipalRole.NODE)
        old = IdentityFolder(tmp_path / "old")
        old.save(
            authority=node.authority_pem,
            certificate=node.certificate_pem,
            key=node.key_pem,
            cloud=node.cloud,
        )
        await apart(renew, node)
        assert old.key_pem != node.key_pem
        assert (await apart(who, node)).name == "node-1"
        assert (await apart(who, old)).name == "node-1"
        clock.ahead_s = 3700
        code, _ = await apart(who, old)
        assert code is S.UNAUTHENTICATED
        assert (await apart(who, node)).name == "node-1"

    play(story)


def methods():
    """Every method of every service of the wire, but inference, which is another port."""
    modules = (
        enrolment_pb2,
        federation_pb2,
        fleet_pb2,
        identity_pb2,
        metadata_pb2,
        registry_pb2,
        session_pb2,
        transfer_pb2,
    )
    for module in modules:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}"


def test_every_method_has_a_row_or_stands_on_the_open_port():
    assert set(methods()) - set(RIGHTS) == OPEN_PORT
    assert {row for row in RIGHTS if row.startswith("/triplane.")} <= set(methods())


@pytest.mark.slow
@pytest.mark.parametrize("role", list(PrincipalRole))
def test_a_role_calls_what_its_rows_say_and_nothing_else(play, role):
    async def story(cloud):
        folder = cloud.person("somebody", role)
        async with connect_aio(folder) as channel:
            for method in sorted(set(RIGHTS) & served()):
                code = await _code_of(channel.stream_stream(method))
                refused = code is S.PERMISSION_DENIED
                assert refused == (role not in RIGHTS[method]), (method, code)

    play(story)


async def _code_of(open_: Any):
    """Return how a call ends, or OK once it is answered."""
    for _ in range(20):
        stream = open_(iter([b""]))
        code = await stream.code() if not await _answers(stream) else S.OK
        # grpc.aio's own word where it sends into a stream that was refused a moment before.
        if code is not S.INTERNAL:
            break
    return code


async def _answers(stream):
    with contextlib.suppress(grpc.aio.AioRpcError):
        return await asyncio.wait_for(stream.read(), 60) is not grpc.aio.EOF
    return False


def served():
    return {m for m in methods() if ".identity." in m or ".session." in m}


def test_the_audit_log_holds_every_deed_and_verifies(play, database):
    async def story(cloud):
        boss = cloud.operator()
        async with connect_aio(boss) as channel:
            stub = IdentityStub(channel)
            await stub.CreateToken(identity_pb2.CreateTokenRequest(role=identity_pb2.NODE))
            await stub.CreateToken(
                identity_pb2.CreateTokenRequest(role=identity_pb2.VIEWER, name="eve")
            )
            entries = [
                AuditRecord(
                    e.number,
                    e.time_s,
                    e.actor,
                    e.action,
                    e.subject,
                    e.details,
                    e.previous,
                    e.digest,
                )
                async for e in stub.ReadAudit(identity_pb2.ReadAuditRequest())
            ]
        assert [e.action for e in entries] == ["identity.enrol", "token.create", "token.create"]
        number, head = verify(entries)
        assert number == 3
        with pytest.raises(Corrupt, match="entry 3 does not follow"):
            verify([entries[0], entries[2]])
        with pytest.raises(Corrupt, match="cut off"):
            verify(entries[:2], head=head)

    play(story)


@pytest.mark.parametrize("request_bytes", [b"", b"\x30\x03abc", bytes(9000)])
def test_bytes_that_are_no_request_are_refused(play, request_bytes):
    async def story(cloud):
        with pytest.raises(InvalidInput, match="certificate request"):
            cloud.authority.issue(request_bytes, "x", 1.79e9)

    play(story)


def test_an_unknown_token_over_the_wire_is_told_so(play, tmp_path):
    async def story(cloud):
        token = Token.make(cloud.authority.der)
        with pytest.raises(InvalidInput, match="unknown, expired or used"):
            await apart(enrol, str(token), cloud.enrolment, tmp_path / "node")

    play(story)


def test_errors_keep_their_family_over_the_wire():
    class Call(grpc.RpcError):
        def code(self):
            return S.UNAUTHENTICATED

        def details(self):
            return "x"

    assert isinstance(error_from(Call()), InvalidInput)


def test_a_generator_of_responses_is_closed_when_its_call_is_cancelled_in_a_write():
    closed = []

    async def generate(_request, _context):
        try:
            yield "first"
        finally:
            closed.append(True)

    class Stuck:
        def __init__(self):
            self.writing = asyncio.Event()

        async def write(self, _response):
            self.writing.set()
            await asyncio.Event().wait()

    async def story():
        context = Stuck()
        call = asyncio.ensure_future(_written(generate)("request", context))
        await context.writing.wait()
        call.cancel()
        await asyncio.wait({call})
        return closed

    gc.disable()  # what only the collector would close counts as left open
    try:
        assert asyncio.run(story()) == [True]
    finally:
        gc.enable()
