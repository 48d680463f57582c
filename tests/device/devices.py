"""Devices as real processes and in-process clients against a real cloud."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.cloud.federation import given

from triplane.cloud.identity.rights import PrincipalRole
from triplane.cloud.server import running
from triplane.device import FederatedClient


@asynccontextmanager
async def cloud_of(folder, **options):
    """A running cloud that has tiny@1."""
    async with running(given.make_home(folder), **options) as cloud:
        await given.registered(cloud, folder)
        yield cloud


async def token_for(cloud, name):
    invited = await cloud.principals.invite("operator", PrincipalRole.DEVICE, name=name, labels={})
    return invited.token


async def client_of(cloud, folder, name, number, **options):
    """An enrolled client of this process with a shard of its own."""
    client = FederatedClient(
        folder / name, given.shard(number), population=given.POPULATION, **options
    )
    token = await token_for(cloud, name)
    assert await asyncio.to_thread(client.enrol, token, cloud.enrol_address) == name
    return client


@asynccontextmanager
async def taking_part(*clients):
    """Every client serves on this loop."""
    tasks = [asyncio.create_task(client.serve()) for client in clients]
    try:
        yield
    finally:
        for client in clients:
            client.stop()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


def save_shard(path, shard):
    held_out = {f"held_out.{name}": x for name, x in shard.held_out.items()}
    np.savez(path, **shard.train, **held_out)


@dataclass
class Process:
    """`python -m triplane.device`: can be killed and started again."""

    home: Path
    data: Path
    population: str = given.POPULATION
    interpreter: tuple = (sys.executable,)
    said: dict = field(default_factory=dict)
    child: Any = None

    def command(self):
        return [
            *self.interpreter, "-m", "triplane.device", str(self.home), "--data", str(self.data),
            "--population", self.population,
        ]  # fmt: skip

    def start(self):
        with (self.home / "log").open("ab") as log:
            self.child = subprocess.Popen(
                self.command(), stdout=subprocess.PIPE, stderr=log, text=True
            )
        line = self.child.stdout.readline()
        assert line, self.log()
        self.said = json.loads(line)

    def processor_s(self):
        """Seconds of processor it took so far, with the process that does its tasks."""
        times = [process.cpu_times() for process in self.both()]
        return sum(time.user + time.system for time in times)

    def peak_bytes(self):
        """The most memory that was resident at once in each of its processes, added."""
        peaks = []
        for process in self.both():
            status = Path(f"/proc/{process.pid}/status").read_text()
            peaks += re.findall(r"VmHWM:\s+(\d+) kB", status)
        return sum(map(int, peaks)) * 1024

    def both(self):
        """The process, and the one that does its tasks if it has begun."""
        process = psutil.Process(self.child.pid)
        return [process, *process.children()]

    def kill(self):
        if self.child is not None:
            self.child.kill()
            self._reap()

    def stop(self):
        if self.child is not None:
            self.child.terminate()
            return self._reap()
        return None

    def log(self):
        return (self.home / "log").read_text()

    def _reap(self):
        code = self.child.wait(30)
        self.child.stdout.close()
        self.child = None
        return code


async def process_of(cloud, folder, name, number):
    """An enrolled device process, not started."""
    await client_of(cloud, folder, name, number)
    save_shard(folder / f"{name}.npz", given.shard(number))
    return Process(folder / name, folder / f"{name}.npz")


@contextlib.contextmanager
def started(*processes):
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
            process.start()
        yield
