"""The addresses at which a node answers calls, from the ready line of its serving process.

The line is in `run/serving.ready` as long as the process that wrote it lives; the file is emptied
before another one starts. It has the ports that were really opened where the settings say 0.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from triplane.edge.home import NodeHome

MAX_LINE_BYTES: Final = 256 << 10
"""The line names every model, of which a node has at most 64."""
MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Ready:
    """The addresses that serving listens on."""

    host: str
    port: int
    metrics_port: int
    tls: bool


def said_in(path: Path) -> Ready | None:
    """Parse the line in a file; None while there is no complete valid line."""
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


def json_line(home: NodeHome, ready: Ready) -> str:
    """Return the ready line of `triplane edge up --json`."""
    node = {"name": home.identity.name, "cloud": home.identity.cloud, "home": str(home.path)}
    return json.dumps({**node, **asdict(ready)})


def text(home: NodeHome, ready: Ready) -> str:
    """Return the ready line for people."""
    how = "TLS" if ready.tls else "not encrypted"
    return (
        f"{home.identity.name} of {home.identity.cloud} answers calls on {ready.host}:{ready.port} "
        f"({how}; metrics :{ready.metrics_port}); logs in {home.logs}"
    )
