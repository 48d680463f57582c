"""Keep the inference server and the agent of a node running.

A child that ends is started again after a pause. The pause doubles, up to 10 s for the agent and
1 s for serving, whose calls fail meanwhile; it is reset after ten seconds without a failure.
SIGTERM and SIGINT stop the agent, drain serving, and end the supervisor; a second signal kills the
agent and cuts the drain short. An error that ends the supervisor stops its children in the same
way. If the supervisor is killed, its children go on, and the next supervisor takes them over.

A port of 0 in `node.json` is replaced by the port that serving got at its first start, so that the
node keeps its address. The agent reports the address, so it is started after that.
"""

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from triplane.edge.home import NodeHome
from triplane.edge.supervisor.children import Child, adopt, last_line, start
from triplane.edge.supervisor.ready import Ready, said_in
from triplane.proto import signals
from triplane.proto.disk import lock_file
from triplane.proto.errors import Conflict, TriplaneError

logger = logging.getLogger(__name__)

SERVING_SETTINGS: Final = (
    "host", "port", "metrics_port", "device", "tls_cert", "tls_key", "tls_client_ca",
)  # fmt: skip
"""Settings of the node that are options of its server under the same name."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 10.0
MAX_SERVING_PAUSE_S: Final = 1.0
STEADY_S: Final = 10.0
LOOK_S: Final = 0.05
DRAIN_S: Final = 30.0
STOP_S: Final = 10.0
"""Time for a child to end besides the drain, and again after it was killed."""
HURRY_S: Final = signals.HURRY_S + 2.0
"""Time for serving to end itself after a second signal."""
LIMIT_S: Final = DRAIN_S + 5 * STOP_S
"""Limit of the whole end; the steps of `_stop` take less, even if both children are killed."""


@dataclass(slots=True)
class ManagedProcess:
    """One child process. pause_s: before its next start, at due_s. stop_s: time for it to end."""

    name: str
    command: Callable[[], list[str]]
    max_pause_s: float
    stop_s: float
    says: Path | None = None
    child: Child | None = None
    started_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    due_s: float = 0.0

    def wait(self, now_s: float) -> None:
        """Schedule the next start after the pause, and double the pause."""
        self.due_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, self.max_pause_s)


class Supervisor:
    """One run of the supervisor. Conflict if another one keeps this home.

    Corrupt and NotFound name a missing or damaged file; then no process is started or taken over.
    on_ready: called once, when calls are answered, with the addresses.
    """

    def __init__(self, home: NodeHome, on_ready: Callable[[Ready], None] = lambda _: None) -> None:
        home.require_enrolled()
        _ = (
            home.identity.name,
            home.identity.cloud,
        )  # damaged files are reported before anything runs
        settings = home.settings
        home.make()
        self._home = home
        try:
            self._lock = lock_file(home.run / "supervisor.lock")
        except BlockingIOError as error:
            raise Conflict(f"another supervisor keeps {home.path}; stop it first") from error
        self._hurried = threading.Event()
        self._on_ready, self._is_ready = on_ready, False
        self._has_ports = 0 not in (settings.port, settings.metrics_port)
        self._says = home.run / "serving.ready"
        self._processes = [
            ManagedProcess(
                "serving", self._serving_command, MAX_SERVING_PAUSE_S, DRAIN_S + STOP_S, self._says
            ),
            ManagedProcess("agent", self._agent_command, MAX_PAUSE_S, STOP_S),
        ]

    def run(self) -> None:
        """Keep the children running until a signal or an error, then stop them."""
        termination = signals.Termination(
            limit_s=LIMIT_S, hurry=self._hurried.set, hurry_s=HURRY_S + 2 * STOP_S
        )
        try:
            while not termination.wait(LOOK_S):
                for process in self._processes[: 2 if self._has_ports else 1]:
                    self._look(process)
                if not self._is_ready:
                    self._listen()
        finally:
            termination.request()
            self._stop()

    def _look(self, process: ManagedProcess) -> None:
        now = time.monotonic()
        if process.child is not None:
            if not process.child.ended:
                return
            lived_s = now - process.started_s
            process.pause_s = FIRST_PAUSE_S if lived_s > STEADY_S else process.pause_s
            log = self._home.logs / f"{process.name}.log"
            facts = {
                "child": process.name,
                "lived_s": round(lived_s, 3),
                "pause_s": process.pause_s,
            }
            logger.warning("ended", extra={**facts, "last_line": last_line(log)})
            process.child.close()
            process.child = None
            process.wait(now)
        if now >= process.due_s:
            try:
                self._begin(process)
            except (OSError, TriplaneError) as error:  # such as a full disk, which may pass
                facts = {"child": process.name, "pause_s": process.pause_s, "reason": str(error)}
                logger.error("not started", extra=facts)  # noqa: TRY400 -- the reason is enough
                process.wait(now)

    def _begin(self, process: ManagedProcess) -> None:
        name, run, logs = process.name, self._home.run, self._home.logs
        process.child = adopt(name, run) or start(
            name, process.command(), run=run, logs=logs, says=process.says
        )
        process.started_s = time.monotonic()

    def _listen(self) -> None:
        """Read the ready line of serving, store its ports, and call `on_ready`."""
        serving = self._processes[0].child
        ready = said_in(self._says)
        if serving is None or ready is None:
            return
        if not self._has_ports:
            settings = self._home.settings
            settings = replace(settings, port=ready.port, metrics_port=ready.metrics_port)
            self._home.save_settings(settings)
            self._has_ports = True
        self._is_ready = True
        self._on_ready(ready)

    def _stop(self) -> None:
        """Stop the agent first, because it must not switch models while serving drains."""
        for process in reversed(self._processes):
            # A process that a killed supervisor left may not have been taken over yet.
            child = process.child or adopt(process.name, self._home.run)
            if child is None:
                continue
            child.signal(signal.SIGTERM)
            if not self._ends(child, process.stop_s):
                child.signal(signal.SIGTERM)
                if process.name == "agent" or not child.wait(HURRY_S):
                    child.signal(signal.SIGKILL)
                    child.wait(STOP_S)
            logger.info("stopped", extra={"child": process.name})
        self._lock.close()

    def _ends(self, child: Child, grace_s: float) -> bool:
        """Wait until a child ends; False if that takes too long or a second signal comes."""
        until_s = time.monotonic() + grace_s
        while not child.wait(LOOK_S):
            if self._hurried.is_set() or time.monotonic() > until_s:
                return False
        return True

    def _agent_command(self) -> list[str]:
        return [sys.executable, "-m", "triplane.edge.agent", str(self._home.path)]

    def _serving_command(self) -> list[str]:
        options = {
            "bundles": [],
            "home": str(self._home.path),
            "control_socket": str(self._home.control_socket),
            "drain_s": DRAIN_S,
            "json": True,
            "log_level": "info",
        }
        options |= {name: getattr(self._home.settings, name) for name in SERVING_SETTINGS}
        return [sys.executable, "-m", "triplane.edge.serving", json.dumps(options)]
