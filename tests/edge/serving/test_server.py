"""The server as a whole: refusals, isolation of calls, deadlines, TLS, and its way down."""

import contextlib
import datetime as dt
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.runtime import graphs as runtime_graphs

from triplane.edge.serving import server as server_module
from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.server import Server, Tls
from triplane.edge.serving.wire import WIRE_NAME
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.unified_ir.runtime.session import Session

X = np.ones((1, 4), np.float32)


def status_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    code: grpc.StatusCode = raised.value.code()
    return code


@pytest.fixture
def channel():
    channels = []

    def open_to(server, **options):
        channels.append(
            grpc.insecure_channel(
                f"127.0.0.1:{server.port}",
                options=[(f"grpc.{key}", value) for key, value in options.items()],
            )
        )
        return channels[-1]

    yield open_to
    for one in channels:
        one.close()


def test_a_full_queue_refuses_with_unavailable_while_health_still_answers(serve, connect, kit):
    gated = kit.Gated(kit.linear())
    server = serve(gated, limits=ServingLimits(threads=2, queued_calls=1))
    client = connect(server)
    answers: queue.Queue[Any] = queue.Queue()
    for _ in range(2):
        client.async_infer("linear", [kit.tensor("x", X)], lambda **kw: answers.put(kw))
    gated.wait_for_runs(2)
    client.async_infer("linear", [kit.tensor("x", X)], lambda **kw: answers.put(kw))
    while not server._turns.waiting:
        time.sleep(0)
    with pytest.raises(triton.InferenceServerException, match="queues are full") as raised:
        client.infer("linear", [kit.tensor("x", X)])
    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    assert client.is_server_live()
    assert client.is_model_ready("linear")
    gated.gate.set()
    for _ in range(3):
        assert answers.get(timeout=30)["error"] is None
    assert client.infer("linear", [kit.tensor("x", X)]).as_numpy("y").shape == (1, 3)


def test_a_call_that_outlives_its_deadline_in_the_queue_is_never_run(serve, connect, kit):
    gated = kit.Gated(kit.linear())
    client = connect(serve(gated, limits=ServingLimits(threads=1)))
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer("linear", [kit.tensor("x", X)], lambda **kw: answers.put(kw))
    gated.wait_for_runs(1)
    with pytest.raises(triton.InferenceServerException) as raised:
        client.infer("linear", [kit.tensor("x", X)], client_timeout=0.05)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    gated.gate.set()
    assert answers.get(timeout=30)["error"] is None
    assert client.infer("linear", [kit.tensor("x", X)]).as_numpy("y").shape == (1, 3)
    assert gated.runs == 2


def test_the_timeout_parameter_is_a_deadline_in_microseconds(serve, connect, kit):
    client = connect(serve(kit.linear()))
    with pytest.raises(triton.InferenceServerException) as raised:
        client.infer("linear", [kit.tensor("x", X)], timeout=1)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert client.infer("linear", [kit.tensor("x", X)], timeout=10_000_000)


def test_a_run_without_end_is_stopped_when_nobody_waits_for_it_any_more(serve, connect, kit):
    counting = kit.SessionServable(Session(runtime_graphs.counting()), name="counting")
    server = serve(counting, limits=ServingLimits(threads=1))
    client, x = connect(server), np.zeros(1, np.float32)

    def count(trips, **kw):
        tensors = [kit.tensor("trips", np.array(trips), "INT64"), kit.tensor("x", x)]
        return client.infer("counting", tensors, **kw).as_numpy("y")

    for options in ({"client_timeout": 0.1}, {"timeout": 100_000}):
        with pytest.raises(triton.InferenceServerException) as raised:
            count(2**62, **options)
        assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        assert count(3) == 3, "the only thread is free again"


