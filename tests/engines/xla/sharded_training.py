"""A step with strategies in its code learns on 4 devices what one learns; run by test_planned."""

import io
import sys
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.engines.xla.engine import XlaEngine


class Net(nn.Cell):
    """The rows of the input are cut, and then the columns of a product."""

    def __init__(self):
        super().__init__()
        self.wide, self.head = nn.Dense(8, 32), nn.Dense(32, 4)

    def construct(self, x):
        hidden = ops.relu(self.wide.shard((4, 1))(x))
        y = ops.matmul.shard((1, 1), (1, 4))(hidden, ops.transpose(self.head.weight))
        return y + self.head.bias


class Squared(nn.Cell):
    """A cell with a gradient of its own, whose product and gradient are cut."""

    def construct(self, x):
        return ops.mul.shard((4, 1), (4, 1))(x, x)

    def bprop(self, x, y, g):
        return ops.mul.shard((2, 2), (2, 2))(g, 2.0 * x)


def squares():
    """A cell with a bprop is split alike in training, validation and prediction."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 8)).astype(np.float32), np.arange(8) % 4
    engine, answers = XlaEngine(parallel="auto", devices=4), []
    for each in (engine, "onnx"):
        nn.seed(0)
        trainer = train.Trainer(
            nn.Sequential(nn.Dense(8, 8), Squared(), nn.Dense(8, 4)),
            loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1), engine=each,
        )  # fmt: skip
        trainer.fit((x, y), 1, validation=(x, y), batch_size=8)
        answers.append(trainer.predict(x))
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-5, atol=1e-5)
    planned: Any = engine.devices
    splits = [set(p.strategies().values()) for p in planned.plans]
    assert len(splits) == 3, splits
    assert all(((4, 1), (4, 1)) in each for each in splits), splits
    assert ((2, 2), (2, 2)) in splits[0], splits


def trained(engine):
    nn.seed(0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((22, 8)).astype(np.float32)
    y = rng.integers(0, 4, 22)
    record = train.Record()
    trainer = train.Trainer(
        Net(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1), engine=engine,
        callbacks=[record],
    )  # fmt: skip
    said = io.StringIO()
    trainer.fit((x, y), 2, batch_size=8, progress=train.Progress("lines", stream=said))
    return np.array([row["loss"] for row in record.steps]), trainer.state(), said.getvalue()


def main():
    losses, state, _ = trained("onnx")
    engine = XlaEngine(parallel="auto", devices=4)
    for other in ("xla", engine):
        here, after, said = trained(other)
        np.testing.assert_allclose(here, losses, rtol=1e-5, atol=1e-5)
        for name in state:
            np.testing.assert_allclose(after[name], state[name], rtol=1e-4, atol=1e-5)
    whole, last = (line for line in said.splitlines() if line.startswith("plan for N="))
    assert "planned freely" not in whole, whole
    assert "planned freely, as its slices do not divide: ((4, 1)) of Identity at " in last, last
    planned: Any = engine.devices
    splits = [set(p.strategies().values()) for p in planned.plans]
    # Batches of 8, and a last one of 6, whose rows 4 does not divide.
    assert {((4, 1),), ((1, 1), (1, 4))} <= splits[0], splits
    assert ((4, 1),) not in splits[1], splits
    assert ((1, 1), (1, 4)) in splits[1], splits
    try:
        trained(XlaEngine(mesh={"data": 4}))
    except InvalidInput as error:
        line = Net.construct.__code__.co_firstlineno + 1
        assert f"sharded_training.py:{line} has a strategy of its own" in str(error), error
    else:
        raise AssertionError("a mesh ignored the strategies")
    squares()
    sys.stdout.write("all held\n")


if __name__ == "__main__":
    main()
