"""A loss that is not finite stops the run and names where that began."""

import inspect
import re

import numpy as np
import pytest

from triplane.unified_ir import nn, ops, optim, train

from .models import QUIET, bits, data, trainer


class Logarithm(nn.Cell):
    """log(x w), which is not a number once a product is negative."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(np.full((4, 3), 0.5))

    def construct(self, x):
        inner = x @ self.weight
        return ops.log(inner)


def positive(n=40):
    x, y = data(n)
    return np.abs(x) + 0.1, y


def test_the_first_operator_that_is_not_finite_is_named_with_its_line():
    x, y = positive()
    x[25:] -= 9.0
    made = trainer(cell=Logarithm, optimizer=optim.SGD(1e-3))
    with pytest.raises(train.NonFinite, match=r"loss of step \d+ \(epoch 1\) is nan") as raised:
        made.fit([(x[:20], y[:20]), (x[20:30], y[20:30])], 2, **QUIET)
    assert raised.value.step == 2
    line = inspect.getsourcelines(Logarithm.construct)[1] + 2
    assert re.search(
        rf"Log at (\S+/)?test_diagnosis.py:{line} makes float32\[10, 3\] .*15 of 30 not finite of "
        r"float32\[10, 3\] in \[-",
        raised.value.cause,
    )
    assert "began in step 2: Log" in str(raised.value)


def test_a_step_that_spoils_the_state_is_found_though_its_loss_is_finite():
    """The gradient of sqrt at 0 is infinite; the loss is NaN one step later."""

    class Root(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(np.zeros((4, 3)))

        def construct(self, x):
            return ops.sqrt(ops.abs_(x @ self.weight))

    made = trainer(cell=Root, optimizer=optim.SGD(0.1))
    with pytest.raises(train.NonFinite) as raised:
        made.fit(data(), 1, batch_size=10, **QUIET)
    assert raised.value.step == 2
    assert "began in step 1: Div at" in str(raised.value)
    assert "(in grad" in raised.value.cause


def test_data_that_is_not_finite_is_named():
    x, y = data()
    x[17, 2] = np.nan
    with pytest.raises(train.NonFinite, match=r"'x' holds float32\[50, 4\] in .* with 1 of 200"):
        trainer().fit((x, y), 1, batch_size=64, **QUIET)


@pytest.mark.slow
def test_the_cell_keeps_the_state_of_the_last_whole_epoch():
    x, y = data()
    good, bad = [(x[:25], y[:25]), (x[25:], y[25:])], (x[:25] * np.nan, y[:25])

    class Turning:
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            return iter(good if self.epochs <= 2 else [*good, bad])

    made, calm = trainer(), trainer()
    with pytest.raises(train.NonFinite):
        made.fit(Turning(), 3, **QUIET)
    calm.fit(good, 1, **QUIET)
    assert bits(made) == bits(calm)
    for trained in (made, calm):
        trained.fit(good, 1, **QUIET)
    assert bits(made) == bits(calm)
    assert made.history.rows == calm.history.rows


def test_batches_that_do_not_come_again_leave_the_cause_open():
    x, y = data()
    once = iter([(x, y), (x * np.inf, y)])
    with pytest.raises(train.NonFinite, match="cannot be iterated again"):
        trainer().fit(once, 1, **QUIET)
