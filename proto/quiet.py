"""grpc's own lines on standard error. This module imports nothing of grpc: it is called before."""

import os


def quiet_grpc() -> None:
    """Keep grpc's own lines off standard error: what they say is in our errors.

    To be called before grpc is imported, by every process that listens or calls. Whoever sets
    GRPC_VERBOSITY sees them.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
