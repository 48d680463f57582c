"""A Flower app in which nothing is learnt, for `flwr run`: FedAvg over clients that answer zeros.

`rounds_flower.py` copies it, with `flower_gate.py` beside it, into an app of its own. Options of
the run: `devices`, `side` of the square matrix, `gate`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from .flower_gate import Gate

ROUNDS = 1_000_000
server = ServerApp()
client = ClientApp()


def zeros(side: int) -> ArrayRecord:
    """A dense layer's matrix and bias."""
    return ArrayRecord([np.zeros((side, side), np.float32), np.zeros(side, np.float32)])


class Gated(FedAvg):
    """FedAvg that asks the gate before each round."""

    def __init__(self, gate: Gate, devices: int) -> None:
        super().__init__(
            fraction_evaluate=0.0, min_train_nodes=devices, min_available_nodes=devices
        )
        self._gate = gate

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See `Strategy`."""
        self._gate.open()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """See `Strategy`. A round that lost somebody must not count as a fast one."""
        found = list(replies)
        if len(found) < self.min_train_nodes or any(reply.has_error() for reply in found):
            raise RuntimeError(f"round {server_round} has {len(found)} replies, errors included")
        return super().aggregate_train(server_round, found)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Rounds without end."""
    config = context.run_config
    strategy = Gated(Gate(str(config["gate"])), int(config["devices"]))
    strategy.start(grid, zeros(int(config["side"])), num_rounds=ROUNDS)


@client.train()
def train(message: Message, _context: Context) -> Message:
    """Zeros, of what came."""
    arrays = [np.zeros_like(x) for x in message.content["arrays"].to_numpy_ndarrays()]
    told = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(told), reply_to=message)
