"""One process of two that add integers, whose sums are exact: I/2 HOST:PORT ITERATIONS."""

import sys

import numpy as np

from triplane.unified_ir.engines.xla.door import exact, jax
from triplane.unified_ir.engines.xla.hosts import Hosts
from triplane.unified_ir.engines.xla.processes import join

MIB = 1 << 20


def main():
    which, coordinator, iterations = sys.argv[1:]
    process, count = map(int, which.split("/"))
    processes = join(Hosts(coordinator=coordinator, process=process, count=count))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    draws = np.random.default_rng(7)  # the same in both processes
    with exact():
        add = jax.jit(lambda _, x: x[0].sum(0), out_shardings=everywhere)
        for kind, nbytes in ((np.float32, MIB), (np.float64, 16 * MIB), (np.float32, 16 * MIB)):
            call = processes.checked(add)
            for _ in range(int(iterations)):
                x = draws.integers(-1000, 1000, (2, nbytes // np.dtype(kind).itemsize)).astype(kind)
                total = np.asarray(call([], processes.put([x], [rows])))
                np.testing.assert_array_equal(total, x.sum(0))
    sys.stdout.write("all held\n")


if __name__ == "__main__":
    main()
