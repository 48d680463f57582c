"""Nodes by the hundred over real streams: how long a rollout takes them, what memory a node costs.

    python benchmarks/fleet.py 10 100 1000

Real cloud process, real certificates, real streams; only the work of a node is left out: a
simulated one commits at once whatever it is told. 30 percent of the nodes are away when the rollout
begins and come after the others have committed. Per size: seconds until those that are there
committed, seconds from the arrival of the others until all did, and resident bytes of the cloud per
node (growth from no node to all of them, divided).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from triplane.cloud.cli.connection import calls
from triplane.cloud.cli.remote import remote_at
from triplane.cloud.home import Home, initialize, open_database
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.principals import Principals
from triplane.cloud.identity.rights import Role
from triplane.cloud.registry import Push
from triplane.cloud.server import running
from triplane.cloud.trust.signing import sign_release
from triplane.proto import fleet_pb2 as pb
from triplane.proto.channels import connect_aio
from triplane.proto.fleet_pb2_grpc import FleetStub
from triplane.proto.identity import (
    IdentityFolder,
    certificate_pem,
    certificate_request,
    key_pem,
    new_key,
)
from triplane.proto.stream import SessionClient
from triplane.unified_ir import nn
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import Module, StateTensor, TensorSpec

AWAY = 0.3
PROCESSES = 4
DEADLINE_S = 600.0
POLL_S = 0.05


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
        made = principals.admit_now(certificate_request(key), f"node-{i:05}", Role.NODE)
        IdentityFolder(folder / f"{i}").save(
            authority=authority.pem, certificate=certificate_pem(made), key=key_pem(key), cloud=""
        )
    database.close()


async def live(folder: Path, address: str) -> None:
    """One simulated node, for ever."""
    identity = IdentityFolder(folder)
    told: asyncio.Queue[pb.Desired] = asyncio.Queue()
    client = SessionClient(lambda: connect_aio(identity, address=address), told.put)
    running_client = asyncio.create_task(client.run())
    capability = pb.Capability(
        runtime="onnxruntime", runtime_version="99", max_opset=26, targets=["ort-x64"],
        instructions=["avx2", "avx512_vnni", "fma"], memory_bytes=8 << 30,
    )  # fmt: skip
    try:
        await client.send(pb.Report(capability=capability))
        while True:
            desired = await told.get()
            report = pb.Report(capability=capability, desired_number=desired.number)
            for wanted in desired.assignments:
                report.models.add(
                    model=wanted.model, version=wanted.version, attempt=wanted.attempt,
                    state=pb.COMMITTED, committed_version=wanted.version,
                )  # fmt: skip
            await client.send(report)
    finally:
        running_client.cancel()


async def clients(folder: Path, address: str, first: int, last: int) -> None:
    """The nodes of one process: most at once, the others after a line on standard input."""
    mine = range(first, last)
    away = [i for i in mine if i % 10 < AWAY * 10]
    there = [i for i in mine if i not in away]
    tasks = [asyncio.create_task(live(folder / f"{i}", address)) for i in there]
    await asyncio.to_thread(sys.stdin.readline)
    tasks += [asyncio.create_task(live(folder / f"{i}", address)) for i in away]
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        task.cancel()


def resident_bytes(pid: int) -> int:
    """Of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def until(count: int, counted: Any) -> float:
    """Seconds until `counted()` reaches `count`."""
    start_s = time.monotonic()
    while await counted() < count:
        if time.monotonic() - start_s > DEADLINE_S:
            raise TimeoutError(f"{await counted()} of {count} after {DEADLINE_S} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - start_s


def client_processes(folder: Path, address: str, size: int) -> list[subprocess.Popen[str]]:
    """Processes that live as the nodes between them."""
    bounds = [size * i // PROCESSES for i in range(PROCESSES + 1)]
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--clients", str(folder), address, str(a), str(b)],
            stdin=subprocess.PIPE,
            text=True,
        )
        for a, b in itertools.pairwise(bounds)
        if b > a
    ]


async def measured(home: Home, ready: dict[str, Any], pid: int, folder: Path, size: int) -> Any:
    """One size: a record of figures."""
    address = f"127.0.0.1:{ready['port']}"
    before = resident_bytes(pid)
    children = client_processes(folder, address, size)
    channel = connect_aio(IdentityFolder(home.operator), address=address)
    fleet = FleetStub(channel)
    away = sum(i % 10 < AWAY * 10 for i in range(size))

    async def connected() -> int:
        listed = await fleet.ListNodes(pb.ListNodesRequest(page_size=1000))
        return sum(n.connected and bool(n.report.capability.runtime) for n in listed.nodes)

    connecting_s = await until(size - away, connected)
    start_s = time.monotonic()
    made = await fleet.Deploy(
        pb.DeployRequest(reference="line@1", selector="all", key=b"1", role="release",
                         node_deadline_s=DEADLINE_S)
    )  # fmt: skip

    async def committed() -> int:
        rollout = await fleet.GetRollout(pb.GetRolloutRequest(id=made.id))
        return sum(node.state == pb.COMMITTED for node in rollout.nodes)

    await until(size - away, committed)
    there_s = time.monotonic() - start_s
    tell(children)
    late_s = await until(size, committed)
    done = await fleet.GetRollout(pb.GetRolloutRequest(id=made.id))
    record = {
        "nodes": size,
        "away": away,
        "connecting_s": round(connecting_s, 2),
        "committed_s": round(there_s, 2),
        "all_s": round(late_s, 2),
        "state": pb.Rollout.State.Name(done.state),
        "cloud_bytes": resident_bytes(pid),
        "bytes_per_node": (resident_bytes(pid) - before) // size,
    }
    tell(children)
    for child in children:
        child.wait(30)
    await channel.close()
    return record


def tell(children: list[subprocess.Popen[str]]) -> None:
    """Have every client process go on."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()


def size_measured(size: int) -> Any:
    """A cloud of its own, its nodes, the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = released(folder)
        let_in(home, folder / "nodes", size)
        options = {"home": str(home.path), "host": "127.0.0.1"}
        ports = {"port": 0, "enrol_port": 0, "dashboard_port": 0}
        cloud = subprocess.Popen(
            [sys.executable, "-m", "triplane.cloud", json.dumps(options | ports)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert cloud.stdout is not None
        try:
            ready = json.loads(cloud.stdout.readline())
            return asyncio.run(measured(home, ready, cloud.pid, folder / "nodes", size))
        finally:
            cloud.terminate()
            cloud.wait(60)


def main() -> None:
    """Measure each size and print a record per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[10, 100, 1000])
    parser.add_argument("--clients", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.clients:
        folder, address, first, last = given.clients
        asyncio.run(clients(Path(folder), address, int(first), int(last)))
        return
    for size in given.sizes:
        print(json.dumps(size_measured(size)), flush=True)


if __name__ == "__main__":
    main()
