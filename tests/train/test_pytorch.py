"""Twenty training steps against PyTorch: losses, final state, and logits in evaluation mode."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from triplane.unified_ir import grad, mode, nn, ops, optim, train

GOLDEN = Path(__file__).parents[1] / "golden" / "train"
EPOCHS = 4


class LastState(nn.Cell):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 8)
        self.head = nn.Dense(8, 4)

    def construct(self, x):
        _, (h, _) = self.rnn(x)
        return self.head(h)


def mlp():
    return nn.Sequential(nn.Dense(6, 16), nn.Tanh(), nn.Dense(16, 4))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same", bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dense(4 * 3 * 3, 4),
    )  # fmt: skip


CASES = {
    "mlp": (mlp, optim.SGD(0.2, momentum=0.9)),
    "cnn": (cnn, optim.Adam(0.02)),
    "lstm": (LastState, optim.AdamW(0.02, weight_decay=0.1)),
}


def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as held:
        return {key: held[key] for key in held.files}


def part(found, prefix):
    return {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}


def batches(found):
    edges = np.cumsum([0, *found["sizes"]])
    return [(found["x"][a:b], found["y"][a:b]) for a, b in pairwise(edges)]


def trained(name, found, engine):
    make, optimizer = CASES[name]
    cell, record = make(), train.Record()
    cell.load(part(found, "start/"))
    trainer = train.Trainer(
        cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optimizer, engine=engine, callbacks=[record]
    )
    trainer.fit(batches(found), EPOCHS, progress="none")
    return trainer, np.array([row["loss"] for row in record.steps])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "tolerance"), [("onnx", 1e-6), ("reference", 1e-6), ("ascend", 5e-3)]
)
@pytest.mark.parametrize("name", CASES)
def test_twenty_losses_follow_pytorch(name, engine, tolerance):
    found = golden(name)
    trainer, losses = trained(name, found, engine)
    np.testing.assert_allclose(losses, found["losses"], rtol=tolerance)
    for path, expected in part(found, "end/").items():
        got = trainer.cell.parameters()[path].array
        np.testing.assert_allclose(got, expected, atol=10 * tolerance, rtol=0)
    logits = trainer.predict(found["x"])
    np.testing.assert_allclose(logits, found["logits"], atol=10 * tolerance, rtol=0)


def test_the_ascend_engine_really_rounds():
    found = golden("cnn")
    _, exact = trained("cnn", found, "onnx")
    _, rounded = trained("cnn", found, "ascend")
    assert 1e-6 < np.abs(exact - rounded).max() < 1e-2


def test_stateful_layers_train_alike_in_small_and_large_evaluation_batches():
    found = golden("cnn")
    trainer, _ = trained("cnn", found, "onnx")
    whole = trainer.predict(found["x"])
    np.testing.assert_allclose(trainer.predict(found["x"], batch_size=7), whole, atol=1e-6)
    held_out = (found["x"], found["y"])
    a, b = (trainer.evaluate(held_out, batch_size=n) for n in (7, 53))
    assert a == pytest.approx(b, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_eager_gradients_equal_the_graphs(name):
    cell, x = CASES[name][0]().eval(), golden(name)["x"][:5]

    def loss(given):
        return (ops.tanh(cell(given)) * ops.tanh(cell(given))).mean()

    graphed = grad(loss)(x)
    with mode("eager"):
        np.testing.assert_allclose(grad(loss)(x), graphed, rtol=1e-4, atol=1e-7)
