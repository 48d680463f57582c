"""Where labels weigh or are ignored, how samples fall into batches changes no mean or update."""

import json

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.train.snapshot import PROGRESS

from .models import QUIET, bits

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 16)
Y[:7] = 1
WEIGHT = np.array([0.25, 3.0, 1.5])
LOSSES = {
    "ignored": lambda: nn.SoftmaxCrossEntropy(ignore_index=1),
    "weighted": lambda: nn.SoftmaxCrossEntropy(weight=WEIGHT),
    "both": lambda: nn.SoftmaxCrossEntropy(weight=WEIGHT, ignore_index=1, label_smoothing=0.1),
    "zero": lambda: nn.SoftmaxCrossEntropy(weight=WEIGHT * [1, 0, 1]),
    "smoothed": lambda: nn.SoftmaxCrossEntropy(weight=WEIGHT * [1, 0, 1], label_smoothing=0.1),
    "likelihood": lambda: nn.NegativeLogLikelihood(weight=WEIGHT, ignore_index=1),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def made(loss, **options):
    nn.seed(3)
    options = {"optimizer": optim.SGD(0.1), **options}
    return train.Trainer(nn.Dense(4, 3), loss=loss, **options)


@each_loss
@pytest.mark.parametrize("size", [8, 4, 3, 1])
def test_an_evaluation_does_not_depend_on_the_size_of_its_batches(name, size):
    trainer = made(LOSSES[name]())
    whole = trainer.evaluate((X, Y), batch_size=16)
    assert trainer.evaluate((X, Y), batch_size=size) == pytest.approx(whole, rel=1e-6)


def test_weights_and_ignored_labels_evaluate_to_their_definition():
    trainer = made(nn.SoftmaxCrossEntropy(weight=WEIGHT, ignore_index=1))
    logits = trainer.predict(X).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    kept = Y != 1
    w = np.where(kept, WEIGHT[Y], 0.0)
    row = trainer.evaluate((X, Y), batch_size=4)
    assert row["loss"] == pytest.approx(-(w * log_p[np.arange(16), Y]).sum() / w.sum(), rel=1e-6)
    assert row["accuracy"] == pytest.approx((logits.argmax(1) == Y)[kept].mean(), rel=1e-6)


@each_loss
@pytest.mark.parametrize("engine", ["onnx", "reference"])
def test_accumulated_batches_count_what_one_large_batch_does(name, engine):
    large = made(LOSSES[name](), engine=engine)
    first = large.fit((X, Y), 2, batch_size=8, **QUIET)
    small = made(LOSSES[name](), engine=engine, accumulate=2)
    second = small.fit((X, Y), 2, batch_size=4, **QUIET)
    for k, array in large.state().items():
        np.testing.assert_allclose(small.state()[k], array, rtol=2e-5, atol=1e-6, err_msg=k)
    for column in ("loss", "accuracy"):
        np.testing.assert_allclose(second[column], first[column], rtol=1e-5)


@each_loss
def test_an_epoch_reports_the_mean_over_what_counts(name):
    """At a rate of 0 training measures what evaluation does."""
    trainer = made(LOSSES[name](), optimizer=optim.SGD(0.0))
    row = trainer.fit((X, Y), 1, batch_size=3, **QUIET).last
    whole = trainer.evaluate((X, Y), batch_size=16)
    assert {k: row[k] for k in whole} == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "float16"}])
@pytest.mark.parametrize("name", ["ignored", "zero"])
def test_a_batch_whose_labels_count_nowhere_moves_nothing(name, options):
    seen = []

    class Watch(train.Callback):
        def on_step(self, run):
            seen.append((run.results["loss"], run.state()["weight"].tobytes(), set(run.results)))

    batches = [(X[:4], Y[:4] * 0 + 1)] * 2 + [(X[8:], Y[8:])]
    trainer = made(LOSSES[name](), callbacks=[Watch()], **options)
    before = trainer.state()["weight"].tobytes()
    history = trainer.fit(batches, 1, **QUIET)
    assert [loss for loss, _, _ in seen[:2]] == [0.0, 0.0]
    assert [w for _, w, _ in seen[:2]] == [before, before]
    assert trainer.state()["weight"].tobytes() != before
    assert history.last["loss"] == pytest.approx(seen[2][0])
    assert not any("counted" in k for k in seen[0][2] | set(history.columns()))


