"""Room for connections: every one of them takes a descriptor."""

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 4096
RESERVED: Final = 256  # for files, listeners, pipes, the metrics page and gRPC's own


def raise_descriptor_limit() -> None:
    """Raise the process's limit of open descriptors as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS names no hard limit that can be set
        logger.info("descriptor limit kept", extra={"limit": soft, "reason": str(error)})


def max_connections() -> int:
    """Connections at once: `MAX_CONNECTIONS`, or fewer where descriptors do not reach."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - min(RESERVED, soft // 2)))
