"""`simulate` on files of models that are not classifiers of single samples."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.cli import simulate as simulate_module
from triplane.unified_ir.cli.simulate import simulate

DEVICES, SAMPLES = 6, 20


class TwoSensors(nn.Cell):
    """A line through two sensors."""

    def __init__(self):
        super().__init__()
        self.slow, self.fast = nn.Dense(3, 1), nn.Dense(4, 1)

    def construct(self, slow, fast):
        return self.slow(slow) + self.fast(fast)


class NextCharacter(nn.Cell):
    """Logits of the next character from the present one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 5)

    def construct(self, x):
        return self.embedding(x)


def saved(folder, cell, loss, **arrays):
    """The model file and the npz of its data, which has a column of devices."""
    nn.seed(2)
    trainer = train.Trainer(cell, loss=loss, optimizer=optim.SGD(0.1))
    trainer.prepare(*arrays.values())
    trainer.export().save(folder / "a.tpm")
    device = np.repeat(np.arange(DEVICES), SAMPLES)
    np.savez(folder / "a.npz", **arrays, device=device)
    return str(folder / "a.tpm"), "--data", str(folder / "a.npz"), "--group", "device"


def run(*arguments):
    options = ("--rounds", "3", "--support", "8")
    return CliRunner().invoke(simulate, [*arguments, *options], catch_exceptions=False)


