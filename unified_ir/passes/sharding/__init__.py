"""Planning how a function is split over devices, without devices (`docs/parallel.md`)."""

from triplane.unified_ir.passes.sharding.planner import ParallelPlan as ParallelPlan
from triplane.unified_ir.passes.sharding.planner import plan as plan
from triplane.unified_ir.passes.sharding.planner import plan_with_layouts as plan_with_layouts
from triplane.unified_ir.passes.sharding.problem import data_parallel as data_parallel
from triplane.unified_ir.passes.sharding.topology import LinkCost as LinkCost
from triplane.unified_ir.passes.sharding.topology import Topology as Topology
from triplane.unified_ir.passes.sharding.topology import read_topology as read_topology

__all__ = [
    "LinkCost",
    "ParallelPlan",
    "Topology",
    "data_parallel",
    "plan",
    "plan_with_layouts",
    "read_topology",
]
