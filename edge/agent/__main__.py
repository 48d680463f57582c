"""`python -m triplane.edge.agent HOME`: the agent process of a node."""

import asyncio
import logging
import sys
from pathlib import Path

from triplane.edge.agent.agent import Agent
from triplane.edge.home import NodeHome
from triplane.edge.serving.__main__ import Facts
from triplane.proto import signals
from triplane.proto.errors import TriplaneError


def main() -> None:
    """Run until a signal."""
    signals.restore_defaults()
    log = logging.StreamHandler()
    log.setFormatter(Facts())
    logging.basicConfig(level="INFO", handlers=[log])
    try:
        asyncio.run(Agent(NodeHome(Path(sys.argv[1]))).run())
    except TriplaneError as error:
        sys.exit(f"agent: {error}")


if __name__ == "__main__":
    main()
