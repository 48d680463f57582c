"""grpc's own lines on standard error. This module imports nothing of grpc: it is called before."""

import os


def quiet_grpc() -> None:
    """Keep grpc's own lines off standard error: our errors contain their facts.

    Every process that listens or calls must call it before it imports grpc. Set GRPC_VERBOSITY to
    see the lines.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
