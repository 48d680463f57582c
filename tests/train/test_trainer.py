"""The trainer: data in every form, modes, batches of any size, callbacks, errors."""

import io
import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.unified_ir import TensorSpec, nn, ops, optim, train
from triplane.unified_ir import data as datasets
from triplane.unified_ir.engines import engine
from triplane.unified_ir.runtime import available_providers

from .models import QUIET, Noisy, bits, data, trainer


@pytest.mark.slow
def test_digits_are_learnt_to_ninety_seven_percent():
    training, held_out = datasets.digits().split()
    nn.seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dense(16 * 4 * 4, 10),
    )  # fmt: skip
    done = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(1e-2))
    history = done.fit(training, epochs=15, validation=held_out, **QUIET)
    assert history.last["validation.accuracy"] >= 0.97
    assert history.last["epoch"] == 15
    assert len(history["loss"]) == 15
    measured = done.evaluate(held_out)
    hits = done.predict(held_out.x).argmax(1) == held_out.y
    assert measured["accuracy"] == pytest.approx(hits.mean())
    assert done.labels == tuple("0123456789")


@pytest.mark.slow
def test_one_seed_gives_one_set_of_bits_and_another_another():
    def trained(seed):
        made = trainer(seed=seed)
        made.fit(data(), 2, batch_size=8, **QUIET)
        return bits(made)

    assert trained(3) == trained(3)
    assert trained(3) != trained(4)


def test_the_seed_of_keys_and_order_is_the_trainers_own():
    cell = Noisy()
    first = train.Trainer(cell, loss=nn.MSE(), optimizer=optim.SGD(0.1), seed=1)
    key = first.cell.drop.key.array.copy()
    train.Trainer(cell, loss=nn.MSE(), optimizer=optim.SGD(0.1), seed=2)
    assert not np.array_equal(cell.drop.key.array, key)


