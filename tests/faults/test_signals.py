"""SIGTERM and SIGINT at each instant of start, serving and draining: the process ends, every time.

A process that is ready and gets one signal ends with status 0; none lives longer than `END_S`, and
none leaves a child.
"""

import json
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.faults.nursery import Nursery

from triplane.cloud.home import initialize
from triplane.cloud.identity.authority import Authority
from triplane.edge.home import NodeHome, NodeSettings
from triplane.edge.serving.wire import WIRE_NAME
from triplane.edge.supervisor.children import is_alive
from triplane.proto.identity import (
    IdentityFolder,
    certificate_pem,
    certificate_request,
    key_pem,
    new_key,
)
from triplane.proto.signed.trust import bootstrap
from triplane.unified_ir import convert, nn, optim, train

END_S = 180.0
READY_S = 180.0
STEP_S = 0.005
MARK = "TRIPLANE_SIGNAL_TEST"
EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "signals.md"
PHASES = ("starting", "serving", "draining")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
DRAIN_S = 20.0
# The kernel gives signals to other threads once they are asked for, so they interrupt no call of
# the main thread: as if each came just before a call blocks. Children inherit the blocked signals.
NOT_INTERRUPTED = """
import runpy, signal, sys
from triplane.proto.signals import SIGNALS, Termination
init = Termination.__init__
def made(*args, **options):
    init(*args, **options)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
Termination.__init__ = made
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Kind:
    """A process: its module and arguments, and what its output says when it is ready."""

    module: str
    arguments: tuple[str, ...]
    ready: str


@dataclass
class Tally:
    ended: Counter = field(default_factory=Counter)
    statuses: Counter = field(default_factory=Counter)
    longest_s: Counter = field(default_factory=Counter)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """All processes, with a cloud that is away; what they write stays in their folders."""
    folder = tmp_path_factory.mktemp("kinds")
    home = initialize(folder / "cloud", offline_keys=folder / "keys").home
    cloud = {
        "home": str(home.path), "host": "127.0.0.1", "port": 0, "enrol_port": 0,
        "dashboard_port": 0,
    }  # fmt: skip
    device = folder / "device"
    device.mkdir()
    enrolled(home, IdentityFolder(device / "identity"), "ann")
    np.savez(folder / "samples.npz", x=np.zeros((10, 4), np.float32), y=np.zeros(10, np.int64))
    return {
        "serving": Kind(
            "triplane.edge.serving",
            (
                json.dumps(
                    {
                        "bundles": [str(made_bundle(folder))], "port": 0, "metrics_port": 0,
                        "json": True, "drain_s": DRAIN_S,
                        "limits": {"receive_s": 3600, "call_s": 3600},
                    }
                ),
            ),
            '"serving":',
        ),
        "supervisor": Kind(
            "triplane.edge.supervisor", (made_node(home, folder / "a"),), "answers calls on"
        ),
        "agent": Kind("triplane.edge.agent", (made_node(home, folder / "b"),), "agent started"),
        "device": Kind(
            "triplane.device", (str(device), "--data", str(folder / "samples.npz")), '"device":'
        ),
        "cloud": Kind("triplane.cloud", (json.dumps(cloud),), '"enrol_port":'),
    }  # fmt: skip


def made_bundle(folder):
    nn.seed(0)
    trainer = train.Trainer(nn.Dense(4, 2), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(1))
    trainer.prepare(np.zeros((1, 4), np.float32), np.zeros(1, np.int64))
    path = folder / "dense.bundle"
    convert.convert(trainer.export(("predict",)), name="dense", out=path)
    return path


def made_node(cloud, home):
    node = NodeHome(home)
    node.make()
    enrolled(cloud, node.identity, home.name)
    bootstrap(node.trust, lambda _: (cloud.metadata / "1.root.json").read_bytes())
    node.save_settings(NodeSettings(port=0, metrics_port=0))
    return str(home)


def enrolled(cloud, identity, name):
    authority, key = Authority.load(cloud.authority), new_key()
    issued = authority.issue(certificate_request(key), name, time.time())
    identity.save(
        authority=authority.pem,
        certificate=certificate_pem(issued),
        key=key_pem(key),
        cloud="127.0.0.1:1",
    )


class Running:
    """A process that writes to a log of its own; forked by a nursery where one is given."""

    def __init__(self, kind, log, nursery=None, *, interrupted=True):
        self._kind, self._log, self.mark = kind, log, f"{MARK}={os.urandom(8).hex()}"
        self._child = None
        name, _, value = self.mark.partition("=")
        with log.open("wb") as out:
            if nursery is not None:
                self.pid = nursery.fork(kind.module, [*kind.arguments], out.fileno(), out.fileno())
            else:
                how = ("-m",) if interrupted else ("-c", NOT_INTERRUPTED)
                self._child = subprocess.Popen(
                    [sys.executable, *how, kind.module, *kind.arguments],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    env={**os.environ, name: value}, start_new_session=True,
                )  # fmt: skip
                self.pid = self._child.pid
        self._handle = os.pidfd_open(self.pid)

    def said(self):
        return self._log.read_text(errors="replace")

    def is_ready(self):
        return self._kind.ready in self.said()

    def has_ended(self):
        if self._child is not None:
            return self._child.poll() is not None
        return not Path(f"/proc/{self.pid}").exists()

    def until_ready(self):
        self._until(lambda: self.is_ready() or self.has_ended(), READY_S)
        assert self.is_ready(), self.said()[-2000:]

    def until_ended(self):
        """Seconds it took."""
        start_s = time.monotonic()
        self._until(self.has_ended, END_S)
        return time.monotonic() - start_s

    def _until(self, holds, seconds):
        until_s = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until_s, f"not within {seconds} s: {self.said()[-2000:]}"
            time.sleep(STEP_S)

    def send(self, number):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    @property
    def status(self):
        """None where the nursery's system reaped it."""
        return self._child.returncode if self._child else None

    def left(self):
        """Processes with our mark in their environment, or in a supervisor's records."""
        run = Path(self._kind.arguments[0]) / "run"
        found = [name for name in ("serving", "agent") if is_alive(name, run)]
        if self._child is None:
            return found
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                marked = self.mark.encode() in (path / "environ").read_bytes()
                alive = (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if marked and alive:
                    found.append((path / "cmdline").read_text())
        return found

    def close(self):
        self.send(signal.SIGKILL)
        if self._child is not None:
            self._child.wait(END_S)
        os.close(self._handle)


@contextmanager
def running(kind, log, nursery=None, **options):
    process = Running(kind, log, nursery, **options)
    try:
        yield process
    finally:
        process.close()


@contextmanager
def busy_caller(process):
    """A call to serving that never ends, so that it drains for as long as it may."""
    ready = json.loads(next(line for line in process.said().splitlines() if '"serving":' in line))
    stalled = threading.Event()

    def nothing():
        stalled.wait(END_S)
        yield b""

    with grpc.insecure_channel(f"127.0.0.1:{ready['port']}") as channel:
        grpc.channel_ready_future(channel).result(READY_S)
        call: Any = channel.stream_unary(f"/{WIRE_NAME}/ModelInfer").future(nothing())
        try:
            yield
        finally:
            stalled.set()
            call.cancel()


def one(kind, phase, log, chance, *, start_s=1.0, nursery=None, tally=None, interrupted=True):
    """Send one or two signals to a new process at an instant of the phase; what its end was."""
    with running(kind, log, nursery, interrupted=interrupted) as process:
        number = chance.choice(SIGNALS)
        if phase == "starting":
            number = signal.SIGTERM  # Python's own start takes SIGINT as it likes
            time.sleep(chance.uniform(0, start_s))
            allowed = {0, -number}
            process.send(number)
        else:
            process.until_ready()
            time.sleep(chance.choice((0.0, chance.uniform(0, 0.01), chance.uniform(0, 0.3))))
            if phase == "serving":
                allowed = {0}
                process.send(number)
            else:
                allowed = {0, 1, *(-n for n in SIGNALS)}
                if kind.module == "triplane.edge.serving":
                    with busy_caller(process):
                        twice(process, number, chance)
                else:
                    twice(process, number, chance)
        took_s = process.until_ended()
        assert process.status in {None, *allowed}, (phase, number, process.status, process.said())
        assert process.left() == []
    if tally is not None:
        name = kind.module.removeprefix("triplane.").rpartition(".")[2]
        tally.ended[name, phase] += 1
        tally.statuses[str(process.status)] += 1
        tally.longest_s[name, phase] = max(tally.longest_s[name, phase], took_s)


def twice(process, number, chance):
    process.send(number)
    time.sleep(chance.uniform(0, 0.2))
    process.send(chance.choice(SIGNALS))


KINDS = ("serving", "supervisor", "agent", "device", "cloud")
IN_TURN = [
    pytest.param(name, phase, marks=[] if i % len(PHASES) == k else pytest.mark.long)
    for i, name in enumerate(KINDS)
    for k, phase in enumerate(PHASES)
]
"""Each kind of process in one phase, the others in the long run."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase"), IN_TURN)
def test_a_process_ends_on_a_signal_at_any_instant(kinds, tmp_path, name, phase):
    chance = random.Random(f"{name} {phase}")
    one(kinds[name], phase, tmp_path / "log", chance, interrupted=phase != "serving")


@contextmanager
def load(processes):
    """Something else for each processor to do."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait(END_S)


@pytest.mark.deep
def test_a_thousand_signals_end_a_thousand_processes_under_load(kinds, tmp_path):
    count, seed = int(os.environ.get("TRIPLANE_SIGNALS", "1000")), 2026
    chance, tally, started_s = random.Random(seed), Tally(), time.time()
    cores = os.cpu_count() or 1
    with load(cores), Nursery() as nursery:
        for number in range(count):
            kind = kinds[[*kinds][number % len(kinds)]]
            phase = PHASES[number // len(kinds) % len(PHASES)]
            # A forked process starts in a tenth of the time, so more of them die while they start.
            forked = chance.random() < 0.7
            one(
                kind, phase, tmp_path / "log", chance, start_s=0.5 if forked else 4.0,
                nursery=nursery if forked else None, tally=tally,
            )  # fmt: skip
    write_evidence(tally, seed, cores, (time.time() - started_s) / 60)


def write_evidence(tally, seed, cores, minutes):
    rows = [
        f"| {name} | {phase} | {count} | {tally.longest_s[name, phase]:.1f} |\n"
        for (name, phase), count in sorted(tally.ended.items())
    ]
    counted = ", ".join(
        f"{count} with {'no status, forked' if status == 'None' else status}"
        for status, count in sorted(tally.statuses.items())
    )
    ended, today = sum(tally.ended.values()), time.strftime("%Y-%m-%d", time.gmtime())
    EVIDENCE.parent.mkdir(exist_ok=True)
    EVIDENCE.write_text(
        "# Signals\n\n"
        f"`TRIPLANE_SIGNALS={ended} make deep SUITE=signals`, {today}, seed {seed}, "
        f"{platform.machine()}, {cores} cores with {cores} busy loops beside the processes, "
        f"Python {platform.python_version()}; {minutes:.0f} minutes.\n\n"
        f"{ended} processes got SIGTERM or SIGINT (two of them while they drain) at random "
        "instants. Every one ended. No supervisor left a child, nor did any process that was "
        "started and not forked.\n\n"
        "| process | while it was | ended | longest time to the end, s |\n|---|---|---|---|\n"
        + "".join(rows)
        + f"\nExit statuses: {counted}.\n"
    )
