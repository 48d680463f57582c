"""A change of the cell, its loss or a metric is in the next graph, whatever was compiled before."""

import numpy as np
import pytest

from triplane.unified_ir import nn, optim, train

from .models import QUIET, data

FACTOR = {"value": 1.0}


class Scaled(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Dense(4, 3), 1.0

    def construct(self, x):
        return self.inner(x) * self.scale * FACTOR["value"]


class Weighted(nn.MSE):
    weight = 1.0

    def construct(self, y, target):
        return super().construct(y, target) * self.weight


def made(**options):
    nn.seed(0)
    return train.Trainer(Scaled(), loss=Weighted(), optimizer=optim.SGD(0.0), **options)


X, Y = data()
TARGET = np.eye(3, dtype=np.float32)[Y]


def loss_of(trainer):
    """What `fit` at rate 0, `evaluate` and `predict` say, which are to agree."""
    fitted = trainer.fit((X, TARGET), 1, **QUIET).last["loss"]
    measured = trainer.evaluate((X, TARGET))["loss"]
    error = ((trainer.predict(X) - TARGET) ** 2).mean() * trainer.loss.weight
    np.testing.assert_allclose([fitted, measured], error, rtol=1e-5)
    return measured


def test_attributes_globals_and_the_loss_are_looked_at_again():
    trainer = made()
    first = loss_of(trainer)
    trainer.cell.scale = 3.0
    second = loss_of(trainer)
    FACTOR["value"] = 0.0
    try:
        third = loss_of(trainer)
    finally:
        FACTOR["value"] = 1.0
    trainer.loss.weight = 10.0
    fourth = loss_of(trainer)
    trainer.loss = Weighted()
    assert loss_of(trainer) == second
    assert len({first, second, third}) == 3
    np.testing.assert_allclose(fourth, 10 * second, rtol=1e-6)


def test_a_change_by_a_callback_holds_from_the_next_epoch_on():
    class Rescale(train.Callback):
        def on_epoch(self, run):
            trainer.cell.scale = 0.0

    trainer = made(callbacks=[Rescale()])
    history = trainer.fit((X, TARGET), 2, validation=(X, TARGET), **QUIET)
    np.testing.assert_allclose(history["loss"][1], (TARGET**2).mean(), rtol=1e-6)
    assert history["loss"][0] != history["loss"][1]


def test_a_metric_replaced_is_measured():
    trainer = made(metrics={"m": lambda y, _: y.mean() * 0.0 + 1.0})
    assert trainer.evaluate((X, TARGET))["m"] == 1.0
    trainer.metrics = {"m": lambda y, _: y.mean() * 0.0 + 2.0}
    assert trainer.evaluate((X, TARGET))["m"] == 2.0


def test_nothing_changed_is_nothing_compiled_again():
    trainer = made()
    loss_of(trainer)
    before = trainer.training_program()
    loss_of(trainer)
    assert trainer.training_program() is before


def test_random_numbers_of_numpy_in_a_step_are_warned_of():
    """One step is compiled for all batches, so every batch would get the same numbers."""

    class Noisy(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner, self.rng = nn.Dense(4, 3), np.random.default_rng(0)

        def construct(self, x):
            return self.inner(x + self.rng.normal(size=4))

    trainer = train.Trainer(Noisy(), loss=Weighted(), optimizer=optim.SGD(0.1))
    with pytest.warns(UserWarning, match=r"Noisy draws .* generator Noisy\.rng .* nn\.RandomKey"):
        trainer.fit((X, TARGET), 1, **QUIET)
