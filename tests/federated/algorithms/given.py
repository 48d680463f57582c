"""Models, golden gradients and the plain loss that the tests of algorithms share."""

from functools import cache
from pathlib import Path

import numpy as np

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.engines import engine
from triplane.unified_ir.federated.algorithms import Hyper
from triplane.unified_ir.ir import TensorSpec

GOLDEN = Path(__file__).parents[2] / "golden" / "federated"
SHAPES = {"mlp": (6,), "cnn": (1, 8, 8)}
HYPER = Hyper(lr=0.4, meta_lr=0.25, inner_steps=3, proximal=0.3)


def mlp():
    return nn.Sequential(nn.Dense(6, 8), nn.Tanh(), nn.Dense(8, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dense(5 * 2 * 2, 3),
    )  # fmt: skip


MAKE = {"mlp": mlp, "cnn": cnn}


@cache
def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def part(name, prefix, dtype="float64"):
    """The arrays below a prefix, floating-point ones in `dtype`."""
    found = {k.removeprefix(prefix): v for k, v in golden(name).items() if k.startswith(prefix)}
    return {k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in found.items()}


def exported(cell, shape, dtype="float32", entries=("predict", "evaluate", "loss")):
    """The module of a classifier; all its state in `dtype`."""
    for p in cell.parameters().values():
        if p.array.dtype.kind == "f":
            p.array = p.array.astype(dtype)
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(TensorSpec(("N", *shape), dtype), TensorSpec(("N",), "int64"))
    return trainer.export(entries)


@cache
def module(name, dtype="float64"):
    """The network of a golden file, at its starting state."""
    cell = MAKE[name]()
    cell.load(part(name, "start/", dtype))
    return exported(cell, SHAPES[name], dtype)


def call(function, given, on="reference"):
    """Results by name."""
    made = engine(on).compile(function)(*(given[n] for n in function.param_names))
    return dict(zip(function.result_names, made, strict=True))
