"""`simulate`: what it prints and writes, from a model file and a dataset's name."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.cli.simulate import simulate

ARGS = ("--data", "digits", "--partition", "labels", "--population", "6", "--unseen", "0.5",
        "--rounds", "2", "--steps", "1")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    nn.seed(0)
    trainer = train.Trainer(
        nn.Sequential(nn.Flatten(), nn.Dense(64, 10)),
        loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1),
    )  # fmt: skip
    trainer.prepare(np.zeros((1, 1, 8, 8), np.float32), np.zeros(1, np.int64))
    path = tmp_path_factory.mktemp("model") / "digits.tpm"
    trainer.export().save(path)
    return path


def run(model, *more):
    return CliRunner().invoke(simulate, [str(model), *ARGS, *more], catch_exceptions=False)


def test_it_compares_algorithms_in_a_table_and_a_page(model, tmp_path):
    out = tmp_path / "study.html"
    made = run(model, "--rate", "0.1", "--rate", "0.3", "--out", str(out))
    assert made.exit_code == 0
    rows = [line.split() for line in made.stdout.splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        ["fedavg", "3", "training"], ["fedavg", "3", "unseen"],
        ["maml", "3", "training"], ["maml", "3", "unseen"],
    ]  # fmt: skip
    assert "maml round 2/2  loss" in made.stderr
    text = out.read_text()
    assert text.startswith("<!doctype html>")
    assert "rates <b>0.1, 0.3</b>" in text


def test_the_record_is_whole_and_the_same_again(model, tmp_path):
    options = ("--json", "--algorithm", "meta-sgd", "--rate", "0.1", "--folder", str(tmp_path))
    first, second = (json.loads(run(model, *options).stdout) for _ in range(2))
    assert first == second
    (trial,) = first["trials"]
    assert [row["number"] for row in trial["rounds"]] == [1, 2]
    assert {score["samples"] > 0 for score in trial["unseen"]} == {True}
    assert trial["rates"] == {}
    assert (tmp_path / "meta-sgd" / "study.tpc").is_file()


def test_compression_is_by_name(model):
    plain, packed = (
        json.loads(run(model, "--json", "--algorithm", "fedavg", *more).stdout)["trials"][0]
        for more in ((), ("--compression", "top-k", "--keep", "0.1"))
    )
    assert packed["bytes_up"] < plain["bytes_up"] / 3
