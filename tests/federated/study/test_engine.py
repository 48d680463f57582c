"""The steps of many devices at once on XLA: the study of one device after the other."""

from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.algorithms import ALGORITHMS
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import simulate

from .given import Normed, OwnLayer, Personalized, module, part, shards, study
from .sines import regression, sines

CLOSE: Any = {"rtol": 2e-5, "atol": 2e-6}
"""Sums of float32 in another order, over 4 rounds of 2 steps."""


def both(made, devices=None, cell=None, **options):
    """The study on both engines."""
    net = module() if cell is None else module(cell)
    devices = devices or shards()
    return [
        simulate(net, devices, study(made, engine=engine, **options)) for engine in ("onnx", "xla")
    ]


def same(one, other):
    assert one.state.keys() == other.state.keys()
    for name, x in one.state.items():
        np.testing.assert_allclose(other.state[name], x, err_msg=name, **CLOSE)
    for a, b in zip(one.rounds, other.rounds, strict=True):
        assert (a.number, a.devices, a.bytes_up) == (b.number, b.devices, b.bytes_up)
        assert b.loss == pytest.approx(a.loss, rel=1e-4)
    for a, b in zip(one.scores, other.scores, strict=True):
        assert (a.device, a.samples) == (b.device, b.samples)
        assert (b.before, b.after) == pytest.approx((a.before, a.after), abs=0.11)


@pytest.mark.parametrize(
    "algorithm",
    [a if a == "fedavg" else pytest.param(a, marks=pytest.mark.long) for a in sorted(ALGORITHMS)],
)
def test_a_study_is_that_of_the_default_engine(algorithm):
    same(*both(algorithm))


@pytest.mark.long
@pytest.mark.parametrize("cell", [Normed, OwnLayer, Personalized])
def test_statistics_and_own_layers_of_devices_stay_theirs(cell):
    same(*both("fedavg", cell=cell))


@pytest.mark.long
def test_devices_with_few_samples_take_smaller_batches():
    rng = np.random.default_rng(3)
    few = {f"few-{i}": Shard(part(rng, n, i), part(rng, 6, i)) for i, n in enumerate((3, 3, 5))}
    devices = {**shards(2), **few}
    same(*both("fedavg", devices=devices, batch_size=8))


@pytest.mark.long
def test_scores_are_those_of_the_default_engine(monkeypatch):
    """By loss, which shows every digit; in batches of 8, 8 and 4, two and one devices at a time."""
    monkeypatch.setattr(learn, "EVALUATE_ROWS", 8)
    study_module = import_module("triplane.unified_ir.federated.study.simulate")
    monkeypatch.setattr(study_module, "TOGETHER", 2)
    options: Any = {"rates": (0.05,), "evaluate_every": 2}
    one, other = (
        simulate(
            regression(4), sines(2), study("fomaml", engine=engine, **options), unseen=sines(1, 7)
        )
        for engine in ("onnx", "xla")
    )
    assert {s.device for s in one.scores} == {"device-0", "device-1", "device-7"}
    assert one.sweep.keys() == other.sweep.keys() == {0.05, study().hyper.lr}
    rows = [(t.start, t.scores, *t.sweep.values()) for t in (one, other)]
    for ours, theirs in zip(*(chain(*parts) for parts in rows), strict=True):
        assert (ours.device, ours.round, ours.seen) == (theirs.device, theirs.round, theirs.seen)
        assert theirs.before == pytest.approx(ours.before, rel=1e-4)
        assert theirs.after == pytest.approx(ours.after, rel=1e-4)
        assert ours.before != ours.after


@pytest.mark.long
def test_a_study_goes_on_with_its_own_engine_only(tmp_path):
    whole = simulate(module(), shards(), study(engine="xla", rounds=4))
    simulate(module(), shards(), study(engine="xla", rounds=2), folder=tmp_path)
    with pytest.raises(Conflict, match="engine"):
        simulate(module(), shards(), study(rounds=4), folder=tmp_path)
    resumed = simulate(module(), shards(), study(engine="xla", rounds=4), folder=tmp_path)
    for name, x in whole.state.items():
        np.testing.assert_array_equal(resumed.state[name], x)


@pytest.mark.long
def test_a_rate_that_diverges_is_named_with_the_device():
    with pytest.raises(InvalidInput, match=r"device-\d in round 1: .*a smaller rate is needed"):
        simulate(module(), shards(), study(engine="xla", hyper=study().hyper.but(lr=3e38)))


class Words(nn.Cell):
    """Looks numbers up in a table of four."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def construct(self, x):
        return self.table(x)


@pytest.mark.long
def test_data_that_are_refused_are_named_with_the_device():
    trainer = train.Trainer(Words(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros(1, np.int64), np.zeros(1, np.int64))
    rng = np.random.default_rng(0)
    devices = {}
    for i in range(3):
        x = rng.integers(0, 4, 12)
        x[0] = 9 if i == 1 else 0
        devices[f"device-{i}"] = Shard({"x": x, "y": x % 2}, {})
    net = trainer.export(("predict", "evaluate", "loss"))
    with pytest.raises(InvalidInput, match=r"device-1 in round 1: .*idx=9"):
        simulate(net, devices, study(engine="xla", batch_size=12))


def test_another_engine_is_refused():
    with pytest.raises(InvalidInput, match="engine must be one of 'onnx', 'xla', got 'jax'"):
        study(engine="jax")
