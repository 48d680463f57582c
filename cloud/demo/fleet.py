"""A cloud and its nodes as processes of the real command, and queries to them."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from triplane.cloud.demo import processes
from triplane.proto.errors import Unavailable

NODES: Final = ("camera-a", "camera-b")
WAIT_S: Final = 90.0
STEP_S: Final = 0.5
"""Pause between two queries to the cloud, each of which is a process of half a second."""


@dataclass(frozen=True, slots=True)
class DemoFleet:
    """A running cloud: its folders, its addresses, and its nodes' homes by name."""

    home: Path
    offline_keys: Path
    port: int
    enrol_port: int
    dashboard: str
    homes: dict[str, Path] = field(default_factory=dict)

    def ask(self, *args: str | Path) -> Any:
        """Return the JSON answer of a verb, called as the operator."""
        return processes.answer(*args, "--identity", self.home / "operator")

    def followed(self, *args: str | Path) -> int:
        """Return the exit code of a verb that shows its progress on this terminal."""
        return processes.run_visibly(*args, "--identity", self.home / "operator")

    def enrol(self, role: str, name: str, home: Path, *options: str | Path) -> None:
        """Enroll a node or device with a token of its own."""
        labels = ("--label", "site=demo") if role == "node" else ()
        token = self.ask("cloud", "token", "--role", role, "--name", name, *labels)["token"]
        processes.output(
            "edge" if role == "node" else role, "enrol", token,
            "--cloud", f"127.0.0.1:{self.enrol_port}", "--home", home, *options, "--json",
        )  # fmt: skip

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return the cloud's view of every node, by name."""
        return {node["name"]: node for node in self.ask("fleet", "ls")["nodes"]}

    def models(self, model: str) -> dict[str, dict[str, Any]]:
        """Return each node's report of a model, by the node's name."""
        return {
            name: next((m for m in node["report"]["models"] if m["model"] == model), {})
            for name, node in self.nodes().items()
        }

    def serving_address(self, node: str) -> str:
        """Return the address of a node's inference server."""
        return str(self.nodes()[node]["report"]["serving_address"])


@contextlib.contextmanager
def fleet_at(folder: Path) -> Iterator[DemoFleet]:
    """Run a new cloud and two enrolled nodes below `folder`; stop them at the end."""
    home, keys = folder / "cloud", folder / "offline-keys"
    processes.output("cloud", "init", "--home", home, "--offline-keys", keys, "--json")
    with contextlib.ExitStack() as running:
        _, ready = running.enter_context(processes.started(
            "cloud", "up", "--home", home, "--host", "127.0.0.1", "--port", "0",
            "--enrol-port", "0", "--dashboard-port", "0",
        ))  # fmt: skip
        fleet = DemoFleet(home, keys, ready["port"], ready["enrol_port"], ready["dashboard"])
        for name in NODES:
            home = fleet.homes[name] = folder / name
            # Fixed ports, so that the kept fleet can be started again at the same addresses.
            ports = ("--port", str(free_port()), "--metrics-port", str(free_port()))
            fleet.enrol("node", name, home, *ports)
            log = folder / f"{name}.log"
            running.enter_context(processes.background("edge", "up", "--home", home, log=log))
        until("two nodes connected", lambda: all(n["connected"] for n in fleet.nodes().values()))
        yield fleet


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until(what: str, holds: Callable[[], bool]) -> None:
    """Wait until `holds`; Unavailable says what did not happen."""
    end_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > end_s:
            raise Unavailable(f"{what}: not within {WAIT_S:.0f} s")
        time.sleep(STEP_S)


def agent_process(home: Path) -> int:
    """Return the process id of a node's agent, from the supervisor's record."""
    return int(json.loads((home / "run" / "agent.json").read_text())["pid"])
