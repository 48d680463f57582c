"""What a round cannot do without: TLS, one hash, one write and one fsync of each transfer.

    python benchmarks/rounds_floor.py server FOLDER PORT DEVICES BYTES
    python benchmarks/rounds_floor.py device FOLDER PORT NUMBER BYTES

A side of `rounds.py`. The server sends each device the state and takes its update, both of so many
bytes; whoever receives bytes hashes them with SHA-256, writes them to a file and syncs it.
No messages, no journal, nothing is computed. A line of the server's standard input is a
number of rounds; the answer is a line of JSON with the milliseconds of each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from rounds_flower import tls_files
from rounds_relay import Relay
from rounds_sides import Case, Told, free_port, running, wait_for_port

CHUNK_BYTES: Final = 1 << 20


@contextlib.contextmanager
def floor(folder: Path, case: Case, relay: Relay | None = None) -> Iterator[Told]:
    """A server, and a process for each device."""
    with running(folder) as family:
        tls_files(folder / "tls")
        port, size = free_port(), case.parameter_bytes
        words = [sys.executable, Path(__file__).resolve()]
        server = family.start("server", [*words, "server", folder, port, case.devices, size])
        wait_for_port(port, server)
        if relay is not None:
            relay.target = port
        to = relay.port if relay else port
        for number in range(case.devices):
            family.start("devices", [*words, "device", folder, to, number, size])
        assert server.stdin is not None
        assert server.stdout is not None
        yield Told(family, server.stdin, server.stdout)


def receive(link: ssl.SSLSocket, size: int, path: Path) -> bytes:
    """Write so many bytes to a file and sync it; their SHA-256."""
    buffer, digest, left = bytearray(CHUNK_BYTES), hashlib.sha256(), size
    with path.open("wb") as file:
        while left:
            count = link.recv_into(memoryview(buffer)[: min(left, CHUNK_BYTES)])
            if not count:
                raise EOFError(f"the other side left; {left} bytes are missing")
            part = memoryview(buffer)[:count]
            digest.update(part)
            file.write(part)
            left -= count
        file.flush()
        os.fsync(file.fileno())
    return digest.digest()


def serve(folder: Path, port: int, devices: int, size: int) -> None:
    """Take the devices' connections, then do rounds until the standard input ends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls" / "server.pem", folder / "tls" / "server.key")
    state, links = os.urandom(size), list[ssl.SSLSocket]()
    with socket.create_server(("127.0.0.1", port)) as listener:
        while len(links) < devices:
            with contextlib.suppress(OSError):  # who only looks whether somebody listens
                links.append(context.wrap_socket(listener.accept()[0], server_side=True))

    def exchange(at: int) -> None:
        links[at].sendall(state)
        receive(links[at], size, folder / f"update-{at}")

    with ThreadPoolExecutor(devices) as pool:
        for line in sys.stdin:
            ms = []
            for _ in range(int(line)):
                began_s = time.perf_counter()
                list(pool.map(exchange, range(devices)))
                ms.append(1000 * (time.perf_counter() - began_s))
            print(json.dumps(ms), flush=True)


def answer(folder: Path, port: int, number: int, size: int) -> None:
    """Take the state and send an update, until the server leaves."""
    context = ssl.create_default_context(cafile=str(folder / "tls" / "ca.pem"))
    update = os.urandom(size)
    plain = socket.create_connection(("127.0.0.1", port))
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as link:
        while True:
            receive(link, size, folder / f"state-{number}")
            link.sendall(update)


if __name__ == "__main__":
    role, where, *numbers = sys.argv[1:]
    {"server": serve, "device": answer}[role](Path(where), *map(int, numbers))
