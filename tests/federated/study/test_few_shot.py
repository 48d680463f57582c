"""Studies whose episodes have classes of their own, as in few-shot learning."""

from dataclasses import replace

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.algorithms import Hyper
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import Study, simulate
from triplane.unified_ir.federated.study.trial import RoundRow

from .given import there

WAYS, SIZE, CLASSES = 3, 8, 6


def few_shot_module():
    nn.seed(3)
    cell = nn.Sequential(nn.Dense(SIZE, 16), nn.Tanh(), nn.Dense(16, WAYS))
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, SIZE), np.float32), np.zeros(1, np.int64))
    return trainer.export(("predict", "evaluate", "loss"))


def device(seed):
    """Classes that no other device has: centres that differ in four features; the rest is noise."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.standard_normal((CLASSES, SIZE)) * (np.arange(SIZE) < 4)
    noise = np.where(np.arange(SIZE) < 4, 0.2, 2)
    y = np.repeat(np.arange(CLASSES), 12)
    x = (centres[y] + noise * rng.standard_normal((len(y), SIZE))).astype(np.float32)
    y = y + 1000 * seed + 10  # no number below the model's three outputs
    some = np.arange(len(y)) % 12 < 8
    return Shard({"x": x[some], "y": y[some]}, {"x": x[~some], "y": y[~some]})


def few_shot(algorithm="maml", **options):
    hyper = Hyper(lr=0.05, meta_lr=0.1, inner_steps=3)
    some = {"rounds": 30, "steps": 5, "ways": WAYS, "support": 2 * WAYS, "query": 4 * WAYS}
    return Study(algorithm=algorithm, hyper=hyper, **(some | options))


def test_a_start_is_learned_that_adapts_to_classes_nobody_has_seen():
    seen, unseen = ({str(i): device(i) for i in ids} for ids in (range(4), range(4, 8)))
    module = few_shot_module()
    trials = (simulate(module, seen, few_shot(rounds=n), unseen=unseen) for n in (1, 30))
    first, last = (there(trial.summary(seen=False)) for trial in trials)
    assert last.before == pytest.approx(1 / WAYS, abs=0.15)  # nothing to know before it adapts
    assert first.after < 0.6
    assert last.after > 0.7


@pytest.mark.long
def test_another_engine_scores_the_same_episodes():
    """By accuracy, means over ten episodes of 12 answers, of which 2 may differ by rounding."""
    devices = {str(i): device(i) for i in range(2)}
    one, other = (
        simulate(few_shot_module(), devices, few_shot("fomaml", rounds=2, engine=engine))
        for engine in ("onnx", "xla")
    )
    for a, b in zip((*one.start, *one.scores), (*other.start, *other.scores), strict=True):
        assert (b.before, b.after) == pytest.approx((a.before, a.after), abs=2 / 120 + 1e-9)
        assert a.before != a.after


def test_rates_are_compared_on_the_same_episodes():
    devices = {str(i): device(i) for i in range(2)}
    swept = simulate(few_shot_module(), devices, few_shot(rounds=2, rates=(0.0, 0.05)))
    assert [s.after for s in swept.sweep[0.0]] == [s.before for s in swept.sweep[0.0]]
    assert swept.sweep[0.05] == swept.scores
    other = simulate(few_shot_module(), devices, few_shot(rounds=2))
    assert swept.scores == other.scores


def test_what_does_not_learn_from_episodes_is_refused():
    with pytest.raises(InvalidInput, match="fedavg does not learn from episodes"):
        few_shot("fedavg")
    with pytest.raises(InvalidInput, match="got 3 classes, 4 and 12 samples"):
        few_shot(support=4)
    with pytest.raises(InvalidInput, match="3 outputs, one for each class; an episode of 4"):
        simulate(few_shot_module(), {"0": device(0)}, few_shot(ways=4, support=4, query=4))


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_device_without_enough_classes_is_refused_before_the_first_round(part):
    whole = device(0)
    rounds: list[RoundRow] = []
    rows = np.flatnonzero(getattr(whole, part)["y"] < 12)  # two classes
    poor = replace(whole, **{part: {k: x[rows] for k, x in getattr(whole, part).items()}})
    devices = {"rich": device(1), "poor": poor}
    with pytest.raises(InvalidInput, match=r"^poor: an episode takes 3 classes .* 2 of this"):
        simulate(few_shot_module(), devices, few_shot(), on_round=rounds.append)
    assert not rounds
