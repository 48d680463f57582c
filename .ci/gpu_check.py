"""Check training on this machine's GPU.

`make gpu` runs it, by any Python that has numpy, ml_dtypes, onnx, protobuf and onnxruntime or
onnxruntime-gpu, and jax for the engine xla. Triplane itself need not be installed.

Small networks learn 20 steps on each engine that is there, which must follow the reference engine.
Products of float32 must have the precision of float32. It runs on a CPU as well; `--gpu` then
fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent / "namespace"))

import numpy as np

from triplane.proto.errors import TriplaneError
from triplane.unified_ir import nn, ops, optim, train, zoo
from triplane.unified_ir.engines import engine
from triplane.unified_ir.frontend.trace import traced
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.runtime import available_providers, version

STEPS: Final = 20
BATCH: Final = 32
LOSS: Final = 1e-4
"""Largest relative difference of a loss from the reference engine's, in float32."""
HALF_LOSS: Final = 5e-2
"""The same where products have 8 or 11 bits."""
PRODUCT: Final = 1e-5
"""Largest error of a product of 1,024 terms, in units of the largest result; TF32 has 5e-4."""

Check = Callable[["Side"], str]


@dataclass(frozen=True)
class Side:
    """One way to a GPU: the trainer's options, and where it runs."""

    name: str
    options: Mapping[str, Any]
    place: str
    is_gpu: bool


class Noisy(nn.Cell):
    """LeNet with dropout: masks are functions of a key, which a GPU has to reproduce."""

    def __init__(self) -> None:
        super().__init__()
        self.body = zoo.LeNet()
        self.drop = nn.Dropout(0.1)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, 1, 28, 28) -> (N, 10)."""
        return self.drop(self.body(x))


class Normalized(nn.Cell):
    """Batch normalization, and causal attention over the rows of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 32, 3, padding="same"), nn.BatchNorm2d(32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, p_drop=0.0)
        self.head = nn.Dense(32, 10)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, 1, 28, 28) -> (N, 10)."""
        rows = ops.relu(self.norm(self.conv(x))).mean([3]).transpose(0, 2, 1)
        return self.head(self.layer(rows, causal=True).mean([1]))


class Losses(train.Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, run: train.Run) -> None:
        """See `Callback`."""
        self.values.append(float(run.results["loss"]))


@cache
def samples() -> tuple[np.ndarray, np.ndarray]:
    """Images of 10 patterns under noise, which a network learns within the steps."""
    rng = np.random.default_rng(0)
    y = np.arange(STEPS * BATCH) % 10
    patterns = rng.normal(size=(10, 1, 28, 28))
    return (patterns[y] + rng.normal(size=(len(y), 1, 28, 28))).astype(np.float32), y


def trained(cell: type[nn.Cell] = Noisy, **options: Any) -> tuple[list[float], train.Trainer]:
    nn.seed(0)
    losses = Losses()
    trainer = train.Trainer(
        cell(),
        loss=nn.SoftmaxCrossEntropy(),
        # The schedule reads the step counter, which onnxruntime keeps on the CPU's side.
        optimizer=optim.SGD(optim.Cosine(0.1, STEPS), momentum=0.9),
        callbacks=[losses],
        **options,
    )
    trainer.fit(samples(), 1, batch_size=BATCH, progress="none")
    return losses.values, trainer


@cache
def reference(cell: type[nn.Cell]) -> list[float]:
    return trained(cell, engine="reference")[0]


def follow(losses: list[float], tolerance: float, cell: type[nn.Cell] = Noisy) -> str:
    """Return the largest relative difference from the reference losses; they must be near."""
    if len(losses) != STEPS:
        raise AssertionError(f"{len(losses)} losses of {STEPS} steps")
    off = float(np.max(np.abs(np.divide(losses, reference(cell)) - 1)))
    if not off <= tolerance:  # NaN is not
        raise AssertionError(f"losses are off by {off:.1e}, allowed {tolerance:.0e}: {losses}")
    return f"{losses[0]:.4f} to {losses[-1]:.4f}, off by {off:.1e} (allowed {tolerance:.0e})"


def float32(side: Side) -> str:
    return follow(trained(**side.options)[0], LOSS)


def normalized(side: Side) -> str:
    return follow(trained(Normalized, **side.options)[0], LOSS, Normalized)


def normalized_half(side: Side) -> str:
    precision = half_of(side)
    losses, _ = trained(Normalized, **side.options, precision=precision)
    return f"{precision}: {follow(losses, HALF_LOSS, Normalized)}"


def repeated(side: Side) -> str:
    """Two runs end in the same bits."""
    options = dict(side.options)
    if side.name == "xla":
        options["engine"] = repeating()
    runs = ((Noisy, "float32"), (Normalized, "float32"), (Normalized, half_of(side)))
    differing, count = [], 0
    for cell, precision in runs:
        first, second = (trained(cell, **options, precision=precision)[1].state() for _ in range(2))
        differing += [
            f"{cell.__name__} in {precision}: {name}"
            for name, x in first.items()
            if x.tobytes() != second[name].tobytes()
        ]
        count += len(first)
    if differing:
        raise AssertionError(f"{len(differing)} of {count} tensors differ: {differing[:3]}")
    return f"{count} tensors of state have the same bits"


def repeating() -> Any:
    from triplane.unified_ir.engines.xla.engine import XlaEngine

    return XlaEngine(deterministic=True)


def half(side: Side) -> str:
    precision = half_of(side)
    losses, _ = trained(**side.options, precision=precision)
    return f"{precision}: {follow(losses, HALF_LOSS)}"


def half_of(side: Side) -> str:
    return "bfloat16" if side.name == "xla" else "float16"


def launches(side: Side) -> str:
    return follow(trained(**side.options, steps_per_launch=5)[0], LOSS)


def products(side: Side) -> str:
    """A matrix product and a convolution of float32, against float64."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 1024, 1024)).astype(np.float32)
    x, w = a[:, :].reshape(1, 1024, 32, 32), b[:64, :, None, None]
    wanted = (
        a.astype(np.float64) @ b,
        (w[:, :, 0, 0].astype(np.float64) @ x[0].reshape(1024, -1)).reshape(1, 64, 32, 32),
    )
    specs = [TensorSpec(v.shape) for v in (a, b, x, w)]
    function = traced(lambda a, b, x, w: (a @ b, ops.conv(x, w)), specs, {}, name="f").function
    results = engine_of(side).compile(function)(a, b, x, w)
    errors = [np.abs(y - z).max() / np.abs(z).max() for y, z in zip(results, wanted, strict=True)]
    text = f"matrix product {errors[0]:.1e}, convolution {errors[1]:.1e} (allowed {PRODUCT:.0e})"
    if not max(errors) <= PRODUCT:
        raise AssertionError(f"errors against float64: {text}; is this TF32?")
    return text


