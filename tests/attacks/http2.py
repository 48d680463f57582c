"""Callers that speak HTTP/2 frame by frame: what a well-behaved gRPC library never sends.

Only what the tests need: a connection, calls whose bytes the test chooses, and a look at what came
back. Header fields are literals without indexing and without Huffman coding (RFC 7541, 6.2.2), and
gRPC's answers come uncoded too, so a refusal can be read in the bytes of its frame.
"""

import contextlib
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 2, 3, 4, 6, 8
CONTINUATION = 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
WATCH = "/grpc.health.v1.Health/Watch"
CHECK = "/grpc.health.v1.Health/Check"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """RFC 9113, 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def headers(path: str) -> bytes:
    """Header block of a gRPC call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(_literal(name, value) for name, value in fields.items())


def indexed(name: str, value: str) -> bytes:
    """A field that enters the dynamic table, where its index is 62 (RFC 7541, 6.2.1)."""
    return b"\x40" + _short(name) + _long(value)


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _long(text: str) -> bytes:
    """A string of 127 bytes or more: its length begins with seven ones (RFC 7541, 5.1)."""
    left, head = len(text) - 127, bytearray(b"\x7f")
    while left > 127:
        head.append(left & 127 | 128)
        left >>= 7
    return bytes(head) + bytes([left]) + text.encode()


def message_start(n_bytes: int) -> bytes:
    """gRPC's prefix of a message that has `n_bytes`."""
    return struct.pack(">BI", 0, n_bytes)


def message(data: bytes) -> bytes:
    """A whole message."""
    return message_start(len(data)) + data


def rapid_reset(hostile, path: str = INFER) -> int:
    """Calls taken back as soon as they begin (CVE-2023-44487), on connections; how many."""
    block, cancel = headers(path), (8).to_bytes(4)
    sent = 0
    for one in hostile:
        for first in range(0, 5000, 50):
            streams = range(2 * first + 1, 2 * first + 101, 2)
            burst = b"".join(
                frame(HEADERS, END_HEADERS, n, block) + frame(RST_STREAM, 0, n, cancel)
                for n in streams
            )
            sent += 50 * one.flood(burst, 1)
    return sent


class Connection:
    """One raw connection; `source` is the loopback address that it comes from."""

    def __init__(self, port: int, *, source: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection(
            ("127.0.0.1", port), timeout=60, source_address=(source, 0)
        )
        self._next_stream = 1
        self._initial_window = 65535
        self._windows = {0: 65535}  # bytes that may be sent, by stream; 0 is the connection
        self._answers: dict[int, bytes] = {}
        self._seen = b""
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))

    def begin(self, path: str = INFER, data: bytes = b"\0\0") -> int:
        """Open a call and send these bytes of its body; the rest never comes."""
        stream = self._next_stream
        self._next_stream += 2
        self._windows[stream] = self._initial_window
        self._socket.sendall(frame(HEADERS, END_HEADERS, stream, headers(path)))
        self.send(stream, data)
        return stream

    def send(self, stream: int, data: bytes) -> bool:
        """Further bytes of the body as flow control allows; False when the call ended meanwhile."""
        while data:
            size = min(16384, len(data), self._windows[0], self._windows.get(stream, 0))
            if size > 0:
                self._socket.sendall(frame(DATA, 0, stream, data[:size]))
                data = data[size:]
                self._windows[0] -= size
                self._windows[stream] -= size
                continue
            self.read()
            if stream not in self._windows:
                return False
        return True

    def flood(self, frames: bytes, count: int, *, blocked_s: float = 1.0) -> int:
        """Send the same bytes again and again and read nothing: how often it went.

        It ends early where the server hangs up, or takes nothing more for `blocked_s`.
        """
        times = max(1, 65536 // len(frames))
        self._socket.settimeout(blocked_s)
        try:
            for sent in range(0, count, times):
                self._socket.sendall(frames * min(times, count - sent))
        except OSError:
            return sent
        return count

    def end(self, stream: int) -> None:
        """Say that the body is complete."""
        self._socket.sendall(frame(DATA, END_STREAM, stream, b""))

    def reset(self, stream: int) -> None:
        """Take a call back."""
        self._windows.pop(stream, None)
        self._socket.sendall(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def read(self) -> tuple[int, int, bytes]:
        """The next frame: kind, stream and payload. Keeps the windows and answers settings."""
        head = self._exactly(9)
        kind, flags = head[3], head[4]
        stream = struct.unpack(">I", head[5:])[0]
        payload = self._exactly(int.from_bytes(head[:3]))
        if kind == WINDOW_UPDATE and stream in self._windows:
            self._windows[stream] += struct.unpack(">I", payload)[0]
        if kind == SETTINGS and not flags & ACK:
            self._socket.sendall(frame(SETTINGS, ACK, 0, b""))
            for start in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[start : start + 6])
                if name == INITIAL_WINDOW_SIZE:
                    for one in self._windows.keys() - {0}:
                        self._windows[one] += value - self._initial_window
                    self._initial_window = value
        if kind in {HEADERS, DATA}:
            self._answers[stream] = self._answers.get(stream, b"") + payload
        if kind == PING and not flags & ACK:
            self._socket.sendall(frame(PING, ACK, 0, payload))
        if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self._windows.pop(stream, None)
        return kind, stream, payload

    def answer(self, stream: int) -> bytes:
        """All header and data bytes of a call's answer, to its end."""
        while stream in self._windows:
            self.read()
        return self._answers.get(stream, b"")

    def read_to_the_end(self) -> None:
        """Read until the server hangs up; TimeoutError when it does not."""
        with contextlib.suppress(ConnectionError):
            while True:
                self.read()

    def is_open(self) -> bool:
        """Whether the server still holds the connection; waits for its answer to a ping."""
        try:
            self._socket.sendall(frame(PING, 0, 0, bytes(8)))
            while self.read()[0] != PING:
                pass
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Hang up; ends a read in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        while len(self._seen) < size:
            if not (data := self._socket.recv(65536)):
                raise ConnectionResetError("the server hung up")
            self._seen += data
        taken, self._seen = self._seen[:size], self._seen[size:]
        return taken


@contextlib.contextmanager
def connections(port, count, **options):
    """So many raw connections, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Connection(port, **options)))
            for _ in range(count)
        ]
