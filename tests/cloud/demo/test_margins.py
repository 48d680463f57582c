"""What the demo prints of MAML and FedAvg, asserted where seeds can be averaged over.

The demo itself runs once, with devices that are killed: its margin is one draw, and is printed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.federated.study.given import there

from triplane.cloud.demo import asking, learning
from triplane.cloud.demo.question import Question
from triplane.unified_ir import data, nn, optim, train
from triplane.unified_ir.federated.algorithms import Hyper
from triplane.unified_ir.federated.study import Study, simulate, summary

SEEDS = range(3)
ROUNDS = 50


def study(name):
    rate = learning.RATE[name]
    return Study(
        algorithm=name,
        hyper=Hyper(lr=rate, meta_lr=rate, inner_steps=asking.INNER_STEPS),
        rates=asking.RATES if name == "fedavg" else (),
        rounds=ROUNDS, steps=learning.STEPS, batch_size=40, support=asking.SUPPORT, query=40,
    )  # fmt: skip


def untrained(seed):
    nn.seed(seed)
    trainer = train.Trainer(Question(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 1, 8, 8), np.float32), np.zeros(1, np.int64))
    return trainer.export(("predict", "evaluate", "loss"))


@cache
def adapted(name, seed):
    """Percent after adaptation, over the devices that learned and over the others."""
    shards = asking.shards_of(data.digits(), seed)
    names = sorted(shards)
    seen, unseen = names[: asking.LEARNING], names[asking.LEARNING :]
    made: Any = simulate(
        untrained(seed),
        {n: shards[n] for n in seen},
        replace(study(name), seed=seed),
        unseen={n: shards[n] for n in unseen},
    )
    return [100 * there(summary(made.final(seen=part))).after for part in (True, False)]


@pytest.mark.slow
def test_maml_beats_fedavg_over_seeds_in_the_setting_of_the_demo():
    gains = np.array([np.subtract(adapted("maml", s), adapted("fedavg", s)) for s in SEEDS])
    learned, never = gains.mean(0)
    assert learned > 6, gains
    assert never > 5, gains
