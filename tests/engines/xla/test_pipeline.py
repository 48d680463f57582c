"""Pipeline stages: the program learns what one device learns, and its options are checked.

JAX fixes the number of its devices when it starts, so the training runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.engines.xla import pipeline
from triplane.unified_ir.engines.xla.engine import XlaEngine
from triplane.unified_ir.engines.xla.lower import Trace
from triplane.unified_ir.engines.xla.packing import Packing, common_lengths

SCRIPT = Path(__file__).parent / "pipeline_training.py"


@pytest.mark.long
def test_four_stages_learn_what_one_device_learns():
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4"}
    ran = subprocess.run(
        [sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "all held"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stages": 99}, "a pipeline of 99 stages needs 99 devices, and JAX finds 1"),
        ({"stages": 0}, "stages is a whole number >= 1, got 0"),
        ({"stages": 2, "mesh": {"data": 3}}, "a pipeline of 2 stages, 3 times, needs 6 devices"),
        ({"stages": 1, "microbatches": 1.5}, "microbatches is a whole number >= 1, got 1.5"),
        ({"stages": 1, "mesh": {"model": 1}}, "but no other axis, shard, parallel"),
        ({"stages": 1, "parallel": "auto"}, "but no other axis, shard, parallel"),
        ({"microbatches": 4}, "give stages too"),
    ],
)
def test_options_that_contradict_are_refused(options, why):
    with pytest.raises(InvalidInput, match=why):
        XlaEngine(**options)


class Sliced(nn.Dense):
    """A layer with a strategy of its own."""

    def construct(self, x):
        return ops.matmul.shard((2, 1), (1, 1))(x, self.weight)


def net(*layers):
    return nn.Sequential(nn.Flatten(), nn.Dense(4, 8), *layers, nn.Dense(8, 3))


@pytest.mark.parametrize(
    ("layers", "options", "why"),
    [
        ((nn.BatchNorm1d(8),), {}, "Sequential assigns 2.running_mean, 2.running_var"),
        ((nn.Dropout(0.5),), {}, "Sequential assigns 2.key"),
        ((Sliced(8, 8, bias=False),), {}, "has a strategy of its own, which a pipeline does"),
        ((), {"accumulate": 2}, "take no accumulate=2, which is what microbatches do"),
        ((), {"clip_norm": 1.0, "clip_each": 1.0}, "take clip_norm alone"),
        ((), {"precision": "float16"}, "take no loss_scale"),
        ((), {"steps_per_launch": 2}, "steps_per_launch and pipeline stages exclude each other"),
        ((), {"metrics": {"top": lambda y, _: ops.argmax(y).max()}}, "'top' is int64.*; return a"),
    ],
)
def test_what_a_pipeline_cannot_keep_equal_is_refused_by_name(layers, options, why):
    trainer = train.Trainer(
        net(*layers), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1),
        engine=XlaEngine(stages=1), **options,
    )  # fmt: skip
    trainer.prepare(np.zeros((8, 4), np.float32), np.zeros(8, np.int64))
    with pytest.raises(InvalidInput, match=why):
        trainer.training_program()


def kept(output, labels):
    """Return a mean over samples with a label above 0, which does not say that it is one."""
    mask = (labels > 0).cast("float32")
    return ((output * output).sum(1) * mask).sum() / ops.maximum(mask.sum(), 1.0)


@pytest.mark.parametrize("loss", [lambda output, _: (output * output).sum(), kept])
def test_a_loss_that_is_no_mean_over_samples_is_refused(loss):
    trainer = train.Trainer(net(), loss=loss, optimizer=optim.SGD(0.1), engine=XlaEngine(stages=1))
    # Of the first two samples the mask keeps both.
    batch = np.eye(8, 4, dtype=np.float32), np.array([1, 1, 0, 0, 1, 0, 0, 1])
    with pytest.raises(InvalidInput, match=r"'loss' of 8 samples is .*, the mean of each alone"):
        trainer.fit(batch, 1, batch_size=8, progress="none")


@pytest.mark.long
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_pipeline_takes_no_kernels_of_the_device(monkeypatch, deterministic):
    taken = []

    class Noting(Trace):
        def __init__(self, *args, kernels=True):
            taken.append(kernels)
            super().__init__(*args, kernels=kernels)

    monkeypatch.setattr(pipeline, "Trace", Noting)
    trainer = train.Trainer(
        net(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1),
        engine=XlaEngine(stages=1, deterministic=deterministic),
    )  # fmt: skip
    batch = np.zeros((2, 4), np.float32), np.zeros(2, np.int64)
    trainer.fit(batch, 1, batch_size=2, progress="none")
    assert set(taken) == {not deterministic}


def test_vectors_hold_each_tensor_and_zeros():
    first = Packing({"a": ((2, 2), np.float32), "n": ((), np.int64)})
    second = Packing({"b": ((5,), np.float32), "c": ((1,), np.float32)})
    lengths = common_lengths([first, second])
    assert lengths == {"float32": 6, "int64": 1}
    vectors = first.packed({"a": np.array([[1, 2], [3, 4]]), "n": np.array(7)}, lengths, np)
    np.testing.assert_array_equal(vectors["float32"], [1, 2, 3, 4, 0, 0])
    np.testing.assert_array_equal(first.tensor(vectors, "n"), 7)
    # An absent tensor is zero, and keeps its place.
    vectors = second.packed({"c": np.array([9.0])}, lengths, np)
    np.testing.assert_array_equal(vectors["float32"], [0, 0, 0, 0, 0, 9])
    assert {k: x.shape for k, x in second.unpacked(vectors).items()} == {"b": (5,), "c": (1,)}
