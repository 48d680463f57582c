"""The graphs of federated algorithms, derived from a module's `loss`; a plan for the devices."""

from triplane.unified_ir.federated.algorithms.hyper import MAX_INNER_STEPS
from triplane.unified_ir.federated.algorithms.plan import (
    PlanMade,
    functions_of,
    module_of,
    plan_of,
)
from triplane.unified_ir.federated.algorithms.table import (
    ALGORITHMS,
    Algorithm,
    Hyper,
    algorithm,
    defaults,
)

__all__ = [
    "ALGORITHMS",
    "MAX_INNER_STEPS",
    "Algorithm",
    "Hyper",
    "PlanMade",
    "algorithm",
    "defaults",
    "functions_of",
    "module_of",
    "plan_of",
]
