"""What a notebook shows of modules, functions, histories, reports and trials fits one screen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from triplane.unified_ir import convert, data, nn, optim, train
from triplane.unified_ir.convert.report import Report
from triplane.unified_ir.federated.study import DeviceScore, RoundRow, Trial
from triplane.unified_ir.ir import Function, Module, Role, StateTensor, Value
from triplane.unified_ir.ir.types import type_of

EVIL = "<img src=x onerror=alert(1)>"


def page(shown: Any) -> ET.Element:
    """Return the HTML of a value, which is well formed and bounded."""
    drawn = shown._repr_html_()
    assert len(drawn) < 20_000
    root = ET.fromstring(drawn)
    assert not list(root.iter("img"))
    return root


def texts(root: ET.Element) -> list[str]:
    return [e.text or "" for e in root.iter()]


@pytest.fixture(scope="module")
def trainer() -> train.Trainer:
    cell = nn.Sequential(nn.Flatten(), nn.Dense(64, 10))
    own = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.1))
    own.fit(data.digits().take(64), 2, validation=data.digits().take(32), progress="none")
    return own


def identity(name: str, params: int) -> Function:
    type_ = type_of(np.zeros(2, np.float32))
    values = tuple(Value(type_, f"{name}.{k}") for k in range(params))
    return Function(name, values, values, tuple(v.name for v in values), ())


def test_a_module_shows_its_entries(trainer: train.Trainer) -> None:
    shown = texts(page(trainer.export(("predict", "evaluate"))))
    assert "module of 2 entries, 650 parameters" in shown
    assert "x: float32[N,1,8,8], y: int64[N]" in shown
    assert "logits: float32[N,10]" in shown
    assert "10 classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in shown


def test_names_in_a_module_from_outside_are_escaped() -> None:
    state = {f"{EVIL}{k}": StateTensor(Role.BUFFER, np.zeros(2, np.float32)) for k in range(3)}
    functions = {f"{EVIL}{k}": identity(f"{EVIL}{k}", 3) for k in range(200)}
    module = Module(functions, {name: name for name in functions}, state, {"cell": EVIL})
    assert "and 180 more" in texts(page(module))


def test_a_function_shows_parameters_and_results() -> None:
    shown = texts(page(identity(EVIL, 3000)))
    assert f"{EVIL}: 0 nodes" in shown
    assert {"takes", "gives", f"{EVIL}.0", "float32[2]", "and 5,984 more"} <= set(shown)


def test_a_history_shows_its_newest_epochs(trainer: train.Trainer) -> None:
    assert "validation.loss" in texts(page(trainer.history))
    rows = [{"epoch": k, **{f"{EVIL}{c}": 1.0 / k for c in range(50)}} for k in range(1, 1001)]
    shown = texts(page(train.History(rows)))
    assert "history of 1000 epochs, the newest 10" in shown
    assert "1000" in shown
    page(train.History())


def test_a_report_shows_its_verdict_and_layers(trainer: train.Trainer, tmp_path: Path) -> None:
    report: Report = convert.convert(trainer.export(("predict",)), out=tmp_path / "d.bundle")
    assert report.verdict in texts(page(report))
    layers = tuple(replace(report.layers[0], name=f"{EVIL}{k}") for k in range(5000))
    large = replace(report, layers=layers, name=EVIL, notes=(EVIL,) * 100)
    page(large)
    assert len(repr(large).splitlines()) <= 31
    assert len(repr(large)) < 6000
    assert repr(large).endswith("more lines; print(report)")


def test_a_trial_shows_scores_and_never_its_state() -> None:
    scores = [DeviceScore(f"d{k}", k % 2 == 0, 3, 5, 0.5, 0.75) for k in range(5000)]
    rounds = [RoundRow(k, 10, math.nan, 1000, 1000, 0.1) for k in range(1, 4)]
    state = {"w": np.zeros((1000, 1000), np.float32)}
    trial = Trial(EVIL, rounds, scores, {}, state)
    assert {"2500", "50.0", "75.0", f"{EVIL}: 3 rounds, 0.0 MB up, 0.0 MB down, 0.3 s"} <= set(
        texts(page(trial))
    )
    assert len(repr(trial)) < 300
    assert "  2500 training devices: 50.0 before, 75.0 adapted" in repr(trial)
    page(Trial("fedavg", [], [], {}, {}))
