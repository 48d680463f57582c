"""`simulate --ways`: episodes of classes that a model has no output of its own for."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.cli.simulate import simulate


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of three outputs, and four alphabets of six characters each."""
    folder = tmp_path_factory.mktemp("few-shot")
    nn.seed(0)
    trainer = train.Trainer(nn.Dense(8, 3), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 8), np.float32), np.zeros(1, np.int64))
    trainer.export().save(folder / "three.tpm")
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(24), 12)
    x = (3 * rng.standard_normal((24, 8))[y] + rng.standard_normal((len(y), 8))).astype(np.float32)
    np.savez(folder / "characters.npz", x=x, y=y, alphabet=y // 6, test=(y // 6 > 1).astype(int))
    return str(folder / "three.tpm"), str(folder / "characters.npz")


def run(files, *more):
    model, data = files
    args = [model, "--data", data, "--group", "alphabet", "--split", "test", "--rounds", "3"]
    return CliRunner().invoke(simulate, [*args, *more], catch_exceptions=False)


def test_a_study_of_three_ways_scores_classes_that_nobody_learned_from(files, tmp_path):
    out = tmp_path / "study.html"
    options = ("--algorithm", "maml+adam", "--ways", "3", "--support", "3", "--query", "3")
    made = run(files, *options, "--json", "--out", str(out))
    assert made.exit_code == 0, made.stderr
    (trial,) = json.loads(made.stdout)["trials"]
    assert trial["algorithm"] == "maml+adam"
    scores = trial["unseen"]
    assert [score["device"] for score in scores] == ["device-2", "device-3"]
    assert all(score["after"] > score["before"] for score in scores)
    assert "<td>ways</td><td>3</td>" in out.read_text()


def test_without_ways_such_labels_are_refused_and_with_ways_batches_are(files):
    with pytest.raises(InvalidInput, match=r"the labels of .* are 0 to 23"):
        run(files, "--algorithm", "maml")
    with pytest.raises(InvalidInput, match="fedavg does not learn from episodes"):
        run(files, "--ways", "3", "--support", "3", "--query", "3")
