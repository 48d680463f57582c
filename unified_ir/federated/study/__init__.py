"""Studies: algorithms compared on a partitioned dataset, devices simulated in one process."""

from triplane.unified_ir.federated.study.partition import (
    by_dirichlet,
    by_group,
    by_label_shards,
    evenly,
)
from triplane.unified_ir.federated.study.report import page, picture, verdicts
from triplane.unified_ir.federated.study.simulate import Study, simulate
from triplane.unified_ir.federated.study.trial import (
    DeviceScore,
    Difference,
    RoundRow,
    Summary,
    Trial,
    difference,
    summary,
)

__all__ = [
    "DeviceScore",
    "Difference",
    "RoundRow",
    "Study",
    "Summary",
    "Trial",
    "by_dirichlet",
    "by_group",
    "by_label_shards",
    "difference",
    "evenly",
    "page",
    "picture",
    "simulate",
    "summary",
    "verdicts",
]
