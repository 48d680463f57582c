"""Training with gradient buckets learns what one device learns; run by test_bucketed."""

import io
import re
import sys
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import data, nn, ops, optim, train
from triplane.unified_ir.engines.xla.engine import XlaEngine


class Net(nn.Cell):
    """A convolution, statistics of each sample, a random mask, and layers of unequal size."""

    def __init__(self, norm):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = norm
        self.drop = nn.Dropout(0.25)
        self.wide = nn.Dense(8 * 36, 64)
        self.head = nn.Dense(64, 10)

    def construct(self, x):
        x = self.drop(ops.flatten(ops.relu(self.norm(self.conv(x)))))
        return self.head(ops.relu(self.wide(x)))


def digits(n):
    held = np.load(data.__path__[0] + "/digits.npz")
    return held["x"][:n].astype(np.float32)[:, None] / 16, held["y"][:n].astype(np.int64)


def trained(engine, cell=None, loss=None, **options):
    nn.seed(0)
    record, said = train.Record(), io.StringIO()
    trainer = train.Trainer(
        cell() if cell else Net(nn.BatchNorm2d(8)),
        loss=loss or nn.SoftmaxCrossEntropy(),
        optimizer=optim.SGD(0.05, momentum=0.9),
        engine=engine,
        callbacks=[record],
        **options,
    )
    progress = train.Progress("lines", stream=said)
    # Batches of 48, and a last one of 4, which no device count divides but 4.
    trainer.fit(digits(148), 2, batch_size=48, validation=digits(40), progress=progress)
    return np.array([row["loss"] for row in record.steps]), trainer.state(), said.getvalue()


def same(mesh, options, one, state, **arguments):
    engine = XlaEngine(mesh={"data": mesh}, **options)
    losses, after, said = trained(engine, **arguments)
    np.testing.assert_allclose(losses, one, rtol=2e-4, atol=2e-4)
    for name in state:
        np.testing.assert_allclose(after[name], state[name], rtol=1e-2, atol=2e-3, err_msg=name)
    return engine, said


def reductions(engine):
    """The element counts of each float32 all-reduce in the compiled step."""
    trainer = train.Trainer(Net(nn.BatchNorm2d(8)), loss=nn.SoftmaxCrossEntropy(),
                            optimizer=optim.SGD(0.05), engine=engine)  # fmt: skip
    x, y = digits(48)
    function = None
    trainer.prepare(*(train.step.batch_type(a) for a in (x, y)))
    function = trainer.train_function()
    names = [n for n in function.result_names if n in {p.name for p in function.params}]
    program: Any = engine.compile(function, donate=names)
    state = {n: x for n, x in trainer.state().items() if n in names}
    program.loop(state).step(x=x, y=y)
    from triplane.unified_ir.engines.xla.door import exact

    compiled = next(iter(program._compiled.values()))
    loop = program.loop(state)
    with exact():
        text = compiled.call.lower(loop._present(), [x, y]).compile().as_text()
    ops_ = re.findall(r"= (\S.*?) all-reduce(?:-start)?\(", text)
    return sorted(
        sum(
            int(np.prod([int(d) for d in s.split(",") if d]))
            for s in re.findall(r"f32\[([\d,]*)\]", o)
        )
        for o in ops_
    )


def main():
    one, state, _ = trained("xla")
    small: Any = {"buckets": 4096}
    engine, said = same(8, small, one, state)
    assert "engine xla on 8 of 8 x CPU, for the mesh data=8, gradients in buckets" in said, said
    assert "gradient buckets:" in said, said
    print(said, reductions(engine))
    print(reductions(XlaEngine(mesh={"data": 8}, buckets="one")))
    same(6, {"buckets": "auto"}, one, state)
    same(4, {"buckets": "one"}, one, state, steps_per_launch=3)
    sys.stdout.write("all held\n")


if __name__ == "__main__":
    main()