def test_only_data_without_any_label_that_counts_is_refused():
    trainer = made(LOSSES["ignored"]())
    none = np.ones_like(Y)
    with pytest.raises(InvalidInput, match=r"no label of this data counts in the mean of .*loss:"):
        trainer.evaluate((X, none), batch_size=4)
    before = bits(trainer)
    with pytest.raises(InvalidInput, match=r"no label of epoch 1 counts in the mean of .*loss:"):
        trainer.fit((X, none), 1, batch_size=4, **QUIET)
    assert bits(trainer) == before
    history = trainer.fit((X, Y), 1, batch_size=4, **QUIET)
    assert history["step"] == [4]


def test_a_run_resumes_within_an_epoch_with_what_was_counted(tmp_path):
    class Stop(train.Callback):
        def on_step(self, run):
            if run.step == 3:
                run.stop()

    whole = made(LOSSES["both"]())
    expected = whole.fit((X, Y), 2, batch_size=3, **QUIET)
    first = made(LOSSES["both"](), callbacks=[Stop()])
    first.fit((X, Y), 2, batch_size=3, checkpoint=tmp_path, **QUIET)
    second = made(LOSSES["both"]())
    again = second.fit((X, Y), 2, batch_size=3, checkpoint=tmp_path, **QUIET)
    assert again.rows == expected.rows
    assert bits(second) == bits(whole)


def test_of_exported_functions_evaluate_alone_gives_what_its_means_divide_by():
    trainer = made(LOSSES["both"]())
    trainer.prepare(X, Y)
    module = trainer.export(("predict", "evaluate"))
    names = ("loss", "accuracy", "counted/loss", "counted/accuracy")
    assert sorted(module.functions["evaluate"].result_names) == sorted(names)
    assert module.meta["ignored"] == "1"


def test_exported_functions_and_files_of_plain_losses_hold_no_counts(tmp_path):
    entries = ("loss", "train_step", "gradients", "local_update")
    names = []
    for loss in (nn.SoftmaxCrossEntropy(), LOSSES["both"]()):
        trainer = made(loss, accumulate=2)
        trainer.fit((X, Y), 1, batch_size=4, **QUIET)
        module = trainer.export(entries)
        names.append({k: (f.param_names, f.result_names) for k, f in module.functions.items()})
    assert names[0] == names[1]
    plain = made(nn.SoftmaxCrossEntropy())
    plain.fit((X, Y), 1, **QUIET)
    evaluate = plain.export(("evaluate",))
    assert evaluate.functions["evaluate"].result_names == ("loss", "accuracy")
    assert "ignored" not in evaluate.meta
    plain.save(tmp_path / "run")
    file = Container(tmp_path / "run", kind="checkpoint")
    assert "counted" not in json.loads(bytes(file.part(PROGRESS)))["place"]


def test_a_loss_of_ones_own_says_what_its_samples_count():
    class Squares(nn.Loss):
        """Of targets above 0."""

        def counted(self, output, target):
            return (target > 0.0).cast(output.dtype).sum()

        def construct(self, output, target):
            error = (output - target) * (target > 0.0).cast(output.dtype)
            return (error * error).sum() / ops.maximum(self.counted(output, target), 1.0)

    target = X[:, :3]
    trainer = made(Squares())
    whole = trainer.evaluate((X, target), batch_size=16)
    assert trainer.evaluate((X, target), batch_size=5) == pytest.approx(whole, rel=1e-6)
    error = (trainer.predict(X) - target)[target > 0]
    assert whole["loss"] == pytest.approx((error**2).mean(), rel=1e-6)


def test_a_metric_may_not_take_the_name_of_a_count():
    with pytest.raises(InvalidInput, match="cannot be called 'counted/loss'"):
        made(LOSSES["both"](), metrics={"counted/loss": nn.accuracy}).evaluate((X, Y))


def test_what_a_mean_divides_by_is_one_number():
    class Each(nn.MSE):
        """Counts by element."""

        def counted(self, output, target):
            return (output == target).cast(output.dtype)

    with pytest.raises(InvalidInput, match="the divisor of 'loss' must be a scalar, got float32"):
        made(Each()).evaluate((X, X[:, :3]))
