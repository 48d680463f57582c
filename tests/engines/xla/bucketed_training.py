"""Training with gradient buckets learns what one device learns; run by test_bucketed."""

import io
import re
import sys
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.support.xla_training import digits

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.engines.xla import bucketed
from triplane.unified_ir.engines.xla.door import exact
from triplane.unified_ir.engines.xla.engine import XlaEngine
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.passes.sharding.batch_split import split_batch
from triplane.unified_ir.passes.sharding.buckets import capped_buckets, planned_buckets
from triplane.unified_ir.passes.sharding.ready_times import MeasuredTimes
from triplane.unified_ir.passes.sharding.topology import LinkCost


class Net(nn.Cell):
    """A convolution, statistics of the batch, a random mask, and layers of unequal size."""

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


class Words(nn.Cell):
    """Rows of a table that several devices read, and scores at each place of a text."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.head = nn.Dense(8, 20)

    def construct(self, x):
        return self.head(ops.relu(self.table(x)))


def words(n):
    drawn = np.random.default_rng(0)
    x = drawn.integers(0, 20, (n, 6))
    return x, np.where(drawn.random(x.shape) < 0.4, -100, (x + 1) % 20)


def trained(engine, cell, samples, loss, epochs=2, checkpoint=None, **options):
    nn.seed(0)
    record, said = train.Record(), io.StringIO()
    trainer = train.Trainer(
        cell(), loss=loss, optimizer=optim.SGD(0.05, momentum=0.9), engine=engine,
        callbacks=[record], **options,
    )  # fmt: skip
    progress = train.Progress("lines", stream=said)
    trainer.fit(
        samples, epochs, batch_size=48, validation=samples, progress=progress,
        checkpoint=checkpoint,
    )  # fmt: skip
    return np.array([row["loss"] for row in record.steps]), trainer.state(), said.getvalue()


def compare(engine, one, *what, **options):
    losses, state, said = trained(engine, *what, **options)
    np.testing.assert_allclose(losses, one[0], rtol=2e-4, atol=2e-4)
    for name, x in state.items():
        np.testing.assert_allclose(x, one[1][name], rtol=1e-2, atol=2e-3, err_msg=name)
    return said


def all_reduces(engine, function, trainer, batch):
    """The elements of float32 in each all-reduce of a step that XLA has compiled.

    A label out of range is refused on every device, and changes nothing.
    """
    names = [n for n in function.result_names if n in function.param_names]
    program: Any = engine.compile(function, donate=names)
    loop: Any = program.loop({n: trainer.state()[n] for n in names})
    loop.step(x=batch[0], y=batch[1])
    held, wrong = loop.state(), batch[1].copy()
    wrong[41] = 10  # a row of the last devices
    with pytest.raises(InvalidInput, match="10"):
        loop.step(x=batch[0], y=wrong)
    assert all(np.array_equal(x, held[n]) for n, x in loop.state().items())
    (compiled,) = program._compiled.values()
    with exact():
        text = compiled.call.lower(loop._present(), list(batch)).compile().as_text()
    shapes = re.findall(r"= (\S.*?) all-reduce(?:-start)?\(", text)
    floats = [re.findall(r"f32\[([\d,]*)\]", shape) for shape in shapes]
    return [
        sum(int(np.prod([int(d) for d in dims.split(",") if d])) for dims in of_one)
        for of_one in floats
        if of_one
    ]


def check_hlo():
    """XLA compiles one all-reduce for each bucket, of its size, and no other of floats."""
    batch, cap = digits(0, 48), 4096
    loss, optimizer = nn.SoftmaxCrossEntropy(), optim.SGD(0.05)
    trainer = train.Trainer(Net(nn.LayerNorm(6)), loss=loss, optimizer=optimizer)
    trainer.prepare(TensorSpec(("N", 1, 8, 8)), TensorSpec(("N",), "int64"))
    function = trainer.train_function()
    tensors = planned_buckets(
        split_batch(function, 8, sizes={"N": 48}), LinkCost(1e-6, 1e9)
    ).tensors
    expected = [sum(tensors[k].size_bytes // 4 for k in b) for b in capped_buckets(tensors, cap)]
    assert len(expected) == 2
    engine = XlaEngine(mesh={"data": 8}, buckets=cap)
    assert sorted(all_reduces(engine, function, trainer, batch)) == sorted(expected)
    engine = XlaEngine(mesh={"data": 8}, buckets="one")
    assert all_reduces(engine, function, trainer, batch) == [sum(expected)]


def check_parts():
    """What is timed computes the gradients up to a number, as parts that add up to the step's."""

    def compute(predicted, run_up_to, _):
        for k in range(len(predicted)):
            assert len(run_up_to(k)()) == k + 1
        for x in run_up_to(len(predicted) - 1)():
            parts = [np.asarray(shard.data) for shard in x.addressable_shards]
            assert len(parts) == 8
            sums.append(np.sum(parts, 0))
        return MeasuredTimes((0,), (1.0,), 1)

    sums: list[np.ndarray[Any, Any]] = []
    trainer = train.Trainer(
        Net(nn.LayerNorm(6)), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(1.0),
        engine=XlaEngine(mesh={"data": 8}, buckets="auto"),
    )  # fmt: skip
    before = {k: p.array.copy() for k, p in trainer.cell.parameters().items() if p.trainable}
    x, y = digits(0, 48)
    with mock.patch.object(bucketed, "measured_times", compute):
        history = trainer.fit((x, y), 1, batch_size=48, progress="none")
    losses = [s / 8 for s in sums if s.size == 1]
    assert any(np.allclose(s, history.last["loss"], rtol=1e-5) for s in losses)
    for name, array in before.items():
        gradient = np.sort(array - trainer.state()[name], None)  # a sum may be transposed
        alike = [np.sort(s, None) for s in sums if s.size == array.size]
        assert any(np.allclose(s, gradient, rtol=1e-4, atol=1e-5) for s in alike), name


