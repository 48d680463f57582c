"""`python -m triplane.edge.supervisor HOME`: the supervisor of a node."""

import sys
from collections.abc import Callable
from pathlib import Path

from triplane.edge.home import NodeHome
from triplane.edge.supervisor.ready import Ready, text
from triplane.edge.supervisor.supervisor import Supervisor
from triplane.proto import signals
from triplane.proto.logs import configure_logging, exit_on_error, say_ready


def main(home: Path, line: Callable[[NodeHome, Ready], str] = text) -> None:
    """Keep a node running until a signal. line: formats the ready line. Raises the families."""
    signals.restore_defaults()
    node = NodeHome(home)
    configure_logging()
    Supervisor(node, lambda ready: say_ready(line(node, ready))).run()


if __name__ == "__main__":
    exit_on_error("supervisor", lambda: main(Path(sys.argv[1])))
