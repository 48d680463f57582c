"""What `fleet.py` stands on: a home with one released model and many nodes, and its process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from triplane.cloud.cli.connection import calls
from triplane.cloud.cli.remote import remote_at
from triplane.cloud.home import Home, initialize, open_database
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.principals import Principals
from triplane.cloud.identity.rights import PrincipalRole
from triplane.cloud.registry import Push
from triplane.cloud.server import running
from triplane.cloud.trust.signing import sign_release
from triplane.proto.identity import (
    IdentityFolder,
    certificate_pem,
    certificate_request,
    key_pem,
    new_key,
)
from triplane.unified_ir import nn
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import Module, StateTensor, TensorSpec

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Line(nn.Cell):
    """The smallest model there is."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Dense(4, 2)

    def construct(self, x: Any) -> Any:
        """x: (N, 4)."""
        return self.head(x)


def released(folder: Path) -> Home:
    """A cloud with line@1, converted and signed."""
    cell = Line()
    made = trace(cell, TensorSpec(("N", 4), np.float32), name="predict")
    state = {n: StateTensor(p.role, p.array.copy()) for n, p in cell.parameters().items()}
    Module({"predict": made}, {"predict": "predict"}, state, {}).save(folder / "line.tpm")
    home = initialize(folder / "home", offline_keys=folder / "keys").home

    async def push() -> None:
        async with running(home) as cloud:
            blob = cloud.blobs.put((folder / "line.tpm").read_bytes())
            await cloud.registry.push(Push(model="line", blob=blob, key=b"1" * 16), by="operator")
            bundle = await cloud.registry.wait_bundle("line", 1, "ort-x64")
            assert bundle.blob, bundle.reason
            await asyncio.to_thread(sign, home, folder / "keys")

    asyncio.run(push())
    return home


def sign(home: Home, keys: Path) -> None:
    """Release line@1."""
    with calls(home.operator) as cloud, remote_at(cloud) as remote:
        sign_release(remote, "line@1", "ort-x64", keys)


def let_in(home: Home, folder: Path, count: int) -> None:
    """Certificates for that many nodes, as if each had enrolled."""
    authority, database = Authority.load(home.authority), open_database(home)
    principals = Principals(database, authority, time.time)
    for i in range(count):
        key = new_key()
        made = principals.admit_now(certificate_request(key), f"node-{i:05}", PrincipalRole.NODE)
        IdentityFolder(folder / f"{i}").save(
            authority=authority.pem, certificate=certificate_pem(made), key=key_pem(key), cloud=""
        )
    database.close()


class CloudProcess:
    """`python -m triplane.cloud` over a home; takes the same port when it is started again."""

    def __init__(self, home: Home, log: Path) -> None:
        self._home, self._log = home, log
        self.port = 0
        self.start()

    def start(self) -> None:
        """Returns when calls are taken."""
        options = {"home": str(self._home.path), "host": "127.0.0.1", "port": self.port}
        options |= {"enrol_port": 0, "dashboard_port": 0, "json": True}
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "triplane.cloud", json.dumps(options)],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the cloud did not start: {self._log.read_text()[-2000:]}")
        self.port = json.loads(line)["port"]

    def kill(self) -> None:
        """At once, with -9."""
        self._child.kill()
        self._child.wait(60)

    def stop(self) -> None:
        """As an operator would."""
        self._child.terminate()
        self._child.wait(60)

    @property
    def address(self) -> str:
        """Where nodes and people call."""
        return f"127.0.0.1:{self.port}"

    def resident_bytes(self) -> int:
        """Memory of the process now."""
        return int(self._file("statm").read_text().split()[1]) * PAGE_BYTES

    def cpu_s(self) -> float:
        """Processor time of all its threads so far."""
        fields = self._file("stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def descriptors(self) -> int:
        """How many it has open."""
        return len(list(self._file("fd").iterdir()))

    def _file(self, name: str) -> Path:
        return Path(f"/proc/{self._child.pid}/{name}")
