"""Flower's gRPC server and clients of before the SuperLink, with nothing learnt.

    python benchmarks/flower_legacy.py '{"part": "server", "address": ..., "devices": 3, ...}'

Flower still ships them, deprecated; they are the fastest way of its own through a round. Runs in
Flower's environment. The clients of a process are threads of it.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from flower_gate import Gate
from flwr.client import NumPyClient, start_client
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

ROUNDS = 1_000_000


class Gated(FedAvg):
    """FedAvg that asks the gate before each round."""

    def __init__(self, gate: Gate, devices: int, side: int) -> None:
        first = [np.zeros((side, side), np.float32), np.zeros(side, np.float32)]
        super().__init__(
            fraction_evaluate=0.0,
            min_fit_clients=devices,
            min_available_clients=devices,
            accept_failures=False,
            initial_parameters=ndarrays_to_parameters(first),
        )
        self._gate = gate

    def configure_fit(self, *args: Any, **named: Any) -> Any:
        """See `Strategy`."""
        self._gate.open()
        return super().configure_fit(*args, **named)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """See `Strategy`. A round that lost somebody must not count as a fast one."""
        if failures or len(results) < self.min_fit_clients:
            raise RuntimeError(f"round {server_round} has {len(results)} results")
        return super().aggregate_fit(server_round, results, failures)


class Idle(NumPyClient):
    """Answers zeros of what came."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """See `NumPyClient`."""
        return [np.zeros_like(x) for x in parameters], 1, {}


def serve(told: dict[str, Any]) -> None:
    """Rounds without end."""
    folder = Path(told["tls"])
    names = ("ca.pem", "server.pem", "server.key")
    start_server(
        server_address=told["address"],
        config=ServerConfig(num_rounds=ROUNDS),
        strategy=Gated(Gate(told["gate"]), told["devices"], told["side"]),
        certificates=tuple((folder / name).read_bytes() for name in names),
    )


def take_part(told: dict[str, Any]) -> None:
    """So many clients, until the server is gone."""
    root = (Path(told["tls"]) / "ca.pem").read_bytes()
    options = {"server_address": told["address"], "root_certificates": root}
    clients = [
        threading.Thread(target=start_client, kwargs=options | {"client": Idle().to_client()})
        for _ in range(told["devices"])
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


if __name__ == "__main__":
    TOLD = json.loads(sys.argv[1])
    {"server": serve, "clients": take_part}[TOLD["part"]](TOLD)
