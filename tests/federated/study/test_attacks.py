"""Accuracy on the digits while devices lie, by algorithm, attack and limits.

`make deep SUITE=robustness` writes the whole table to docs/evidence/robustness.md.
"""

import contextlib
import datetime as dt
import os
import platform
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from tests.support.liars import (
    LyingServer,
    boasting,
    flipped,
    honest,
    scaled,
    taking_the_bound_of_sums,
)

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.algorithms import ALGORITHMS, defaults
from triplane.unified_ir.federated.algorithms.aggregators import UNLIMITED, Robustness
from triplane.unified_ir.federated.study import Study, simulate
from triplane.unified_ir.federated.study.masked_sums import MaskedStudy
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
MASKED_DEVICES, GROUPS, NORM = 28, 7, 1.5
TAKES = scaled(-1e9)
MASKED_ATTACKS = {
    "none": (0, honest, False),
    "change x -10 by 1 device": (1, scaled(-10), False),
    "change x -10 by 3 devices": (3, scaled(-10), False),
    "1 device takes the bound of its sum": (1, TAKES, False),
    "2 devices take the bound of their sums": (2, TAKES, False),
    "3 devices take the bound of their sums": (3, TAKES, False),
    "labels flipped by 3 devices": (3, honest, True),
    "labels flipped by 6 devices": (6, honest, True),
}
WHOLE = MaskedStudy(norm=NORM, colluding_share=1 / MASKED_DEVICES)
GROUPED = replace(WHOLE, groups=GROUPS)
MASKED_LIMITS = {
    "unmasked, defaults": (None, Robustness()),
    "unmasked, multi-krum": (None, Robustness(aggregator="multi-krum", numbers={"byzantine": 3})),
    "masked, one sum": (WHOLE, Robustness(returns=0)),
    "groups, median": (GROUPED, Robustness(aggregator="median", returns=0)),
    "groups, multi-krum": (
        GROUPED, Robustness(aggregator="multi-krum", numbers={"byzantine": 2}, returns=0),
    ),
    "groups, centred-clip": (GROUPED, Robustness(aggregator="centred-clip", returns=0)),
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
def devices(count=DEVICES):
    source = SampleSource(data="digits", way="dirichlet", alpha=1.0, devices=count)
    return devices_of(source, model())[0]


@cache
def accuracy(algorithm, attack, limits):
    """Percent on held-out samples of honest devices, adapted where that is learned for; or None."""
    return accuracy_of(algorithm, devices(), ATTACKS[attack], LIMITS[limits])


@cache
def masked_accuracy(algorithm, attack, limits):
    """The same for the devices of masked rounds."""
    masking, robustness = MASKED_LIMITS[limits]
    with taking_the_bound_of_sums() if masking else contextlib.nullcontext():
        return accuracy_of(
            algorithm, devices(MASKED_DEVICES), MASKED_ATTACKS[attack], robustness, masking
        )


def accuracy_of(algorithm, honest_shards, attack, robustness, masking=None):
    count, lie, flips = attack
    liars = sorted(honest_shards)[:count]
    shards = {n: flipped(s) if flips and n in liars else s for n, s in honest_shards.items()}
    row = ALGORITHMS[algorithm]
    rates = {"lr": 0.3, "meta_lr": 0.3, **RATES.get(algorithm, {})}
    study = Study(
        algorithm=algorithm, rounds=ROUNDS, steps=3, hyper=defaults(algorithm).but(**rates),
        robustness=robustness, masking=masking,
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


@pytest.mark.long
def test_groups_keep_a_masked_round_from_devices_that_take_the_bound_of_their_sums():
    clean = masked_accuracy("fedavg", "none", "groups, multi-krum")
    assert clean > 75
    for attack in ("1 device takes the bound of its sum", "2 devices take the bound of their sums"):
        assert masked_accuracy("fedavg", attack, "groups, multi-krum") > clean - 3, attack
        assert masked_accuracy("fedavg", attack, "masked, one sum") < 30, "the attack is one"


@pytest.mark.deep
def test_the_table_of_attacks():
    began = time.time()
    blocks = []
    for algorithm in ALGORITHMS:
        blocks.append(_block(f"## {algorithm}", partial(accuracy, algorithm), ATTACKS, LIMITS))
        clean = accuracy(algorithm, "none", "defaults")
        for attack in FAR:
            found = accuracy(algorithm, attack, "defaults")
            assert found is not None, (algorithm, attack)
            assert found > clean - 2, (algorithm, attack)
    masked = masked_part()
    minutes = (time.time() - began) / 60
    EVIDENCE.write_text(f"{_head(minutes)}\n" + "\n".join([*blocks, masked]))


def masked_part():
    """The part of the page about masked rounds."""
    blocks = [
        _block(f"### {name}", partial(masked_accuracy, name), MASKED_ATTACKS, MASKED_LIMITS)
        for name in ("fedavg", "fedadam")
    ]
    return MASKED_HEAD + "\n".join(blocks)


def _block(heading, accuracy_by, attacks, limits):
    rows = [[a, *(_shown(accuracy_by(a, one)) for one in limits)] for a in attacks]
    lines = [
        heading, "", f"| attack | {' | '.join(limits)} |", "|---" * (1 + len(limits)) + "|",
        *(f"| {' | '.join(row)} |" for row in rows), "",
    ]  # fmt: skip
    return "\n".join(lines)


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


MASKED_HEAD = f"""\
## In masked rounds

{MASKED_DEVICES} devices, all in each round, one of which may collude; otherwise as above. Masked, \
they clip to the norm {NORM:g}
and weigh the same. *One sum* is the mean of all of them; with groups, a hash draws {GROUPS} \
groups of {MASKED_DEVICES // GROUPS} devices for
each round, and multi-krum counts on two liars. Nobody sees a masked update, so a device that knows
the others' changes can *take the bound of its sum*: it adds integers by which the mean of its
cohort, or of its group, points against what it learned, as long as the norm bound. The cloud cannot
tell it from an honest mean. Unmasked, the same device sends -1e9 times its change. Three liars are
as a rule in more groups than two, and a device with flipped labels sends nothing that is far from
the others, so groups help little against it.

"""
