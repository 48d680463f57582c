"""Accuracy on the digits while devices lie, by algorithm, attack and limits.

`make deep SUITE=robustness` writes the whole table to docs/evidence/robustness.md.
"""

import datetime as dt
import os
import platform
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.support.liars import LyingServer, boasting, flipped, honest, scaled

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.algorithms import ALGORITHMS, defaults
from triplane.unified_ir.federated.algorithms.aggregators import UNLIMITED, Robustness
from triplane.unified_ir.federated.study import Study, simulate
from triplane.unified_ir.federated.study.source import SampleSource, devices_of

EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence" / "robustness.md"
DEVICES, ROUNDS = 20, 30
# fmt: off
ATTACKS = {
    "none": (0, honest, False),
    "change x 1e6": (2, scaled(1e6), False),
    "change x -1e6": (2, scaled(-1e6), False),
    "change x 3e38": (2, scaled(3e38), False),
    "change x -3e38": (2, scaled(-3e38), False),
    "change x -10": (2, scaled(-10), False),
    "change x -2": (2, scaled(-2), False),
    "2^32 - 1 examples, labels flipped": (2, boasting, True),
    "labels flipped by 10 %": (2, honest, True),
    "labels flipped by 20 %": (4, honest, True),
}
FAR = ("change x 1e6", "change x -1e6", "change x 3e38", "change x -3e38")
LIMITS = {
    "defaults": Robustness(),
    "off": UNLIMITED,
    "median": Robustness(aggregator="median"),
    "trimmed-mean": Robustness(aggregator="trimmed-mean"),
    "krum": Robustness(aggregator="krum", numbers={"byzantine": 4}),
    "multi-krum": Robustness(aggregator="multi-krum", numbers={"byzantine": 4}),
    "centred-clip": Robustness(aggregator="centred-clip"),
    "bucketing+median": Robustness(aggregator="bucketing+median"),
}
# fmt: on
RATES = {"reptile": {}, "fedadam": {}, "fedavgm": {"momentum": 0.5}}


@cache
def model():
    nn.seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Dense(64, 32), nn.ReLU(), nn.Dense(32, 10))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 1, 8, 8), np.float32), np.zeros(1, np.int64))
    return trainer.export()


@cache
def devices():
    source = SampleSource(data="digits", way="dirichlet", alpha=1.0, devices=DEVICES)
    return devices_of(source, model())[0]


@cache
def accuracy(algorithm, attack, limits):
    """Percent on held-out samples of honest devices, adapted where that is learned for; or None."""
    count, lie, flips = ATTACKS[attack]
    liars = sorted(devices())[:count]
    shards = {n: flipped(s) if flips and n in liars else s for n, s in devices().items()}
    row = ALGORITHMS[algorithm]
    rates = {"lr": 0.3, "meta_lr": 0.3, **RATES.get(algorithm, {})}
    study = Study(
        algorithm=algorithm, rounds=ROUNDS, steps=3, hyper=defaults(algorithm).but(**rates),
        robustness=LIMITS[limits],
    )  # fmt: skip
    try:
        trial = simulate(model(), shards, study, server=LyingServer(liars, lie))
    except InvalidInput:
        return None
    scores = [s for s in trial.scores if s.device not in liars]
    return 100 * float(np.mean([s.after if row.episodes else s.before for s in scores]))


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fomaml"])
def test_scaling_costs_two_points_at_most_with_defaults(algorithm):
    clean = accuracy(algorithm, "none", "defaults")
    assert clean > 75
    for attack in FAR:
        assert accuracy(algorithm, attack, "defaults") > clean - 2, attack
        without = accuracy(algorithm, attack, "off")
        assert without is None or without < 50, "the attack is one"


@pytest.mark.deep
def test_the_table_of_attacks():
    began = time.time()
    blocks = []
    for algorithm in ALGORITHMS:
        rows = [
            [attack, *(_shown(accuracy(algorithm, attack, limits)) for limits in LIMITS)]
            for attack in ATTACKS
        ]
        lines = [
            f"## {algorithm}", "", f"| attack | {' | '.join(LIMITS)} |", "|---" * (1 + len(LIMITS))
            + "|", *(f"| {' | '.join(row)} |" for row in rows), "",
        ]  # fmt: skip
        blocks.append("\n".join(lines))
        clean = accuracy(algorithm, "none", "defaults")
        for attack in FAR:
            found = accuracy(algorithm, attack, "defaults")
            assert found is not None, (algorithm, attack)
            assert found > clean - 2, (algorithm, attack)
    minutes = (time.time() - began) / 60
    EVIDENCE.write_text(f"{_head(minutes)}\n" + "\n".join(blocks))


def _shown(value):
    return "diverges" if value is None else f"{value:.1f}"


def _head(minutes):
    day = dt.datetime.now(dt.UTC).date()
    return f"""# Devices that lie

`make deep SUITE=robustness`, {day}, {platform.machine()}, {os.cpu_count()} cores, Python \
{platform.python_version()}; {minutes:.0f} minutes.

Accuracy in percent on held-out digits of the honest devices after {ROUNDS} rounds of three steps;
of MAML, FOMAML and Meta-SGD after adaptation. {DEVICES} devices share the 1,797 digits unevenly
(Dirichlet, alpha 1), and all take part in each round; one seed. Two devices lie in each attack, but
four where 20 % flip labels. Products saturate at 3e38, the largest numbers of float32. *defaults*
is the plain mean with the norm bound and the cap of examples, *off* the plain mean alone; the
aggregators have the norm bound and the cap, too. Changes of 1e6 and 3e38 times are left out, those
of -10 times are left out or scaled to the median of the round, and most of -2 times are within what
an honest device may send.
"""
