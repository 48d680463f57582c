"""Models that sample, from the command line: `train --key-input`, then `--seed` of other verbs."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from triplane.unified_ir import convert, export_onnx, load, nn, optim, train
from triplane.unified_ir.cli import shell

NETS = """
import numpy as np
from triplane.unified_ir import nn, ops

class Noisy(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, 1)
        self.key = nn.RandomKey(np.array([1, 2], np.uint32))

    def construct(self, x):
        y = self.dense(x)
        y = y + ops.random_normal(self.key, y.shape)
        self.key = ops.next_key(self.key)
        return y
"""
X = np.random.default_rng(0).standard_normal((20, 2)).astype(np.float32)
VERBS = {
    name: EntryPoint(name, f"triplane.unified_ir.cli.{name}:command", shell.VERB_GROUP)
    for name in ("train", "predict", "evaluate")
}


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_entry_points", lambda: VERBS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sampling")
    (path / "nets.py").write_text(NETS)
    np.savez(path / "d.npz", x=X, y=X[:, :1])
    flags = ("--data", path / "d.npz", "--epochs", 1, "--key-input", "seed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "_entry_points", lambda: VERBS)
        argv = ["train", f"{path}/nets.py:Noisy", *flags, "--out", path / "m.tpm"]
        assert shell.run([*map(str, argv)]) == 0
    module = load(path / "m.tpm")
    export_onnx(module, path / "m.onnx")
    convert.convert(module, out=path / "m.bundle")
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = shell.run([*map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("name", ["m.tpm", "m.onnx", "m.bundle"])
def test_batch_number_k_gets_the_key_of_seed_and_k(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    flags = (folder / "d.npz", "--out", tmp_path / "y.npz", "--batch-size", 8, "--seed", 7)
    code, _, error = run(capsys, "predict", folder / name, *flags)
    assert code == 0, error
    module = load(folder / "m.tpm")
    parts = [
        module.predict(X[at : at + 8], seed=np.array([7, k], np.uint32))
        for k, at in enumerate((0, 8, 16))
    ]
    with np.load(tmp_path / "y.npz") as file:
        y = file["y"]
    np.testing.assert_allclose(y, np.concatenate([np.asarray(p) for p in parts]), rtol=1e-5)
    assert (y != module.predict(X, seed=np.array([8, 0], np.uint32))).all()


def test_a_seed_is_asked_for_where_it_is_needed_and_refused_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, "predict", folder / "m.tpm", folder / "d.npz")
    assert code == 2
    assert "draws random numbers by its input 'seed'; give a number, as in --seed 7" in error
    plain = train.Trainer(nn.Dense(2, 1), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    plain.prepare(X, X[:, :1])
    plain.export(("predict",)).save(tmp_path / "plain.tpm")
    code, _, error = run(capsys, "predict", tmp_path / "plain.tpm", folder / "d.npz", "--seed", 7)
    assert code == 2
    assert "samples nothing; omit --seed" in error


@pytest.mark.parametrize(
    ("cell", "flags", "message"),
    [
        ("Noisy", ("--key-input", "key"), "key_input='key' is the name of another tensor"),
        ("Noisy", ("--key-input", ""), "key_input must be a name such as 'seed', got ''"),
        ("Noisy", ("--key-input", "seed", "--entry", "loss"), "export that entry"),
        ("Plain", ("--key-input", "seed"), "predict draws no random numbers"),
    ],
)
def test_an_input_that_cannot_be_is_refused_before_the_training(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cell: str,
    flags: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "nets.py").write_text(f"{NETS}\n\ndef Plain():\n    return nn.Dense(2, 1)\n")
    data = ("--data", folder / "d.npz", "--epochs", 3, *flags)
    code, _, error = run(
        capsys, "train", f"{tmp_path / 'nets.py'}:{cell}", *data, "--out", tmp_path / "m.tpm"
    )
    assert code == 2
    assert message in error
    assert "epoch 1" not in error


def test_a_sampling_model_is_evaluated_with_the_same_keys(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = run(
        capsys, "evaluate", folder / "m.tpm", "--data", folder / "d.npz", "--seed", 7, "--json"
    )
    assert code == 0, error
    module = load(folder / "m.tpm")
    y = np.asarray(module.predict(X, seed=np.array([7, 0], np.uint32)))
    assert json.loads(out)["measures"]["mae"] == pytest.approx(
        np.abs(y - X[:, :1]).mean(), rel=1e-4
    )


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_a_model_that_draws_from_a_key_of_its_own_is_noted(
    verb: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = tmp_path / "own.tpm", folder / "d.npz"
    flags = ("--data", data, "--epochs", 1, "--entry", "predict", "--entry", "evaluate")
    assert run(capsys, "train", f"{folder}/nets.py:Noisy", *flags, "--out", out)[0] == 0
    source = (data,) if verb == "predict" else ("--data", data)
    code, _, err = run(capsys, verb, out, *source)
    assert code == 0
    assert "from its own key 'key', the same in each batch" in " ".join(err.split())
    seed = ("--seed", 1)
    _, _, quiet = run(capsys, verb, folder / "m.tpm", *source, *seed)
    assert "its own key" not in quiet
