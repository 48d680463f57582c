"""Launches that end early: by an error of the data, a callback or the device, or by Ctrl-C."""

from typing import Any

import jax
import numpy as np
import pytest
from tests.support.xla_training import At, drawn_samples

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.engines import StateLost, engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

QUIET: Any = {"progress": "none"}
X, Y, BATCHES = drawn_samples(16)


def trainer(*callbacks, steps_per_launch=4, lr=0.1, **options):
    nn.seed(0)
    return train.Trainer(
        nn.Dense(3, 2), loss=nn.SoftmaxCrossEntropy(), callbacks=callbacks, engine="xla",
        optimizer=optim.Adam(lr), steps_per_launch=steps_per_launch, **options,
    )  # fmt: skip


def alike(a, b):
    a, b = a.state(), b.state()
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)


class Stops:
    """The batches before one that cannot be read."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        yield from BATCHES[: self.n]
        raise OSError("the disk is gone")


def test_data_that_raise_leave_the_run_after_the_batches_before():
    run = trainer()
    with pytest.raises(OSError, match="the disk is gone"):
        run.fit(Stops(6), 1, **QUIET)
    assert run.place.step == 6
    whole = trainer(steps_per_launch=1)
    whole.fit(BATCHES[:6], 1, **QUIET)
    alike(run, whole)


def test_a_callback_that_raises_leaves_state_and_place_of_one_step():
    def fails(_run):
        raise RuntimeError("full disk")

    run = trainer(At(2, fails))
    with pytest.raises(RuntimeError, match="full disk"):
        run.fit((X, Y), 1, batch_size=2, **QUIET)
    assert run.place.step == 4
    run.callbacks = ()
    run.fit((X, Y), 1, batch_size=2, **QUIET)
    whole = trainer()
    whole.fit((X, Y), 1, batch_size=2, **QUIET)
    assert run.place.step == whole.place.step == 8
    alike(run, whole)


def test_weights_within_a_launch_cannot_be_asked_for():
    with pytest.raises(InvalidInput, match="the launch went 2 steps further"):
        trainer(At(2, lambda run: run.weights())).fit((X, Y), 1, batch_size=2, **QUIET)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"accumulate": 3}, marks=pytest.mark.long),
        pytest.param(
            {"precision": "float16", "loss_scale": train.LossScale(start=2.0**30)},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_the_learning_rate_is_that_of_its_step(options):
    class Rates(train.Callback):
        def __init__(self):
            self.seen: list[float] = []

        def on_step(self, run):
            self.seen.append(run.learning_rate())

    one, many = Rates(), Rates()
    lr = optim.StepDecay(0.1, 0.5, 1)
    trainer(one, steps_per_launch=1, lr=lr, **options).fit((X, Y), 2, batch_size=2, **QUIET)
    trainer(many, lr=lr, **options).fit((X, Y), 2, batch_size=2, **QUIET)
    assert many.seen == one.seen
    assert len(set(one.seen)) > 2


@pytest.mark.parametrize("steps_per_launch", [1, 4])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")], ids=str
)
def test_a_step_cut_short_takes_the_run_back_to_the_start_of_the_epoch(
    monkeypatch, tmp_path, error, steps_per_launch
):
    run = trainer(steps_per_launch=steps_per_launch)
    run.fit((X, Y), 1, batch_size=2, checkpoint=tmp_path, **QUIET)
    before, done = run.state(), [0]
    ready = jax.block_until_ready

    def cut(arrays):
        done[0] += 1
        if done[0] == 2:
            raise error
        return ready(arrays)

    with monkeypatch.context() as patched:
        patched.setattr(jax, "block_until_ready", cut)
        with pytest.raises((KeyboardInterrupt, InvalidInput)) as caught:
            run.fit((X, Y), 1, batch_size=2, **QUIET)
    assert "deleted" not in str(caught.value)
    assert (run.place.epoch, run.place.step, run.place.position) == (1, 8, 0)
    for name, array in run.state().items():
        np.testing.assert_array_equal(array, before[name])
    run.fit((X, Y), 1, batch_size=2, **QUIET)
    whole = trainer(steps_per_launch=steps_per_launch)
    whole.fit((X, Y), 2, batch_size=2, **QUIET)
    alike(run, whole)


def kept():
    """A step whose new state is its batch."""
    build = Build(TABLE, "step")
    with build:
        s, x = (build.param(n, TensorSpec((3,))) for n in "sx")
        return build.finish({"r": s + x, "s": x})


def test_a_loop_whose_state_is_gone_says_so(monkeypatch):
    loop = engine("xla").compile(kept(), donate=["s"]).loop({"s": np.zeros(3, np.float32)})
    with monkeypatch.context() as patched:
        patched.setattr(jax, "block_until_ready", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.step(x=np.ones(3, np.float32))
    for read in (loop.state, loop.view, lambda: loop.step(x=np.ones(3, np.float32))):
        with pytest.raises(StateLost, match="a step that was cut short has used up the state"):
            read()


@pytest.mark.parametrize("name", ["xla", "onnx", "reference"])
def test_state_that_is_a_batch_does_not_follow_the_callers_array(name):
    loop = engine(name).compile(kept(), donate=["s"]).loop({"s": np.zeros(3, np.float32)})
    x = np.ones(3, np.float32)
    loop.step(x=x)
    x[:] = 7
    np.testing.assert_array_equal(loop.state()["s"], [1, 1, 1])


def test_a_trainer_moves_to_the_engine_that_it_is_given_later():
    run = trainer(steps_per_launch=1)
    run.fit((X, Y), 1, batch_size=2, **QUIET)
    first = run.training_program()
    run.engine = "onnx"
    assert type(run.training_program()) is not type(first)
