"""Rounds in which nothing is learnt: what the way of an update costs, part by part.

    python benchmarks/rounds.py                  # 3, 10, 100 devices; 40 MB with 2 devices
    python benchmarks/rounds.py --only 10        # one of them
    python benchmarks/rounds.py --only 1000      # 1,000 devices, 100 of them in each round
    python benchmarks/rounds.py --record         # also into docs/evidence/rounds.md

A real cloud process, mutual TLS, a stream a device, digests, fsync and the journal on. A device
fetches the state, sends an update of zeros and waits for the acknowledgement. Two runs are measured
in turn, A and A again: their difference is the noise. Parts are seconds per round summed over
threads and devices, so they overlap and need not add up to the round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine

from triplane.cloud.cli.connection import Calls, calls, new_key
from triplane.cloud.home import Home, initialize, open_database
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.principals import Principals
from triplane.cloud.identity.rights import Role
from triplane.cloud.registry import Push
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.proto.federation_pb2_grpc import FederationStub
from triplane.proto.identity import (
    IdentityFolder,
    certificate_pem,
    certificate_request,
    key_pem,
)
from triplane.proto.identity import (
    new_key as private_key,
)
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.ir import TensorSpec

HERE = Path(__file__).resolve().parent
EVIDENCE = HERE.parent / "docs" / "evidence" / "rounds.md"
WARM = 3
"""Rounds that do not count."""
POLL_S = 0.2


@dataclass(frozen=True)
class Case:
    """devices in a round; side: of the square matrix that is learnt; target_ms of a round.

    crowd: devices that are there, at least as many.
    """

    name: str
    devices: int
    side: int
    rounds: int
    target_ms: float
    crowd: int = 0

    @property
    def there(self) -> int:
        """Devices with a stream."""
        return max(self.crowd, self.devices)


CASES = (
    Case("3", 3, 16, 60, 10.0),
    Case("10", 10, 16, 40, 25.0),
    Case("100", 100, 16, 15, 250.0),
    Case("40mb", 2, 3162, 8, 700.0),
)
LARGE = Case("1000", 100, 16, 6, 250.0, crowd=1000)


def furnished(folder: Path, case: Case) -> Home:
    """A cloud with square@1, and identities of the devices."""
    cell = nn.Sequential(nn.Dense(case.side, case.side))
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(TensorSpec(("N", case.side), "float32"), TensorSpec(("N",), "int64"))
    trainer.export(("predict", "evaluate", "loss")).save(folder / "square.tpm")
    home = initialize(folder / "home", offline_keys=folder / "keys").home

    async def push() -> None:
        async with running(home) as cloud:
            blob = await asyncio.to_thread(cloud.blobs.put_file, folder / "square.tpm")
            await cloud.registry.push(Push(model="square", blob=blob, key=b"1" * 16), by="operator")

    asyncio.run(push())
    return home


def let_in(home: Home, folder: Path, count: int, address: str) -> None:
    """Certificates for that many devices, as if each had enrolled."""
    authority, database = Authority.load(home.authority), open_database(home)
    principals = Principals(database, authority, time.time)
    for number in range(count):
        key = private_key()
        name = f"device-{number:05}"
        made = principals.admit_now(certificate_request(key), name, Role.DEVICE)
        IdentityFolder(folder / f"{number}").save(
            authority=authority.pem, certificate=certificate_pem(made), key=key_pem(key),
            cloud=address,
        )  # fmt: skip
    database.close()


@contextlib.contextmanager
def cloud_process(home: Home, folder: Path, port: int) -> Iterator[Path]:
    """Serves on `port`; the file it leaves its figures in."""
    options = {"home": str(home.path), "host": "127.0.0.1", "port": port}
    options |= {"enrol_port": 0, "dashboard_port": 0, "json": True}
    figures = folder / "figures.json"
    command = [sys.executable, HERE / "rounds_cloud.py", json.dumps(options), figures]
    with (folder / "cloud.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert child.stdout is not None
    if not child.stdout.readline():
        raise RuntimeError((folder / "cloud.log").read_text()[-2000:])
    try:
        yield figures
    finally:
        child.terminate()
        child.wait(60)


@contextlib.contextmanager
def device_processes(folder: Path, count: int) -> Iterator[list[dict[str, float]]]:
    """The devices, in as many processes as there are processors; their figures at the end."""
    processes = min(count, os.cpu_count() or 1)
    bounds = [count * i // processes for i in range(processes + 1)]
    children = [
        subprocess.Popen(
            [sys.executable, HERE / "rounds_devices.py", folder, str(a), str(b)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for a, b in itertools.pairwise(bounds)
    ]  # fmt: skip
    found: list[dict[str, float]] = []
    try:
        yield found
    finally:
        found += [json.loads(child.communicate(timeout=120)[0] or "{}") for child in children]


def run_of(cloud: Calls, case: Case) -> pb.Run:
    """One run, ended."""
    stub = FederationStub(cloud.channel)
    spec = pb.Spec(
        model="square@1", population="bench", rounds=case.rounds,
        cohort=pb.Cohort(devices=case.devices, quorum=1.0, deadline_s=300.0, patience_s=120.0),
    )  # fmt: skip
    run = stub.Start(pb.StartRequest(spec=spec, key=new_key()))
    while run.phase not in {pb.Run.DONE, pb.Run.FAILED, pb.Run.STOPPED}:
        time.sleep(POLL_S)
        run = stub.GetRun(pb.GetRunRequest(id=run.id))
    if run.phase != pb.Run.DONE:
        raise RuntimeError(f"{case.name}: {run.reason}")
    return run


def periods_ms(run: pb.Run) -> list[float]:
    """From the opening of one round to that of the next, warm ones only."""
    opened = [found.opened_s for found in run.rounds]
    return [1000 * (b - a) for a, b in itertools.pairwise(opened)][WARM:]


def measured(case: Case) -> dict[str, Any]:
    """Quartiles of two runs in ms, and seconds of each part per round."""
    with tempfile.TemporaryDirectory(prefix="triplane-rounds-") as name:
        folder = Path(name)
        home = furnished(folder, case)
        port = free_port()
        let_in(home, folder / "devices", case.there, f"127.0.0.1:{port}")
        with (
            cloud_process(home, folder, port) as figures,
            device_processes(folder / "devices", case.there) as sides,
            calls(operator_at(home, port)) as cloud,
        ):
            runs = [periods_ms(run_of(cloud, case)) for _ in range(2)]
        rounds = 2 * case.rounds
        cloud_side = json.loads(figures.read_text())
        parts = {k: v / rounds for k, v in cloud_side["spent_s"].items()}
        parts["cloud cpu"] = cloud_side["cpu_s"] / rounds
        for side in sides:
            for part, spent in side.items():
                parts[f"device {part}"] = parts.get(f"device {part}", 0.0) + spent / rounds
        return {
            "case": case.name,
            "target_ms": case.target_ms,
            "memory_mb": round(cloud_side["rss_bytes"] / 1e6),
            "ms": [statistics.quantiles(run, n=4) for run in runs],
            "parts_ms": {k: round(1000 * v, 2) for k, v in sorted(parts.items())},
            "calls": {k: round(v / rounds, 1) for k, v in cloud_side["calls"].items()},
        }


def operator_at(home: Home, port: int) -> Path:
    """The operator's identity, calling that port."""
    (home.operator / "cloud").write_text(f"127.0.0.1:{port}\n")
    return home.operator


