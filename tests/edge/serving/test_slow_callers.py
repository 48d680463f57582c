"""Callers that send slowly, or nothing, or too much: the others are served as if alone."""

import numpy as np
import pytest
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from tests.attacks.http2 import CHECK, INFER, LIVE, connections

from triplane.edge.serving.limits import Limits

X = np.ones((1, 4), np.float32)
PATIENT = Limits(receive_s=3600)  # so that no clock frees what a slow caller holds
WAIT_S = 60


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
    import grpc

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