def test_streams_beyond_the_limit_are_refused_and_idle_ones_do_not_block_inference(
    serve, connect, kit
):
    server = serve(kit.linear(), limits=ServingLimits(threads=1, streams=2))
    streams, answers = [connect(server) for _ in range(3)], queue.Queue[Any]()
    for client in streams[:2]:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("linear", [kit.tensor("x", X)])
        assert answers.get(timeout=30).as_numpy("y").shape == (1, 3)
    streams[2].start_stream(lambda result, error: answers.put(error or result))
    assert answers.get(timeout=30).status() == "StatusCode.UNAVAILABLE"
    assert streams[2].infer("linear", [kit.tensor("x", X)])
    for client in streams:
        client.stop_stream()


@pytest.mark.slow
def test_a_sender_that_stalls_is_told_so_and_frees_its_thread(serve, channel, connect, kit):
    server = serve(kit.linear(), limits=ServingLimits(threads=1, receive_s=1))
    stalled = threading.Event()

    def nothing():
        stalled.wait(30)
        yield b""

    call = channel(server).stream_unary(f"/{WIRE_NAME}/ModelInfer").future(nothing())
    assert status_of(call.result) == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not arrive within 1 s" in call.details()
    stalled.set()
    assert connect(server).infer("linear", [kit.tensor("x", X)])


WIDE = np.ones((4, 300_000), np.float32)  # an answer of 1.2 MB
SMALL_WINDOW = {"http2.bdp_probe": 0, "http2.lookahead_bytes": 65535}  # taken unasked


