"""Training in stages on four devices learns what one device learns; run by test_pipeline."""

import io
import sys
from typing import Any

import numpy as np

from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.engines.xla.door import exact
from triplane.unified_ir.engines.xla.engine import XlaEngine
from triplane.unified_ir.passes.sharding import Topology

STEPS = 10
SLOW = Topology(flops_per_s=1e9, memory_bytes_per_s=1e9)


class Perceptron(nn.Cell):
    """Eight layers with short cuts, so that a cut may send two values."""

    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(width, width) for _ in range(8)])
        self.head = nn.Dense(width, 10)

    def construct(self, x):
        for layer in self.layers:
            x = ops.relu(layer(x)) + x
        return self.head(x)


class Transformer(nn.Cell):
    """A small language model whose embedding is also its head: two stages read it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(np.random.default_rng(1).normal(0, 0.3, (20, 16)).astype("f"))
        self.blocks = nn.CellList(
            [nn.TransformerEncoderLayer(16, 2, 32, p_drop=0.0) for _ in range(4)]
        )

    def construct(self, tokens):
        # A mask that each block reads: it is sent from stage to stage beside the activations.
        seen = (tokens != 0).cast("float32").unsqueeze(-1)
        x = ops.embedding(self.embedding, tokens)
        for block in self.blocks:
            x = block(x) * seen
        return ops.matmul(x, ops.transpose(self.embedding))


def vectors(rng, n=32):
    return rng.normal(size=(n, 16)).astype(np.float32), rng.integers(0, 10, n)


def marked(rng):
    # In batches of 32, and a last one of 9, which is three microbatches.
    x, y = vectors(rng, 41)
    return x, np.where(rng.random(41) < 0.4, -100, y)


def sequences(rng):
    tokens = rng.integers(0, 20, (32, 6))
    return tokens, np.where(rng.random((32, 6)) < 0.4, -100, np.roll(tokens, 1, 1))


def trained(net, data, engine, loss=None, **options):
    nn.seed(0)
    record, said = train.Record(), io.StringIO()
    chosen: Any = {"engine": engine, "callbacks": [record], **options}
    chosen.setdefault("optimizer", optim.SGD(0.05, momentum=0.9))
    trainer = train.Trainer(net(), loss=loss or nn.SoftmaxCrossEntropy(), **chosen)
    x, y = data(np.random.default_rng(0))
    progress = train.Progress("lines", stream=said)
    trainer.fit(
        (x, y), STEPS // -(-len(x) // 32), batch_size=32, validation=(x, y), progress=progress
    )
    return record.steps, trainer, said.getvalue()


def compare(net, data, stages=4, mesh=None, tolerance=1e-4, **options):
    one, alone, _ = trained(net, data, "xla", **options)
    engine = XlaEngine(stages=stages, microbatches=8, topology=SLOW, mesh=mesh)
    many, divided, said = trained(net, data, engine, **options)
    assert len(many) == STEPS
    for before, after in zip(one, many, strict=True):
        assert before.keys() == after.keys()
        for name in before:
            np.testing.assert_allclose(after[name], before[name], rtol=tolerance, atol=tolerance)
    state = alone.state()
    for name, x in divided.state().items():
        np.testing.assert_allclose(x, state[name], rtol=tolerance, atol=tolerance, err_msg=name)
    assert "4 of 4 x CPU, a stage of the pipeline on each" in said, said
    last = f"stage {stages} {'.  ' * (stages - 1)}F1 F2 F3 F4 F5 F6 F7 F8 B1"
    assert last in said, said
    return said


def check_division():
    """Each device holds about a quarter of the state, as predicted, and stages send by permutes."""
    x, y = np.zeros((64, 256), np.float32), np.zeros(64, np.int64)
    engine = XlaEngine(stages=4, microbatches=8)
    trainer = train.Trainer(
        Perceptron(256), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.1), engine=engine
    )
    trainer.prepare(x, y)
    program: Any = trainer.training_program()
    loop, feeds = program.loop(trainer.state()), {"x": x, "y": y}
    whole = sum(v.nbytes for v in loop.state().values())
    shards = loop.vectors["float32"].addressable_shards
    assert len({shard.device for shard in shards}) == 4
    assert all(shard.data.nbytes < 0.28 * whole for shard in shards), whole
    with exact():
        compiled = program.executable(feeds).call.lower(loop.vectors, feeds).compile()
    assert compiled.as_text().count("collective-permute(") >= 2
    used = compiled.memory_analysis()
    assert used.argument_size_in_bytes < 0.28 * whole + x.nbytes + y.nbytes, used
    total = used.argument_size_in_bytes + used.output_size_in_bytes
    total += used.temp_size_in_bytes - used.alias_size_in_bytes
    predicted = max(stage.memory_bytes for stage in program.plan.stages)
    assert 0.8 < predicted / total < 1.25, (predicted, total)


def main():
    compare(Perceptron, vectors)
    check_division()
    compare(Perceptron, vectors, optimizer=optim.AdamW(1e-3), average=0.9, clip_each=0.5)
    loss = nn.SoftmaxCrossEntropy(ignore_index=-100)
    said = compare(Transformer, sequences, loss=loss, clip_norm=0.5)
    assert "read by several  embedding" in said, said
    # Two pipelines of two stages, each with half of a batch; one of 9 rows is computed by both.
    said = compare(Perceptron, marked, loss=loss, stages=2, mesh={"data": 2})
    assert "a stage of the pipeline on each of 2 pipelines" in said, said
    sys.stdout.write("all held\n")


if __name__ == "__main__":
    main()
