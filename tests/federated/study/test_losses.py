"""Studies of models that are scored by their loss, checked with numpy, and of sequences."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.cli import simulate as command
from triplane.unified_ir.federated.algorithms import ALGORITHMS, Hyper
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.core.metric import ACCURACY, LOSS, metric_of
from triplane.unified_ir.federated.study import (
    Study,
    difference,
    page,
    simulate,
    summary,
    verdicts,
)
from triplane.unified_ir.federated.study.export import trial_record

from .given import module, shards, study, there
from .sines import mse, regression, sines

LR, STEPS = 0.3, 3
HYPER = Hyper(lr=LR, meta_lr=0.1, inner_steps=STEPS)


def run(algorithm, module=None, **options):
    options = {"rounds": 6, "steps": 2, "batch_size": 6, "support": 8, "query": 4, **options}
    made = Study(algorithm=algorithm, **{"hyper": HYPER, **options})
    unseen = sines(4, first=20)
    return simulate(module or regression(), sines(), made, unseen=unseen)


@pytest.fixture(scope="module")
def trials():
    return [
        run("fedavg", evaluate_every=2, rates=(0.1, 0.01)), run("maml", evaluate_every=2)
    ]  # fmt: skip


def adapted(w, b, part, rate):
    """Plain gradient descent on the mean squared error, written by hand."""
    x, y = part["x"].astype(float), part["y"].astype(float)
    for _ in range(STEPS):
        error = x @ w.T + b - y
        w, b = w - rate * 2 * error.T @ x / len(x), b - rate * 2 * error.mean(0)
    return w, b


def test_scores_are_losses_before_and_after_adaptation_as_numpy_computes_them(trials):
    trial = trials[0]
    assert trial.metric == LOSS
    w, b = (trial.state[k].astype(float) for k in ("0.weight", "0.bias"))
    everyone = sines() | sines(4, first=20)
    for rate, scores in trial.sweep.items():
        for s in scores:
            shard = everyone[s.device]
            draws = Draws(0, s.round, s.device, "support")
            rows = draws.permutation(shard.examples)[:8]
            support = {k: x[rows] for k, x in shard.train.items()}
            moved_w, moved_b = adapted(w, b, support, rate)
            after = mse(moved_w, moved_b, shard.held_out)
            assert s.before == pytest.approx(mse(w, b, shard.held_out), rel=1e-4)
            assert s.after == pytest.approx(after, rel=1e-4)


def test_adaptation_lowers_the_loss_of_devices_that_never_learned(trials):
    for trial in trials:
        scores = there(trial.summary(seen=False))
        assert scores.after < 0.5 * scores.before


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_algorithm_learns_a_regression(algorithm):
    hyper = Hyper(lr=0.05, meta_lr=0.02, inner_steps=2)
    trial = run(algorithm, regression(hidden=4), rounds=20, hyper=hyper)
    assert trial.metric == LOSS
    assert trial.rounds[-1].loss < trial.rounds[0].loss


def test_the_best_rate_has_the_lowest_loss_and_the_worst_tenth_the_highest(trials):
    rate, best = there(trials[0].best_rate(seen=True))
    means = {r: np.mean([s.after for s in at if s.seen]) for r, at in trials[0].sweep.items()}
    assert rate == min(means, key=lambda r: means[r])
    assert best.after == pytest.approx(min(means.values()))
    scores = trials[0].final(seen=True)
    assert best.after_worst_tenth == max(s.after for s in scores)
    assert there(summary(scores)).after_worst_tenth == min(s.after for s in scores)


def test_a_gain_is_positive_where_the_loss_is_lower(trials):
    scores = trials[0].final(seen=True)
    lower = [replace(s, after=s.after - 0.25) for s in scores]
    assert there(difference(lower, scores, LOSS)).mean == pytest.approx(0.25)
    assert there(difference(lower, scores, ACCURACY)).mean == pytest.approx(-0.25)


def test_the_report_of_a_regression_speaks_of_losses(trials):
    text = page(trials, "sines")
    assert "accuracy" not in text.lower()
    assert "Loss (lower is better), the mean over devices" in text
    assert text.count("loss on a device&#x27;s own held-out samples; lower is better") == 1
    assert "Adapted loss of unseen devices" in text
    lowest = min(there(summary(t.final(seen=False))).after for t in trials)
    assert f"<b>{lowest:.4g}</b>" in text


def test_the_verdict_names_the_algorithm_of_the_lowest_loss(trials):
    means = {t.algorithm: there(summary(t.final(seen=True))).after for t in trials}
    best = min(means, key=lambda name: means[name])
    line = verdicts(trials)[0]
    assert line.startswith(f"On training devices, loss after adaptation: {best} {means[best]:.4g}")


def test_the_table_and_the_record_of_the_command_name_the_loss(trials):
    heading, row, *_ = command._lines(trials, {})
    assert heading.split("  ")[-4:] == ["loss before", "adapted", "worst tenth", "MB up"]
    scores = there(summary(trials[0].final(seen=True), LOSS))
    assert row.split()[4:7] == [
        f"{x:.4g}" for x in (scores.before, scores.after, scores.after_worst_tenth)
    ]
    assert trial_record(trials[0])["metric"] == "loss"
    json.dumps(trial_record(trials[0]), allow_nan=False)


def test_a_classifier_is_scored_by_accuracy_and_its_record_has_no_new_field():
    trial = simulate(module(), shards(), study(rounds=1))
    assert trial.metric == ACCURACY
    assert "metric" not in trial_record(trial)


def test_a_rate_at_which_adaptation_diverges_is_left_out_of_the_comparison():
    heard = []
    hyper = HYPER.but(inner_steps=10)
    trial = simulate(
        regression(),
        sines(),
        Study(algorithm="fedavg", rounds=1, hyper=hyper, support=8, rates=(1e8,)),
        on_scores=lambda _, rate, scores: heard.append((rate, len(scores))),
    )
    assert heard == [(None, 6), (None, 6), (1e8, 0)]
    assert list(trial.sweep) == [LR]


def test_a_run_whose_own_rate_diverges_names_the_device_and_the_way_out():
    hyper = HYPER.but(lr=1e6, inner_steps=10)
    made = Study(algorithm="fedavg", rounds=1, hyper=hyper, steps=1)
    expected = r"device-0 after round 1: the loss on held-out samples is .*a smaller rate is needed"
    with pytest.raises(InvalidInput, match=expected):
        simulate(regression(), sines(), made)


def test_a_page_refuses_trials_of_different_metrics(trials):
    other = simulate(module(), shards(), study(rounds=1))
    with pytest.raises(InvalidInput, match="fedavg by loss, maml by loss, fedavg by accuracy"):
        page([*trials, other], "mixed")


def test_a_model_without_accuracy_and_loss_cannot_be_scored():
    with pytest.raises(InvalidInput, match=r"`evaluate` must return 'accuracy' or 'loss'.*top5"):
        metric_of(["top5"])


class NextCharacter(nn.Cell):
    """Logits of the next character at every position."""

    def __init__(self, characters=5):
        super().__init__()
        self.embedding = nn.Embedding(characters, 4)
        self.gru = nn.GRU(4, 6)
        self.head = nn.Dense(6, characters)

    def construct(self, x):
        states, _ = self.gru(self.embedding(x))
        return self.head(states)


def text(number, count=24, length=7):
    """Sequences that count up by a step of the device's own, so a device's text is predictable."""
    rng = np.random.default_rng(number)
    at = rng.integers(0, 5, (count, 1)) + np.arange(length + 1) * (1 + number % 2)
    x = (at % 5).astype(np.int64)
    data = {"x": x[:, :-1], "y": x[:, 1:]}
    return Shard(*({k: v[part] for k, v in data.items()} for part in np.s_[:16, 16:]))


@pytest.mark.parametrize("algorithm", ["fedavg", "maml"])
def test_a_model_of_characters_learns_targets_of_sequences(algorithm):
    nn.seed(4)
    loss = nn.SoftmaxCrossEntropy()
    trainer = train.Trainer(NextCharacter(), loss=loss, optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 7), np.int64), np.zeros((1, 7), np.int64))
    exported = trainer.export(("predict", "evaluate", "loss"))
    devices = {f"device-{k}": text(k) for k in range(4)}
    hyper = Hyper(lr=1.0, meta_lr=1.0, inner_steps=3)
    made = Study(algorithm=algorithm, rounds=8, hyper=hyper, steps=4, batch_size=8, support=8)
    trial = simulate(exported, devices, made)
    assert trial.metric == ACCURACY
    scores = there(trial.summary(seen=True))
    assert 0.3 < scores.before < scores.after <= 1.0
    bad = text(9)
    bad.held_out["y"][2, 3] = 5
    with pytest.raises(InvalidInput, match=r"tells 5 classes apart.*to score on are \d to 5"):
        simulate(exported, {"odd": bad}, made)


def test_digits_of_a_page_are_finite_numbers(trials):
    assert not re.search(r"\b(nan|inf)\b", page(trials, "t"))