def free_port() -> int:
    """One that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def document(conditions: str, found: list[dict[str, Any]]) -> str:
    """What `--record` writes."""
    names = sorted({part for row in found for part in row["parts_ms"]})
    cases = " | ".join(row["case"] for row in found)
    lines = [
        "# Rounds in which nothing is learnt",
        "",
        f"Made by `python benchmarks/rounds.py --record`. {conditions}",
        "",
        "A round is from its opening to that of the next: median (quartiles) in ms, of two runs in",
        "turn. Below are ms per round, summed over threads and devices; they overlap.",
        "",
        f"| | {cases} |",
        "|---|" + "---|" * len(found),
    ]
    for number in (0, 1):
        cells = " | ".join(_quartiles(row["ms"][number]) for row in found)
        lines.append(f"| run {number + 1} | {cells} |")
    lines.append("| target | " + " | ".join(f"{row['target_ms']:g}" for row in found) + " |")
    memory = " | ".join(str(row["memory_mb"]) for row in found)
    lines.append(f"| the cloud's memory, MB | {memory} |")
    for name in names:
        cells = " | ".join(f"{row['parts_ms'].get(name, 0):.1f}" for row in found)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def _quartiles(found: list[float]) -> str:
    low, middle, high = found
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    """Measures and prints one line of JSON a case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[case.name for case in (*CASES, LARGE)], action="append")
    parser.add_argument("--record", action="store_true", help=f"into {EVIDENCE.name}")
    options = parser.parse_args()
    load = f"{len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f} before"
    conditions = f"{'; '.join(machine().values())}; {load}; numpy {np.__version__}."
    print(conditions, flush=True)
    found = []
    for case in (*CASES, LARGE):
        if case.name in (options.only or [case.name for case in CASES]):
            found.append(measured(case))
            print(json.dumps(found[-1]), flush=True)
    if options.record:
        EVIDENCE.write_text(document(conditions, found))


if __name__ == "__main__":
    main()