@pytest.mark.slow
def test_arrays_datasets_and_lists_of_batches_train_alike():
    rng = np.random.default_rng(1)
    x, y = rng.random((20, 1, 2, 2)).astype(np.float32), rng.integers(0, 3, 20)
    dataset = datasets.arrays(x, y)

    class Flat(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = Noisy()

        def construct(self, x):
            return self.inner(ops.flatten(x))

    found = []
    for given in (dataset, (dataset.x, dataset.y), list(dataset.batches(6, seed=0, epoch=0))):
        made = trainer(cell=Flat)
        made.fit(given, 1, batch_size=6, **QUIET)
        found.append(bits(made))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_fitting_twice_goes_on():
    once, twice = trainer(), trainer()
    once.fit(data(), 4, **QUIET)
    for _ in range(2):
        history = twice.fit(data(), 2, **QUIET)
    assert bits(once) == bits(twice)
    assert history.rows == once.history.rows


def test_a_change_of_the_cell_between_fits_is_seen():
    made = trainer()
    made.fit(data(), 1, **QUIET)
    made.cell.head.bias = np.full(3, 100.0, np.float32)
    assert made.evaluate(data())["loss"] < 2.0
    made.cell.head.weight = np.zeros((3, 8), np.float32)
    assert made.evaluate(data())["loss"] == pytest.approx(np.log(3))


@pytest.mark.parametrize("size", [1, 7, 50, 64])
def test_any_batch_size_sees_every_sample_once(size):
    record = train.Record()
    made = trainer(callbacks=[record], cell=lambda: nn.Dense(4, 3))
    history = made.fit(data(), 1, batch_size=size, **QUIET)
    assert len(record.steps) == -(-50 // size)
    weights = [size] * (50 // size) + ([50 % size] if 50 % size else [])
    mean = np.average([row["loss"] for row in record.steps], weights=weights)
    assert history.last["loss"] == pytest.approx(mean)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["reference", "ascend"])
def test_losses_agree_between_engines_with_dropout_and_statistics(other):
    losses = {}
    for name in ("onnx", other):
        record = train.Record()
        made = trainer(engine=name, callbacks=[record])
        made.fit(data(), 2, batch_size=16, **QUIET)
        losses[name] = [row["loss"] for row in record.steps]
    np.testing.assert_allclose(
        losses[other], losses["onnx"], rtol=3e-3 if other == "ascend" else 1e-5
    )


def test_clipping_keeps_steps_below_the_limit():
    made = trainer(optimizer=optim.SGD(1.0), clip_norm=0.01, cell=lambda: nn.Dense(4, 3))
    before = made.state()
    x, y = data()
    made.fit((x * 100, y), 1, batch_size=50, **QUIET)
    moved = np.sqrt(sum(((made.state()[k] - a) ** 2).sum() for k, a in before.items()))
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_metrics_and_summaries_are_averaged_over_the_epoch():
    class Watched(nn.Dense):
        def construct(self, x):
            ops.scalar_summary("size", (x * x).mean())
            return super().construct(x)

    made = trainer(cell=lambda: Watched(4, 3), metrics={"half": lambda y, _: y.mean() * 0.0 + 0.5})
    x, y = data()
    row = made.fit((x, y), 1, batch_size=20, **QUIET).last
    assert row["half"] == 0.5
    assert row["summary/size"] == pytest.approx((x * x).mean(), rel=1e-5)
    assert "accuracy" not in row


def test_several_inputs_and_a_function_as_loss():
    class Sum(nn.Cell):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Dense(4, 1), nn.Dense(2, 1)

        def construct(self, left, right):
            return self.a(left) + self.b(right)

    rng = np.random.default_rng(2)
    left, right = rng.standard_normal((30, 4)), rng.standard_normal((30, 2))
    target = left[:, :1] * 2 - right[:, 1:]
    made = train.Trainer(
        Sum(), loss=lambda y, t: ((y - t) * (y - t)).mean(), optimizer=optim.Adam(0.1)
    )
    history = made.fit((left, right, target), 60, **QUIET)
    assert history["loss"][-1] < 0.01
    np.testing.assert_allclose(made.predict(left, right), target, atol=0.5)
    assert made.model.batch_names() == ("left", "right", "y")


class LastState(nn.Cell):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 6), nn.Dense(6, 3)

    def construct(self, x):
        return self.head(self.rnn(x)[1])


@pytest.mark.slow
def test_sequences_of_any_length_train_in_one_graph_where_specs_leave_it_open():
    rng = np.random.default_rng(3)
    batches = [
        (rng.standard_normal((5, t, 4)).astype(np.float32), rng.integers(0, 3, 5))
        for t in (3, 7, 1)
    ]
    opened, closed = trainer(cell=LastState), trainer(cell=LastState)
    opened.prepare(TensorSpec(("N", "T", 4)), TensorSpec(("N",), "int64"))
    opened.fit(batches, 2, **QUIET)
    assert opened.evaluate(batches)["loss"] > 0
    assert opened.predict(batches[1][0]).shape == (5, 3)
    assert [str(v.type) for v in opened.export().inputs("predict")] == ["float32[N,T,4]"]
    for _ in range(2):
        for batch in batches:
            closed.fit([batch], 1, **QUIET)
    got, expected = opened.state(), closed.state()
    for name in ("head.weight", "rnn.weight_hh"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)


def test_evaluation_takes_other_shapes_than_training():
    made = trainer(cell=LastState)
    made.fit([(np.ones((4, 3, 4), np.float32), np.zeros(4, np.int64))], 1, **QUIET)
    longer = (np.ones((4, 9, 4), np.float32), np.zeros(4, np.int32))
    assert made.evaluate(longer)["accuracy"] == 1.0
    assert made.predict(longer[0]).shape == (4, 3)


def test_frozen_parameters_stay():
    class Half(nn.Cell):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Dense(4, 4), nn.Dense(4, 3)
            self.body.parameters()["weight"].trainable = False
            self.body.parameters()["bias"].trainable = False

        def construct(self, x):
            return self.head(ops.relu(self.body(x)))

    made = trainer(cell=Half)
    before = made.state()
    made.fit(data(), 1, **QUIET)
    after = made.state()
    assert np.array_equal(before["body.weight"], after["body.weight"])
    assert not np.array_equal(before["head.weight"], after["head.weight"])
    assert "optimizer.m.body.weight" not in after


@pytest.mark.slow
def test_another_rate_between_fits_keeps_the_optimizers_state():
    made = trainer(optimizer=optim.Adam(0.01))
    made.fit(data(), 1, **QUIET)
    made.optimizer = optim.Adam(0.0)
    before = made.state()
    made.fit(data(), 1, **QUIET)
    after = made.state()
    assert np.array_equal(before["head.weight"], after["head.weight"])
    assert after["optimizer.step"] == 2 * before["optimizer.step"] > 0
    assert not np.array_equal(before["optimizer.m.head.weight"], after["optimizer.m.head.weight"])


@pytest.mark.slow
def test_a_parameter_thawed_between_fits_is_trained():
    made = trainer(optimizer=optim.Adam(0.01))
    weight = made.cell.parameters()["first.weight"]
    weight.trainable = False
    made.fit(data(), 1, **QUIET)
    frozen, step = weight.array, made.state()["optimizer.step"]
    weight.trainable = True
    made.fit(data(), 1, **QUIET)
    assert not np.array_equal(weight.array, frozen)
    assert made.state()["optimizer.step"] == 2 * step


@pytest.mark.slow
def test_importing_training_imports_no_rich():
    code = "import sys, triplane.unified_ir.train; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_training_leaves_the_cells_own_modes():
    made = trainer()
    made.cell.drop.eval()
    made.fit(data(), 1, validation=data(20), **QUIET)
    assert made.cell.training
    assert not made.cell.drop.training


@pytest.mark.slow
def test_a_callback_may_stop_the_run_within_an_epoch():
    class Stop(train.Callback):
        def on_step(self, run):
            if run.step == 3:
                run.stop()

    made = trainer(callbacks=[Stop()])
    made.fit(data(), 2, batch_size=10, **QUIET)
    assert (made.place.epoch, made.place.position, made.place.step) == (0, 3, 3)
    whole = trainer()
    whole.fit(data(), 1, batch_size=10, **QUIET)
    made.callbacks = ()
    made.fit(data(), 1, batch_size=10, **QUIET)
    assert bits(made) == bits(whole)


def test_early_stop_waits_its_patience():
    made = trainer(callbacks=[train.EarlyStop("loss", patience=2, min_change=10.0)])
    assert len(made.fit(data(), 9, **QUIET)) == 3


def test_early_stop_takes_accuracy_for_better_when_larger():
    made = trainer(callbacks=[train.EarlyStop("accuracy", patience=1)])
    history = made.fit(data(), 30, **QUIET)
    rising = history["accuracy"]
    assert all(b > a for a, b in pairwise(rising[:-1]))
    assert rising[-1] <= rising[-2]


def test_the_history_is_kept_in_files(tmp_path):
    files = [train.HistoryFile(tmp_path / name) for name in ("h.csv", "h.json")]
    history = trainer(callbacks=files).fit(data(), 2, validation=data(20), **QUIET)
    assert json.loads((tmp_path / "h.json").read_text()) == history.rows
    header, *rows = (tmp_path / "h.csv").read_text().splitlines()
    assert header == "epoch,step,loss,accuracy,validation.loss,validation.accuracy"
    assert len(rows) == 2


@pytest.mark.slow
def test_progress_without_a_terminal_is_a_line_per_epoch():
    out = io.StringIO()
    trainer().fit(data(), 2, progress=train.Progress(stream=out))
    first, second = out.getvalue().splitlines()
    assert first.startswith("epoch 1/2  loss ")
    assert first.endswith("  lr 0.02")
    assert "accuracy" in second


@pytest.mark.slow
def test_an_interrupt_leaves_what_was_learnt_in_the_cell():
    class Interrupt(train.Callback):
        def on_step(self, run):
            if run.step == 4:
                raise KeyboardInterrupt

    made = trainer(callbacks=[Interrupt()])
    before = bits(made)
    with pytest.raises(KeyboardInterrupt):
        made.fit(data(), 2, batch_size=5, **QUIET)
    assert bits(made) != before
    made.callbacks = ()
    made.fit(data(), 1, batch_size=5, **QUIET)
    whole = trainer()
    whole.fit(data(), 1, batch_size=5, **QUIET)
    assert bits(made) == bits(whole)


def test_a_parameter_the_loss_ignores_is_named():
    class Spare(nn.Cell):
        def __init__(self):
            super().__init__()
            self.used, self.spare, self.cut = (nn.Dense(4, 3) for _ in range(3))

        def construct(self, x):
            return self.used(x) + ops.stop_gradient(self.cut(x))

    with pytest.raises(InvalidInput, match=r"depend on 'spare.weight', 'spare.bias'.*trainable"):
        trainer(cell=Spare).fit(data(), 1, **QUIET)

    class Cut(Spare):
        def construct(self, x):
            return self.used(x) + ops.stop_gradient(self.cut(x)) + self.spare(x)

    with pytest.raises(InvalidInput, match=r"depend on 'cut.weight', 'cut.bias'"):
        trainer(cell=Cut).fit(data(), 1, **QUIET)


class Clashing(nn.Cell):
    def __init__(self):
        super().__init__()
        self.loss = nn.Parameter(np.zeros((4, 3)))

    def construct(self, x):
        return x @ self.loss


X, Y = data()


class Silent(nn.Cell):
    def construct(self, x):
        pass


def made(**fields):
    """A trainer of which one part is not what it is to be."""
    parts = {"cell": nn.Dense(4, 3), "loss": nn.MSE(), "optimizer": optim.SGD(0.1), **fields}
    return train.Trainer(parts.pop("cell"), **parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: trainer().fit((X, Y), 1, batch_size=0), "at least 1 sample, got batch_size=0"),
        (lambda: trainer().fit((X, Y), 1, batch_size=2.5), "got batch_size=2.5"),
        (lambda: trainer().fit((X, Y), "3"), "epochs must be a whole number >= 0, got '3'"),
        (lambda: trainer().fit((X, Y.astype(str)), 1), r"numbers or booleans, got <U21; turn"),
        (lambda: trainer().fit((X.astype(object), Y), 1), "numbers or booleans, got object"),
        (lambda: trainer().fit({"x": X, "y": Y}, 1), "data must be a Dataset, .* got dict"),
        (lambda: trainer().fit((X, Y), -1), "epochs must be a whole number >= 0, got -1"),
        (
            lambda: trainer().fit((X, Y[:9]), 1),
            r"the same number of rows.*\[50, 4\], \[9\]",
        ),
        (lambda: trainer().fit(7, 1), "data must be a Dataset, a tuple of arrays"),
        (lambda: trainer().fit([], 1), "the data is empty"),
        (lambda: trainer().fit([X], 1), "a batch is a tuple of arrays"),
        (lambda: trainer().fit((X, X, Y), 1), "3 arrays passes 2 inputs to Noisy.construct"),
        (lambda: trainer().fit((X, Y.astype(np.float32)), 1), "integer labels"),
        (lambda: trainer().fit((X, Y - 1), 1), r"labels are 0..2, got -1..1"),
        (lambda: trainer().evaluate((X, Y * 2)), r"labels are 0..2, got 0..4"),
        (
            lambda: trainer().fit([(X[:9], Y[:9]), (X[:9, :3], Y[:9])], 1, **QUIET),
            r"x: float32\[N,4\], y: int64\[N\], as the first one was, got float32\[9, 3\]",
        ),
        (
            lambda: trainer().fit([(X, Y), (X, Y.astype(np.int32))], 1, **QUIET),
            r"got float32\[50, 4\], int32\[50\]; convert it",
        ),
        (
            lambda: trainer().fit((X, np.where(Y == 1, 7, Y)), 1),
            r"range is 7, sample \d+ of",
        ),
        (lambda: trainer().export(), "has not seen data yet"),
        (lambda: trainer().evaluate([]), "no data to evaluate on"),
        (lambda: trainer().predict(), "a batch is a tuple"),
        (lambda: trainer(cell=nn.ReLU).fit((X, Y), 1), "ReLU has no trainable parameter"),
        (lambda: trainer(cell=Clashing).fit((X, Y), 1), "state 'loss' of Clashing"),
        (lambda: trainer().fit(iter([(X, Y)]), 2, **QUIET), "epoch 2 has no batches"),
        (
            lambda: trainer(metrics={"loss": nn.accuracy}).fit((X, Y), 1),
            "a metric cannot be called 'loss'",
        ),
        (
            lambda: trainer(metrics={"all": lambda y, _: y}).fit((X, Y), 1),
            r"'all' is float32\[N,3\]; take the mean",
        ),
        (lambda: trainer(cell=Silent).fit((X, Y), 1), "Silent.construct returns nothing; return"),
        (lambda: made(cell=nn.ReLU), r"cell is the class ReLU; give an instance: ReLU\("),
        (lambda: made(loss=nn.MSE), "loss is the class MSE"),
        (lambda: made(loss="mse"), "loss must be a loss cell or a function, got 'mse'"),
        (lambda: made(optimizer=optim.Adam), "optimizer is the class Adam"),
        (lambda: made(optimizer=0.1), "optimizer must be of kind Optimizer, got 0.1"),
        (lambda: train.EarlyStop(patience=0), "patience >= 1"),
        (lambda: train.HistoryFile("h.txt"), r"ends in \.csv or \.json"),
        (lambda: train.Checkpoint("c", keep=0), "keep >= 1"),
        (
            lambda: train.Trainer(
                nn.Dense(4, 3), loss=lambda y, _: y, optimizer=optim.SGD(0.1)
            ).fit((X, Y), 1),
            "losses and metrics are scalars, 'loss' is float32",
        ),
    ],
)
def test_mistakes_are_named_with_the_way_out(act, said):
    with pytest.raises(InvalidInput, match=said):
        act()


