"""The addresses at which a node answers calls, as its serving process printed them.

The line lies in `run/serving.ready` for as long as the process that wrote it lives; it is emptied
before another one starts. It is the process's word, so a port of 0 is the one it was given.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from triplane.edge.home import NodeHome

MAX_LINE_BYTES: Final = 256 << 10
"""The line names every model; a node has 64 at most."""
MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Ready:
    """The addresses that serving listens on."""

    host: str
    port: int
    metrics_port: int
    tls: bool


def said_in(path: Path) -> Ready | None:
    """The whole line in a file; None while there is none, or none that can be read."""
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_LINE_BYTES)
        parsed = json.loads(line) if line.endswith(b"\n") else {}
        ready = Ready(
            str(parsed["host"]),
            int(parsed["port"]),
            int(parsed["metrics_port"]),
            bool(parsed["tls"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return ready if 0 < ready.port <= MAX_PORT else None


def record(home: NodeHome, ready: Ready) -> dict[str, object]:
    """The ready line of `triplane edge up --json`."""
    return {
        "name": home.identity.name,
        "cloud": home.identity.cloud,
        "home": str(home.path),
        "host": ready.host,
        "port": ready.port,
        "metrics_port": ready.metrics_port,
        "tls": ready.tls,
    }


def text(home: NodeHome, ready: Ready) -> str:
    """The ready line for people."""
    how = "TLS" if ready.tls else "not encrypted"
    return (
        f"{home.identity.name} of {home.identity.cloud} answers calls on {ready.host}:{ready.port} "
        f"({how}; metrics :{ready.metrics_port}); logs in {home.logs}"
    )