def windows():
    """Windows (N, 2, 64) of sensors and a number that depends on the device, too."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(DEVICES * SAMPLES, 2, 64)).astype(np.float32) / 4
    own = np.repeat(rng.normal(size=DEVICES), SAMPLES) * 3
    return x, (x[:, 0, 0] + own)[:, None]


def test_a_regression_of_windows_is_compared_by_its_loss(tmp_path):
    x, y = windows()
    cell = nn.Sequential(nn.Flatten(), nn.Dense(128, 1))
    arguments = saved(tmp_path, cell, nn.MSE(), x=x, y=y)
    page = tmp_path / "study.html"
    done = run(*arguments, "--rate", "0.3", "--rate", "1e9", "--out", str(page))
    assert done.exit_code == 0, done.output
    heading, row = done.stdout.splitlines()[:2]
    assert heading.split() == [
        "algorithm", "devices", "start", "loss", "before", "adapted", "worst", "tenth", "MB", "up"
    ]  # fmt: skip
    start, before, adapted, worst = map(float, row.split()[3:7])
    assert before < start
    assert adapted < before
    assert adapted < worst
    assert done.stdout.splitlines()[-1].startswith("On training devices, loss after adaptation: ")
    assert "fedavg scored after round 3  at rate 1e+09  the loss is not finite" in done.stderr
    assert "accuracy" not in page.read_text().lower()
    (trial,) = json.loads(run(*arguments, "--json", "--algorithm", "fedavg").stdout)["trials"]
    assert trial["metric"] == "loss"
    assert len(trial["training"]) == DEVICES


@pytest.mark.parametrize(
    ("flags", "way", "other"),
    [
        (("--x", "x:1x128", "--y", "y:1"), "--x 'a*:2x64'", "--y speed"),
        (("--x", "x", "--y", "y"), "--y speed:1", "--x"),
    ],
)
def test_a_wrong_shape_names_the_option_of_that_side_alone(tmp_path, flags, way, other):
    x, y = windows()
    cell = nn.Sequential(nn.Flatten(), nn.Dense(128, 1))
    files = saved(tmp_path, cell, nn.MSE(), x=x, y=y)
    np.savez(tmp_path / "a.npz", x=x, y=y[:, 0], device=np.repeat(np.arange(DEVICES), SAMPLES))
    with pytest.raises(InvalidInput) as error:
        run(*files, *flags)
    assert f"choose another shape as in {way}" in str(error.value)
    assert other not in str(error.value)


def test_a_model_of_two_inputs_takes_two_columns(tmp_path):
    rng = np.random.default_rng(1)
    slow, fast = (rng.normal(size=(DEVICES * SAMPLES, k)).astype(np.float32) for k in (3, 4))
    y = slow.sum(1, keepdims=True) - fast.sum(1, keepdims=True)
    arguments = saved(tmp_path, TwoSensors(), nn.MSE(), slow=slow, fast=fast, y=y)
    done = run(*arguments, "--x", "slow", "--x", "fast", "--json")
    trials = json.loads(done.stdout)["trials"]
    assert [trial["metric"] for trial in trials] == ["loss", "loss"]
    losses = [row["loss"] for row in trials[0]["rounds"]]
    assert losses[-1] < losses[0]


def test_a_model_of_characters_is_compared_by_accuracy(tmp_path):
    rng = np.random.default_rng(1)
    x = (rng.integers(0, 5, (DEVICES * SAMPLES, 1)) + np.arange(7)) % 5
    arguments = saved(tmp_path, NextCharacter(), nn.SoftmaxCrossEntropy(), x=x[:, :-1], y=x[:, 1:])
    done = run(*arguments, "--lr", "1")
    assert done.exit_code == 0, done.output
    heading, row = done.stdout.splitlines()[:2]
    assert heading.startswith("algorithm  devices     start  before  adapted")
    before, adapted = map(float, row.split()[4:6])
    assert 0 < before <= adapted <= 100


@pytest.mark.parametrize("way", ["labels", "dirichlet"])
def test_a_partition_by_class_refuses_targets_that_are_numbers(tmp_path, way):
    x, y = windows()
    cell = nn.Sequential(nn.Flatten(), nn.Dense(128, 1))
    model, _, data, *_ = saved(tmp_path, cell, nn.MSE(), x=x, y=y)
    done = CliRunner().invoke(simulate, [model, "--data", data, "--partition", way])
    assert done.exit_code != 0
    assert "labels are 120 whole numbers, one for each sample" in str(done.exception)


DIVERGING = ("--algorithm", "maml", "--algorithm", "fedavg", "--lr", "1e6", "--meta-lr", "3e6")


def test_a_divergence_names_algorithm_seed_and_the_options_to_lower(tmp_path):
    x, y = windows()
    cell = nn.Sequential(nn.Flatten(), nn.Dense(128, 1))
    arguments = saved(tmp_path, cell, nn.MSE(), x=x, y=y)
    files = ("--out", str(tmp_path / "a.html"), "--out-csv", str(tmp_path / "a.csv"))
    with pytest.raises(InvalidInput) as raised:
        run(*arguments, *DIVERGING, *files, "--seeds", "1,2")
    assert re.fullmatch(
        r"maml, seed 1: device-\d in round 1: the loss is (nan|inf) at step \d; a smaller rate is "
        r"needed; "
        r"try a smaller --meta-lr \(3e\+06\) or --lr \(1e\+06\)\. All 4 runs stopped; --out and "
        r"--out-csv were not written",
        str(raised.value),
    )
    with pytest.raises(InvalidInput, match=r"^fedavg: .*try a smaller --lr \(1e\+06\)$"):
        run(*arguments, *DIVERGING[2:])
    assert not list(tmp_path.glob("a.[hc]*"))


def test_an_algorithm_that_lost_seeds_is_said_first_and_not_ranked(tmp_path, monkeypatch):
    x, y = windows()
    cell = nn.Sequential(nn.Flatten(), nn.Dense(128, 1))
    arguments = saved(tmp_path, cell, nn.MSE(), x=x, y=y)
    trial = simulate_module._trial

    def diverging(served, *rest):
        if served[0].algorithm == "maml" and served[0].seed:
            raise InvalidInput("0 in round 3: a smaller rate is needed")
        return trial(served, *rest)

    monkeypatch.setattr(simulate_module, "_trial", diverging)
    page = tmp_path / "study.html"
    done = run(*arguments, "--seeds", "3", "--out", str(page), "--json")
    assert done.exit_code == 2
    record = json.loads(done.stdout)
    assert record["warnings"][0].startswith("maml stopped in 2 of 3 seeds, ")
    assert record["verdicts"][0].endswith("; not ranked: maml stopped in 2 of 3 seeds.")
    assert record["stopped"]["maml seed 2"] == (
        "0 in round 3: a smaller rate is needed; try a smaller --meta-lr (0.05) or --lr (0.05)"
    )
    assert "<p class='warning' role='alert'>maml stopped in 2 of 3 seeds, " in page.read_text()
    done = run(*arguments, "--seeds", "3")
    lines = done.stdout.splitlines()
    assert lines[0] == record["warnings"][0]
    fedavg, maml = (line for line in lines if re.match(r"(fedavg|maml)  ?[ (]", line))
    assert maml.startswith("maml (1 of 3 seeds)  ")
    start = re.compile(r" training +(\S+ ± \S+)")
    assert start.findall(fedavg) == start.findall(maml) != []


def test_a_start_whose_adaptation_raises_the_loss_is_noted_with_the_rate(tmp_path):
    x, y = windows()
    cell = nn.Sequential(nn.Flatten(), nn.Dense(128, 1))
    arguments = saved(tmp_path, cell, nn.MSE(), x=x, y=y)
    note = "maml: adaptation at the start makes the loss of training devices "
    done = run(*arguments, "--algorithm", "maml", "--lr", "3", "--meta-lr", "0")
    (line,) = (line for line in done.stderr.splitlines() if line.startswith(note))
    assert re.search(r" \d+(\.\d+)?(e\+\d+)? times as large; try a smaller --lr \(3\)$", line)
    assert note not in run(*arguments, "--algorithm", "maml").stderr