def test_a_column_that_no_epoch_has_is_named():
    history = trainer().fit(data(), 1, **QUIET)
    with pytest.raises(NotFound, match=r"no epoch has 'validation\.loss'; there are epoch, step"):
        history["validation.loss"]
    with pytest.raises(NotFound, match="no epoch is finished"):
        _ = train.History().last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu"}, "one of 'cpu', 'cuda', got 'tpu'"),
        ({"device": "cuda", "engine": "xla"}, "JAX chooses"),
        ({"device": "cuda", "engine": engine("onnx")}, r"SessionOptions\(device='cuda'\)"),
    ],
)
def test_a_device_that_the_engine_cannot_take_is_refused_before_any_data(options, words):
    with pytest.raises(InvalidInput, match=words):
        trainer(**options)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in available_providers(), reason="this is the build for GPUs"
)
def test_a_gpu_is_refused_with_the_packages_that_it_needs():
    with pytest.raises(
        Unavailable, match="pip uninstall onnxruntime && pip install onnxruntime-gpu"
    ):
        trainer(device="cuda")


def test_an_engine_of_ones_own_may_be_given():
    made = trainer(engine=engine("reference"))
    assert len(made.fit(data(), 1, **QUIET)) == 1


def test_ignored_labels_are_fed_and_others_are_held_to_the_classes():
    loss = nn.SoftmaxCrossEntropy(ignore_index=-100)
    made = train.Trainer(Noisy(), loss=loss, optimizer=optim.SGD(0.1))
    some = np.where(np.arange(len(Y)) % 3 == 0, -100, Y)
    made.fit((X, some), 1, **QUIET)
    assert all(np.isfinite(p.array).all() for p in made.cell.parameters().values())
    with pytest.raises(InvalidInput, match=r"labels are 0..2, got -1.."):
        made.fit((X, Y - 1), 1, **QUIET)
