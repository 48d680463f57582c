"""`python -m triplane.edge.agent HOME`: the agent process of a node."""

import asyncio
import sys
from pathlib import Path

from triplane.edge.agent.agent import Agent
from triplane.edge.home import NodeHome
from triplane.proto import signals
from triplane.proto.logs import configure_logging, exit_on_error


def main() -> None:
    """Run until a signal."""
    signals.restore_defaults()
    configure_logging()
    asyncio.run(Agent(NodeHome(Path(sys.argv[1]))).run())


if __name__ == "__main__":
    exit_on_error("agent", main)
