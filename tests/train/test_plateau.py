"""Ends of a run: weights of the best epoch, and rates that fall when a measure stops improving."""

from dataclasses import replace

import numpy as np
import pytest

from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.train.snapshot import read

from .models import QUIET, bits, data, trainer

X, Y = data()
HELD_OUT = data(20, seed=1)


class Scripted(train.Callback):
    """Measures that a test chooses: written over those of each epoch, before others read them."""

    def __init__(self, values, name="scripted"):
        self.values, self.column = values, name

    def on_epoch(self, run):
        run.history.rows[-1][self.column] = self.values[run.epoch - 1]


def weights(trained):
    return {k: p.array.tobytes() for k, p in trained.cell.parameters().items()}


class Kept(train.Callback):
    """The weights after each epoch."""

    def __init__(self):
        self.after = []

    def on_epoch(self, run):
        self.after.append({k: a.tobytes() for k, a in run.weights().items()})


def stopping(values, *, epochs=9, folder=None, stop=None, **options):
    stop = stop or train.EarlyStop("scripted", patience=2, restore_best=True)
    kept = Kept()
    trained = trainer(callbacks=[Scripted(values), kept, stop], **options)
    trained.fit((X, Y), epochs, batch_size=16, checkpoint=folder, **QUIET)
    return trained, kept


def without_keys(trained):
    return {k: a for k, a in weights(trained).items() if not k.endswith("key")}


def test_the_weights_of_the_best_epoch_are_restored():
    trained, kept = stopping([3, 1, 2, 2, 0, 0, 0, 0, 0])
    assert len(trained.history) == 4
    assert without_keys(trained) == kept.after[1]
    assert without_keys(trained) != kept.after[3]


def test_the_best_epoch_is_restored_at_the_last_epoch_too():
    trained, kept = stopping([1, 2, 0.5, 0.7, 0.9], epochs=4)
    assert len(trained.history) == 4
    assert without_keys(trained) == kept.after[2]


def test_larger_values_are_better_for_shares():
    stop = train.EarlyStop("validation.r2", patience=2, restore_best=True)
    assert stop.sign == -1.0
    stop = train.EarlyStop("scripted", patience=2, restore_best=True, better="larger")
    trained, kept = stopping([1, 3, 2, 2, 2], stop=stop)
    assert without_keys(trained) == kept.after[1]


def test_the_moving_average_is_that_of_the_best_epoch():
    trained, kept = stopping([3, 1, 2, 2], average=0.9)
    with trained.averaged():
        mean = trained.cell.first.weight.array.tobytes()
    assert mean == kept.after[1]["optimizer.average.first.weight"]


def test_without_restore_best_the_last_weights_stay():
    trained, kept = stopping([3, 1, 2, 2], stop=train.EarlyStop("scripted", patience=2))
    assert without_keys(trained) == kept.after[3]


@pytest.mark.parametrize(
    "first", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4)), 2]
)
def test_a_resumed_run_restores_the_same_epoch(first, tmp_path):
    values = [3, 1, 2, 2, 0]
    whole, _ = stopping(values)
    stopping(values, epochs=first, folder=tmp_path)
    resumed, _ = stopping(values, epochs=9, folder=tmp_path)
    assert bits(resumed) == bits(whole)
    assert resumed.history.rows == whole.history.rows


def test_a_checkpoint_that_lacks_the_best_weights_is_reported(tmp_path):
    values = [3, 1, 2, 2]
    stopping(values, epochs=3, folder=tmp_path, stop=train.EarlyStop("scripted", patience=5))
    stop = train.EarlyStop("scripted", patience=2, restore_best=True)
    with pytest.warns(UserWarning, match="cannot restore the weights of epoch 2"):
        stopping(values, epochs=9, folder=tmp_path, stop=stop)


def test_best_weights_of_another_network_are_refused(tmp_path):
    stopping([3, 1, 2], epochs=3, folder=tmp_path)
    snapshot = read(train.Checkpoint(tmp_path).files()[-1])
    best = snapshot.callbacks["EarlyStop.scripted"]
    assert best["epoch"] == 2
    odd = {"EarlyStop.scripted": {**best, "first.weight": np.zeros((1, 1), np.float32)}}
    replace(snapshot, callbacks=odd).write(train.Checkpoint(tmp_path).files()[-1])
    with pytest.raises(Conflict, match=r"'first\.weight' as float32"):
        stopping([3, 1, 2, 2], folder=tmp_path)


def test_a_run_without_such_callbacks_writes_no_part_for_them(tmp_path):
    trained = trainer()
    trained.fit((X, Y), 1, checkpoint=tmp_path, **QUIET)
    assert b"callbacks.safetensors" not in train.Checkpoint(tmp_path).files()[-1].read_bytes()


def plateau(measure="scripted", **options):
    return optim.ReduceOnPlateau(0.02, measure, **{"patience": 0, "factor": 0.5, **options})


