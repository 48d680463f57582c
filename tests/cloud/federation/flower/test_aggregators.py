"""Our robust means beside Flower's; skipped where flwr is not installed."""

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra [flower]")

from flwr.serverapp import strategy as flower

from triplane.cloud.federation.flower.adapter import (
    StreamGrid,
    instruction,
    named_arrays,
    reply_to,
)
from triplane.unified_ir.federated.algorithms.aggregators import Robustness, reduce_round
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.core.limits import RoundUpdate
from triplane.unified_ir.federated.core.reduce import SGD

START = {"w": np.zeros((3, 4), np.float32), "b": np.ones(5, np.float32)}


def states(n):
    """States that devices arrive at; one of them is far away."""
    rng = np.random.default_rng(2)
    made = [{k: x + rng.normal(size=x.shape).astype(np.float32) for k, x in START.items()}
            for _ in range(n)]  # fmt: skip
    made[1] = {k: x + np.float32(100) for k, x in made[1].items()}
    return made


def theirs(strategy, arrived):
    StreamGrid(list, lambda *_: {}, run=1)  # Flower's messages need the run that it begins
    replies = []
    for node, state in enumerate(arrived, 11):
        metrics = {"num-examples": 10.0, "loss": 0.5}
        replies.append(reply_to(instruction(node, "train"), state, metrics))
    arrays, _ = strategy.aggregate_train(1, replies)
    return named_arrays(arrays)


def ours(name, arrived, **numbers):
    changes = [{k: x[k] - START[k] for k in START} for x in arrived]
    limits = Robustness(norm_bound="off", aggregator=name, numbers=numbers)
    found = reduce_round(
        START, {}, [RoundUpdate(10, partial(dict, c)) for c in changes], robustness=limits,
        draws=Draws(0, 1, "", "buckets"), weighting="equal", server=SGD,
        hyper={"server_lr": 1.0},
    )  # fmt: skip
    return found.state


MINIMA: Any = {"min_train_nodes": 2, "min_available_nodes": 2, "min_evaluate_nodes": 1}


@pytest.mark.parametrize("n", [7, 10])
@pytest.mark.parametrize(
    ("strategy", "name", "numbers"),
    [
        (partial(flower.FedMedian), "median", {}),
        (partial(flower.FedTrimmedAvg, beta=0.2), "trimmed-mean", {"trim": 0.2}),
        (partial(flower.Krum, num_malicious_nodes=2), "krum", {"byzantine": 2}),
        (
            partial(flower.MultiKrum, num_malicious_nodes=2, num_nodes_to_select=5),
            "multi-krum",
            {"byzantine": 2},
        ),
    ],
)
def test_a_robust_mean_is_flower_s(strategy, name, numbers, n):
    if name == "multi-krum" and n != 7:
        pytest.skip("Flower selects a number of nodes, ours n - byzantine")
    arrived = states(n)
    wanted, found = theirs(strategy(**MINIMA), arrived), ours(name, arrived, **numbers)
    for key in START:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-5, atol=1e-5)
