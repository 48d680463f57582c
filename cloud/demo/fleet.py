"""A cloud and its nodes as processes of the real command, and queries to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triplane.cloud.demo import processes
from triplane.proto.errors import Unavailable

NODES: Final = ("camera-a", "camera-b")
WAIT_S: Final = 90.0
STEP_S: Final = 0.5
"""Pause between two queries to the cloud, each of which is a process of half a second."""


@dataclass(frozen=True, slots=True)
class DemoCloud:
    """A running cloud: its folders and its addresses."""

    home: Path
    offline_keys: Path
    port: int
    enrol_port: int
    dashboard: str

    def ask(self, *args: str | Path) -> Any:
        """Return the JSON answer of a verb, called as the operator."""
        return processes.json_of(self.tried(*args, "--json"))

    def tried(self, *args: str | Path) -> Any:
        """Return the ended process of a verb, called as the operator."""
        return processes.triplane(*args, "--identity", self.home / "operator")

    def followed(self, *args: str | Path) -> int:
        """Return the exit code of a verb that shows its progress on this terminal."""
        return processes.run_visibly(*args, "--identity", self.home / "operator")


@contextlib.contextmanager
def cloud_at(folder: Path) -> Iterator[DemoCloud]:
    """Run a new cloud below `folder`; stop it at the end."""
    home, keys = folder / "cloud", folder / "offline-keys"
    processes.output("cloud", "init", "--home", home, "--offline-keys", keys, "--json")
    with processes.server(
        "cloud", "up", "--home", home, "--host", "127.0.0.1", "--port", "0",
        "--enrol-port", "0", "--dashboard-port", "0",
    ) as ready:  # fmt: skip
        yield DemoCloud(home, keys, ready["port"], ready["enrol_port"], ready["dashboard"])


@contextlib.contextmanager
def node_at(folder: Path, cloud: DemoCloud, name: str) -> Iterator[Path]:
    """Enroll a node with a token of its own and run it; yield its home."""
    home = folder / name
    token = cloud.ask("cloud", "token", "--role", "node", "--name", name, "--label", "site=demo")
    processes.output(
        "edge", "enrol", token["token"], "--cloud", f"127.0.0.1:{cloud.enrol_port}",
        "--home", home, "--port", str(free_port()), "--metrics-port", str(free_port()),
        "--json",
    )  # fmt: skip
    with processes.background("edge", "up", "--home", home, log=folder / f"{name}.log"):
        yield home


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def reports(cloud: DemoCloud) -> dict[str, dict[str, Any]]:
    """Return the cloud's view of every node, by name."""
    return {node["name"]: node for node in cloud.ask("fleet", "ls")["nodes"]}


def until(what: str, holds: Callable[[], bool]) -> float:
    """Wait until `holds` and return the seconds; Unavailable says what did not happen."""
    start_s = time.monotonic()
    while not holds():
        if time.monotonic() - start_s > WAIT_S:
            raise Unavailable(f"{what}: not within {WAIT_S:.0f} s")
        time.sleep(STEP_S)
    return time.monotonic() - start_s


def agent_process(home: Path) -> int:
    """Return the process id of a node's agent, from the supervisor's record."""
    return int(json.loads((home / "run" / "agent.json").read_text())["pid"])


def kill_agent(home: Path) -> int:
    """Kill a node's agent with SIGKILL; return the process id it had."""
    pid = agent_process(home)
    os.kill(pid, signal.SIGKILL)
    return pid
