"""Checkpoints: the same bits after any kill, whole files only, damage told and passed over."""

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
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged and passed over"):
        again.fit(data(), 3, checkpoint=tmp_path, **QUIET)
    assert bits(again) == bits(done)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_truncated_checkpoint_is_passed_over(cut, tmp_path):
    done, (_, newest) = checkpoints(tmp_path)
    newest.write_bytes(newest.read_bytes()[:cut])
    again = trainer()
    with pytest.warns(UserWarning, match="passed over"):
        again.fit(data(), 3, checkpoint=tmp_path, **QUIET)
    assert bits(again) == bits(done)


def test_a_folder_of_damaged_checkpoints_only_is_refused(tmp_path):
    _, files = checkpoints(tmp_path)
    for path in files:
        damage(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Corrupt, match=r"all 2 checkpoints in .* are damaged; move them away"):
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
        {"history": [1]},
        {"history": [{"loss": "x"}]},
        {"place": []},
        {"place": {"epoch": 0, "position": 0, "step": 0, "rows": 0, "sums": [1]}},
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
    with pytest.raises(
        Conflict, match="50 samples in batches of 6, this run has 50 in batches of 7"
    ):
        trainer().fit(data(), 1, **{**small, "batch_size": 7})
    with pytest.raises(Conflict, match=r"another model or optimizer: 'optimizer\.m\.first"):
        trainer(optimizer=optim.SGD(0.1)).fit(data(), 1, **small)
    with pytest.raises(Conflict, match="another model"):
        trainer(cell=lambda: nn.Dense(4, 3)).fit(data(), 1, **small)
    with pytest.raises(Conflict, match="holds checkpoints of a run; resume it"):
        trainer().fit(data(), 1, resume=False, **small)
    x, y = data()
    made = trainer()
    made.load(train.Checkpoint(tmp_path).files()[-1])
    with pytest.raises(InvalidInput, match="stopped after 4 batches"):
        made.fit([(x[:6], y[:6])] * 2, 1, **QUIET)


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
