"""Training with several targets, and with none."""

import json

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data, nn, ops, optim, train

RNG = np.random.default_rng(0)
X = RNG.random((24, 3), np.float32)
A = X @ np.array([[1.0], [2.0], [3.0]], np.float32)
B = X[:, :1] - X[:, 1:2]


class Two(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 2)

    def construct(self, x):
        y = self.dense(x)
        return y[:, :1], y[:, 1:]


class One(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 2)

    def construct(self, x):
        return self.dense(x)


def sum_of_squares(output, targets):
    return sum((((o - t) ** 2).mean() for o, t in zip(output, targets, strict=True)), 0.0)


def trainer(cell, loss):
    nn.seed(0)
    return train.Trainer(cell(), loss=loss, optimizer=optim.SGD(0.1), metrics={})


def test_two_targets_train_like_one_of_both():
    dataset = data.arrays({"x": X, "a": A, "b": B}).roles("x", ("a", "b"))
    two = trainer(Two, sum_of_squares)
    two.fit(dataset, 3, batch_size=8, progress="none")
    both = trainer(One, lambda y, t: 2 * ((y - t) ** 2).mean())
    both.fit((X, np.concatenate([A, B], axis=1)), 3, batch_size=8, progress="none")
    for mine, theirs in zip(two.cell.parameters().values(), both.cell.parameters().values(),
                            strict=True):  # fmt: skip
        np.testing.assert_allclose(mine.array, theirs.array, rtol=1e-5)
    assert two.evaluate(dataset)["loss"] == pytest.approx(
        both.evaluate((X, np.concatenate([A, B], axis=1)))["loss"], rel=1e-5
    )
    parts = two.predict(X)
    np.testing.assert_allclose(
        np.concatenate([*parts.values()], axis=1), both.predict(X), rtol=1e-4
    )
    target = json.loads(two.export(("predict", "loss")).meta["target"])
    assert list(target) == ["y0", "y1"]


class Copying(nn.Cell):
    """An autoencoder that returns its own error."""

    def __init__(self):
        super().__init__()
        self.code, self.out = nn.Dense(3, 2), nn.Dense(2, 3)

    def construct(self, x):
        return ops.relu(self.out(self.code(x))) - x


def squared(error):
    return (error**2).mean()


@pytest.mark.parametrize("batches", [(X,), data.arrays(X), [(X[:12],), (X[12:],)]],
                         ids=["arrays", "dataset", "batches"])  # fmt: skip
def test_a_loss_of_the_output_alone_needs_no_target(batches):
    learner = trainer(Copying, squared)
    history = learner.fit(batches, 5, batch_size=8, progress="none")
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
    assert learner.evaluate(batches)["loss"] == pytest.approx(
        float((learner.predict(X) ** 2).mean()), rel=1e-5
    )


def test_a_run_without_targets_resumes(tmp_path):
    whole = trainer(Copying, squared)
    whole.fit(data.arrays(X), 4, batch_size=8, progress="none")
    for epochs in (2, 4):  # in all, since each trainer begins at the checkpoint
        part = trainer(Copying, squared)
        part.fit(data.arrays(X), epochs, batch_size=8, progress="none", checkpoint=tmp_path)
    for mine, theirs in zip(whole.cell.parameters().values(), part.cell.parameters().values(),
                            strict=True):  # fmt: skip
        assert np.array_equal(mine.array, theirs.array)


def test_a_loss_that_needs_a_target_says_so():
    with pytest.raises(InvalidInput, match=r"no target, and MSE\.construct\(.*pass \(x, y\)"):
        trainer(One, nn.MSE()).fit((X,), 1, progress="none")


def test_sequences_of_any_length_train_from_padded_batches():
    class Mean(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(1, 1)

        def construct(self, x):
            return self.dense(x.reshape((*x.shape, 1)).mean(axis=1))

    rows = [RNG.random(k, np.float32) for k in RNG.integers(1, 9, 40)]
    y = np.array([[r.sum()] for r in rows], np.float32)
    dataset = data.arrays(data.Ragged.of(rows), y).padded_batch(7)
    learner = trainer(Mean, nn.MSE())
    learner.fit(dataset, 2, progress="none")
    assert np.isfinite(learner.evaluate(dataset)["loss"])
