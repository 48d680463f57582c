"""Models of characters and of raw pixels answer about other files than they were trained on."""

import json

import numpy as np
import pytest
from tests.support.digits_model import digits_trainer

from triplane.unified_ir import convert, data, nn, optim, train
from triplane.unified_ir.cli import shell


class Next(nn.Cell):
    """Scores of the character after each character; x: (N, T) -> (N, T, 4)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def construct(self, x):
        return self.table(x)


@pytest.fixture
def model(tmp_path):
    """A model of a text of three characters, a file of it, and a text without the first one."""
    (tmp_path / "book.txt").write_text("abc" * 200)
    (tmp_path / "other.txt").write_text("bcbcbbc" * 20)
    trainer = train.Trainer(Next(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.1))
    trainer.fit(data.load(tmp_path / "book.txt", window=8), 20, progress="none")
    trainer.export(("predict", "evaluate")).save(tmp_path / "next.tpm")
    return tmp_path / "next.tpm"


def test_another_text_is_numbered_as_the_model_does(model, capsys):
    other = str(model.with_name("other.txt"))
    argv = ["evaluate", str(model), "--data", other, "--window", "8", "--metric", "accuracy"]
    assert shell.run([*argv, "--json"]) == 0
    # b is followed by c in 3 of 4 places. With the numbers of `other` alone, b would be a, which is
    # always followed by b.
    text = model.with_name("other.txt").read_text()
    windows = range(0, len(text) - 8, 8)
    wanted = np.mean([text[k + i : k + i + 2] == "bc" for k in windows for i in range(8)])
    measured = json.loads(capsys.readouterr().out)["measures"]["accuracy"]
    assert measured == pytest.approx(wanted, abs=1e-6)
    out = model.with_name("scores.npz")
    assert shell.run(["predict", str(model), other, "--window", "8", "--out", str(out)]) == 0
    with np.load(out) as file:
        best = file["logits"].argmax(-1)
    assert best[0].tolist() == [{"b": 2, "c": 0}[c] for c in text[:8]]


def test_a_column_of_a_table_called_token_is_numbered_as_it_is(tmp_path, capsys):
    """Only the characters of a text have the numbers of the classes."""
    for name, rows in {"all.csv": "0,a\n1,b\n2,c\n", "some.csv": "1,b\n2,c\n0,b\n"}.items():
        (tmp_path / name).write_text("token,y\n" + rows * 20)
    trainer = train.Trainer(
        nn.Embedding(3, 3), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.2), labels="abc"
    )
    trainer.fit(data.load(tmp_path / "all.csv", x="token"), 30, progress="none")
    model, some = tmp_path / "next.tpm", str(tmp_path / "some.csv")
    trainer.export(("predict", "evaluate")).save(model)
    argv = ["evaluate", str(model), "--data", some, "--x", "token", "--metric", "accuracy"]
    assert shell.run([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measures"]["accuracy"] == pytest.approx(2 / 3)
    assert shell.run(["predict", str(model), some, "--x", "token", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [row["top"][0]["class"] for row in answers[:3]] == ["b", "c", "a"]


def test_a_text_with_an_unknown_character_is_refused(model, capsys):
    model.with_name("odd.txt").write_text("abcz" * 20)
    odd = str(model.with_name("odd.txt"))
    assert shell.run(["evaluate", str(model), "--data", odd, "--window", "8"]) == 2
    error = capsys.readouterr().err
    assert "odd.txt has the class 'z', but the model's classes are a, b, c" in error


def test_a_model_of_bytes_refuses_pixels_in_0_to_1(tmp_path, capsys):
    digits = data.load("digits")
    convert.with_pipeline(digits_trainer().export(("predict",)), digits).save(tmp_path / "raw.tpm")
    argv = ["evaluate", str(tmp_path / "raw.tpm"), "--data", "digits"]
    assert shell.run([*argv, "--pixels"]) == 2
    assert "the model takes x: uint8" in capsys.readouterr().err
    assert shell.run(argv) == 0


def test_a_real_target_without_the_axis_of_the_output_is_refused_with_the_option(tmp_path, capsys):
    trainer = train.Trainer(nn.Dense(1, 1), loss=nn.MSE(), optimizer=optim.SGD(0.001))
    trainer.prepare(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))
    trainer.export(("predict", "evaluate")).save(tmp_path / "line.tpm")
    (tmp_path / "a.csv").write_text("x,speed\n1,2.5\n2,3.5\n")
    argv = ["evaluate", str(tmp_path / "line.tpm"), "--data", str(tmp_path / "a.csv"), "--x", "x:1"]
    assert shell.run([*argv, "--y", "speed"]) == 2
    assert "compares with y: float32[N,1], but" in (error := capsys.readouterr().err)
    assert "--y 'speed:1'" in error
    assert shell.run([*argv, "--y", "speed:1"]) == 0
