"""`python -m triplane.edge.agent HOME`: the agent process of a node."""

import asyncio
import sys
from pathlib import Path

from triplane.edge.agent.agent import Agent
from triplane.edge.home import NodeHome
from triplane.proto import signals
from triplane.proto.errors import TriplaneError
from triplane.proto.logs import configure_logging


def main() -> None:
    """Run until a signal."""
    signals.restore_defaults()
    configure_logging()
    try:
        asyncio.run(Agent(NodeHome(Path(sys.argv[1]))).run())
    except TriplaneError as error:
        sys.exit(f"agent: {error}")


if __name__ == "__main__":
    main()
