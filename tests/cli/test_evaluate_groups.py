"""`triplane evaluate --group`: the measures of each group of samples, from the worst."""

from __future__ import annotations

import csv
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triplane.unified_ir import convert, export_onnx, nn, optim, train
from triplane.unified_ir.cli import evaluation, shell

VERBS = {
    "evaluate": EntryPoint("evaluate", "triplane.unified_ir.cli.evaluate:command", shell.VERB_GROUP)
}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((120, 2)).astype(np.float32)
Y = RNG.integers(0, 3, 120)
PEOPLE = RNG.choice(["ann", "bob", "cy", "di"], 120)
FLAGS = ("--x", "c*", "--y", "y", "--group", "client")


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_entry_points", lambda: VERBS)


def classifier(loss: nn.Loss) -> train.Trainer:
    nn.seed(3)
    trainer = train.Trainer(nn.Dense(2, 3), loss=loss, optimizer=optim.SGD(0.1))
    trainer.prepare(X, Y)
    return trainer


def table(path: Path, y: Any = Y, people: Any = PEOPLE) -> Path:
    """Write columns c0, c1, client and y; the pattern c* is meant for the first two."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["c0", "client", "c1", "y"])
        writer.writerows(zip(X[:, 0], people, X[:, 1], y, strict=True))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("groups")
    module = classifier(nn.SoftmaxCrossEntropy()).export(("predict", "evaluate"))
    module.save(path / "m.tpm")
    export_onnx(module, path / "m.onnx")
    convert.convert(module, out=path / "m.bundle")
    table(path / "d.csv")
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = shell.run(["evaluate", *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def record(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code, out, error = run(capsys, *argv, "--json")
    assert code == 0, error
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.parametrize("name", ["m.tpm", "m.onnx", "m.bundle"])
@pytest.mark.parametrize("size", [120, 7])
def test_each_group_has_the_measures_of_its_samples_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, size: int
) -> None:
    trainer = classifier(nn.SoftmaxCrossEntropy())
    flags = ("--data", folder / "d.csv", *FLAGS, "--batch-size", size, "--metric", "accuracy")
    result = record(capsys, folder / name, *flags)
    wanted = {}
    for person in set(PEOPLE.tolist()):
        mine = np.isin(PEOPLE, person)
        wanted[person] = (int(mine.sum()), trainer.evaluate((X[mine], Y[mine])))
    groups = result["groups"]
    assert {r["group"]: r["samples"] for r in groups} == {k: n for k, (n, _) in wanted.items()}
    for row in groups:
        measures = wanted[row["group"]][1]
        expected = measures if name == "m.tpm" else {"accuracy": measures["accuracy"]}
        assert row["measures"] == pytest.approx(expected, rel=1e-5)
    accuracies = [r["measures"]["accuracy"] for r in groups]
    assert accuracies == sorted(accuracies)
    assert (result["group"], result["ranked_by"]) == ("client", "accuracy")
    whole = trainer.evaluate((X, Y))
    assert result["measures"]["accuracy"] == pytest.approx(whole["accuracy"])


def test_the_table_begins_with_the_worst_group_and_leaves_out_the_middle(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = table(tmp_path / "d.csv", people=np.arange(120) % 40)
    flags = ("--data", numbers, *FLAGS, "--metric", "accuracy")
    code, out, error = run(capsys, folder / "m.onnx", *flags)
    assert code == 0, error
    lines = out.splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith("accuracy over 40 groups of"))
    assert lines[at + 1].split() == ["client", "samples", "accuracy"]
    assert lines[at + 17] == "  ... 20 more groups"
    rows = [line.split() for line in lines[at + 2 : at + 17] + lines[at + 18 :]]
    assert len(rows) == 20
    groups = record(capsys, folder / "m.onnx", *flags)["groups"]
    assert [int(r[0]) for r in rows] == [r["group"] for r in groups[:15] + groups[-5:]]


def test_numbers_have_the_group_of_the_largest_error_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y = X[:, :1] * 2
    trainer = train.Trainer(nn.Dense(2, 1), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(X, y)
    trainer.export(("predict", "evaluate")).save(tmp_path / "m.tpm")
    table(tmp_path / "d.csv", y=y[:, 0])
    flags = ("--data", tmp_path / "d.csv", "--x", "c*", "--y", "y:1", "--group", "client")
    groups = record(capsys, tmp_path / "m.tpm", *flags)["groups"]
    errors = [r["measures"]["mae"] for r in groups]
    assert errors == sorted(errors, reverse=True)
    mine = np.isin(PEOPLE, groups[0]["group"])
    assert errors[0] == pytest.approx(np.abs(trainer.predict(X) - y)[mine].mean(), rel=1e-5)


def test_a_group_in_which_no_label_counts_has_no_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y = np.where(PEOPLE == "bob", -1, Y)
    module = classifier(nn.SoftmaxCrossEntropy(ignore_index=-1)).export(("predict", "evaluate"))
    module.save(tmp_path / "m.tpm")
    table(tmp_path / "d.csv", y=y)
    flags = ("--data", tmp_path / "d.csv", *FLAGS, "--batch-size", 16)
    groups = record(capsys, tmp_path / "m.tpm", *flags)["groups"]
    assert groups[-1]["group"] == "bob"
    assert groups[-1]["measures"] == {}
    code, out, _ = run(capsys, tmp_path / "m.tpm", *flags)
    assert code == 0
    assert out.splitlines()[-1].split() == ["bob", str((PEOPLE == "bob").sum()), *["-"] * 5]


def test_groups_of_classes_have_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classifier(nn.SoftmaxCrossEntropy()).export(("predict",)).save(tmp_path / "m.tpm")
    names = np.array(["no", "yes", "maybe"])[Y]
    table(tmp_path / "d.csv", y=names)
    flags = ("--data", tmp_path / "d.csv", "--x", "c?", "--y", "y", "--group", "y")
    groups = record(capsys, tmp_path / "m.tpm", *flags)["groups"]
    assert {r["group"]: r["samples"] for r in groups} == {
        name: int((names == name).sum()) for name in set(names.tolist())
    }


@pytest.mark.parametrize(
    ("group", "message"),
    [("", "'--group': it names a column, got ''"), ("clie*", "no column is called 'clie*'")],
)
def test_a_group_is_one_column_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str], group: str, message: str
) -> None:
    flags = ("--data", folder / "d.csv", "--x", "c0,c1", "--y", "y", "--group", group)
    code, _, error = run(capsys, folder / "m.tpm", *flags)
    assert code == 2
    assert message in " ".join(error.split())


def test_groups_that_cannot_be_are_refused(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ("--data", folder / "d.csv", "--x", "c0,c1", "--y", "y", "--group")
    code, _, error = run(capsys, folder / "m.tpm", *flags, "person")
    assert code == 2
    assert "no column is called 'person'" in error
    np.savez(tmp_path / "d.npz", x=X, y=Y, who=X)
    code, _, error = run(capsys, folder / "m.tpm", "--data", tmp_path / "d.npz", "--group", "who")
    assert code == 2
    assert "needs one text or number for each sample" in error
    monkeypatch.setattr(evaluation, "MAX_GROUPS", 3)
    code, _, error = run(capsys, folder / "m.tpm", *flags, "client")
    assert code == 2
    assert "client has more than 3 different values" in error
    monkeypatch.setattr(evaluation, "MAX_GROUPS", 4)
    monkeypatch.setattr(evaluation, "MAX_COUNTS_BYTES", 700)
    code, _, error = run(capsys, folder / "m.tpm", *flags, "client")
    assert code == 2
    assert "choose --metric accuracy" in error
