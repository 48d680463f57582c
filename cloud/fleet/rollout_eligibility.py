"""Which nodes the release policy lets take what the automatic key signed (record 0012).

The node decides by its own copy of the policy; here it is only foreseen, so that a rollout does
not wait for nodes that will refuse. Both sides must agree bit for bit; a test holds them together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from triplane.cloud.fleet.values import Limit

SHARE_BITS: Final = 53
"""As many as a float holds exactly, so that a share of 1 includes every node."""


def in_share(node: str, model: str, share: float) -> bool:
    """Whether SHA-256(node, model), read as a fraction of 1, falls below the share."""
    digest = hashlib.sha256(f"{node}\0{model}".encode()).digest()
    fraction = (int.from_bytes(digest[:8], "big") >> (64 - SHARE_BITS)) / (1 << SHARE_BITS)
    return fraction < share


def outside(node: str, model: str, targets: Iterable[str], limit: Limit | None) -> str:
    """Why the node would refuse the model's version; empty where it would not.

    targets: that the node takes, best first.
    """
    if limit is None or next(iter(targets), "") in limit.released:
        return ""
    return "" if in_share(node, model, limit.share) else said(model, limit)


def said(model: str, limit: Limit) -> str:
    """What a node is that the limit leaves out."""
    return (
        f"outside the {limit.share:.2%} of nodes that the release policy lets take versions of "
        f"{model} that people have not signed"
    )
