"""Count the bytes of unfinished requests that each connection has received.

gRPC reports the size of a message only when all of it is in memory. The kernel knows earlier: Linux
counts the received bytes of every TCP connection (`tcp_info`, since Linux 4.1). The bytes that a
connection received beyond its finished requests may be in memory now. If the kernel does not report
them, each waiting call counts as a message of the largest size.

The bytes that a connection received before it was first checked count only if it has not finished a
request yet; otherwise they may belong to finished requests, and only later bytes are counted.
"""

import contextlib
import functools
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

BYTES_RECEIVED: Final = 128  # offset of tcpi_bytes_received in struct tcp_info
CALL_OVERHEAD_BYTES: Final = 512  # limit for headers of one finished call; frames add 1/64
DESCRIPTORS: Final = Path("/proc/self/fd")

Address = tuple[str, int]


@dataclass(slots=True)
class Track:
    """A connection. received: bytes, by the kernel; arriving: bytes of unfinished requests."""

    received: int | None
    arriving: int = 0
    pace: float = 0.0  # bytes between two checks, averaged over the last few


class Arrivals:
    """Follows connections with calls whose requests are arriving. One thread calls `look`."""

    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._descriptors: dict[Address, int] = {}
        self._kernel_tells = False
        self._used: set[str] = set()  # connections that have finished a request
        self.tracks: dict[str, Track] = {}

    def finished_one(self, connection: str) -> None:
        """Note, from any thread, that a connection has finished a request."""
        if connection not in self._used:
            self._used.add(connection)

    def look(self, waiting: Mapping[str, int], finished: Mapping[str, int]) -> None:
        """Update `tracks` for the connections in `waiting`, and remove all others.

        waiting: number of calls that wait for their request, by connection. finished: bytes of
        requests that were finished on a connection since the last time.
        """
        received = self._bytes_received(waiting)
        self._kernel_tells = self._kernel_tells or bool(received)
        tracks = {}
        for connection, calls in waiting.items():
            now = received.get(connection)
            if now is None and self._kernel_tells:
                continue  # the connection is closed; its calls are about to end
            track = self.tracks.get(connection)
            if track is None:
                fresh = now is not None and connection not in self._used
                track = Track(0 if fresh else now)
            if now is None:
                track.arriving = calls * self._message_bytes
            elif track.received is None:
                track.arriving = 0  # the first count for this connection
            else:
                more = now - track.received
                track.arriving = max(0, track.arriving + more - finished.get(connection, 0))
                track.pace = (track.pace + more) / 2
            track.received = now
            tracks[connection] = track
        self.tracks = tracks

    def _bytes_received(self, connections: Iterable[str]) -> dict[str, int]:
        addresses = {name: address for name in connections if (address := _address(name))}
        counts = {name: self._count(address) for name, address in addresses.items()}
        if None in counts.values():
            self._descriptors = _descriptors()
            for name in [*self._used]:
                if _address(name) not in self._descriptors:
                    self._used.discard(name)
            counts |= {n: self._count(addresses[n]) for n, count in counts.items() if count is None}
        return {name: count for name, count in counts.items() if count}

    def _count(self, address: Address) -> int | None:
        """Return the bytes received from `address`; None if no known descriptor belongs to it."""
        if (descriptor := self._descriptors.get(address)) is None:
            return None
        with _looking_at(descriptor) as one:
            if one is None or _peer(one) != address or not hasattr(socket, "TCP_INFO"):
                return None
            try:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
                return int(struct.unpack_from("=Q", info, BYTES_RECEIVED)[0])
            except (OSError, struct.error):  # it was just closed, or the kernel is older than 4.1
                return None


@functools.lru_cache(8192)
def _address(connection: str) -> Address | None:
    """Parse a peer as gRPC writes it: `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = unquote(connection).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in {"ipv4", "ipv6"} or not port.isdecimal():
        return None
    return _plain(host.strip("[]"), int(port))


def _plain(host: str, port: int) -> Address:
    """Normalize an address for comparison: without a zone, and as IPv4 if it is mapped."""
    if ":" not in host:
        return host, port
    ip = ipaddress.ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), port


def _descriptors() -> dict[Address, int]:
    """Return the descriptors of this process's TCP connections by the address of the peer."""
    descriptors = {}
    with contextlib.suppress(OSError):  # the folder does not exist or is not readable
        for link in DESCRIPTORS.iterdir():
            with _looking_at(int(link.name)) as one:
                if one is not None and (address := _peer(one)) is not None:
                    descriptors[address] = int(link.name)
    return descriptors


@contextlib.contextmanager
def _looking_at(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield gRPC's own descriptor as a socket; None if it is not one.

    It is neither closed nor duplicated: a duplicate would keep a connection open that gRPC is just
    closing.
    """
    try:
        one = socket.socket(fileno=descriptor)
    except OSError:
        yield None
        return
    try:
        yield one
    finally:
        one.detach()


def _peer(one: socket.socket) -> Address | None:
    if one.family not in {socket.AF_INET, socket.AF_INET6}:
        return None
    try:
        host, port = one.getpeername()[:2]
    except OSError:
        return None
    return _plain(host, port)