def never(*_):
    raise AssertionError("measured although the buckets are known")


def check_choice():
    """Measured buckets give the bits of the same ones if given, and a resumed run has them."""
    what = lambda: Net(nn.BatchNorm2d(8)), digits(0, 144), nn.SoftmaxCrossEntropy()
    engine: Any = lambda: XlaEngine(mesh={"data": 8}, buckets="auto")
    measuring, given = engine(), engine()
    _, state, said = trained(measuring, *what)
    assert said.count("ready times: measured, the median of") == 1, said
    assert "gradient buckets: planned, " in said
    assert "by measured ready times and at assumed rates" in said
    kept = measuring.state_dict()
    ((key, ends),) = kept.items()

    with mock.patch.object(bucketed, "measured_times", never):
        given.load_state_dict(kept)
        _, same, said = trained(given, *what)
        assert "gradient buckets: as in the checkpoint, " in said
        assert all(np.array_equal(x, same[n]) for n, x in state.items())

        # No measurement would choose these.
        odd = {key: np.array([1, 2, 3, ends[-1]])}
        whole, begun, resumed = engine(), engine(), engine()
        for one in (whole, begun):
            one.load_state_dict(odd)
        _, state, _ = trained(whole, *what)
        with tempfile.TemporaryDirectory() as folder:
            trained(begun, *what, epochs=1, checkpoint=folder)
            _, same, _ = trained(resumed, *what, checkpoint=folder)
        assert resumed.devices.plans[-1].ends == (1, 2, 3, ends[-1])
        assert all(np.array_equal(x, same[n]) for n, x in state.items())


def check_loaded():
    """Programs that were compiled for other buckets do not run after a checkpoint was loaded."""
    engine: Any = XlaEngine(mesh={"data": 8}, buckets="auto")
    batch = digits(0, 48)
    trainer = train.Trainer(
        Net(nn.LayerNorm(6)), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.05),
        engine=engine,
    )  # fmt: skip
    trainer.fit(batch, 1, batch_size=48, progress="none")
    ((key, ends),) = engine.state_dict().items()
    engine.load_state_dict({key: np.arange(1, ends[-1] + 1)})
    trainer.fit(batch, 1, batch_size=48, progress="none")
    assert [plan.ends[0] for plan in engine.devices.plans][1:] == [1]
    engine.load_state_dict({key: np.array([ends[-1] + 1])})
    with pytest.raises(Corrupt, match="buckets end at gradient"):
        trainer.fit(batch, 1, batch_size=48, progress="none")


def main():
    # Batches of 48, and a last one of 4, which neither 8 nor 6 devices divide.
    what = lambda: Net(nn.BatchNorm2d(8)), digits(0, 148), nn.SoftmaxCrossEntropy()
    one = trained("xla", *what)
    said = compare(XlaEngine(mesh={"data": 8}, buckets=4096), one, *what)
    assert "engine xla on 8 of 8 x CPU, for the mesh data=8, gradients in buckets" in said, said
    assert "gradient buckets: 4 KiB each, 2 of 75.1 KiB in all, predicted to end" in said, said
    compare(XlaEngine(mesh={"data": 6}, buckets="auto"), one, *what, steps_per_launch=3)
    texts = Words, words(96), nn.SoftmaxCrossEntropy(ignore_index=-100)
    one = trained("xla", *texts)
    compare(XlaEngine(mesh={"data": 8}, buckets="one"), one, *texts)
    check_hlo()
    check_parts()
    check_choice()
    check_loaded()
    sys.stdout.write("all held\n")


if __name__ == "__main__":
    main()
