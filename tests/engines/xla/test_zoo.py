"""Every network of the zoo trains on XLA as on onnxruntime: 100 steps of SGD on equal batches.

Sums of float32 in another order differ, and training amplifies that, most of all behind batch
normalization. So the large networks are held to what training makes of a change of the first
weights in their last bit, on one engine. Each of them writes its line of
docs/evidence/zoo-on-xla.md.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from triplane.unified_ir import nn, optim, train, zoo

EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence" / "zoo-on-xla.md"
STEPS, BATCH, SAMPLES = 100, 8, 80
NEAR = 2e-3
"""Relative difference of losses that is always allowed."""
AMPLIFIED = 10
"""Times the difference that a last bit makes, which is allowed too."""


class Case(NamedTuple):
    shape: tuple[int, ...]
    lr: float = 0.01
    classes: int = 10
    options: Any = {}  # noqa: RUF012 - never changed


SMALL = {
    "lenet": Case((1, 28, 28)),
    "leaf-cnn": Case((1, 28, 28)),
    "resnet8": Case((3, 32, 32)),
    "char-lstm": Case((12,), options={"hidden": 32}),
    "text-encoder": Case((12,), classes=2),
    "text-decoder": Case((12,)),
}
LARGE = {
    "mobilenet-v2": Case((3, 64, 64), lr=3e-4),
    "resnet18": Case((3, 64, 64), lr=3e-4),
    "resnet50": Case((3, 64, 64), lr=3e-5),
}


def samples(name, case):
    rng = np.random.default_rng(4)
    x: Any
    if len(case.shape) > 1:
        x = rng.standard_normal((SAMPLES, *case.shape)).astype(np.float32)
    else:
        x = rng.integers(0, 50, (SAMPLES, *case.shape))
    return x, rng.integers(0, case.classes, x.shape if name == "text-decoder" else SAMPLES)


def losses(name, case, engine, *, nudged=False):
    """The loss of each step. nudged: every weight begins one last bit larger."""
    nn.seed(3)
    record = train.Record()
    cell = partial(zoo.network, name, **case.options)()
    for parameter in cell.parameters().values() if nudged else ():
        if parameter.array.dtype == np.float32:
            parameter.array = np.nextafter(parameter.array, np.float32(np.inf))
    trainer = train.Trainer(
        cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(case.lr), seed=1, engine=engine,
        callbacks=[record],
    )  # fmt: skip
    epochs = STEPS * BATCH // SAMPLES
    trainer.fit(samples(name, case), epochs, batch_size=BATCH, progress="none")
    found = np.array([row["loss"] for row in record.steps])
    assert len(found) == STEPS
    return found


def relative(some, others):
    return np.abs(some - others) / np.maximum(np.abs(others), 1)


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_small_networks_learn_the_same(name):
    case = SMALL[name]
    assert relative(losses(name, case, "xla"), losses(name, case, "onnx")).max() <= NEAR


@pytest.mark.deep
@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_networks_differ_by_what_training_makes_of_rounding(name):
    case = (SMALL | LARGE)[name]
    usual = losses(name, case, "onnx")
    apart = relative(losses(name, case, "xla"), usual)
    rounding = relative(losses(name, case, "onnx", nudged=True), usual)
    write_row(name, case, usual, apart, rounding)
    assert apart.max() <= max(NEAR, AMPLIFIED * rounding.max())


def write_row(name, case, usual, apart, rounding):
    """Put the network's line into the table, in place of an older one."""
    size, step = " x ".join(map(str, case.shape)), apart.argmax() + 1
    fell = f"{usual[0]:.3f} to {usual[-1]:.3f}"
    numbers = f"{apart.max():.1e} | {step} | {apart[:10].max():.1e} | {rounding.max():.1e}"
    row = f"| {name} | {size} | {case.lr:g} | {fell} | {numbers} |"
    lines = EVIDENCE.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(f"| {name} |")]
    EVIDENCE.write_text("\n".join([*kept, row]) + "\n")
