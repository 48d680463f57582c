"""Checkpoints: the same bits after any kill, whole files only, damage told and passed over."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.files import container
from triplane.unified_ir.train import identity
from triplane.unified_ir.train.snapshot import read

from .models import QUIET, Noisy, bits, data, trainer

VICTIM = Path(__file__).with_name("victim.py")
ROOT = Path(__file__).parents[2]
STEPS = 27  # of the victim: 3 epochs of 9 batches


def start(folder):
    return subprocess.Popen(
        [sys.executable, str(VICTIM), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / '.ci' / 'namespace'}:{ROOT}"},
    )  # fmt: skip


def run_steps(process, count):
    """Lets the process take `count` steps; the last step it said, 0 if it ended."""
    said = 0
    for _ in range(count):
        line = process.stdout.readline()
        if not line:
            break
        said = int(line)
        process.stdin.write("\n")
        process.stdin.flush()
    return said


def kill(process):
    """Amid whatever it does after up to two more steps, writing a checkpoint perhaps."""
    process.stdin.write("\n\n")
    process.stdin.flush()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_a_run_killed_at_random_steps_ends_with_the_bits_of_one_undisturbed(tmp_path):
    undisturbed = trainer()
    undisturbed.fit(data(), 3, batch_size=6, **QUIET)
    chance = random.Random(20)
    for _ in range(3):
        process = start(tmp_path)
        run_steps(process, chance.randrange(2, 7))
        kill(process)
    process = start(tmp_path)
    assert run_steps(process, STEPS + 1) == STEPS
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    found = read(tmp_path / "final.tpc")
    assert {k: a.tobytes() for k, a in found.state.items()} == bits(undisturbed)
    assert found.history.rows == undisturbed.history.rows
    assert not list(tmp_path.glob(".*")), "a killed writer's leftovers are swept away"
    assert len(train.Checkpoint(tmp_path).files()) == 2


class StopAt(train.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.step == self.step:
            run.stop()


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 6, 9, 10, 18])
def test_resuming_at_any_step_gives_the_same_bits(step, tmp_path):
    whole = trainer()
    whole.fit(data(), 2, batch_size=6, validation=data(20), **QUIET)
    first = trainer(callbacks=[StopAt(step)])
    first.fit(data(), 2, batch_size=6, validation=data(20), checkpoint=tmp_path, **QUIET)
    second = trainer()
    history = second.fit(data(), 2, batch_size=6, validation=data(20), checkpoint=tmp_path, **QUIET)
    assert bits(second) == bits(whole)
    assert history.rows == whole.history.rows


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(tmp_path):
    done = trainer()
    done.fit(data(), 2, checkpoint=tmp_path, **QUIET)
    record = train.Record()
    again = trainer(callbacks=[record])
    again.fit(data(), 2, checkpoint=tmp_path, **QUIET)
    assert record.steps == []
    assert bits(again) == bits(done)
    again.fit(data(), 1, **QUIET)
    assert again.place.epoch == 3


@pytest.mark.slow
def test_a_resumed_early_stop_stays_stopped(tmp_path):
    stop = {"callbacks": [train.EarlyStop("loss", patience=1, min_change=9.0)]}
    for _ in range(2):
        history = trainer(**stop).fit(data(), 5, checkpoint=tmp_path, **QUIET)
        assert len(history) == 2


def checkpoints(tmp_path, epochs=3):
    made = trainer()
    made.fit(data(), epochs, checkpoint=tmp_path, **QUIET)
    return made, train.Checkpoint(tmp_path).files()


def damage(path, at=-200):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path):
    done, (_, newest) = checkpoints(tmp_path)
    damage(newest)
    again = trainer()
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged and skipped"):
        again.fit(data(), 3, checkpoint=tmp_path, **QUIET)
    assert bits(again) == bits(done)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_truncated_checkpoint_is_passed_over(cut, tmp_path):
    done, (_, newest) = checkpoints(tmp_path)
    newest.write_bytes(newest.read_bytes()[:cut])
    again = trainer()
    with pytest.warns(UserWarning, match="skipped"):
        again.fit(data(), 3, checkpoint=tmp_path, **QUIET)
    assert bits(again) == bits(done)


def test_a_folder_of_damaged_checkpoints_only_is_refused(tmp_path):
    _, files = checkpoints(tmp_path)
    for path in files:
        damage(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Corrupt, match=r"all 2 checkpoints in .* are damaged; move them to"):
            trainer().fit(data(), 3, checkpoint=tmp_path, **QUIET)


def rewritten(path, **changes):
    """The checkpoint with other progress, in a valid container."""
    found = read(path)
    file = container.Container(path, kind="checkpoint")
    progress = json.loads(bytes(file.part("progress.json")))
    text = changes.pop("text", None) or json.dumps({**progress, **changes})
    roles = {k: str(r) for k, r in found.roles.items()}
    parts = [
        container.part("progress.json", text.encode()),
        container.tensor_part("state.safetensors", found.state, roles),
    ]
    container.write(path, "checkpoint", parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"text": "[" * 100_000},
        {"text": "{}"},
        {"text": '{"format": 1}'},
        {"format": 2},
        {"seed": -1},
        {"seed": "0"},
        {"batch_size": 1.5},
        {"identity": {"data": 1}},
        {"identity": []},
        {"history": [1]},
        {"history": [{"loss": "x"}]},
        {"place": []},
        {"place": {"epoch": 0, "position": 0, "step": 0, "rows": 0, "sums": [1]}},
        {"place": {"epoch": 0, "position": 0, "step": 0, "rows": 0, "sums": {}, "counts": [1]}},
        {
            "place": {
                "epoch": 0,
                "position": 0,
                "step": 0,
                "rows": 0,
                "sums": {},
                "counts": {"f1": [[1.0], [2.0, 3.0]]},
            }
        },
        {
            "place": {
                "epoch": 0,
                "position": 0,
                "step": 0,
                "rows": 0,
                "sums": {},
                "counts": {"f1": ["x"]},
            }
        },
        {"place": {"epoch": 1e400, "position": 0, "step": 0, "rows": 0, "sums": {}}},
    ],
)
def test_nonsense_progress_is_corrupt(changes, tmp_path):
    _, (_, newest) = checkpoints(tmp_path, 2)
    rewritten(newest, **changes)
    with pytest.raises(Corrupt, match=newest.name):
        read(newest)


def test_a_run_goes_on_only_with_what_it_began_with(tmp_path):
    trainer(callbacks=[StopAt(4)]).fit(data(), 1, batch_size=6, checkpoint=tmp_path, **QUIET)
    small = {"batch_size": 6, "checkpoint": tmp_path, **QUIET}
    with pytest.raises(Conflict, match="seed 0, this trainer has 5"):
        trainer(seed=5).fit(data(), 1, **small)
    with pytest.raises(Conflict, match="another batch size: 6 there, 7 here"):
        trainer().fit(data(), 1, **{**small, "batch_size": 7})
    with pytest.raises(Conflict, match=r"another optimizer: .*Adam.* there, .*SGD.* here"):
        trainer(optimizer=optim.SGD(0.1)).fit(data(), 1, **small)
    with pytest.raises(Conflict, match=r"another network: Noisy \w+ there, Dense \w+ here"):
        trainer(cell=lambda: nn.Dense(4, 3)).fit(data(), 1, **small)
    with pytest.raises(Conflict, match="already holds checkpoints; resume that run"):
        trainer().fit(data(), 1, resume=False, **small)
    x, y = data()
    made = trainer()
    made.load(train.Checkpoint(tmp_path).files()[-1])
    with pytest.raises(InvalidInput, match="stopped after 4 batches"):
        made.fit([(x[:6], y[:6])] * 2, 1, **QUIET)


class Halved(nn.SoftmaxCrossEntropy):
    factor = 0.5

    def construct(self, logits, labels):
        return super().construct(logits, labels) * self.factor


class Wide(Noisy):
    """Of the same state, and another graph."""

    def construct(self, x):
        return super().construct(x) * 2.0


class Unsettled(optim.Schedule):
    """Whose text holds an address, as an object's does by default."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return step.cast("float32") * 0.0 + self.rate


