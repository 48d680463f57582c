"""Callers that send slowly, or nothing, or too much: the others are served as if alone."""

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from tests.attacks.http2 import (
    CHECK,
    INFER,
    LIVE,
    STREAM,
    WATCH,
    connections,
    message,
    message_start,
)

from triplane.edge.serving import server as server_module
from triplane.edge.serving.limits import ServingLimits
from triplane.proto import open_inference_pb2 as pb

X = np.ones((1, 4), np.float32)
PATIENT = ServingLimits(receive_s=3600)  # so that no clock frees what a slow caller holds
WAIT_S = 60
MIB = 1 << 20


def is_healthy(channel):
    check = channel.unary_unary(
        CHECK,
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    answer = check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def channel():
    channels = []

    def open_to(server):
        channels.append(grpc.insecure_channel(f"127.0.0.1:{server.port}"))
        return channels[-1]

    yield open_to
    for one in channels:
        one.close()


def ask(client, kit):
    return client.infer("linear", [kit.tensor("x", X)], client_timeout=WAIT_S).as_numpy("y")


@pytest.mark.parametrize("path", [INFER, LIVE, CHECK])
def test_callers_that_send_two_bytes_of_a_request_stop_no_other_call(
    serve, connect, channel, kit, path
):
    server = serve(kit.linear(), limits=PATIENT)
    client, health = connect(server), channel(server)
    with connections(server.port, 64) as slow:
        for one in slow:
            one.begin(path)
        for _ in range(20):
            np.testing.assert_allclose(ask(client, kit), X @ kit.WEIGHTS, rtol=1e-5)
            assert is_healthy(health)
            assert client.is_server_live(client_timeout=WAIT_S)
            assert client.is_model_ready("linear", client_timeout=WAIT_S)


@pytest.mark.slow
def test_a_thousand_slow_connections_stop_no_other_call(serve, connect, channel, kit):
    server = serve(kit.linear(), limits=PATIENT)
    client, health = connect(server), channel(server)
    with connections(server.port, 1000) as slow:
        for number, one in enumerate(slow):
            one.begin((INFER, LIVE, CHECK)[number % 3])
            if number % 20 == 0:
                np.testing.assert_allclose(ask(client, kit), X @ kit.WEIGHTS, rtol=1e-5)
                assert is_healthy(health)
        for _ in range(20):
            np.testing.assert_allclose(ask(client, kit), X @ kit.WEIGHTS, rtol=1e-5)
            assert is_healthy(health)


def test_one_connection_that_begins_call_after_call_stops_no_other(serve, connect, channel, kit):
    server = serve(kit.linear(), limits=PATIENT)
    client, health = connect(server), channel(server)
    with connections(server.port, 2) as slow:
        for one in slow:
            for number in range(400):
                one.begin((INFER, LIVE, CHECK)[number % 3])
        for _ in range(20):
            np.testing.assert_allclose(ask(client, kit), X @ kit.WEIGHTS, rtol=1e-5)
            assert is_healthy(health)


@pytest.mark.parametrize("path", [INFER, LIVE])
def test_calls_that_are_reset_as_soon_as_they_begin_stop_no_other(
    serve, connect, channel, kit, path
):
    server = serve(kit.linear(), limits=PATIENT)
    client, health = connect(server), channel(server)
    with connections(server.port, 4) as hasty:
        for _ in range(250):
            for one in hasty:
                with contextlib.suppress(OSError):  # gRPC hangs up on some of this
                    one.reset(one.begin(path))
        for _ in range(20):
            np.testing.assert_allclose(ask(client, kit), X @ kit.WEIGHTS, rtol=1e-5)
            assert is_healthy(health)


def hold(connection, n_bytes, ended):
    """Send all of a request but its last byte; `ended` gets the answer, if one ever comes."""
    with contextlib.suppress(OSError):
        stream = connection.begin(INFER, message_start(n_bytes))
        connection.send(stream, bytes(n_bytes - 1))
        ended.put(connection.answer(stream))


@pytest.mark.slow
def test_requests_that_are_still_arriving_are_bounded_in_bytes(serve, connect, kit):
    limits = ServingLimits(receive_s=3600, message_bytes=4 * MIB, request_bytes=16 * MIB)
    server = serve(kit.linear(), limits=limits)
    client, ended = connect(server), queue.Queue[bytes]()
    with connections(server.port, 12) as large:
        threads = [threading.Thread(target=hold, args=(one, 4 * MIB, ended)) for one in large]
        for thread in threads:
            thread.start()
        for _ in range(8):
            answer = ended.get(timeout=WAIT_S)
            assert b"16777216 at most: retry in 1000 ms" in answer
            assert b"raise the limit request_bytes" in answer
            np.testing.assert_allclose(ask(client, kit), X @ kit.WEIGHTS, rtol=1e-5)
    for thread in threads:
        thread.join()


def test_a_request_that_finds_no_room_is_refused_while_small_ones_go_on(serve, connect, kit):
    gated = kit.Gated(kit.linear())
    limits = ServingLimits(request_bytes=2 * MIB, rows=1 << 20)
    server = serve(gated, kit.linear(name="other"), limits=limits)
    client, answers = connect(server), queue.Queue[Any]()
    wide = kit.tensor("x", np.ones((100_000, 4), np.float32))  # 1.6 MB
    client.async_infer("linear", [wide], lambda **kw: answers.put(kw))
    gated.wait_for_runs(1)
    with pytest.raises(triton.InferenceServerException, match="retry in 1000 ms") as raised:
        client.infer("other", [wide], client_timeout=WAIT_S)
    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    assert client.infer("other", [kit.tensor("x", X)], client_timeout=WAIT_S)
    gated.gate.set()
    assert answers.get(timeout=WAIT_S)["error"] is None
    assert client.infer("other", [wide], client_timeout=WAIT_S), "the room is free again"


@pytest.mark.slow
def test_compressed_requests_count_with_what_they_unpack_to(serve, connect, kit):
    gated = kit.Gated(kit.linear())
    limits = ServingLimits(request_bytes=2 * MIB, rows=1 << 20)
    server = serve(gated, kit.linear(name="other"), limits=limits)
    client, answers = connect(server), queue.Queue[Any]()
    wide = kit.tensor("x", np.zeros((100_000, 4), np.float32))  # 1.6 MB, packed a few KB
    client.async_infer("linear", [wide], lambda **kw: answers.put(kw))
    gated.wait_for_runs(1)
    with pytest.raises(triton.InferenceServerException, match="raise the limit request_bytes"):
        client.infer("other", [wide], client_timeout=WAIT_S, compression_algorithm="gzip")
    gated.gate.set()
    assert answers.get(timeout=WAIT_S)["error"] is None
    assert client.infer("other", [wide], client_timeout=WAIT_S, compression_algorithm="gzip"), (
        "the room is free again"
    )


def test_a_call_whose_request_never_comes_gives_way_with_a_status_that_says_so(serve, kit):
    server = serve(kit.linear(), limits=ServingLimits(receive_s=3600, receiving=1))
    with connections(server.port, 2) as slow:
        first = slow[0].begin()
        while not server._receiving._waiting:  # the oldest gives way: this one came first
            time.sleep(0)
        slow[1].begin()
        answer = slow[0].answer(first)
    assert b"too many calls whose requests have not arrived: 2 from your address" in answer
    assert b"1 at most" in answer


def test_a_full_queue_takes_the_call_of_another_caller(serve, connect, kit):
    gated = kit.Gated(kit.linear())
    server = serve(gated, limits=ServingLimits(threads=1, queued_calls=3))
    client, answers = connect(server), queue.Queue[Any]()
    tensors = [kit.tensor("x", X)]
    for runs in (1, None, None, None):
        client.async_infer("linear", tensors, lambda **kw: answers.put(kw))
        if runs:
            gated.wait_for_runs(runs)
    while server._turns.waiting < 3:
        time.sleep(0)
    with connections(server.port, 1, source="127.0.0.2") as (other,):
        stream = other.begin(INFER, message(infer_request()))
        other.end(stream)
        displaced = answers.get(timeout=WAIT_S)["error"]
        assert "all queues are full" in str(displaced)
        gated.gate.set()
        assert b"linear" in other.answer(stream)
    assert [answers.get(timeout=WAIT_S)["error"] for _ in range(3)] == [None] * 3


def test_a_full_house_of_resting_streams_gives_a_seat_to_another_caller(serve, connect, kit):
    server = serve(kit.linear(), limits=ServingLimits(streams=2))
    clients, answers = [connect(server) for _ in range(2)], queue.Queue[Any]()
    for client in clients:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("linear", [kit.tensor("x", X)])
        assert answers.get(timeout=WAIT_S).as_numpy("y").shape == (1, 3)
    with connections(server.port, 1, source="127.0.0.2") as (other,):
        stream = other.begin(STREAM, message(infer_request()))
        other.end(stream)
        assert b"linear" in other.answer(stream)
    assert answers.get(timeout=WAIT_S).status() == "StatusCode.UNAVAILABLE"
    for client in clients:
        client.stop_stream()


def test_watchers_of_health_beyond_their_number_are_refused_and_checks_are_answered(
    serve, channel, kit, monkeypatch
):
    monkeypatch.setattr(server_module, "WATCHERS", 2)
    opened = channel(serve(kit.linear()))
    watch = opened.unary_stream(
        WATCH,
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    watches = [watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
    for one in watches:
        assert next(one).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as raised:
        next(watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "all 2 watchers of health are taken" in str(raised.value.details())
    assert is_healthy(opened)
    for one in watches:
        one.cancel()


def infer_request():
    request = pb.ModelInferRequest(model_name="linear", raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    return request.SerializeToString()


def is_served(port):
    with connections(port, 1) as (one,):
        stream = one.begin(CHECK, message(b""))
        one.end(stream)
        with contextlib.suppress(OSError):
            return b"\x08\x01" in one.answer(stream)
    return False


@pytest.mark.slow
def test_more_idle_connections_than_the_soft_limit_of_descriptors_lock_nobody_out(bundle):
    options = {"bundles": [str(bundle())], "port": 0, "metrics_port": 0, "json": True}
    server = f"exec {sys.executable} -m triplane.edge.serving '{json.dumps(options)}'"
    command = ["sh", "-c", f"ulimit -Sn 128; {server}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = json.loads(process.stdout.readline())["port"]
            with connections(port, 300) as idle:
                assert all(one.is_open() for one in idle)
                assert is_served(port)
        finally:
            process.kill()


def test_connections_beyond_the_limit_are_closed_and_those_inside_are_served(
    serve, kit, monkeypatch
):
    monkeypatch.setattr(server_module, "max_connections", lambda: 4)
    server = serve(kit.linear())
    with connections(server.port, 4) as inside:
        assert all(one.is_open() for one in inside)
        with connections(server.port, 1) as (beyond,):
            assert not beyond.is_open()
        stream = inside[0].begin(CHECK, message(b""))
        inside[0].end(stream)
        assert b"\x08\x01" in inside[0].answer(stream)


@pytest.mark.slow
def test_a_connection_without_a_call_is_closed(serve, kit, monkeypatch):
    monkeypatch.setattr(server_module, "IDLE_MS", 300)
    server = serve(kit.linear())
    with connections(server.port, 1) as (idle,):
        idle.read_to_the_end()
