"""Plans of models that are not classifiers of single samples: what their entries compute."""

import numpy as np
import pytest

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.cli.shell import run
from triplane.unified_ir.federated.algorithms import ALGORITHMS, defaults, plan_of
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import Study, simulate
from triplane.unified_ir.runtime import Plan

LR, N, LENGTH, CHARACTERS = 0.1, 12, 5, 7


class OneNumber(nn.Cell):
    """One number per sample, without an axis of its own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(3, 1)

    def construct(self, x):
        return self.head(x).reshape(-1)


class TwoInputs(nn.Cell):
    """A line through two inputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Dense(3, 1), nn.Dense(2, 1)

    def construct(self, left, right):
        return self.left(left) + self.right(right)


class Characters(nn.Cell):
    """Logits of the next character from the present one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, CHARACTERS)

    def construct(self, x):
        return self.embedding(x)


def normal(*shape):
    return np.random.default_rng(len(shape) + sum(shape)).normal(size=shape).astype(np.float32)


def text():
    return np.random.default_rng(3).integers(0, CHARACTERS, (N, LENGTH))


CASES = {
    "targets (N,)": (OneNumber, nn.MSE, {"x": normal(N, 3), "y": normal(N)}),
    "targets (N, k)": (lambda: nn.Dense(3, 2), nn.MSE, {"x": normal(N, 3), "y": normal(N, 2)}),
    "windows": (
        lambda: nn.Sequential(nn.Flatten(), nn.Dense(128, 1)), nn.MSE,
        {"x": normal(N, 2, 64) / 4, "y": normal(N, 1)},
    ),
    "targets (N, T)": (Characters, nn.SoftmaxCrossEntropy, {"x": text(), "y": text()[:, ::-1]}),
    "two inputs": (
        TwoInputs, nn.MSE, {"left": normal(N, 3), "right": normal(N, 2), "y": normal(N, 1)},
    ),
}  # fmt: skip


def trained(name):
    nn.seed(5)
    cell, loss, data = CASES[name]
    trainer = train.Trainer(cell(), loss=loss(), optimizer=optim.SGD(LR))
    trainer.prepare(*data.values())
    return trainer.export(("predict", "evaluate", "loss", "local_update", "adapt")), data


def loss_of(plan, data):
    """The loss of the plan's predictions, by numpy."""
    *inputs, target = data
    (output,) = plan.predict(**{k: data[k] for k in inputs}).values()
    output, y = output.astype(float), data[target]
    if y.dtype.kind == "f":
        assert output.shape == y.shape
        return np.mean((output - y) ** 2)
    log_p = output - np.log(np.exp(output).sum(-1, keepdims=True))
    return -np.mean(np.take_along_axis(log_p, y[..., None], -1))


@pytest.mark.parametrize("name", CASES)
def test_a_converted_plan_measures_and_lowers_the_loss(tmp_path, name):
    module, data = trained(name)
    module.save(tmp_path / "a.tpm")
    assert run(["convert", str(tmp_path / "a.tpm"), "--plan", str(tmp_path / "a.plan")]) == 0
    plan = Plan.load(tmp_path / "a.plan")
    before = loss_of(plan, data)
    assert plan.evaluate(data)["loss"] == pytest.approx(before, rel=1e-5)
    assert plan.run("local_update", data)["loss"] == pytest.approx(before, rel=1e-5)
    after = loss_of(plan, data)
    assert after < before
    assert plan.adapt([data], steps=3)[0] == pytest.approx(after, rel=1e-5)
    assert loss_of(plan, data) < after


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_has_a_plan_whose_gradient_lowers_the_loss(tmp_path, name, algorithm):
    module, data = trained(name)
    hyper = defaults(algorithm).but(lr=0.05, inner_steps=1)
    plan_of(module, algorithm, hyper, tmp_path / "a.plan")
    plan = Plan.load(tmp_path / "a.plan")
    before = loss_of(plan, data)
    for _ in range(3):
        batch = {t.name: data[t.name.rpartition(".")[2]] for t in plan.inputs("local_update")}
        plan.run("local_update", batch)
    assert loss_of(plan, data) < before


@pytest.mark.parametrize("algorithm", ["fedavg", "maml"])
def test_devices_with_two_inputs_learn_and_are_scored(algorithm):
    module, data = trained("two inputs")
    shard = Shard(*({k: v[part] for k, v in data.items()} for part in np.s_[:8, 8:]))
    hyper = defaults(algorithm).but(lr=0.05, inner_steps=2)
    made = Study(algorithm=algorithm, rounds=2, hyper=hyper, steps=2, batch_size=4, support=4)
    trial = simulate(module, {"ann": shard, "bob": shard}, made)
    assert trial.metric.name == "loss"
    state, held_out = trial.state, shard.held_out
    output = sum(
        held_out[side] @ state[f"{side}.weight"].T + state[f"{side}.bias"]
        for side in ("left", "right")
    )
    expected = np.mean((output - held_out["y"]) ** 2)
    assert [s.before for s in trial.scores] == pytest.approx([expected] * 2, rel=1e-4)
