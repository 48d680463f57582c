"""Floods of HTTP/2 frames: other callers are served, and memory stays bounded.

One process serves all of them, one after the other, with a caller and a prober of health beside.
"""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from tests.attacks.http2 import (
    CHECK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    LIVE,
    PING,
    PRIORITY,
    SETTINGS,
    WINDOW_UPDATE,
    connections,
    frame,
    headers,
    indexed,
    rapid_reset,
)

pytestmark = pytest.mark.slow

WAIT_S = 60
X = np.ones((1, 4), np.float32)
CALLERS = 4
"""Connections of one flood."""
MIB = 1 << 20
GROWTH_BYTES = 256 * MIB
"""Two times what the bomb of headers takes in gRPC's core, which unpacks to 2 GiB."""
CALLS = 5
"""Of each legitimate kind, at least, during each flood."""


@pytest.fixture(scope="module")
def process(tmp_path_factory, kit):
    """(process, its port)."""
    path = kit.write_bundle(tmp_path_factory.mktemp("made"))
    options = {"bundles": [str(path)], "port": 0, "metrics_port": 0, "json": True}
    command = [sys.executable, "-m", "triplane.edge.serving", json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield running, json.loads(running.stdout.readline())["port"]
        finally:
            running.kill()


def peak_bytes(process):
    """The most memory that the process held."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


class Beside:
    """A legitimate caller in a thread: calls again and again until it is told to stop."""

    def __init__(self, call):
        self._call, self._stop = call, threading.Event()
        self.failed: list[BaseException] = []
        self._count, self._counted = 0, threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            try:
                self._call()
            except BaseException as error:  # noqa: BLE001  # the test judges it
                self.failed.append(error)
            with self._counted:
                self._count += 1
                self._counted.notify_all()

    def more(self, count):
        """Until so many more calls came back."""
        with self._counted:
            enough = self._count + count
            assert self._counted.wait_for(lambda: self._count >= enough, WAIT_S)

    def stop(self):
        self._stop.set()
        self._thread.join()


@pytest.fixture
def beside(process, kit):
    """A normal caller and a prober of health."""
    port = process[1]
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    check = channel.unary_unary(
        CHECK,
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )

    def infer():
        answer = client.infer("linear", [kit.tensor("x", X)], client_timeout=WAIT_S)
        np.testing.assert_allclose(answer.as_numpy("y"), X @ kit.WEIGHTS, rtol=1e-5)

    def probe():
        answer = check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    callers = [Beside(infer), Beside(probe)]
    yield callers
    for caller in callers:
        caller.stop()
    client.close()
    channel.close()


def repeated(frames, count):
    """A flood of the same bytes on every connection."""

    def flood(hostile):
        return sum(one.flood(frames, count) for one in hostile)

    return flood


def endless_headers(hostile):
    """A header block that never ends (CERT VU#421644): 16 MiB on each connection."""
    sent = 0
    for one in hostile:
        one.flood(frame(HEADERS, 0, 1, headers(LIVE)), 1)
        sent += one.flood(frame(CONTINUATION, 0, 1, b"\0\1a\x7f\x80\x7f" + bytes(16378)), 1024)
    return sent


def empty_continuations(hostile):
    """The same, with frames that bring nothing."""
    sent = 0
    for one in hostile:
        one.flood(frame(HEADERS, 0, 1, headers(LIVE)), 1)
        sent += one.flood(frame(CONTINUATION, 0, 1, b""), 100_000)
    return sent


def header_bomb(hostile):
    """One byte that stands for 4,000, 16,000 times in each of 8 calls: 0.5 GiB each connection.

    gRPC keeps a reference for each of those bytes until it has refused the call: up to 4 MB.
    """
    entry = indexed("bomb", "a" * 4000)
    sent = 0
    for one in hostile:
        for number in range(8):
            block = headers(LIVE) + (entry if number == 0 else b"") + b"\xbe" * 12_000
            first = frame(HEADERS, 0, 2 * number + 1, block)
            last = frame(CONTINUATION, END_HEADERS, 2 * number + 1, b"\xbe" * 4_000)
            sent += one.flood(first + last, 1)
    return sent


def empty_data(hostile):
    """Frames of a call's body that bring nothing and take no window (CVE-2019-9518)."""
    sent = 0
    for one in hostile:
        stream = one.begin()
        sent += one.flood(frame(DATA, 0, stream, b""), 100_000)
    return sent


FLOODS = {
    "pings": repeated(frame(PING, 0, 0, bytes(8)), 50_000),
    "settings": repeated(frame(SETTINGS, 0, 0, bytes([0, 3, 0, 0, 0, 100])), 50_000),
    "window updates": repeated(frame(WINDOW_UPDATE, 0, 0, (1).to_bytes(4)), 50_000),
    "priorities": repeated(frame(PRIORITY, 0, 1, bytes([0, 0, 0, 0, 16])), 50_000),
    "rapid reset": rapid_reset,
    "endless headers": endless_headers,
    "empty continuations": empty_continuations,
    "header bomb": header_bomb,
    "empty data": empty_data,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_fails_no_other_call_and_takes_no_memory(process, beside, flood):
    running, port = process
    for caller in beside:
        caller.more(1)
    before = peak_bytes(running)
    with connections(port, CALLERS) as hostile:
        sent = flood(hostile)
        for caller in beside:
            caller.more(CALLS)
    assert sent, "the flood began"
    for caller in beside:
        caller.stop()
        assert not caller.failed, str(caller.failed[0])
    assert peak_bytes(running) - before < GROWTH_BYTES
    assert running.poll() is None