def unread(channel):
    """A call whose caller never asks for the answer."""
    request = pb.ModelInferRequest(model_name="linear", raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    ask = channel.stream_stream(f"/{WIRE_NAME}/ModelInfer")
    return ask(iter([request.SerializeToString()]))


def refusal_of(client, kit):
    """Why a further wide answer is refused, None when it comes."""
    try:
        client.infer("linear", [kit.tensor("x", X)])
    except triton.InferenceServerException as error:
        return str(error)


def unread_and_refusal(channel, client, kit):
    """A call whose answer waits, and how a further one is refused meanwhile."""
    call = unread(channel)
    while (refusal := refusal_of(client, kit)) is None:
        if call.done():  # it met the client's own answer on its way out, and was the one refused
            call = unread(channel)
    return call, refusal


def test_answers_that_nobody_takes_are_bounded_in_bytes(serve, channel, connect, kit):
    server = serve(kit.linear(weights=WIDE), limits=ServingLimits(unsent_bytes=2_000_000))
    client = connect(server)
    call, refusal = unread_and_refusal(channel(server, **SMALL_WINDOW), client, kit)
    assert "1200032 bytes of answers are unread, at most 2000000 may be" in refusal
    call.cancel()
    while refusal_of(client, kit):
        pass


@pytest.mark.slow
def test_an_answer_that_nobody_takes_is_given_up(serve, channel, connect, kit):
    server = serve(kit.linear(weights=WIDE), limits=ServingLimits(unsent_bytes=2_000_000, call_s=1))
    client = connect(server)
    call, _ = unread_and_refusal(channel(server, **SMALL_WINDOW), client, kit)
    while refusal_of(client, kit):
        pass  # the caller does nothing: the server ends it
    call.cancel()


@pytest.mark.slow
def test_a_connection_that_never_speaks_is_closed(serve, kit):
    with socket.create_connection(("127.0.0.1", serve(kit.linear()).port), timeout=30) as silent:
        while silent.recv(1024):
            pass


def test_tls_files_that_are_none_are_told_from_a_taken_port(serve, kit, tmp_path):
    (tmp_path / "bad.pem").write_text("nothing")
    with pytest.raises(Unavailable, match="hold no certificate"):
        serve(kit.linear(), tls=Tls(cert=tmp_path / "bad.pem", key=tmp_path / "bad.pem"))


def test_a_call_without_a_message_is_the_callers_error(serve, channel, kit):
    call = channel(serve(kit.linear())).stream_unary(f"/{WIRE_NAME}/ModelInfer")
    assert status_of(lambda: call(iter(()))) == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata", "RepositoryIndex"])
def test_bytes_that_are_no_message_are_the_callers_error(serve, channel, kit, method):
    call = channel(serve(kit.linear())).unary_unary(f"/{WIRE_NAME}/{method}")
    assert status_of(lambda: call(b"\xff" * 40)) == grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_beyond_the_limit_is_refused_before_it_is_read(serve, channel, kit):
    server = serve(kit.linear(), limits=ServingLimits(message_bytes=1 << 20))
    call = channel(server).unary_unary(f"/{WIRE_NAME}/ModelInfer")
    assert status_of(lambda: call(bytes(2 << 20))) == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.slow
def test_a_compressed_message_is_bounded_by_what_it_unpacks_to(serve, channel, kit):
    server = serve(kit.linear(), limits=ServingLimits(message_bytes=1 << 20))
    call = channel(server).unary_unary(f"/{WIRE_NAME}/ModelInfer")
    bomb = bytes(64 << 20)  # 64 KiB when compressed
    for packed in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        with pytest.raises(grpc.RpcError, match="1048576 bytes after decompression") as raised:
            call(bomb, compression=packed)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compressed_request_is_answered(serve, connect, kit, algorithm):
    client = connect(serve(kit.linear()))
    x = np.ones((1000, 4), np.float32)
    answer = client.infer("linear", [kit.tensor("x", x)], compression_algorithm=algorithm)
    np.testing.assert_allclose(answer.as_numpy("y"), x @ kit.WEIGHTS, rtol=1e-5)


def test_headers_beyond_the_limit_are_refused(serve, channel, kit):
    call = channel(serve(kit.linear())).unary_unary(f"/{WIRE_NAME}/ServerLive")
    code = status_of(lambda: call(b"", metadata=[("padding", "a" * (64 << 10))]))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_fault_of_the_server_leaves_as_a_constant_text_and_an_id(serve, connect, kit, caplog):
    class Broken:
        name, version, labels = "broken", "1", {}
        inputs, outputs = kit.linear().inputs, kit.linear().outputs

        def run(self, feeds, *, stop=None):
            raise ZeroDivisionError("secret")

    client = connect(serve(Broken()))
    with pytest.raises(triton.InferenceServerException, match="internal error") as raised:
        client.infer("broken", [kit.tensor("x", X)])
    assert raised.value.status() == "StatusCode.INTERNAL"
    assert "secret" not in raised.value.message()
    (record,) = [r for r in caplog.records if r.message == "internal error"]
    assert record.incident in raised.value.message()
    assert "secret" in str(record.exc_info)


@pytest.mark.slow
def test_an_answer_is_never_another_callers(serve, connect, kit):
    server = serve(kit.linear(weights=np.eye(4, dtype=np.float32)))

    def ask(number):
        client = connect(server)
        for index in range(50):
            x = np.full((1 + index % 3, 4), number * 1000 + index, np.float32)
            result = client.infer("linear", [kit.tensor("x", x)], request_id=f"{number}.{index}")
            assert result.get_response().id == f"{number}.{index}"
            np.testing.assert_array_equal(result.as_numpy("y"), x)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(ask, number) for number in range(8)]:
            done.result(60)


def test_stopping_lets_the_calls_inside_finish_and_refuses_new_ones(serve, connect, kit):
    gated = kit.Gated(kit.linear())
    server = serve(gated)
    client, answers = connect(server), queue.Queue[Any]()
    for _ in range(3):
        client.async_infer("linear", [kit.tensor("x", X)], lambda **kw: answers.put(kw))
    gated.wait_for_runs(3)
    stopping = threading.Thread(target=server.stop, args=(30,))
    stopping.start()
    while server.service.ready:
        time.sleep(0)
    gated.gate.set()
    stopping.join(30)
    assert not stopping.is_alive()
    assert [answers.get(timeout=30)["error"] for _ in range(3)] == [None] * 3
    with pytest.raises(triton.InferenceServerException) as raised:
        connect(server).infer("linear", [kit.tensor("x", X)])
    assert raised.value.status() == "StatusCode.UNAVAILABLE"


