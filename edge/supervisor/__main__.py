"""`python -m triplane.edge.supervisor HOME`: the supervisor of a node."""

import sys
from collections.abc import Callable
from pathlib import Path

from triplane.edge.home import NodeHome
from triplane.edge.supervisor.ready import Ready, text
from triplane.edge.supervisor.supervisor import Supervisor
from triplane.proto import signals
from triplane.proto.errors import TriplaneError
from triplane.proto.logs import configure_logging, say_ready

Said = Callable[[NodeHome, Ready], str]


def main(home: Path, said: Said = text) -> None:
    """Keep the node of a home until a signal; one line, `said`, tells that calls are answered.

    Raises the families.
    """
    signals.restore_defaults()
    node = NodeHome(home)
    configure_logging()

    def announce(ready: Ready) -> None:
        say_ready(said(node, ready))

    Supervisor(node, announce).run()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except TriplaneError as error:
        sys.exit(f"supervisor: {error}")
