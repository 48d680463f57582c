"""Random small functions of products, sums and reductions for the planner's tests."""

import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

SIZES = (4, 6, 12, 48, 96)


def drawn_function(seed, nodes=5):
    """A function of up to three matrices and `nodes` nodes; some values have several readers."""
    rng = np.random.default_rng(seed)
    build = Build(TABLE, f"drawn{seed}")
    with build:
        rows = int(rng.choice(SIZES))
        values = [build.param("x", TensorSpec((rows, int(rng.choice(SIZES)))))]
        weights = 0
        for _ in range(nodes):
            value = values[int(rng.integers(len(values)))]
            kind = rng.choice(["product", "relu", "sum", "add", "transpose"])
            if kind == "product" and weights < 2:
                weights += 1
                shape = (value.shape[1], int(rng.choice(SIZES)))
                values.append(ops.matmul(value, build.param(f"w{weights}", TensorSpec(shape))))
            elif kind == "sum" and value.shape[1] != 1:
                values.append(value.sum(1, keepdims=True))
            elif kind == "add":
                same = [v for v in values if v.shape == value.shape]
                values.append(value + same[int(rng.integers(len(same)))])
            elif kind == "transpose":
                values.append(ops.transpose(value, perm=(1, 0)))
            else:
                values.append(ops.relu(value))
        results = {f"y{i}": v for i, v in enumerate(values[-2:])}
    return build.finish(results)


def least_by_enumeration(network):
    """The least sum of a network's tables over every assignment."""
    total = np.zeros(network.counts)
    for scope, costs in network.tables.items():
        shape = [1] * len(network.counts)
        for v, n in zip(scope, costs.shape, strict=True):
            shape[v] = n
        total += costs.reshape(shape)
    return float(total.min())
