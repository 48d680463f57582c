"""Flower's side of `simulation.py`: `run_simulation` on Ray, let through round by round.

    python benchmarks/simulation_flower.py DEVICES PROCESSORS

In an environment of its own (benchmarks/requirements-flower-simulation.txt). The same lines as
`simulation_ours.py`. The clients' steps are plain numpy, which takes less than any library would.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from simulation_case import samples, start, trained

client, server = ClientApp(), ServerApp()
ANSWERS = os.fdopen(os.dup(1), "w")


@client.train()
def learn(message: Message, context: Context) -> Message:
    """A device's work."""
    arrays = message.content["arrays"].to_numpy_ndarrays()
    x, y = samples(int(context.node_config["partition-id"]))
    weights, loss = trained(dict(zip(start(), arrays, strict=True)), x, y)
    metrics = MetricRecord({"loss": loss, "num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(list(weights.values())), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()
def serve(grid: Grid, _context: Context) -> None:
    """Run rounds until standard input ends."""
    devices = int(sys.argv[1])
    while len(list(grid.get_node_ids())) < devices:
        time.sleep(0.1)
    arrays = ArrayRecord(list(start().values()))
    for line in sys.stdin:
        seconds, loss = [], float("nan")
        for _ in range(int(line)):
            began = time.perf_counter()
            strategy = FedAvg(
                fraction_evaluate=0.0, min_train_nodes=devices, min_available_nodes=devices
            )
            result = strategy.start(grid, arrays, num_rounds=1)
            seconds.append(time.perf_counter() - began)
            arrays = result.arrays
            loss = float(result.train_metrics_clientapp[1]["loss"])
        print(json.dumps({"seconds": seconds, "loss": loss}), file=ANSWERS, flush=True)


def main(devices: int, processors: int) -> None:
    """Simulate with one actor on each processor."""
    os.dup2(2, 1)  # Ray prints to standard output
    np.seterr(all="ignore")
    run_simulation(
        server_app=server, client_app=client, num_supernodes=devices,
        backend_config={
            "init_args": {"num_cpus": processors, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