def test_stopping_does_not_wait_for_idle_streams(serve, connect, kit):
    server = serve(kit.linear())
    client, answers = connect(server), queue.Queue[Any]()
    client.start_stream(lambda result, error: answers.put(error or result))
    client.async_stream_infer("linear", [kit.tensor("x", X)])
    answers.get(timeout=30)
    server.stop(3600)  # beyond the test's limit
    client.stop_stream()


def test_a_stop_can_be_hurried(serve, connect, kit):
    gated = kit.Gated(kit.linear())
    server = serve(gated)
    answers: queue.Queue[Any] = queue.Queue()
    connect(server).async_infer("linear", [kit.tensor("x", X)], lambda **kw: answers.put(kw))
    gated.wait_for_runs(1)
    stopping = threading.Thread(target=server.stop, args=(3600,))
    stopping.start()
    server.cancel()
    assert answers.get(timeout=30)["error"] is not None
    gated.gate.set()
    stopping.join(30)
    assert not stopping.is_alive()


def test_a_taken_port_is_unavailable_and_leaves_nothing_running(serve, kit):
    first = serve(kit.linear(), metrics_port=0)
    with pytest.raises(Unavailable, match="choose another port"):
        serve(kit.linear(), port=first.port)
    with pytest.raises(Unavailable, match=r"for metrics: .*choose another"):
        serve(kit.linear(), metrics_port=first.metrics_port)


def test_a_limit_below_one_is_refused():
    with pytest.raises(InvalidInput, match="limit rank is 0; it must be 1 to"):
        ServingLimits(rank=0)


def authority() -> tuple[Any, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    return key, certificate("authority", key, "authority", key, authority=True)


def certificate(
    name: str, key: Any, issuer: str, issuer_key: Any, *, authority: bool = False
) -> Any:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(minutes=5))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def pem(thing: Any) -> bytes:
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(serialization.Encoding.PEM)
    encoded: bytes = thing.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return encoded


def test_tls_with_a_client_authority_lets_in_only_its_clients(serve, kit, tmp_path):
    ca_key, ca = authority()
    files = {}
    for name in ("server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        cert = certificate(name, key, "authority", ca_key)
        for kind, thing in (("key", key), ("cert", cert)):
            files[name, kind] = tmp_path / f"{name}.{kind}"
            files[name, kind].write_bytes(pem(thing))
    (tmp_path / "ca").write_bytes(pem(ca))
    tls = Tls(cert=files["server", "cert"], key=files["server", "key"], client_ca=tmp_path / "ca")
    server = serve(kit.linear(), tls=tls)
    known = triton.InferenceServerClient(
        f"localhost:{server.port}",
        ssl=True,
        root_certificates=str(tmp_path / "ca"),
        private_key=str(files["client", "key"]),
        certificate_chain=str(files["client", "cert"]),
    )
    unknown = triton.InferenceServerClient(
        f"localhost:{server.port}", ssl=True, root_certificates=str(tmp_path / "ca")
    )
    assert known.infer("linear", [kit.tensor("x", X)]).as_numpy("y").shape == (1, 3)
    with pytest.raises(triton.InferenceServerException) as raised:
        unknown.is_server_live()
    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    known.close()
    unknown.close()


def test_a_tls_file_that_cannot_be_read_is_named(kit, serve, tmp_path):
    with pytest.raises(NotFound, match="none"):
        serve(kit.linear(), tls=Tls(cert=tmp_path / "none", key=tmp_path / "none"))


def test_the_wire_schema_is_private_to_reflection(serve, channel, kit):
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import Default
    from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]

    server = serve(kit.linear())
    for name in ("v1alpha", "v1"):
        ask = channel(server).stream_stream(
            f"/grpc.reflection.{name}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        listed, found = ask(
            iter(
                [
                    reflection_pb2.ServerReflectionRequest(list_services=""),
                    reflection_pb2.ServerReflectionRequest(file_containing_symbol=WIRE_NAME),
                ]
            )
        )
        names = [service.name for service in listed.list_services_response.service]
        assert WIRE_NAME in names
        assert "grpc.health.v1.Health" in names
        schema = FileDescriptorProto.FromString(
            found.file_descriptor_response.file_descriptor_proto[0]
        )
        assert schema.package == "inference"
        assert schema.service[0].method[0].input_type == ".inference.ServerLiveRequest"
    ours = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert Default().FindServiceByName("triplane.inference.v1.GRPCInferenceService") is ours


