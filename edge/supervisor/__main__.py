"""`python -m triplane.edge.supervisor HOME`: the supervisor of a node."""

import logging
import sys
from pathlib import Path

from triplane.edge.home import NodeHome
from triplane.edge.serving.__main__ import Facts
from triplane.edge.supervisor.supervisor import Supervisor
from triplane.proto.errors import TriplaneError


def main(home: Path) -> None:
    """Keep the node of a home until a signal. Raises the families."""
    log = logging.StreamHandler()
    log.setFormatter(Facts())
    logging.basicConfig(level="INFO", handlers=[log])
    Supervisor(NodeHome(home)).run()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except TriplaneError as error:
        sys.exit(f"supervisor: {error}")
