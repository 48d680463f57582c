"""The child that makes a run's plan and its result.

It is started as `python -m triplane.cloud.federation.planning`, and takes and answers one order
through `proto/sandbox.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from triplane.proto.sandbox import serve_order


def plan(order: dict[str, Any]) -> dict[str, Any]:
    """Write the plan at `order["plan"]` and the first shared state at `order["state"]`."""
    from triplane.unified_ir.convert.conversion import read_model
    from triplane.unified_ir.federated.algorithms import Hyper, algorithm, plan_of
    from triplane.unified_ir.federated.core.files import write_state
    from triplane.unified_ir.federated.core.metric import metric_of

    module, digest = read_model(Path(order["model"]))
    row, hyper = algorithm(order["algorithm"]), Hyper(**order["hyper"])
    plan = plan_of(module, row.name, hyper, Path(order["plan"]), digest=digest)
    write_state(Path(order["state"]), plan.state, plan.roles, plan=plan.digest)
    roles = {name: plan.roles[name] for name in plan.state}
    return {
        "digest": plan.digest,
        "roles": roles,
        "frozen": list(plan.frozen),
        "weighting": row.weighting,
        "server": row.server.name,
        "metric": metric_of(module.entry("evaluate").result_names).name,
    }


def finish(order: dict[str, Any]) -> dict[str, Any]:
    """Write the model of a shared state at `order["out"]`."""
    from triplane.unified_ir.convert.conversion import read_model
    from triplane.unified_ir.federated.algorithms import Hyper, module_of
    from triplane.unified_ir.federated.core.files import read_state
    from triplane.unified_ir.ops.check import save

    module, _ = read_model(Path(order["model"]))
    state = read_state(Path(order["state"]), plan=order["plan_digest"])
    hyper = Hyper(**order["hyper"])
    model = module_of(module, order["algorithm"], hyper, state, meta=order["meta"])
    out = Path(order["out"])
    return {"model_digest": save(model, out)}


WORK: Final = {"plan": plan, "finish": finish}

if __name__ == "__main__":
    serve_order(WORK)
