"""Metrics over uneven batches equal their definitions over all samples at once."""

import math
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.cli import training
from triplane.unified_ir.data import by_name
from triplane.unified_ir.frontend import graph
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.train.metrics import BY_NAME, metric_named

from .models import QUIET, bits, data, trainer

CLASSES = 4
RNG = np.random.default_rng(3)
LOGITS = RNG.standard_normal((41, CLASSES)).astype(np.float32)
LABELS = RNG.integers(0, 3, 41)  # the last class is said, and never right


class Given(nn.Cell):
    """Gives its input as logits, with a weight that changes nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(np.ones(()))

    def construct(self, x):
        return x * self.weight


def of(metrics, loss=None, cell=Given):
    return train.Trainer(
        cell(), loss=loss or nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.0), metrics=metrics
    )


def by_definition(average):
    """(precision, recall, F1) by counting samples one by one."""
    said = LOGITS.argmax(1)
    a: Any
    b: Any
    classes: list[Any] = [-1] if average == "micro" else sorted({*said, *LABELS})
    if average == "positive":
        classes = [CLASSES - 1]
    rows = []
    for c in classes:
        a, b = (said == c, c == LABELS) if c >= 0 else (said >= 0, LABELS >= 0)
        a, b = a.astype(int), b.astype(int)
        hits = int((a & b).sum()) if c >= 0 else int(np.sum(said == LABELS))
        p = hits / a.sum() if a.any() else 0.0
        r = hits / b.sum() if b.any() else 0.0
        rows.append((p, r, 2 * p * r / (p + r) if p + r else 0.0))
    return np.mean(rows, axis=0)


@pytest.mark.parametrize("average", ["macro", "micro", "positive"])
@pytest.mark.parametrize("size", [41, 10, 1])
def test_ratios_by_class_are_exact_over_uneven_batches(average, size):
    metrics = {
        "p": train.Precision(average), "r": train.Recall(average), "f": train.F1(average),
    }  # fmt: skip
    row = of(metrics).evaluate((LOGITS, LABELS), batch_size=size)
    np.testing.assert_allclose([row["p"], row["r"], row["f"]], by_definition(average), rtol=1e-12)


def test_means_and_perplexity_are_exact_over_uneven_batches():
    metrics = {"top2": train.TopK(2), "top9": train.TopK(9), "perplexity": train.Perplexity()}
    row = of(metrics).evaluate((LOGITS, LABELS), batch_size=10)
    ranks = (-LOGITS).argsort(1, kind="stable")
    assert row["top2"] == pytest.approx((ranks[:, :2] == LABELS[:, None]).any(1).mean())
    assert row["top9"] == 1.0
    wide = LOGITS.astype(np.float64)
    each = np.log(np.exp(wide).sum(1)) - wide[np.arange(41), LABELS]
    assert row["perplexity"] == pytest.approx(math.exp(each.mean()), rel=1e-6)
    numbers = of(
        {"mae": train.mean_absolute_error, "mse": train.mean_squared_error}, loss=nn.MSE()
    ).evaluate((LOGITS, np.zeros_like(LOGITS)), batch_size=16)
    assert numbers["mae"] == pytest.approx(np.abs(wide).mean(), rel=1e-6)
    assert numbers["mse"] == pytest.approx((wide**2).mean(), rel=1e-6)


@pytest.mark.parametrize("at", [0.0, 3000.0])
def test_errors_of_numbers_are_exact_over_uneven_batches(at):
    rng = np.random.default_rng(1)
    y = (rng.standard_normal((41, 3)) + at).astype(np.float32)
    t = (y + 0.5 * rng.standard_normal((41, 3))).astype(np.float32)
    tallies = {"rmse": train.RMSE(), "r2": train.R2()}
    row = of(tallies, loss=nn.MSE()).evaluate((y, t), batch_size=16)
    wide_y, wide_t = y.astype(np.float64), t.astype(np.float64)
    errors = (wide_y - wide_t) ** 2
    r2 = 1 - errors.sum(0) / ((wide_t - wide_t.mean(0)) ** 2).sum(0)
    assert row["rmse"] == pytest.approx(math.sqrt(errors.mean()), rel=1e-5)
    assert row["r2"] == pytest.approx(r2.mean(), rel=1e-5)


def test_r2_of_equal_targets_is_one_only_without_errors():
    t = np.full((8, 1), 7.1, np.float32)
    for y, expected in ((t, 1.0), (t + 1, 0.0)):
        assert of({"r2": train.R2()}, loss=nn.MSE()).evaluate((y, t))["r2"] == expected


def test_numbers_of_another_shape_are_not_broadcast():
    x, t = np.zeros((4, 4), np.float32), np.zeros(4, np.float32)
    for metric in (train.R2(), train.RMSE(), train.mean_absolute_error):
        trainer = of({"m": metric}, loss=lambda y, t: y.mean() + t.mean())
        with pytest.raises(ShapeError, match="must have one shape"):
            trainer.evaluate((x, t))


def test_ignored_labels_count_in_no_tally():
    padded = np.concatenate([LABELS, [-100] * 9])
    logits = np.concatenate([LOGITS, LOGITS[:9]])
    loss = nn.SoftmaxCrossEntropy(ignore_index=-100)
    metrics = {"p": train.Perplexity(-100), "f": train.F1()}
    plain = of({"p": train.Perplexity(), "f": train.F1()}).evaluate((LOGITS, LABELS))
    row = of(metrics, loss=loss).evaluate((logits, padded), batch_size=48)
    assert row["p"] == pytest.approx(plain["p"], rel=1e-6)
    assert row["f"] == pytest.approx(plain["f"])
    wrong = padded.copy()
    wrong[41] = 9
    first = r"got -100..9; the first one out of range is 9, sample 41 of the data"
    with pytest.raises(InvalidInput, match=first):
        of(metrics, loss=loss).evaluate((logits, wrong), batch_size=16)


def test_a_label_out_of_range_is_named_by_its_place_in_the_training_data():
    wrong = LABELS.copy()
    wrong[7] = 9
    trainer = of({"p": train.Perplexity()})
    with pytest.raises(InvalidInput, match=r"first one out of range is 9, sample 7 of the train"):
        trainer.fit((LOGITS, wrong), epochs=1, batch_size=4)
    with pytest.raises(InvalidInput, match=r"first one out of range is 9, row 3 of the batch"):
        trainer.fit([(LOGITS[k : k + 4], wrong[k : k + 4]) for k in (0, 4)], epochs=1)


def test_a_label_out_of_range_is_named_by_its_place_in_the_file(tmp_path):
    wrong = np.tile(LABELS, 3)
    wrong[len(LABELS) + 7] = 9
    np.savez(tmp_path / "{odd}.npz", x=np.tile(LOGITS, (3, 1)), y=wrong)
    parts = by_name.load_split(tmp_path / "{odd}.npz", seed=1)
    holds = [9 in part.y for part in parts]
    assert holds == [True, False]
    whole = by_name.load(tmp_path / "{odd}.npz").skip(3)
    first = rf"is 9, sample {len(LABELS) + 7} of {{odd}}\.npz"
    for samples in (
        parts[0],
        whole,
        whole.repeat(2),
        whole.cache().shuffle().filter(lambda s: s["y"] >= 0),
    ):
        with pytest.raises(InvalidInput, match=first.replace("{", r"\{").replace("}", r"\}")):
            of({"p": train.Perplexity()}).fit(samples, epochs=1, batch_size=4)
    with pytest.raises(InvalidInput, match=r"is 9, sample \d+ of \{odd"):
        of({"p": train.Perplexity()}).evaluate(whole)


def test_ties_go_to_the_first_class():
    tied = np.zeros((3, CLASSES), np.float32)
    row = of({"top": train.TopK(2)}).evaluate((tied, np.array([0, 1, 2])))
    assert row["top"] == pytest.approx(2 / 3)


def test_the_confusion_matrix_counts_every_sample():
    made = of(None)
    found = made.confusion_matrix((LOGITS, LABELS), batch_size=7)
    expected = np.zeros((CLASSES, CLASSES), np.int64)
    np.add.at(expected, (LABELS, LOGITS.argmax(1)), 1)
    assert np.array_equal(found, expected)
    assert found.dtype == np.int64
    assert made.evaluate((LOGITS, LABELS))["accuracy"] == pytest.approx(
        np.trace(found) / found.sum()
    )
    yes_no = of(None, loss=nn.BinaryCrossEntropy())
    target = (LABELS[:, None] > 0).astype(np.float32).repeat(CLASSES, 1)
    two = yes_no.confusion_matrix((LOGITS, target))
    said = LOGITS > 0
    assert two.tolist() == [
        [int((~said & (target == 0)).sum()), int((said & (target == 0)).sum())],
        [int((~said & (target == 1)).sum()), int((said & (target == 1)).sum())],
    ]


def test_training_reports_a_tally_of_its_epoch_and_resumes_within_one(tmp_path):
    metrics = {"f1": train.F1(), "perplexity": train.Perplexity(), "accuracy": nn.accuracy}

    class Stop(train.Callback):
        def on_step(self, run):
            if run.step == 5:
                run.stop()

    whole = trainer(metrics=metrics)
    history = whole.fit(data(), 2, batch_size=7, validation=data(20), **QUIET)
    assert {"f1", "perplexity", "validation.f1", "accuracy"} <= set(history.columns())
    assert history.last["perplexity"] == pytest.approx(math.exp(history.last["loss"]), rel=1e-6)
    first = trainer(metrics=metrics, callbacks=[Stop()])
    first.fit(data(), 2, batch_size=7, validation=data(20), checkpoint=tmp_path, **QUIET)
    second = trainer(metrics=metrics)
    again = second.fit(data(), 2, batch_size=7, validation=data(20), checkpoint=tmp_path, **QUIET)
    assert again.rows == history.rows
    assert bits(second) == bits(whole)


def test_tallies_stay_out_of_what_is_exported():
    made = trainer(metrics={"f1": train.F1(), "accuracy": nn.accuracy})
    made.fit(data(), 1, **QUIET)
    module = made.export(["evaluate", "train_step", "loss"])
    assert all("f1" not in f.result_names for f in module.functions.values())
    assert module.functions["evaluate"].result_names == ("loss", "accuracy")
    assert module.meta["metrics"] == '["accuracy"]'


def test_the_perplexity_of_a_hopeless_model_is_infinite():
    assert train.Perplexity().finish(np.array([1e6, 1.0])) == math.inf


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: train.TopK(0), "k >= 1, got 0"),
        (lambda: train.F1("mean"), "'macro', 'micro', 'positive', got 'mean'"),  # type: ignore[arg-type]
        (
            lambda: graph(train.TopK(1))(np.zeros((), np.float32), np.zeros((), np.int64)),
            "last axis of logits counts the classes",
        ),
    ],
)
def test_senseless_metrics_are_refused(act, said):
    with pytest.raises(InvalidInput, match=said):
        act()


def named(metrics, loss=None, targets=np.int64):
    nn.seed(0)
    x = np.eye(4, dtype=np.float32)
    y = np.array([0, 1, 2, 0]).astype(targets)
    if targets is np.float32:
        y = np.stack([y, y, y], axis=1)
    trainer = train.Trainer(
        nn.Dense(4, 3), loss=loss or nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1),
        metrics=metrics,
    )  # fmt: skip
    return trainer.evaluate((x, y))


def test_a_metric_by_its_name_is_the_metric():
    assert named({"acc": "accuracy"}).keys() == {"loss", "acc"}
    assert named(["accuracy", "f1"]) == named({"accuracy": nn.accuracy, "f1": train.F1()})
    for name, rows in BY_NAME.items():
        for kind, metric in rows.items():
            assert metric_named(name, kind) is metric
    losses = {"shares": nn.BinaryCrossEntropy(), "numbers": nn.Huber()}
    for kind, loss in losses.items():
        names = [name for name, row in BY_NAME.items() if kind in row]
        assert named(names, loss, np.float32).keys() == {"loss", *names}


def own(output, target):
    return ((output - target) ** 2.0).mean()


# fmt: off
BAD_METRICS = {
    "unknown":   ({"acc": "acuracy"}, None, "one of 'accuracy'.*did you mean 'accuracy'"),
    "unfit":     (["accuracy"], nn.MSE(), "measures classes or shares.*are mae, mse, rmse, r2"),
    "ambiguous": (["accuracy"], own, "give the function, such as nn.accuracy"),
    "one text":  ("accuracy", None, "or a list of names, got 'accuracy'"),
    "a number":  ({"acc": 3}, None, "got 3 under 'acc'"),
}
# fmt: on


@pytest.mark.parametrize(("metrics", "loss", "message"), BAD_METRICS.values(), ids=BAD_METRICS)
def test_metrics_that_do_not_exist_or_fit_are_refused_with_the_choices(metrics, loss, message):
    with pytest.raises(InvalidInput, match=message):
        named(metrics, loss)


def test_a_loss_of_ones_own_takes_metrics_whose_name_says_enough():
    assert named({"error": "mae"}, own, np.float32).keys() == {"loss", "error"}


class Pair(nn.Cell):
    def __init__(self, wrap):
        super().__init__()
        self.dense, self.wrap = nn.Dense(4, 3), wrap

    def construct(self, x):
        return self.wrap(self.dense(x))


# fmt: off
SEVERAL: dict[str, Any] = {
    "MSE": (nn.MSE(), None, lambda y: (y, y)), "L1": (nn.L1(), None, lambda y: [y, y]),
    "Huber": (nn.Huber(), None, lambda y: {"a": y, "b": y}),
    "SoftmaxCrossEntropy": (nn.SoftmaxCrossEntropy(), None, lambda y: (y, y)),
    "accuracy": (lambda o, t: nn.MSE()(o[0], t), {"a": nn.accuracy}, lambda y: (y, y)),
    "RMSE": (lambda o, t: nn.MSE()(o[0], t), {"a": train.RMSE()}, lambda y: (y, y)),
    "TopK": (lambda o, t: nn.MSE()(o[0], t), {"a": train.TopK(1)}, lambda y: (y, y)),
}
# fmt: on


@pytest.mark.parametrize("name", SEVERAL)
def test_several_outputs_are_refused_by_the_name_of_loss_and_cell(name):
    loss, metrics, wrap = SEVERAL[name]
    trainer = train.Trainer(Pair(wrap), loss=loss, optimizer=optim.SGD(0.1), metrics=metrics)
    data = np.eye(4, dtype=np.float32), np.ones((4, 3), np.float32)
    with pytest.raises(InvalidInput, match=rf"^{name} compares.*Pair.construct returns 2 outputs"):
        trainer.fit(data, 1, progress="none")


def test_a_function_that_chooses_among_outputs_trains():
    trainer = train.Trainer(
        Pair(lambda y: (y, y * 2.0)), loss=lambda o, t: nn.MSE()(o[0], t),
        optimizer=optim.SGD(0.1), metrics={"error": lambda o, t: nn.L1()(o[1], t)},
    )  # fmt: skip
    data = np.eye(4, dtype=np.float32), np.ones((4, 3), np.float32)
    assert trainer.fit(data, 1, progress="none").last.keys() >= {"loss", "error"}


def test_the_names_of_the_command_line_are_those_of_the_table():
    assert tuple(BY_NAME) == training.METRICS
    for name, targets in training.LOSSES.values():
        assert getattr(nn, name).targets == targets


@pytest.mark.parametrize("metrics", [[train.F1()], {0: train.F1()}])
def test_a_metric_without_a_name_is_refused_with_the_form(metrics):
    with pytest.raises(InvalidInput, match=r'needs a name: metrics=\{"NAME": \.\.\.\}, got'):
        trainer(metrics=metrics)