def test_health_tells_watchers_when_the_server_goes(kit, channel):
    from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

    from triplane.edge.serving.repository import Repository

    server = Server(Repository())
    answer = health_pb2.HealthCheckResponse
    check = channel(server).unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        answer.FromString,
    )
    for name in ("", WIRE_NAME):
        assert check(health_pb2.HealthCheckRequest(service=name)).status == answer.SERVING
    asked = health_pb2.HealthCheckRequest(service="none")
    assert status_of(lambda: check(asked)) == grpc.StatusCode.NOT_FOUND
    watch = channel(server).unary_stream(
        "/grpc.health.v1.Health/Watch",
        health_pb2.HealthCheckRequest.SerializeToString,
        answer.FromString,
    )
    seen = watch(health_pb2.HealthCheckRequest())
    assert next(seen).status == answer.SERVING
    stopping = threading.Thread(target=server.stop, args=(10,))
    stopping.start()
    assert [told.status for told in seen] == [answer.NOT_SERVING]
    stopping.join(30)
    assert not stopping.is_alive()


class Relay:
    """Passes bytes on between a caller and a port, until it is told to pass nothing any more.

    What a network does that forgets a connection: neither side hears of an end.
    """

    def __init__(self, port):
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._passing = threading.Event()
        self._passing.set()
        self._ends, self._threads = [], []
        self._start(self._accept, port)

    def forget(self):
        self._passing.clear()

    def close(self):
        for one in (self._listening, *self._ends):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _start(self, target, *args):
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _accept(self, port):
        with contextlib.suppress(OSError):
            caller, _ = self._listening.accept()
            server = socket.create_connection(("127.0.0.1", port))
            self._ends += [caller, server]
            self._start(self._pass, caller, server)
            self._start(self._pass, server, caller)

    def _pass(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._passing.is_set():
                    sink.sendall(data)


@pytest.mark.slow
def test_a_stream_whose_caller_is_gone_without_a_word_is_ended(serve, kit, monkeypatch):
    monkeypatch.setattr(server_module, "ALIVE_EVERY_MS", 300)
    monkeypatch.setattr(server_module, "ALIVE_WITHIN_MS", 300)
    server = serve(kit.linear(), limits=ServingLimits(streams=1))
    relay, answers = Relay(server.port), queue.Queue[Any]()
    with triton.InferenceServerClient(f"127.0.0.1:{relay.port}") as client:
        try:
            client.start_stream(lambda result, error: answers.put(error or result))
            client.async_stream_infer("linear", [kit.tensor("x", X)])
            assert answers.get(timeout=30).as_numpy("y").shape == (1, 3)
            relay.forget()
            streams, deadline = server._executors[1], time.monotonic() + 20
            while streams.held and time.monotonic() < deadline:
                time.sleep(0)
            assert not streams.held, "the only stream is held by nobody"
        finally:
            relay.close()
        assert answers.get(timeout=30).status() == "StatusCode.UNAVAILABLE"
        client.stop_stream()