class Rates(train.Callback):
    def __init__(self):
        self.before = []

    def on_step(self, run):
        self.before.append(round(run.learning_rate(), 6))


def test_the_rate_of_a_step_is_the_state_and_falls_after_bad_epochs():
    trained = trainer(optimizer=optim.SGD(plateau("loss", min_change=9.0, change="absolute")))
    rates = Rates()
    trained.callbacks = (rates,)
    trained.fit((X, Y), 4, batch_size=50, **QUIET)
    # The first epoch is the best; each later one halves the rate.
    assert rates.before == [0.02, 0.02, 0.01, 0.005]
    assert trained.state()["optimizer.plateau"] == np.float32(0.0025)


def test_steps_use_the_rate_that_the_state_holds():
    def after(schedule):
        trained = trainer(optimizer=optim.SGD(schedule), cell=linear)
        trained.fit((X, Y), 3, batch_size=50, **QUIET)
        return weights(trained)

    falls = plateau("loss", min_change=9.0, change="absolute")
    same = optim.Piecewise((2,), (0.02, 0.01))
    assert after(falls) == after(same)
    assert after(optim.Warmup(3, falls)) == after(optim.Warmup(3, same))
    assert after(falls) != after(optim.Constant(0.02))


def linear():
    return nn.Dense(4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "float16"}])
def test_a_resumed_run_has_the_same_bits(options, tmp_path):
    def run(epochs, folder=None):
        schedule = plateau("validation.loss", min_change=0.05)
        trained = trainer(optimizer=optim.Adam(schedule), **options)
        trained.fit((X, Y), epochs, batch_size=16, validation=HELD_OUT, checkpoint=folder, **QUIET)
        return trained

    whole = run(6)
    assert whole.state()["optimizer.plateau"] < 0.02
    for epochs in (2, 4, 6):
        resumed = run(epochs, tmp_path)
    assert bits(resumed) == bits(whole)


def test_groups_have_schedules_of_their_own():
    group = optim.Group("head.*", lr=plateau("loss", factor=0.1, min_change=9.0, change="absolute"))
    optimizer = optim.SGD(plateau("loss", min_change=9.0, change="absolute"), groups=(group,))
    trained = trainer(optimizer=optimizer)
    trained.fit((X, Y), 2, batch_size=50, **QUIET)
    state = trained.state()
    assert state["optimizer.plateau"] == np.float32(0.01)
    assert state["optimizer.plateau.1"] == np.float32(0.02 * 0.1)


def test_a_measure_that_does_not_exist_is_refused_before_or_after_the_first_epoch():
    trained = trainer(optimizer=optim.SGD(plateau("validation.loss")))
    with pytest.raises(InvalidInput, match="no validation data; pass validation="):
        trained.fit((X, Y), 1, **QUIET)
    assert trained.place.step == 0
    trained = trainer(optimizer=optim.SGD(plateau("accuracies")))
    with pytest.raises(InvalidInput, match=r"no epoch has; .* did you mean 'accuracy'"):
        trained.fit((X, Y), 1, **QUIET)


def test_a_rate_that_depends_on_measures_is_not_a_function_of_updates():
    with pytest.raises(InvalidInput, match="depends on measures"):
        plateau().at(3)


# fmt: off
BAD = {
    "start": {"start": 0.0}, "factor": {"factor": 1.0}, "patience": {"patience": -1},
    "low": {"low": 1.0}, "min_change": {"min_change": -1.0}, "cooldown": {"cooldown": -1},
    "better": {"better": "smaler"}, "change": {"change": "relatve"},
}
# fmt: on


@pytest.mark.parametrize("options", BAD.values(), ids=BAD)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(InvalidInput, match="ReduceOnPlateau"):
        optim.ReduceOnPlateau(**{"start": 0.1, **options})


class Counter(train.Callback):
    """State of a user's own, under names that users choose."""

    def __init__(self):
        self.name, self.state, self.steps = "mine", "busy", 0

    def on_step(self, run):
        self.steps += 1

    def state_dict(self):
        return {"steps": np.array(self.steps)}

    def load_state_dict(self, state):
        self.steps = int(state.get("steps", 0))


def test_a_callback_of_ones_own_has_its_state_in_checkpoints(tmp_path):
    trainer(callbacks=[Counter()]).fit((X, Y), 1, batch_size=10, checkpoint=tmp_path, **QUIET)
    counter = Counter()
    trainer(callbacks=[counter]).fit((X, Y), 2, batch_size=10, checkpoint=tmp_path, **QUIET)
    assert counter.steps == 10


def test_two_callbacks_with_state_under_one_name_are_refused(tmp_path):
    twice = trainer(callbacks=[Counter(), Counter()])
    with pytest.raises(InvalidInput, match="two callbacks have state under 'Counter'"):
        twice.fit((X, Y), 1, checkpoint=tmp_path, **QUIET)
