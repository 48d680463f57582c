"""Which nodes the release policy allows to take automatically signed versions (decision 0012).

The node decides by its own copy of the policy. The cloud only foresees the decision, so that a
rollout does not wait for nodes that will refuse.
"""

from __future__ import annotations

from collections.abc import Iterable

from triplane.cloud.fleet.values import Limit
from triplane.proto.targets import in_share


def ineligible_reason(node: str, model: str, targets: Iterable[str], limit: Limit | None) -> str:
    """Return why the node would refuse the model's version; empty if it would not.

    targets: targets that the node takes, best first.
    """
    if limit is None or next(iter(targets), "") in limit.released:
        return ""
    return "" if in_share(node, model, limit.share) else limit_text(model, limit)


def limit_text(model: str, limit: Limit) -> str:
    """Describe a node that the limit leaves out."""
    return (
        f"outside the {limit.share:.2%} of nodes that the release policy lets take versions of "
        f"{model} that people have not signed"
    )
