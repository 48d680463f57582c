"""Bytes that XLA gives to arguments and results, beside the planner's; run as a process of its own.

The number of virtual devices is fixed before JAX starts (JAX_NUM_CPU_DEVICES).
"""

import json
import sys

import numpy as np

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.engines.xla.door import exact, jax
from triplane.unified_ir.engines.xla.lower import Requirements, Trace
from triplane.unified_ir.passes.sharding import data_parallel, plan_with_layouts

SIZES = {"N": 16}
MESH = (4,)


def step():
    cell = nn.Sequential(nn.Dense(12, 32), nn.ReLU(), nn.Dense(32, 8))
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01))
    trainer.prepare(np.zeros((4, 12), np.float32), np.zeros(4, np.int64))
    return trainer.train_function()


def sharding(mesh, layout, rank):
    axes = [None] * rank
    for name, cut in zip(mesh.axis_names, layout, strict=True):
        if cut >= 0:
            axes[cut] = name
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def measured(plan):
    """XLA's argument, output and temporary bytes of one device."""
    function, mesh = plan.function, jax.make_mesh(MESH, ("a",))
    ranks = {p.name: p.type.rank for p in function.params}
    ranks |= {n: v.type.rank for n, v in zip(function.result_names, function.results, strict=True)}
    takes = [sharding(mesh, la, ranks[n]) for n, la in plan.layouts().items()]
    gives = [sharding(mesh, la, ranks[n]) for n, la in plan.result_layouts().items()]
    specs = [jax.ShapeDtypeStruct(p.type.concrete(SIZES), p.type.dtype.numpy)
             for p in function.params]  # fmt: skip

    def run(*args):
        return list(Trace(Requirements(), {}, None).run(function, list(args), ()))

    with exact():
        compiled = jax.jit(run, in_shardings=takes, out_shardings=gives, keep_unused=True).lower(
            *specs
        )
        used = compiled.compile().memory_analysis()
    # A tuple of results has a table of its pointers, 8 bytes each, which is not a tensor.
    table = 8 * len(function.results)
    return {"arguments": used.argument_size_in_bytes,
            "results": used.output_size_in_bytes - table,
            "temporaries": used.temp_size_in_bytes}  # fmt: skip


if __name__ == "__main__":
    function = step()
    whole = {p.name: (-1,) for p in function.params}
    rows = []
    for layouts in (whole, data_parallel(function, SIZES, MESH)):
        plan = plan_with_layouts(function, MESH, layouts, sizes=SIZES)
        memory = plan.memory
        predicted = {"arguments": memory.arguments, "results": memory.results,
                     "temporaries": memory.temporaries}  # fmt: skip
        rows.append([predicted, measured(plan)])
    sys.stdout.write(json.dumps(rows))
