"""Limit of calls that a gRPC server has received and Python has not accepted yet.

By default gRPC drops calls at random beyond 1,000 of them, whichever caller made them: a flood of
calls that are reset at once would end the calls of others.
"""

from typing import Final

MAX_UNSEEN_CALLS: Final = 1 << 16
UNSEEN_CALLS: Final = (
    ("grpc.server.max_pending_requests", MAX_UNSEEN_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_UNSEEN_CALLS),
)
