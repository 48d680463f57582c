"""Bytes that XLA gives to a step, beside the planner's; run as a process of its own.

The number of virtual devices is fixed before JAX starts (JAX_NUM_CPU_DEVICES).
"""

import json
import sys
from typing import Any

import numpy as np

from triplane.unified_ir import nn, optim, train, zoo
from triplane.unified_ir.engines.xla.devices import Devices
from triplane.unified_ir.engines.xla.door import exact, jax
from triplane.unified_ir.engines.xla.lower import Requirements, Trace
from triplane.unified_ir.engines.xla.program import XlaExecutable, XlaProgram
from triplane.unified_ir.passes.sharding import data_parallel, plan_with_layouts

SIZES = {"N": 16}


def mlp():
    """A small step on four devices: everything whole, and data parallel."""
    cell = nn.Sequential(nn.Dense(12, 32), nn.ReLU(), nn.Dense(32, 8))
    function = step(cell, np.zeros((4, 12), np.float32))
    whole = {p.name: (-1,) for p in function.params}
    return function, (4,), [whole, data_parallel(function, SIZES, (4,))]


def encoder(width, layers):
    cell = zoo.TextEncoder(1000, 2, length=128, width=width, heads=width // 64, layers=layers)
    return step(cell, np.zeros((4, 128), np.int64))


def images(name, side):
    return step(zoo.network(name), np.zeros((4, 3, side, side), np.float32))


STEPS = {
    "small": [lambda: encoder(256, 4), lambda: images("resnet8", 32)],
    "large": [lambda: encoder(512, 24), lambda: images("resnet50", 224),
              lambda: images("mobilenet-v2", 96)],
}  # fmt: skip
"""Steps on one device, as the engine compiles them."""


def step(cell, x):
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01))
    trainer.prepare(x, np.zeros(len(x), np.int64))
    return trainer.train_function()


def sharding(mesh, layout, rank):
    axes = [None] * rank
    for name, cut in zip(mesh.axis_names, layout, strict=True):
        if cut >= 0:
            axes[cut] = name
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def measured(plan):
    """XLA's argument, output and temporary bytes of one device."""
    function, mesh = plan.function, jax.make_mesh(plan.mesh, ("a",))
    ranks = {p.name: p.type.rank for p in function.params}
    ranks |= {n: v.type.rank for n, v in zip(function.result_names, function.results, strict=True)}
    takes = [sharding(mesh, la, ranks[n]) for n, la in plan.layouts().items()]
    gives = [sharding(mesh, la, ranks[n]) for n, la in plan.result_layouts().items()]
    specs = [jax.ShapeDtypeStruct(p.type.concrete(SIZES), p.type.dtype.numpy)
             for p in function.params]  # fmt: skip

    def run(*args):
        return list(Trace(Requirements(), {}, None).run(function, list(args), ()))

    with exact():
        # State is donated, as in training: its new value replaces the old one.
        donated = tuple(i for i, n in enumerate(function.param_names) if n in plan.problem.replaced)
        compiled = jax.jit(run, in_shardings=takes, out_shardings=gives, keep_unused=True,
                           donate_argnums=donated)  # fmt: skip
        used = compiled.lower(*specs).compile().memory_analysis()
    # A tuple of results has a table of its pointers, 8 bytes each, which is not a tensor.
    table = 8 * len(function.results)
    return {"arguments": used.argument_size_in_bytes,
            "results": used.output_size_in_bytes - table,
            "temporaries": used.temp_size_in_bytes}  # fmt: skip


def compiled(plan):
    """The same of the program that trains, on one device."""
    function = plan.function
    program = XlaProgram(function, list(plan.problem.replaced), Devices(None, None))

    def spec(param):
        return jax.ShapeDtypeStruct(param.type.concrete(SIZES), param.type.dtype.numpy)

    batch = [spec(p) for p in program.batch]
    state = [spec(function.param(n)) for n in program.donate]
    with exact():
        call: Any = XlaExecutable(program, batch, steps=None).call
        used = call.lower(state, batch).compile().memory_analysis()
    return {"arguments": used.argument_size_in_bytes, "temporaries": used.temp_size_in_bytes}


def plans(name):
    """Plans with fixed layouts, each with what measures it."""
    if name == "mlp":
        function, mesh, layouts = mlp()
        yield from (
            (plan_with_layouts(function, mesh, la, sizes=SIZES), measured) for la in layouts
        )
        return
    for make in STEPS[name]:
        function = make()
        whole = {p.name: (-1,) for p in function.params}
        yield plan_with_layouts(function, (1,), whole, sizes=SIZES), compiled


def main(name):
    """Print the predicted and the measured bytes of each plan as JSON."""
    rows = []
    for plan, measure in plans(name):
        memory = plan.memory
        predicted = {"arguments": memory.arguments, "results": memory.results,
                     "temporaries": memory.temporaries}  # fmt: skip
        rows.append([predicted, measure(plan)])
    sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
