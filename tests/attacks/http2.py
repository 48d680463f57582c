"""Callers that speak HTTP/2 frame by frame: what a well-behaved gRPC library never sends.

Only what the tests need: a connection, calls whose bytes the test chooses, and a look at what came
back. Header fields are literals without indexing and without Huffman coding (RFC 7541, 6.2.2), and
gRPC's answers come uncoded too, so a refusal can be read in the bytes of its frame.
"""

import contextlib
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, WINDOW_UPDATE, PING = 0, 1, 4, 8, 6
END_HEADERS, ACK = 4, 1
INFER = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
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


def message_start(n_bytes: int) -> bytes:
    """gRPC's prefix of a message that has `n_bytes`."""
    return struct.pack(">BI", 0, n_bytes)


class Connection:
    """One raw connection; `source` is the loopback address that it comes from."""

    def __init__(self, port: int, *, source: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection(
            ("127.0.0.1", port), timeout=60, source_address=(source, 0)
        )
        self._next_stream = 1
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))

    def begin(self, path: str = INFER, data: bytes = b"\0\0") -> int:
        """Open a call and send these bytes of its body; the rest never comes."""
        stream = self._next_stream
        self._next_stream += 2
        self._socket.sendall(frame(HEADERS, END_HEADERS, stream, headers(path)))
        self.send(stream, data)
        return stream

    def send(self, stream: int, data: bytes) -> None:
        """Further bytes of the body, without a look at flow control."""
        for start in range(0, len(data), 16384):
            self._socket.sendall(frame(DATA, 0, stream, data[start : start + 16384]))

    def read_until(self, wanted: bytes) -> bytes:
        """What the server sends, up to these bytes or the end of the connection."""
        seen = b""
        while wanted not in seen:
            if not (data := self._socket.recv(65536)):
                break
            seen += data
        return seen

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


@contextlib.contextmanager
def connections(port, count, **options):
    """So many raw connections, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Connection(port, **options)))
            for _ in range(count)
        ]
