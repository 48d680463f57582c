"""Accuracy against epsilon on MNIST by writer.

`make deep SUITE=privacy` writes the table and the plot to docs/evidence/. It needs TRIPLANE_DATA.
"""

import datetime as dt
import os
import platform
import statistics
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.algorithms import defaults
from triplane.unified_ir.federated.privacy.central import relative_error
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy
from triplane.unified_ir.federated.study import Study, simulate
from triplane.unified_ir.federated.study.source import SampleSource, devices_of
from triplane.unified_ir.files.chart import line_chart

DATA = Path(os.environ.get("TRIPLANE_DATA", "")) / "mnist_by_writer.npz"
EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence"
ROUNDS, DEVICES, SEPARATION, DELTA = 100, 50, 10, 1e-4
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SEEDS = (0, 1, 2)
CLIP, LR, STEPS, BATCH = 0.3, 0.2, 5, 20
KINDS = {"independent": False, "correlated": True}
"""Whether later rounds take back a part of the noise."""

pytestmark = pytest.mark.skipif(
    not DATA.is_file(), reason="TRIPLANE_DATA holds no mnist_by_writer.npz"
)


@cache
def model():
    """1,970 parameters: a small model has less noise."""
    nn.seed(0)
    net = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Dense(196, 10))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 1, 28, 28), np.float32), np.zeros(1, np.int64))
    return trainer.export(("predict", "evaluate", "loss"))


@cache
def writers():
    source = SampleSource(data=str(DATA), way="group", group="writer", split="split", least=10)
    return devices_of(source, model())


def accuracy(privacy, seed, rounds=ROUNDS):
    """Percent over the writers that never took part, and what was spent."""
    study = Study(
        algorithm="fedavg", rounds=rounds, devices=DEVICES, steps=STEPS, batch_size=BATCH,
        hyper=defaults("fedavg").but(lr=LR), seed=seed, privacy=privacy,
    )  # fmt: skip
    seen, unseen = writers()
    trial = simulate(model(), seen, study, unseen=unseen)
    scores = [s.before for s in trial.scores if not s.seen and s.round == trial.last_round]
    return 100 * float(np.mean(scores)), trial.privacy


def private(kind, epsilon, rounds=ROUNDS):
    return DifferentialPrivacy(
        epsilon=epsilon, delta=DELTA, clip=CLIP, separation=SEPARATION, correlated=KINDS[kind]
    ).resolved(rounds)


@pytest.mark.long
def test_noise_costs_accuracy_and_correlated_noise_costs_less():
    """At an epsilon at which independent noise hides what is learned in 40 rounds."""
    rounds = 40
    found = {kind: accuracy(private(kind, 0.5, rounds), 0, rounds)[0] for kind in KINDS}
    plain, _ = accuracy(None, 0, rounds)
    assert plain > found["correlated"] > found["independent"] + 2


@pytest.mark.deep
def test_the_table_of_accuracy_against_epsilon():
    began = time.time()
    plain = [accuracy(None, seed)[0] for seed in SEEDS]
    rows: list[list[str]] = []
    lines: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for epsilon in EPSILONS:
        cells = []
        for kind in KINDS:
            asked = private(kind, epsilon)
            runs = [accuracy(asked, seed) for seed in SEEDS]
            scores = [score for score, _ in runs]
            assert all(abs(spent.epsilon - epsilon) < 1e-3 * epsilon for _, spent in runs)
            lines[kind].append((epsilon, statistics.mean(scores)))
            cells += [f"{asked.multiplier:.3g}", _spread(scores)]
        rows.append([f"{epsilon:g}", *cells])
    best = {kind: dict(points) for kind, points in lines.items()}
    assert all(best["correlated"][e] > best["independent"][e] for e in EPSILONS if e <= 2)
    line = [(e, statistics.mean(plain)) for e in (EPSILONS[0], EPSILONS[-1])]
    chart = line_chart(
        {"without noise": line, **lines}, "Accuracy against epsilon, MNIST by writer",
        f"epsilon at delta {DELTA:g}, one device", "accuracy on unseen writers, %",
    )  # fmt: skip
    (EVIDENCE / "privacy.svg").write_text(chart)
    heads = ["epsilon", *(f"{kind}: {what}" for kind in KINDS for what in ("multiplier", "%"))]
    table = [heads, ["---"] * len(heads), *rows]
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    minutes = (time.time() - began) / 60
    (EVIDENCE / "privacy.md").write_text(_page(text, _spread(plain), minutes))


def _spread(scores):
    return f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"


def _page(table, plain, minutes):
    day = dt.datetime.now(dt.UTC).date()
    smaller = relative_error(1, ROUNDS) / relative_error(SEPARATION, ROUNDS)
    return f"""# Accuracy against epsilon

`make deep SUITE=privacy`, {day}, {platform.machine()}, {os.cpu_count()} cores, Python \
{platform.python_version()}; {minutes:.0f} minutes.

Accuracy in percent on the digits of {len(writers()[1])} writers that never took part, mean and
standard deviation over {len(SEEDS)} seeds. {len(writers()[0])} writers learn, {DEVICES} in each of
{ROUNDS} rounds, {STEPS} steps of FedAvg at rate {LR:g} with {BATCH} digits; softmax regression on
14 x 14 pixels, 1,970 parameters. Changes are clipped to {CLIP:g}, a writer rests until
{SEPARATION} rounds later, so it is used {ROUNDS // SEPARATION} times at most; delta {DELTA:g}; one
writer is the unit. The multiplier is the standard deviation of a round's noise over the clipping
norm, before correlation; correlated noise has {smaller:.2f} times smaller errors of prefix sums.

Without noise and without clipping: {plain}.

{table}

![Accuracy against epsilon](privacy.svg)
"""