def engine_of(side: Side) -> Any:
    return engine(side.options["engine"], device=side.options.get("device"))


CHECKS: Final[Mapping[str, Check]] = {
    "float32 losses": float32,
    "same bits again": repeated,
    "half precision": half,
    "normalization, attention": normalized,
    "the same, half precision": normalized_half,
    "precision of float32": products,
}
XLA_CHECKS: Final[Mapping[str, Check]] = {"5 steps per launch": launches}


def sides() -> Iterator[Side]:
    """The engines that are there."""
    try:
        devices = str(engine("xla").devices)  # type: ignore[attr-defined]
    except TriplaneError as error:
        print(f"xla is left out: {error}")
    else:
        yield Side("xla", {"engine": "xla"}, devices, is_gpu=not devices.startswith("CPU"))
    has_cuda = "CUDAExecutionProvider" in available_providers()
    device = "cuda" if has_cuda else "cpu"
    place = f"{device}, by onnxruntime {version()} with {', '.join(available_providers())}"
    yield Side("onnx", {"engine": "onnx", "device": device}, place, is_gpu=has_cuda)


def passes(name: str, check: Check, side: Side) -> bool:
    try:
        print(f"  ok      {name}: {check(side)}", flush=True)
    except Exception as error:  # noqa: BLE001 - the others are still worth knowing
        print(f"  FAILED  {name}: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="fail where no engine runs on a GPU")
    needs_gpu = parser.parse_args(arguments).gpu
    results, gpus = [], 0
    for side in sides():
        print(f"{side.name} on {side.place}", flush=True)
        checks = {**CHECKS, **(XLA_CHECKS if side.name == "xla" else {})}
        passed = [passes(name, check, side) for name, check in checks.items()]
        gpus += side.is_gpu and all(passed)
        results += passed
    print(f"{sum(results)} of {len(results)} checks passed; engines that run on a GPU: {gpus}")
    if needs_gpu and not gpus:
        print("no engine runs on a GPU; see docs/engines.md for what to install")
    return int(not all(results) or (needs_gpu and not gpus))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
