"""Progress: one moving line on real terminals of every width, else a line per epoch."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from tests.support.screens import screen

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import train
from triplane.unified_ir.train import progress

from .models import data, trainer

METRICS = {"loss of\nlong name": train.TopK(2), "größe": train.TopK(1), "f1": train.F1()}


@pytest.fixture(autouse=True)
def _every_step_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REFRESH_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_a_terminal_has_one_line_that_never_wraps(columns: int) -> None:
    with screen(columns) as shown:
        own = trainer(metrics=METRICS)
        own.fit(data(), 3, validation=data(20), progress=train.Progress(stream=shown.stream))
    drawings = shown.drawings()
    assert max(map(len, drawings)) < columns
    assert shown.written.count(b"\n") == 1, "the line is left once, at the end"
    assert [d for d in drawings if " 1/2 " in d], "each step moves the line"
    assert re.match(r"epoch 3/3 ━+ 2/2  loss \d\.\d{4}", drawings[-1])
    if columns >= 80:
        assert "validation.loss" in drawings[-1]


def test_the_line_follows_a_terminal_that_is_resized() -> None:
    class Narrow(train.Callback):
        def on_epoch(self, run: train.Run) -> None:
            shown.resize(60 if run.epoch == 1 else 120)

    with screen(200) as shown:
        own = trainer(metrics=METRICS, callbacks=[Narrow()])
        own.fit(data(), 3, validation=data(20), progress=train.Progress(stream=shown.stream))
    drawings = shown.drawings()
    assert len([d for d in drawings if d.startswith("epoch 1/3")][-1]) < 60
    assert max(len(d) for d in drawings if d.startswith("epoch 2/3") and " 1/2 " in d) < 60
    assert 60 <= len(drawings[-1]) < 120


def test_a_stream_without_a_known_length_counts_batches() -> None:
    with screen(80) as shown:
        batches = [data(8, seed) for seed in range(3)]
        trainer().fit(iter(batches), 1, progress=train.Progress(stream=shown.stream))
    assert any(d.startswith("epoch 1/1 2 batches  loss ") for d in shown.drawings())


def test_lines_of_others_stay_above_the_moving_line() -> None:
    with screen(80) as shown:
        own = train.Progress(stream=shown.stream)

        class Say(train.Callback):
            def on_epoch(self, run: train.Run) -> None:
                own.say(f"saved [{run.epoch}]")

        trainer(callbacks=[Say()]).fit(data(), 2, progress=own)
    assert [d for d in shown.drawings() if d.startswith("saved")] == ["saved [1]", "saved [2]"]
    assert shown.drawings()[-1].startswith("epoch 2/2")


def test_a_terminal_that_cannot_move_gets_a_line_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with screen(80) as shown:
        trainer().fit(data(), 2, progress=train.Progress(stream=shown.stream))
    assert [d[:10] for d in shown.drawings()] == ["epoch 1/2 ", "epoch 2/2 "]


def test_without_a_terminal_each_epoch_has_a_line() -> None:
    out = io.StringIO()
    trainer().fit(data(), 2, validation=data(20), progress=train.Progress(stream=out))
    first, second = out.getvalue().splitlines()
    assert re.fullmatch(
        r"epoch 1/2  loss \S+  accuracy \S+  validation.loss \S+  validation.accuracy \S+  lr 0.02",
        first,
    )
    assert second.startswith("epoch 2/2  loss ")


def test_what_a_program_prints_goes_where_it_was_sent() -> None:
    """Only standard error is a terminal; standard output is a pipe that keeps its own lines."""
    program = (
        "from tests.train.models import data, trainer\n"
        "from triplane.unified_ir import train\n"
        "class Say(train.Callback):\n"
        "    def on_epoch(self, run): print('row', run.epoch)\n"
        "trainer(callbacks=[Say()]).fit(data(), 2)\n"
    )
    with screen(80) as shown:
        run = [sys.executable, "-c", program]
        done = subprocess.run(run, stdout=subprocess.PIPE, stderr=shown.stream, check=True)
    assert done.stdout == b"row 1\nrow 2\n"
    assert shown.drawings()[-1].startswith("epoch 2/2")


@pytest.mark.parametrize("style", ["tqdm", "", None, True])
def test_a_style_that_does_not_exist_is_refused_with_the_choices(style: object) -> None:
    with pytest.raises(InvalidInput, match="'auto', 'bar', 'lines', 'none', or a Progress; got"):
        trainer().fit(data(), 1, progress=style)
