"""Which plans the list of the role `auto` keeps."""

from collections.abc import Container, Mapping
from typing import Final

from tuf.api._payload import TargetFile

from triplane.proto.plan_statement import PlanName, is_plan

MAX_PLAN_BYTES: Final = 1 << 20
"""Size of the entries of automatically signed plans above which those not in use are dropped."""


def without_old_plans(
    listed: Mapping[str, TargetFile], new: Container[str], keep: Container[str]
) -> dict[str, TargetFile]:
    """Return the list without plans that are not in use, if plans take more than their share."""
    plans = {path: len(str(entry.to_dict())) for path, entry in listed.items() if is_plan(path)}
    if sum(plans.values()) <= MAX_PLAN_BYTES:
        return dict(listed)
    return {
        path: entry
        for path, entry in listed.items()
        if path not in plans or path in new or PlanName.parse(path).digest in keep
    }
