"""Studies: compare algorithms on a partitioned dataset, with devices simulated in one process."""

from triplane.proto.lazy import public_names as _public_names
from triplane.unified_ir.federated.study.export import rounds_csv as rounds_csv
from triplane.unified_ir.federated.study.export import scores_csv as scores_csv
from triplane.unified_ir.federated.study.partition import by_dirichlet as by_dirichlet
from triplane.unified_ir.federated.study.partition import by_group as by_group
from triplane.unified_ir.federated.study.partition import by_label_shards as by_label_shards
from triplane.unified_ir.federated.study.partition import evenly as evenly
from triplane.unified_ir.federated.study.report import page as page
from triplane.unified_ir.federated.study.report import picture as picture
from triplane.unified_ir.federated.study.simulate import Study as Study
from triplane.unified_ir.federated.study.simulate import simulate as simulate
from triplane.unified_ir.federated.study.trial import DeviceScore as DeviceScore
from triplane.unified_ir.federated.study.trial import Difference as Difference
from triplane.unified_ir.federated.study.trial import RoundRow as RoundRow
from triplane.unified_ir.federated.study.trial import Summary as Summary
from triplane.unified_ir.federated.study.trial import Trial as Trial
from triplane.unified_ir.federated.study.trial import difference as difference
from triplane.unified_ir.federated.study.trial import summary as summary
from triplane.unified_ir.federated.study.verdicts import verdicts as verdicts
from triplane.unified_ir.federated.study.verdicts import warnings as warnings

__all__ = list(_public_names(globals()))
