"""`simulate` of a model that some algorithms cannot learn: refused or left out, before all work."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.cli.simulate import simulate

ARGS = ("--data", "digits", "--population", "3", "--rounds", "1", "--steps", "1", "--seeds", "2")
WAY_OUT = (
    "track_running_stats=False",
    "GroupNorm",
    "fedavg, fedprox, fedadam, fedavgm, scaffold, reptile",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    nn.seed(0)
    norms = [nn.BatchNorm1d(8) for _ in range(3)]
    trainer = train.Trainer(
        nn.Sequential(nn.Flatten(), nn.Dense(64, 8), *norms, nn.Dense(8, 10)),
        loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1),
    )  # fmt: skip
    trainer.prepare(np.zeros((1, 1, 8, 8), np.float32), np.zeros(1, np.int64))
    path = tmp_path_factory.mktemp("model") / "normed.tpm"
    trainer.export().save(path)
    return path


def run(model, *more):
    return CliRunner().invoke(simulate, [str(model), *ARGS, *more], catch_exceptions=False)


@pytest.mark.parametrize(
    ("names", "refused"),
    [(["maml"], "maml cannot"), (["fedavg", "maml", "meta-sgd"], "maml and meta-sgd cannot")],
)
def test_an_algorithm_that_was_named_is_refused_before_any_work(model, tmp_path, names, refused):
    named = [text for name in names for text in ("--algorithm", name)]
    with pytest.raises(InvalidInput) as error:
        run(model, *named, "--folder", str(tmp_path / "study"))
    text = str(error.value)
    assert text.startswith(f"{refused} learn normed.tpm: the loss assigns 6 tensors (")
    assert "and 3 more), such as statistics of a batch" in text
    assert all(part in text for part in WAY_OUT)
    assert text.count("running_mean") + text.count("running_var") == 3
    assert not (tmp_path / "study").exists()  # fedavg, which can learn it, did not begin


@pytest.mark.parametrize("names", [(), ("--algorithm", "all")])
def test_an_algorithm_that_nobody_named_is_left_out(model, names, tmp_path):
    page = tmp_path / "study.html"
    done = run(model, *names, "--out", str(page))
    assert done.exit_code == 0
    first, second, *_ = done.stderr.splitlines()
    absent = "maml, fomaml and meta-sgd" if names else "maml"
    assert first.startswith(f"{absent} left out: the loss assigns 6 tensors (")
    assert "devices learn" in second
    assert "stopped" not in done.output
    assert done.stdout.splitlines()[-1] == first
    assert "left out" in page.read_text()


def test_the_record_tells_what_is_left_out(model):
    record = json.loads(run(model, "--json").stdout)
    assert list(record["left_out"]) == ["maml"]
    assert record["stopped"] == {}
    assert {trial["algorithm"] for trial in record["trials"]} == {"fedavg"}


def test_a_model_that_nothing_can_learn_is_refused_once(model, tmp_path):
    from triplane.unified_ir.ops.check import load

    whole = load(model)
    entries = {name: f for name, f in whole.entries.items() if name != "loss"}
    used = {f: whole.functions[f] for f in entries.values()}
    path = tmp_path / "mute.tpm"
    type(whole)(used, entries, whole.state, whole.meta).save(path)
    with pytest.raises(InvalidInput, match="fedavg and maml cannot learn mute"):
        run(path)