def moved(column):
    x, y = data()
    x = x.copy()
    x[-1, column] += 1.0
    return x, y


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (lambda: trainer(cell=Wide), data, r"another network: Noisy \w+ there, Wide"),
        (lambda: trainer(optimizer=optim.Adam(0.5)), data, "another optimizer"),
        (lambda: trainer(clip_norm=1.0), data, "another optimizer: .*clip_norm=None"),
        (lambda: trainer(accumulate=2), data, "another optimizer"),
        (lambda: trainer(average=0.9), data, "another optimizer"),
        (trainer, lambda: data(49), r"another data: 50 samples of .* there, 49 samples of"),
        (trainer, lambda: moved(2), r"another data: 50 samples of .* all of them has digest"),
    ],
)
def test_a_finished_epoch_goes_on_with_nothing_else(make, given, said, tmp_path):
    trainer().fit(data(), 1, checkpoint=tmp_path, **QUIET)
    other = make()
    before = bits(other)
    with pytest.raises(Conflict, match=said):
        other.fit(given(), 1, checkpoint=tmp_path, **QUIET)
    assert bits(other) == before


def test_the_loss_is_known_by_its_graph(tmp_path):
    for change, said in ((1.0, "Halved has digest"), (None, "another loss: Halved")):
        folder = tmp_path / str(change)
        first, other = trainer(), trainer()
        first.loss = Halved()
        first.fit(data(), 1, checkpoint=folder, **QUIET)
        if change is not None:
            other.loss = Halved()
            other.loss.factor = change
        with pytest.raises(Conflict, match=said):
            other.fit(data(), 1, checkpoint=folder, **QUIET)


