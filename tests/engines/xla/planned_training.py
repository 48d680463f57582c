"""Training on 8, 6 and 4 planned devices learns what one device learns; run by test_planned."""

import io
import sys
from typing import Any

import numpy as np
from tests.support.xla_training import digits

from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.engines.xla.engine import XlaEngine
from triplane.unified_ir.passes.sharding import Topology

SLOW = Topology(flops_per_s=1e9, memory_bytes_per_s=1e9)
"""Devices so slow that even this network is worth splitting."""


class Net(nn.Cell):
    """A convolution, statistics, a random mask, and a wide layer that is worth cutting."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.25)
        self.wide = nn.Dense(8 * 36, 512)
        self.head = nn.Dense(512, 10)

    def construct(self, x):
        x = self.drop(ops.flatten(ops.relu(self.norm(self.conv(x)))))
        return self.head(ops.relu(self.wide(x)))


def trained(engine, **options):
    nn.seed(0)
    record, said = train.Record(), io.StringIO()
    chosen: Any = {"engine": engine, "callbacks": [record], **options}
    trainer = train.Trainer(
        Net(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.05, momentum=0.9), **chosen
    )
    progress = train.Progress("lines", stream=said)
    # Batches of 48, and a last one of 4; another size in validation.
    trainer.fit(digits(0, 148), 3, batch_size=48, validation=digits(0, 40), progress=progress)
    return np.array([row["loss"] for row in record.steps]), trainer.state(), said.getvalue()


def main():
    one, state, _ = trained("xla")
    for count, options in ((8, {}), (6, {}), (4, {"steps_per_launch": 3})):
        engine = XlaEngine(parallel="auto", devices=count, topology=SLOW)
        losses, after, said = trained(engine, **options)
        np.testing.assert_allclose(losses, one, rtol=2e-4, atol=2e-4)
        for name in state:
            np.testing.assert_allclose(after[name], state[name], rtol=1e-2, atol=2e-3, err_msg=name)
        assert f"engine xla on {count} of 8 x CPU, split by a plan" in said, said
        assert "plan for N=48: mesh" in said, said
        planned: Any = engine.devices
        splits = planned.plans[0].strategies().values()
        assert any(n > 1 for split in splits for axes in split for n in axes), "nothing was split"
    sys.stdout.write("all held\n")


if __name__ == "__main__":
    main()
