"""Flower's sides of `rounds.py`: its SuperLink with SuperNodes, and the gRPC server it had before.

In an environment of their own (`make peers`; TRIPLANE_PEERS_FLOWER names another interpreter).
TLS on the server's side is on, telemetry and updates are off, nothing is installed at run time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from harness import ROOT
from rounds_relay import Relay
from rounds_sides import (
    CALLER,
    START_S,
    Case,
    Family,
    Told,
    free_port,
    running,
    wait_for_port,
)

from triplane.cloud.identity.authority import Authority
from triplane.proto.errors import NotFound
from triplane.proto.identity import certificate_pem, key_pem, new_key

HERE: Final = Path(__file__).resolve().parent
APP: Final = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "noop"
version = "0.1.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "triplane"

[tool.flwr.app.components]
serverapp = "noop.flower_app:server"
clientapp = "noop.flower_app:client"

[tool.flwr.app.config]
gate = ""
devices = 2
side = 16
"""


def interpreter() -> Path:
    """The one that has Flower."""
    made = ROOT / ".venv-peers-flower" / "bin" / "python"
    found = Path(os.environ.get("TRIPLANE_PEERS_FLOWER") or made)
    if not found.exists():
        raise NotFound(
            f"no interpreter with Flower at {found}; run `make peers`, or set "
            "TRIPLANE_PEERS_FLOWER to a python that has benchmarks/requirements-flower.txt"
        )
    return found


def environment(folder: Path) -> dict[str, str]:
    """Flower keeps to the folder and to this machine."""
    return {
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{interpreter().parent}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }


@contextlib.contextmanager
def _listening(folder: Path) -> Iterator[tuple[Path, socket.socket]]:
    """A socket that a gate calls, and its path; short, as such paths must be."""
    path = folder / "gate"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(START_S)
        yield path, listener


def _gated(family: Family, listener: socket.socket) -> Told:
    """The side, once its strategy is ready for its first round."""
    link, _ = listener.accept()
    link.settimeout(10 * START_S)
    lines = link.makefile("rw", encoding="utf-8")
    lines.readline()
    return Told(family, lines, lines)


def tls_files(folder: Path) -> Path:
    """An authority and a server's certificate for 127.0.0.1, as `ca.pem`, `server.pem`, `.key`."""
    folder.mkdir()
    now_s, key = time.time(), new_key()
    authority = Authority.make(folder, "bench", now_s)
    certificate = authority.issue_server(key.public_key(), ["127.0.0.1", "localhost"], now_s)
    (folder / "server.pem").write_bytes(certificate_pem(certificate))
    (folder / "server.key").write_bytes(key_pem(key))
    return folder


@contextlib.contextmanager
def legacy(folder: Path, case: Case, relay: Relay | None = None) -> Iterator[Told]:
    """`start_server` and `start_client`; the clients are threads of a process per processor."""
    with running(folder) as family, _listening(folder) as (gate, listener):
        tls, port = tls_files(folder / "tls"), free_port()
        told = {"tls": str(tls), "side": case.side, "gate": str(gate)}

        def start(part: str, devices: int, to: int) -> Any:
            address = f"127.0.0.1:{to}"
            more = {"part": part, "devices": devices, "address": address}
            command = [interpreter(), HERE / "flower_legacy.py", json.dumps(told | more)]
            role = "server" if part == "server" else "devices"
            return family.start(role, command, environment(folder))

        wait_for_port(port, start("server", case.devices, port))
        if relay is not None:
            relay.target = port
        processes = min(case.devices, os.cpu_count() or 1)
        for i in range(processes):
            share = case.devices * (i + 1) // processes - case.devices * i // processes
            start("clients", share, relay.port if relay else port)
        yield _gated(family, listener)


@contextlib.contextmanager
def superlink(folder: Path, case: Case, relay: Relay | None = None) -> Iterator[Told]:
    """`flower-superlink` with its state in SQLite, a `flower-supernode` a device, `flwr run`."""
    with running(folder) as family, _listening(folder) as (gate, listener):
        tls, port = tls_files(folder / "tls"), free_port()
        _write_app(folder, port, tls)

        def start(part: str, program: str, *words: Any) -> Any:
            command = [interpreter().with_name(program), *words]
            return family.start(part, command, environment(folder))

        link = start(
            "server", "flower-superlink", "--disable-runtime-dependency-installation",
            "--ssl-ca-certfile", tls / "ca.pem", "--ssl-certfile", tls / "server.pem",
            "--ssl-keyfile", tls / "server.key", "--database", folder / "state.db",
            "--host", "127.0.0.1", "--port", port,
        )  # fmt: skip
        wait_for_port(port, link)
        if relay is not None:
            relay.target = port
        for number in range(case.devices):
            start(
                "devices", "flower-supernode", "--root-certificates", tls / "ca.pem",
                "--superlink", f"127.0.0.1:{relay.port if relay else port}",
                "--port", free_port(), "--node-config", f"partition-id={number}",
            )  # fmt: skip
        options = f"gate='{gate}' devices={case.devices} side={case.side}"
        begun = start(CALLER, "flwr", "run", folder / "app", "here", "--run-config", options)
        if begun.wait(START_S):
            raise RuntimeError("flwr run refused")
        yield _gated(family, listener)


def _write_app(folder: Path, port: int, tls: Path) -> None:
    home, package = folder / "flwr", folder / "app" / "noop"
    home.mkdir()
    package.mkdir(parents=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{tls / "ca.pem"}"\n'
    )
    (folder / "app" / "pyproject.toml").write_text(APP)
    (package / "__init__.py").write_text("")
    for name in ("flower_app.py", "flower_gate.py"):
        shutil.copy(HERE / name, package / name)


def version() -> str:
    """Of Flower."""
    asked = "from importlib.metadata import version; print(version('flwr'))"
    found = subprocess.run([interpreter(), "-c", asked], check=True, capture_output=True, text=True)
    return f"flwr {found.stdout.strip()}"