def test_a_dropout_rate_is_part_of_the_network(tmp_path):
    trainer().fit(data(), 1, checkpoint=tmp_path, **QUIET)
    other = trainer()
    other.cell.drop.p_drop = 0.4
    with pytest.raises(Conflict, match="another network: Noisy has digest"):
        other.fit(data(), 1, checkpoint=tmp_path, **QUIET)


def test_large_data_is_known_by_a_sample_and_batches_by_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr("triplane.unified_ir.train.identity.WHOLE_BYTES", 100)
    monkeypatch.setattr("triplane.unified_ir.train.identity.SAMPLED_ROWS", 7)
    trainer().fit(data(), 1, checkpoint=tmp_path / "a", **QUIET)
    trainer().fit(data(), 1, checkpoint=tmp_path / "a", **QUIET)
    with pytest.raises(Conflict, match=r"50 samples of .*, 7 of them has digest"):
        trainer().fit(moved(0), 1, checkpoint=tmp_path / "a", **QUIET)
    x, y = data()
    batches = [(x[:9], y[:9]), (x[9:20], y[9:20])]
    trainer().fit(batches, 1, checkpoint=tmp_path / "b", **QUIET)
    with pytest.raises(Conflict, match="another data: 2 batches"):
        trainer().fit(batches[::-1], 1, checkpoint=tmp_path / "b", **QUIET)


def test_a_message_about_another_optimizer_shows_what_differs_alone(tmp_path):
    trainer(optimizer=optim.Adam(0.01), clip_norm=1.0).fit(data(), 1, checkpoint=tmp_path, **QUIET)
    for other, said in (
        (trainer(optimizer=optim.Adam(0.5), clip_norm=1.0), r"Recipe(optimizer=Adam(lr={}))"),
        (trainer(optimizer=optim.Adam(0.01), clip_norm=2.0), r"Recipe(clip_norm={})"),
    ):
        with pytest.raises(Conflict) as raised:
            other.fit(data(), 1, checkpoint=tmp_path, **QUIET)
        values = ("0.01", "0.5") if "lr" in said else ("1.0", "2.0")
        there, here = map(said.format, values)
        assert f"another optimizer: {there} there, {here} here; continue" in str(raised.value)


def test_an_objects_address_is_no_part_of_an_optimizer(tmp_path):
    for rate in (0.1, 0.1):
        made = trainer(optimizer=optim.SGD(Unsettled(rate)))
        made.fit(data(), 1, checkpoint=tmp_path, **QUIET)
    with pytest.raises(Conflict, match=r"another optimizer: .* has digest"):
        trainer(optimizer=optim.SGD(Unsettled(0.2))).fit(data(), 1, checkpoint=tmp_path, **QUIET)


def test_loading_goes_on_with_another_optimizer_on_purpose(tmp_path):
    first = trainer(optimizer=optim.Adam(0.01))
    first.fit(data(), 1, **QUIET)
    first.save(tmp_path / "run.tpc")
    other = trainer(optimizer=optim.SGD(0.1, momentum=0.9))
    other.prepare(*data())
    with pytest.raises(Conflict, match="another optimizer"):
        other.load(tmp_path / "run.tpc")
    other.load(tmp_path / "run.tpc", changed=("optimizer",))
    assert other.place.epoch == 1
    assert np.array_equal(other.state()["head.weight"], first.state()["head.weight"])
    assert not other.state()["optimizer.momentum.head.weight"].any()
    other.fit(data(), 1, **QUIET)


