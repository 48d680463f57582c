"""The graphs of federated algorithms, derived from a module's `loss`; a plan for the devices."""

from triplane.proto.lazy import public_names as _public_names
from triplane.unified_ir.federated.algorithms.aggregators import AGGREGATORS as AGGREGATORS
from triplane.unified_ir.federated.algorithms.aggregators import Robustness as Robustness
from triplane.unified_ir.federated.algorithms.hyper import MAX_INNER_STEPS as MAX_INNER_STEPS
from triplane.unified_ir.federated.algorithms.plan import PlanMade as PlanMade
from triplane.unified_ir.federated.algorithms.plan import functions_of as functions_of
from triplane.unified_ir.federated.algorithms.plan import module_of as module_of
from triplane.unified_ir.federated.algorithms.plan import plan_of as plan_of
from triplane.unified_ir.federated.algorithms.table import ALGORITHMS as ALGORITHMS
from triplane.unified_ir.federated.algorithms.table import Algorithm as Algorithm
from triplane.unified_ir.federated.algorithms.table import Hyper as Hyper
from triplane.unified_ir.federated.algorithms.table import algorithm as algorithm
from triplane.unified_ir.federated.algorithms.table import defaults as defaults
from triplane.unified_ir.federated.algorithms.table import registered as registered

__all__ = list(_public_names(globals()))
