"""What a prompt shows of cells, trainers, histories and bundles fits one screen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from triplane.unified_ir import convert, data, nn, optim, runtime, train, zoo


def fits_a_screen(text: str) -> bool:
    return len(text.splitlines()) <= 40 and len(text) <= 4000


def test_a_cell_shows_its_parts_with_sizes() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Dense(3, 4)))
    assert repr(net).splitlines() == [
        "Sequential(), 16 parameters",
        "  0: Flatten()",
        "  1: Sequential(), 16 parameters",
        "    0: Dense(weight: float32[4,3], bias: float32[4])",
    ]


@pytest.mark.parametrize(
    "cell",
    [
        zoo.resnet18(),
        nn.Sequential(*[nn.Dense(1, 1) for _ in range(500)]),
        nn.Sequential(*[nn.Sequential(*[nn.Dense(1, 1) for _ in range(9)]) for _ in range(9)]),
    ],
)
def test_large_cells_and_their_trainers_fit_a_screen(cell: nn.Cell) -> None:
    trainer = train.Trainer(cell, loss=nn.MSE(), optimizer=optim.Adam(0.1))
    assert fits_a_screen(repr(cell))
    assert fits_a_screen(repr(trainer))


def test_parts_beyond_the_screen_are_counted() -> None:
    text = repr(nn.Sequential(*[nn.Dense(1, 1) for _ in range(500)]))
    lines = text.splitlines()
    shown = sum("Dense" in line for line in lines)
    assert lines[-1] == f"  and {500 - shown} more"


def test_a_history_shows_its_newest_rows() -> None:
    rows = [{"epoch": k, **{f"m{c}": 1 / (k + c + 1) for c in range(20)}} for k in range(1, 101)]
    text = repr(train.History(rows))
    assert fits_a_screen(text)
    assert text.splitlines()[0] == "history of 100 epochs, 13 more columns"
    assert text.splitlines()[1].split()[:2] == ["epoch", "m0"]
    assert text.splitlines()[-1].split()[0] == "100"
    assert repr(train.History()) == "history of 0 epochs"


def test_a_bundle_shows_what_it_takes_and_gives(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dense(64, 10))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.1))
    trainer.fit(data.digits().take(64), 1, progress="none")
    assert "Trainer at epoch 1, step 2, loss " in repr(trainer)
    convert.convert(trainer.export(("predict",)), out=tmp_path / "digits.bundle")
    text = repr(runtime.Bundle.load(tmp_path / "digits.bundle"))
    assert fits_a_screen(text)
    for words in (
        "bundle 'digits' version '1' for ort-x64, digest ",
        "in   x: float32(N, 1, 8, 8)",
        "out  logits: float32(N, 10)",
        "10 classes of logits: 0, 1, 2",
    ):
        assert words in text, words


def test_many_tensors_of_one_part_are_counted() -> None:
    cell = nn.Cell()
    for k in range(30):
        setattr(cell, f"p{k}", nn.Parameter(np.zeros(2)))
    assert repr(cell).endswith("p2: float32[2], and 27 more)")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_what_is_shown_is_no_wider_than_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    trainer = train.Trainer(net, loss=nn.MSE(), optimizer=optim.AdamW(0.1))
    x = np.zeros((2, 1, 4, 4), np.float32)
    trainer.fit((x, np.zeros((2, 16), np.float32)), epochs=1, progress="none")
    monkeypatch.setenv("COLUMNS", str(columns))
    for value in (net, trainer):
        lines = repr(value).splitlines()
        assert max(map(len, lines)) <= columns, type(value)
    text = " ".join(repr(trainer).split())
    assert repr(trainer.optimizer) in text  # wrapped, and whole
    (norm,) = (line for line in repr(net).splitlines() if "BatchNorm2d" in line)
    assert norm.endswith({
        60: "BatchNorm2d(weight: float32[4], and 3 more)",
        80: "BatchNorm2d(weight: float32[4], bias: float32[4], and 2 more)",
        200: "running_mean: float32[4], running_var: float32[4])",
    }[columns])  # fmt: skip


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_measures_are_no_wider_than_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["loss", "r2", "rmse", "validation.loss", "validation.r2", "validation.rmse"]
    trainer = train.Trainer(nn.Dense(2, 2), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.history = train.History([{"epoch": 1, "step": 5, **dict.fromkeys(names, 0.1 / 3)}])
    monkeypatch.setenv("COLUMNS", str(columns))
    for value in (trainer, trainer.history):
        assert max(map(len, repr(value).splitlines())) <= columns, type(value)
    title, header = repr(trainer.history).splitlines()[:2]
    hidden = 8 - len(header.split())
    assert title == f"history of 1 epochs{f', {hidden} more columns' if hidden else ''}"
    assert hidden == {40: 3, 60: 2, 80: 1, 200: 0}[columns]
