"""How many bytes of unfinished requests each connection has brought.

gRPC tells the size of a message only when all of it is in memory. The kernel tells sooner: Linux
counts the received bytes of every TCP connection (`tcp_info`, since Linux 4.1). What a connection
received beyond its finished requests is what it may hold in memory now. Where the kernel does not
tell, each waiting call counts as a whole message of the largest size.

What a connection brought before it was looked at the first time counts only when it has finished no
request yet; else it may belong to finished ones, and what follows is counted.
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
CALL_OVERHEAD_BYTES: Final = 512  # at most, headers of one finished call; frames add 1/64
DESCRIPTORS: Final = Path("/proc/self/fd")

Address = tuple[str, int]


@dataclass(slots=True)
class Track:
    """One connection: bytes counted by the kernel, bytes of unfinished requests, recent pace."""

    received: int | None
    arriving: int = 0
    pace: float = 0.0  # bytes per look, averaged over the last few


class Arrivals:
    """Follows connections with calls whose requests are still arriving; looked at by one thread."""

    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._descriptors: dict[Address, int] = {}
        self._kernel_tells = False
        self._used: set[str] = set()  # connections that have finished a request
        self.tracks: dict[str, Track] = {}

    def finished_one(self, connection: str) -> None:
        """Note that a connection has finished a request; from any thread."""
        if connection not in self._used:
            self._used.add(connection)

    def look(self, waiting: Mapping[str, int], finished: Mapping[str, int]) -> None:
        """Bring `tracks` up to date with the connections in `waiting`, and forget all others.

        waiting: calls that wait for their request, by connection; finished: bytes of requests that
        were finished on a connection since the last look.
        """
        received = self._received(waiting)
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
                track.arriving = 0  # the first that the kernel tells of it
            else:
                more = now - track.received
                track.arriving = max(0, track.arriving + more - finished.get(connection, 0))
                track.pace = (track.pace + more) / 2
            track.received = now
            tracks[connection] = track
        self.tracks = tracks

    def _received(self, connections: Iterable[str]) -> dict[str, int]:
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
        """Bytes received from `address`; None when no known descriptor leads there."""
        if (descriptor := self._descriptors.get(address)) is None:
            return None
        with _looking_at(descriptor) as one:
            if one is None or _peer(one) != address or not hasattr(socket, "TCP_INFO"):
                return None
            try:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
                return int(struct.unpack_from("=Q", info, BYTES_RECEIVED)[0])
            except (OSError, struct.error):  # closed in this instant, or a kernel before 4.1
                return None


@functools.lru_cache(8192)
def _address(connection: str) -> Address | None:
    """`ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`, as gRPC writes a peer."""
    kind, _, rest = unquote(connection).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in {"ipv4", "ipv6"} or not port.isdecimal():
        return None
    return _plain(host.strip("[]"), int(port))


def _plain(host: str, port: int) -> Address:
    """An address in the one form that is compared: without a zone, IPv4 where it is mapped."""
    if ":" not in host:
        return host, port
    ip = ipaddress.ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), port


def _descriptors() -> dict[Address, int]:
    """Open TCP connections of this process by the address of the peer."""
    descriptors = {}
    with contextlib.suppress(OSError):  # no such folder, or not for us
        for link in DESCRIPTORS.iterdir():
            with _looking_at(int(link.name)) as one:
                if one is not None and (address := _peer(one)) is not None:
                    descriptors[address] = int(link.name)
    return descriptors


@contextlib.contextmanager
def _looking_at(descriptor: int) -> Iterator[socket.socket | None]:
    """gRPC's own descriptor as a socket; None when it is none.

    It is neither closed nor duplicated: a duplicate would keep a connection alive that gRPC closes
    in this instant.
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
