"""Real failures of connections, each in plain words."""

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest

from triplane.proto.unreachable import unreachable_cause


@contextlib.contextmanager
def closes_connections():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        ended = threading.Event()

        def serve():
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    listener.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        ended.set()
        thread.join()


class Silent(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Print nothing."""


@contextlib.contextmanager
def http_server():
    with HTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def nothing():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield port


def failure(channel):
    with channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/no.Service/Call")(b"", timeout=5)
    return caught.value.details()


def insecure(address):
    return failure(grpc.insecure_channel(address))


def over_tls(address):
    return failure(grpc.secure_channel(address, grpc.ssl_channel_credentials()))


@pytest.mark.parametrize(
    ("peer", "call", "cause"),
    [
        (nothing, insecure, "connection refused"),
        (nothing, over_tls, "connection refused"),
        (closes_connections, insecure, "it closed the connection"),
        (http_server, insecure, "another server answers"),
        (http_server, over_tls, "it answers without TLS"),
    ],
)
def test_a_failed_connection_has_a_cause_in_plain_words(peer, call, cause):
    with peer() as port:
        details = call(f"127.0.0.1:{port}")
    assert cause in str(unreachable_cause(details)), details


def test_a_name_that_nobody_has_is_told_as_such():
    details = insecure("no such host:1")
    assert unreachable_cause(details) == "its host name cannot be resolved", details


@pytest.mark.parametrize(
    "text", ["64 conversions wait; try later", "the cloud is stopping", "the conversion timed out"]
)
def test_the_words_of_a_peer_that_answers_are_its_own(text):
    assert unreachable_cause(text) is None
