"""Collectives that XLA compiles for plans of two products; run as a process of its own."""

import json
import re
import sys

import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.engines.xla.door import jax
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.sharding import plan

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
PINS = (
    {0: ((4, 1), (1, 1)), 1: ((1, 1), (1, 4))},  # the slides' network
    {0: ((1, 1), (1, 4)), 1: ((1, 4), (4, 1))},  # columns, then rows: a sum at the end
    None,
)


def two_products():
    build = Build(TABLE, "two_products")
    with build:
        x, a, b = (build.param(n, TensorSpec(s)) for n, s in
                   (("x", (1024, 512)), ("a", (512, 2048)), ("b", (2048, 256))))  # fmt: skip
        y = ops.matmul(ops.matmul(x, a), b)
    return build.finish({"y": y})


def compiled_collectives(made):
    """Names of the collectives in XLA's program, with every layout as planned."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(made.mesh), ("a",))

    def sharding(layout):
        axes = [mesh.axis_names[layout.index(i)] if i in layout else None for i in (0, 1)]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    def run(x, a, b):
        for index, weight in enumerate((a, b)):
            s = made.strategy(index)
            x, weight = (jax.lax.with_sharding_constraint(v, sharding(la))
                         for v, la in zip((x, weight), s.operands, strict=True))  # fmt: skip
            x = jax.lax.with_sharding_constraint(x @ weight, sharding(s.outputs[0]))
        return x

    specs = [jax.ShapeDtypeStruct(p.type.shape, np.float32) for p in made.function.params]
    takes = [sharding(layout) for layout in made.layouts().values()]
    return COLLECTIVE.findall(jax.jit(run, in_shardings=takes).lower(*specs).compile().as_text())


def main():
    """Print, for each plan, the planned collectives of its nodes, bytes sent, and those of XLA."""
    rows = []
    for pinned in PINS:
        made = plan(two_products(), 4, pinned=pinned)
        planned = [c for node in made.nodes for c in node.collectives]
        rows.append([planned, made.sent_bytes, compiled_collectives(made)])
    sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    main()