@pytest.mark.slow
def test_ctrl_c_saves_between_two_steps_and_the_same_call_goes_on(tmp_path):
    """The signal arrives while a step runs; what is saved is whole."""

    class Press(train.Callback):
        def on_step(self, run):
            if run.step == 7:
                signal.raise_signal(signal.SIGINT)
                said.append(run.step)

    said: list[int] = []
    out = io.StringIO()
    made = trainer(callbacks=[Press()])
    with pytest.raises(KeyboardInterrupt) as raised:
        made.fit(data(), 2, batch_size=6, checkpoint=tmp_path, progress=train.Progress(stream=out))
    assert said == [7], "the first press lets the step finish"
    assert "Ctrl-C again ends at once" in out.getvalue()
    (note,) = raised.value.__notes__
    assert "step-000000000007.tpc" in note
    assert f"checkpoint={str(tmp_path)!r} continues the run" in note
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = trainer()
    again.fit(data(), 2, batch_size=6, checkpoint=tmp_path, **QUIET)
    whole = trainer()
    whole.fit(data(), 2, batch_size=6, **QUIET)
    assert bits(again) == bits(whole)


def test_a_second_ctrl_c_ends_at_once():
    class Press(train.Callback):
        def on_step(self, run):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer(callbacks=[Press()]).fit(data(), 1, **QUIET)


def test_a_refused_checkpoint_changes_nothing(tmp_path):
    checkpoints(tmp_path)
    other = trainer(seed=9)
    before = bits(other)
    with pytest.raises(Conflict):
        other.fit(data(), 1, checkpoint=tmp_path, **QUIET)
    assert bits(other) == before


@pytest.mark.slow
def test_saving_and_loading_moves_a_run_to_another_trainer(tmp_path):
    whole, first, second = trainer(), trainer(), trainer()
    whole.fit(data(), 3, **QUIET)
    first.fit(data(), 1, **QUIET)
    first.save(tmp_path / "run.tpc")
    second.load(tmp_path / "run.tpc")
    second.fit(data(), 2, **QUIET)
    assert bits(second) == bits(whole)
    with pytest.raises(NotFound):
        second.load(tmp_path / "none.tpc")


def test_the_newest_files_are_kept(tmp_path):
    keep = train.Checkpoint(tmp_path, every_steps=1, keep=3)
    trainer().fit(data(), 1, batch_size=10, checkpoint=keep, **QUIET)
    names = [f"step-{i:012d}.tpc" for i in (3, 4, 5)]
    assert [p.name for p in keep.files()] == names
    (tmp_path / "step-notes.tpc").write_text("mine")
    assert [p.name for p in keep.files()] == names


def test_every_epochs_says_how_often(tmp_path):
    saved = []

    class Watch(train.Checkpoint):
        def save(self, snapshot):
            saved.append(snapshot.place.epoch)
            return super().save(snapshot)

    trainer().fit(data(), 5, checkpoint=Watch(tmp_path, every_epochs=2), **QUIET)
    assert saved == [2, 4, 5]


def test_arrays_of_a_checkpoint_are_its_own(tmp_path):
    """Reading copies: the file may be replaced afterwards."""
    made = trainer()
    made.fit(data(), 1, **QUIET)
    made.save(tmp_path / "a.tpc")
    state = read(tmp_path / "a.tpc").state
    assert all(a.flags.owndata and a.flags.writeable for a in state.values())
    assert state.keys() == made.state().keys()
    assert np.array_equal(state["head.weight"], made.cell.head.weight.array)
    assert isinstance(made.cell, Noisy)


def test_state_of_another_type_is_refused_with_both_types(tmp_path):
    def made(dtype):
        cell = nn.Dense(4, 3)
        cell.weight = nn.Parameter(np.ones((3, 4)), dtype=dtype)
        return train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))

    made("float32").save(tmp_path / "run.tpc")
    said = r"'weight' is float32\[3, 4\] there and float64\[3, 4\] here"
    with pytest.raises(Conflict, match=said):
        made("float64").load(tmp_path / "run.tpc")


def test_only_a_digest_is_shown_as_one():
    digests = [f"16 samples {digit * identity.DIGITS}" for digit in "ab"]
    assert identity.shown(*digests).startswith("16 samples has digest aaa")
    assert identity.shown("options ['f1']", "options ['mae']") == (
        "options ['f1'] there, options ['mae'] here"
    )
