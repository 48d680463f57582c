"""Our side of `rounds.py`: a real cloud process and devices that do all but learn.

The devices are as many processes as there are processors. Mutual TLS, a stream a device, digests,
fsync and the journal are on. A run without end is let through a turn at a time: the devices answer
the tasks of rounds up to a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rounds_relay import Relay
from rounds_sides import START_S, STEP_S, Case, Family, Turn, free_port, per_round, running

from triplane.cloud.cli.connection import Calls, calls, new_key
from triplane.cloud.home import Home, initialize, open_database
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.principals import Principals
from triplane.cloud.identity.rights import PrincipalRole
from triplane.cloud.registry import Push
from triplane.cloud.server import running as cloud_of
from triplane.cloud.trust import MetadataRepository
from triplane.cloud.trust.signing import sign_plan_policy
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
from triplane.proto.plan_statement import PlanPolicy, PlanRule
from triplane.proto.signed.trust import bootstrap
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.ir import TensorSpec

HERE = Path(__file__).resolve().parent
NO_END = 1_000_000
"""Rounds of a run that is ended with its cloud."""
POPULATION = "bench"


def furnished(folder: Path, side: int) -> Home:
    """A cloud with square@1, a dense layer."""
    cell = nn.Sequential(nn.Dense(side, side))
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(TensorSpec(("N", side), "float32"), TensorSpec(("N",), "int64"))
    trainer.export(("predict", "evaluate", "loss")).save(folder / "square.tpm")
    home = initialize(folder / "home", offline_keys=folder / "keys").home
    policy = PlanPolicy({"square": PlanRule(("*",), ("*",))})
    sign_plan_policy(MetadataRepository(home.metadata, home.keys), policy, folder / "keys")

    async def push() -> None:
        async with cloud_of(home) as cloud:
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
        made = principals.admit_now(certificate_request(key), name, PrincipalRole.DEVICE)
        place = folder / f"{number}"
        place.mkdir(parents=True)
        bootstrap(place / "trust", lambda _: (home.metadata / "1.root.json").read_bytes())
        IdentityFolder(place / "identity").save(
            authority=authority.pem, certificate=certificate_pem(made), key=key_pem(key),
            cloud=address,
        )  # fmt: skip
    database.close()


@dataclass
class Ours:
    """A cloud that listens on `port`, with its devices; `run` once one was begun."""

    family: Family
    home: Home
    cloud: Calls
    server: subprocess.Popen[str]
    devices: list[subprocess.Popen[str]]
    run: str = ""
    opened: int = 0
    spent_s: dict[str, float] = field(default_factory=dict)

    def begin(self, devices: int, rounds: int = NO_END, *, masked: bool = False) -> None:
        """A run whose rounds wait for the first turn."""
        cohort = pb.Cohort(devices=devices, quorum=1.0, deadline_s=600.0, patience_s=120.0)
        spec = pb.Spec(model="square@1", population=POPULATION, rounds=rounds, cohort=cohort)
        if masked:
            spec.masking.SetInParent()
            spec.robustness.norm_bound = "1"
        self.run = self.stub.Start(pb.StartRequest(spec=spec, key=new_key())).id

    @property
    def stub(self) -> FederationStub:
        """The operator's calls."""
        return FederationStub(self.cloud.channel)

    def found(self) -> pb.Run:
        """The run, as it is."""
        return self.stub.GetRun(pb.GetRunRequest(id=self.run))

    def turn(self, rounds: int) -> Turn:
        """See `Side`. One round more than asked for: the first of a turn was opened before it."""
        before, first = self.family.cpu_s(), self.opened
        self.opened += rounds + 1
        self.tell(self.opened - 1)
        self.wait()
        cpu_ms = per_round(before, self.family.cpu_s(), rounds + 1)
        opened = {found.number: found.opened_s for found in self.found().rounds}
        marks = [opened[number] for number in range(first + 1, self.opened + 1)]
        return Turn([1000 * (b - a) for a, b in itertools.pairwise(marks)], cpu_ms, rounds + 1)

    def tell(self, last: int) -> None:
        """Let the devices answer the tasks of rounds up to `last`."""
        for child in self.devices:
            assert child.stdin is not None
            child.stdin.write(f"{last}\n")
            child.stdin.flush()

    def wait(self) -> None:
        """Until every process of devices has a task beyond that round; keeps what they spent."""
        spent: dict[str, float] = {}
        for child in self.devices:
            assert child.stdout is not None
            for part, seconds in json.loads(child.stdout.readline() or "{}").items():
                spent[f"device {part}"] = spent.get(f"device {part}", 0.0) + seconds
        self.spent_s = spent

    def parts_s(self) -> dict[str, float]:
        """Seconds of each part of the cloud so far."""
        figures = self.family.folder / "figures.json"
        figures.unlink(missing_ok=True)
        self.server.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + START_S
        while not figures.exists():
            if time.monotonic() > deadline:
                raise RuntimeError("the cloud gives no figures")
            time.sleep(STEP_S)
        found: dict[str, float] = json.loads(figures.read_text())
        return found

    def peak_bytes(self) -> dict[str, int]:
        """See `Side`."""
        return self.family.peak_bytes()


@contextlib.contextmanager
def clouded(
    folder: Path, side: int, there: int, relay: Relay | None = None, *, start: bool = True
) -> Iterator[Ours]:
    """A cloud of its own with so many devices. relay: what they call instead. start: them too."""
    with running(folder) as family:
        home = furnished(folder, side)
        port = free_port()
        if relay is not None:
            relay.target = port
        let_in(home, folder / "devices", there, f"127.0.0.1:{relay.port if relay else port}")
        options = {"home": str(home.path), "host": "127.0.0.1", "port": port}
        options |= {"enrol_port": 0, "dashboard_port": 0, "json": True}
        server = family.start(
            "server",
            [sys.executable, HERE / "rounds_cloud.py", json.dumps(options), "figures.json"],
        )
        assert server.stdout is not None
        if not server.stdout.readline():
            raise RuntimeError("the cloud did not start")
        (home.operator / "cloud").write_text(f"127.0.0.1:{port}\n")
        with calls(home.operator) as cloud:
            devices = _devices(family, there) if start else []
            yield Ours(family, home, cloud, server, devices)


def _devices(family: Family, count: int) -> list[subprocess.Popen[str]]:
    processes = min(count, os.cpu_count() or 1)
    bounds = [count * i // processes for i in range(processes + 1)]
    return [
        family.start("devices", [sys.executable, HERE / "rounds_devices.py", "devices", a, b])
        for a, b in itertools.pairwise(bounds)
    ]


@contextlib.contextmanager
def ours(folder: Path, case: Case, relay: Relay | None = None) -> Iterator[Ours]:
    """Our side of a case, its first round open and waiting."""
    with clouded(folder, case.side, case.devices, relay) as made:
        made.begin(case.devices, masked=case.masked)
        made.wait()
        made.opened = 1
        yield made
