"""Requests at the exact bounds of bytes, by real gRPC clients, plain and compressed."""

import threading

import grpc
import numpy as np
import pytest
from tests.attacks.http2 import INFER, PREFACE, connections, message_start

from triplane.edge.serving import receiving
from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.memory import SMALL_BYTES, RequestMemory
from triplane.edge.serving.wire import WIRE_NAME
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import Unavailable

WAIT_S = 60
MESSAGE_BYTES = 1 << 20
ROWS = 1 << 20
ROW_BYTES = 16
FRAME_BYTES = 9
"""The head of a frame of HTTP/2."""
NONE, GZIP, DEFLATE = (
    grpc.Compression.NoCompression,
    grpc.Compression.Gzip,
    grpc.Compression.Deflate,
)
PACKED = pytest.mark.parametrize("packed", [NONE, GZIP, DEFLATE], ids=["plain", "gzip", "deflate"])


def request_of(n_bytes, name="linear", *, random=False):
    """A valid request of exactly so many bytes. random: of contents that do not compress."""
    for rows in range(n_bytes // ROW_BYTES, 0, -1):
        x = np.zeros((rows, 4), np.float32)
        if random:
            x = np.random.default_rng(0).random((rows, 4), np.float32)
        request = pb.ModelInferRequest(model_name=name, raw_input_contents=[x.tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=x.shape)
        missing = n_bytes - request.ByteSize()
        if missing >= 3:  # tag and length of the id are two bytes
            request.id = "i" * (missing - 2)
            break
    data = request.SerializeToString()
    assert len(data) == n_bytes
    return data


class Infer:
    """ModelInfer on a channel, with requests as bytes."""

    def __init__(self, channel):
        self.channel = channel
        self._call = channel.unary_unary(f"/{WIRE_NAME}/ModelInfer")
        self.future = self._call.future

    def __call__(self, data, **options):
        return self._call(data, **options)


@pytest.fixture
def call(serve, kit):
    """Calls a server of the linear model, and one of the same that waits at a gate."""
    channels = []

    def start(**limits):
        gated = kit.Gated(kit.linear(name="gated"))
        server = serve(gated, kit.linear(), limits=ServingLimits(rows=ROWS, **limits))
        channel = grpc.insecure_channel(
            f"127.0.0.1:{server.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        channels.append(channel)
        return server, gated, Infer(channel)

    yield start
    for channel in channels:
        channel.close()


def outcome(infer, data, packed):
    """The status of a call, and its text."""
    try:
        infer(data, timeout=WAIT_S, compression=packed)
    except grpc.RpcError as error:
        return error.code(), str(error.details())
    return grpc.StatusCode.OK, ""


@PACKED
@pytest.mark.parametrize("random", [False, True], ids=["zeros", "random"])
def test_a_message_of_exactly_the_bound_passes_and_one_byte_more_does_not(call, packed, random):
    _, _, infer = call(message_bytes=MESSAGE_BYTES)
    for n_bytes in (MESSAGE_BYTES - 1, MESSAGE_BYTES):
        data = request_of(n_bytes, random=random)
        assert outcome(infer, data, packed) == (grpc.StatusCode.OK, "")
    code, text = outcome(infer, request_of(MESSAGE_BYTES + 1, random=random), packed)
    assert code in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}
    assert str(MESSAGE_BYTES) in text


@PACKED
def test_requests_fill_the_bound_to_its_last_byte_and_one_more_is_refused(call, packed):
    """A compressed one counts with what it unpacks to; its own few kilobytes are small."""
    inside = SMALL_BYTES + 4096
    limit = inside + SMALL_BYTES + 8192
    _, gated, infer = call(request_bytes=limit)
    waiting = infer.future(request_of(inside, "gated"), timeout=WAIT_S)
    try:
        gated.wait_for_runs(1)
        for n_bytes in (limit - inside - 1, limit - inside):
            assert outcome(infer, request_of(n_bytes), packed) == (grpc.StatusCode.OK, "")
        code, text = outcome(infer, request_of(limit - inside + 1), packed)
        assert code == grpc.StatusCode.UNAVAILABLE
        assert f"hold {inside} bytes and this one {limit - inside + 1} more; {limit}" in text
    finally:
        gated.gate.set()
        waiting.result()


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_request_is_counted_from_one_byte_above_the_small_ones_on(over):
    memory = RequestMemory(1 << 30, lambda: None)
    with memory.holding(SMALL_BYTES + over):
        assert memory.inside_bytes == (SMALL_BYTES + over if over > 0 else 0)
    assert memory.inside_bytes == 0


def test_one_request_alone_passes_whatever_its_size():
    memory = RequestMemory(1, lambda: None)
    with (
        memory.holding(1 << 30),
        pytest.raises(Unavailable, match="; 1 at most"),
        memory.holding(SMALL_BYTES + 1),
    ):
        pass


class Looks:
    """Counts the looks of a server at its connections."""

    def __init__(self, server):
        self.arrivals = server._receiving._arrivals
        self._look, self._looked = self.arrivals.look, threading.Condition()
        self._count = 0
        self.arrivals.look = self._counted

    def _counted(self, waiting, finished):
        self._look(waiting, finished)
        with self._looked:
            self._count += 1
            self._looked.notify_all()

    @property
    def count(self):
        with self._looked:
            return self._count

    def wait(self, holds, looks=2):
        """Until something holds after so many looks; the second began from now on."""
        with self._looked:
            first = self._count + looks
            assert self._looked.wait_for(lambda: self._count >= first and holds(), WAIT_S)

    def arriving(self):
        """Bytes of unfinished requests, of the one connection that is watched."""
        return sum(track.arriving for track in self.arrivals.tracks.values())


@pytest.mark.slow
@PACKED
@pytest.mark.parametrize("random", [False, True], ids=["zeros", "random"])
def test_finished_requests_of_a_real_client_leave_nothing_that_counts_as_arriving(
    call, packed, random
):
    """Frames and headers of a request are more bytes than its message: an allowance covers them.

    Else a client that sends call after call on one connection would be ended for what it finished.
    """
    sizes = [100, *(16384 + over for over in (-6, -5, -4, 0, 1)), 3 * 16384, 600_001]
    server, _, infer = call()
    looks, may_end = Looks(server), threading.Event()
    resting = infer.channel.stream_stream(f"/{WIRE_NAME}/ModelStreamInfer")(
        iter(may_end.wait, True)  # sends nothing, so the connection is watched
    )
    try:
        looks.wait(lambda: len(looks.arrivals.tracks) == 1)
        before = looks.arriving()
        for n_bytes in sizes:
            data = request_of(n_bytes, random=random)
            for _ in range(5):
                assert outcome(infer, data, packed)[0] is grpc.StatusCode.OK
        looks.wait(lambda: True)
        assert looks.arriving() <= before
    finally:
        may_end.set()
        resting.cancel()


class Counted:
    """A socket that counts what is sent."""

    def __init__(self, inner, sent):
        self._inner, self.sent = inner, sent

    def sendall(self, data):
        self.sent += len(data)
        self._inner.sendall(data)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_a_request_that_arrives_fills_the_bound_to_its_last_byte_and_one_more_ends_it(call):
    limit, inside = 2 << 20, 1 << 20
    server, gated, infer = call(request_bytes=limit, receive_s=3600)
    looks = Looks(server)
    waiting = infer.future(request_of(inside, "gated"), timeout=WAIT_S)
    try:
        gated.wait_for_runs(1)
        room = limit - inside
        with connections(server.port, 1) as (slow,):
            counted = slow._socket = Counted(slow._socket, len(PREFACE) + FRAME_BYTES)
            stream = slow.begin(INFER, message_start(limit))
            slow.send(stream, bytes(room - 10_000))  # heads of frames have some bytes too
            while min(slow._windows[0], slow._windows[stream]) < 10_000:
                slow.read()
            slow.send(stream, bytes(room - counted.sent - FRAME_BYTES - 2))
            for _ in range(2):  # 2 bytes are left, which no frame has: the first bytes of one
                assert counted.sent < room
                counted.sendall(b"\0")
                looks.wait(lambda: looks.arriving() == counted.sent)
                looks.wait(lambda: True)
                assert stream in slow._windows
            assert looks.arriving() == room
            counted.sendall(b"\x10")
            assert f"{limit} at most: retry".encode() in slow.answer(stream)
    finally:
        gated.gate.set()
        waiting.result()


def test_connections_are_looked_at_when_memory_grew_and_seldom_where_it_did_not(call, monkeypatch):
    """A look costs a thousand silent connections what a normal caller would wait for."""
    resident, ticks = 100 << 20, threading.Semaphore(0)
    monkeypatch.setattr(receiving, "SELDOM_S", 3600.0)
    monkeypatch.setattr(receiving, "_resident_bytes", lambda: resident)
    server, _, _ = call(receive_s=3600)
    looks, late = Looks(server), server._receiving._end_late

    def ticked(now):
        late(now)
        ticks.release()

    server._receiving._end_late = ticked

    def tick():
        for _ in range(10):
            assert ticks.acquire(timeout=WAIT_S)

    with connections(server.port, 1) as (slow,):
        slow.begin()
        tick()
        before = looks.count
        tick()
        assert looks.count == before
        resident += receiving.GROWTH_BYTES
        looks.wait(lambda: looks.arriving() > 0, looks=1)
        after = looks.count
        tick()
        assert looks.count == after
