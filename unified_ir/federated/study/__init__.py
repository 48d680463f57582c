"""Studies: algorithms compared on a partitioned dataset, devices simulated in one process."""

from triplane.unified_ir.federated.study.partition import (
    by_dirichlet,
    by_group,
    by_label_shards,
    evenly,
)
from triplane.unified_ir.federated.study.report import page, picture
from triplane.unified_ir.federated.study.simulate import Study, simulate
from triplane.unified_ir.federated.study.trial import (
    DeviceScore,
    RoundRow,
    Summary,
    Trial,
    summary,
)

__all__ = [
    "DeviceScore",
    "RoundRow",
    "Study",
    "Summary",
    "Trial",
    "by_dirichlet",
    "by_group",
    "by_label_shards",
    "evenly",
    "page",
    "picture",
    "simulate",
    "summary",
]
