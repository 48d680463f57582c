"""The two products of the slides: how many collectives XLA compiles; run by test_planned."""

import re
import sys

import numpy as np

from triplane.unified_ir import TensorSpec, nn, ops, trace
from triplane.unified_ir.engines.xla.door import exact, jax
from triplane.unified_ir.engines.xla.lower import Requirements, Trace
from triplane.unified_ir.engines.xla.planned import Shardings
from triplane.unified_ir.passes.sharding import plan
from triplane.unified_ir.train import step

X, W, V = (64, 128), (128, 256), (256, 64)
COLLECTIVES = re.compile(r"= \S+ (all-gather|all-reduce|all-to-all|reduce-scatter|collective-p\w+)")


def collectives(function, best, count):
    """The collectives of the compiled program, and its results on random numbers."""
    shardings = Shardings(best, jax.devices()[:count])
    layouts, results = best.layouts(), best.result_layouts()
    run = jax.jit(
        lambda *args: Trace(Requirements(), {}).run(function, args, (), shardings.of_nodes()),
        in_shardings=[shardings.of(layouts[n]) for n in function.param_names],
        out_shardings=[shardings.of(results[n]) for n in function.result_names],
    )
    rng = np.random.default_rng(0)
    shapes = [p.type.concrete({"N": X[0]}) for p in function.params]
    args = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    with exact():
        text = run.lower(*args).compile().as_text()
        return COLLECTIVES.findall(text), args, [np.asarray(y) for y in run(*args)]


class TwoProducts(nn.Cell):
    """The network of the slides: rows of the first product, columns of the second."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(np.zeros(W, np.float32))
        self.second = nn.Parameter(np.zeros(V, np.float32))

    def construct(self, x):
        y = ops.matmul.shard((4, 1), (1, 1))(x, self.first)
        return ops.matmul.shard((1, 1), (1, 4))(y, self.second)


def written_in_code():
    """The same two products with strategies in the code, and one product on 16 devices."""
    two = step.predict(TwoProducts(), [TensorSpec(("N", X[1]))], "y")
    names, (x, w, v), (y,) = collectives(two, plan(two, 4, sizes={"N": X[0]}), 4)
    assert names == ["all-gather"], names
    np.testing.assert_allclose(y, x @ w @ v, rtol=1e-3, atol=1e-3)
    one = trace(ops.matmul.shard((4, 1), (1, 4)), TensorSpec(X), TensorSpec(W))
    names, (x, w), (y,) = collectives(one, plan(one, 16), 16)
    assert not names, names
    np.testing.assert_allclose(y, x @ w, rtol=1e-3, atol=1e-3)


def main():
    written_in_code()
    specs = [TensorSpec(s) for s in (X, W, V)]
    two = trace(lambda x, w, v: ops.matmul(ops.matmul(x, w), v), *specs)
    best = plan(two, 4, pinned={0: ((4, 1), (1, 1)), 1: ((1, 1), (1, 4))})
    names, (x, w, v), (y,) = collectives(two, best, 4)
    assert names == ["all-gather"], names
    np.testing.assert_allclose(y, x @ w @ v, rtol=1e-3, atol=1e-3)

    free = plan(two, 4)
    assert free.seconds <= best.seconds
    _, (x, w, v), (y,) = collectives(two, free, 4)
    np.testing.assert_allclose(y, x @ w @ v, rtol=1e-3, atol=1e-3)

    one = trace(ops.matmul, *specs[:2])
    names, (x, w), (y,) = collectives(one, plan(one, 8, pinned={0: ((4, 1), (1, 2))}), 8)
    assert not names, names
    np.testing.assert_allclose(y, x @ w, rtol=1e-3, atol=1e-3)
    sys.stdout.write("all held\n")


if __name__ == "__main__":
    main()
