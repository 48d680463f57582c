"""The steps of the demo. Each runs the real command or the public API and reports figures."""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from triplane.cloud.demo import learning, processes, rolling
from triplane.cloud.demo.ask import ask
from triplane.cloud.demo.stage import DemoStage, DemoSummary, first
from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, optim
from triplane.unified_ir.cli.shell import CommandOutput
from triplane.unified_ir.cli.train import load_cell
from triplane.unified_ir.data import load_split
from triplane.unified_ir.data.dataset import Dataset, arrays
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.train import Trainer

CELL: Final = Path(__file__).with_name("digits.py")
FINE_TUNE: Final = Path(__file__).with_name("fine_tune.py")
COMPARED_STEPS: Final = 10
COMPARED_BATCH: Final = 32
CALIBRATION_SAMPLES: Final = 200
TUNING_STEPS: Final = 400
TUNING_BATCH: Final = 32
MORE_EPOCHS: Final = 2
"""Additional epochs for the version of step 8."""
MOST_ASKED: Final = 1000
"""Largest number of calls of step 4, even if there is more held-out data."""
MOST_ON_DEVICE: Final = 5000
"""Limit for the samples of each kind that step 5 gives the device."""


def tell(*, data: str, epochs: int, rounds: int, keep: Path | None, output: CommandOutput) -> None:
    """Run all steps and print the summary; on a terminal, with `keep`, the fleet then stays up.

    The folder is removed afterwards unless it is kept, also after Ctrl-C or SIGTERM; a second
    signal gives the processes less time to end.
    """
    start = time.perf_counter()
    processes.INTERRUPTS.install()
    train, held_out = load_split(data)
    if train.x.shape[2:] != (8, 8):
        train, held_out = _small(train), _small(held_out)
    with (
        tempfile.TemporaryDirectory(prefix="triplane-demo-", ignore_cleanup_errors=True)
        if keep is None
        else nullcontext(keep) as path
    ):
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        stage = DemoStage(folder, output, data, train, held_out, DemoSummary(), rounds)
        _save_data(stage)
        _train(stage, epochs)
        _inspect(stage)
        _convert(stage)
        _serve(stage)
        _fine_tune(stage)
        with rolling.fleet_of(stage) as fleet:
            rolling.deploy(stage, fleet)
            rolling.refuse(stage, fleet)
            rolling.heal(stage, fleet, epochs + MORE_EPOCHS)
            learning.learn(stage, fleet)
            seconds = time.perf_counter() - start
            kept = f"files kept in {folder}" if keep else "files removed; --keep DIR keeps them"
            stage.summary.add("all", "wall time", f"{seconds:.0f} s; {kept}", seconds=seconds)
            if keep is not None:
                stage.summary.facts.update(rolling.addresses(fleet))
            output.result(stage.summary.facts, stage.summary.table())
            if keep is not None:
                rolling.linger(stage, fleet)


def _small(data: Dataset) -> Dataset:
    """Average images down to 8x8, the size of the demo's network."""
    _, c, h, w = data.x.shape
    if c != 1 or h < 8 or w < 8:
        raise InvalidInput(f"the demo takes grey images of at least 8x8, got {c} x {h} x {w}")
    rows, columns = (np.linspace(0, size, 9).astype(int)[:-1] for size in (h, w))
    sums = np.add.reduceat(np.add.reduceat(data.x, rows, axis=2), columns, axis=3)
    counts = np.outer(np.diff([*rows, h]), np.diff([*columns, w]))
    return arrays((sums / counts).astype(np.float32), data.y, labels=data.labels)


def _save_data(stage: DemoStage) -> None:
    for name, part in (("train", stage.train), ("held_out", stage.held_out)):
        np.savez(stage.file(f"{name}.npz"), x=part.x, y=part.y)
    few = first(stage.train, CALIBRATION_SAMPLES)
    np.savez(stage.file("calibration.npz"), x=few.x, y=few.y)


def _train(stage: DemoStage, epochs: int) -> None:
    stage.say(
        f"\n1  Train: {CELL.name}:Digits on {len(stage.train)} images; forward, backward and "
        "optimizer are one graph on onnxruntime"
    )
    done = processes.answer(
        "train", f"{CELL}:Digits", "--data", stage.file("train.npz"),
        "--validation", stage.file("held_out.npz"), "--epochs", str(epochs),
        "--out", stage.file("digits.tpm"), "--history", stage.file("history.json"),
    )  # fmt: skip
    accuracy = done["validation"]["accuracy"]
    _draw_history(stage)
    stage.summary.add(
        "train", "held-out accuracy", f"{accuracy:.3f} after {epochs} epochs, "
        f"{done['seconds']:.1f} s", held_out_accuracy=accuracy, train_seconds=done["seconds"],
    )  # fmt: skip
    stage.say(f"\n   The same training step on two engines, {COMPARED_STEPS} steps from one start:")
    pairs = _losses_side_by_side(CELL, stage.train, COMPARED_STEPS)
    stage.say("   step   onnx (fp32)   ascend (fp16 cube)")
    for i, (ours, theirs) in enumerate(pairs):
        stage.say(f"   {i:>4}   {ours:>11.6f}   {theirs:>18.6f}")
    worst = max(abs(a - b) / abs(a) for a, b in pairs)
    stage.summary.add(
        "train", "ascend against onnx", f"losses differ by at most {worst:.2%}",
        ascend_loss_difference=worst,
    )  # fmt: skip


def _losses_side_by_side(cell_file: Path, data: Dataset, steps: int) -> list[tuple[float, float]]:
    """Return (loss on onnx, loss on ascend) for each of the first steps of a run."""
    nn.seed(0)
    trainer = Trainer(
        load_cell(f"{cell_file}:Digits"),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.Adam(0.002),
    )
    batches = list(islice(data.batches(COMPARED_BATCH, seed=0), steps))
    trainer.prepare(*batches[0])
    function = trainer.train_function()
    state = {k: v for k, v in trainer.state().items() if k in function.param_names}
    losses = []
    for name in ("onnx", "ascend"):
        loop = engine(name).compile(function, donate=tuple(state)).loop(state)
        losses.append([float(loop.step(x=x, y=y)["loss"]) for x, y in batches])
    return list(zip(*losses, strict=True))


def _draw_history(stage: DemoStage) -> None:
    from triplane.unified_ir.train import History

    history = History(json.loads(stage.file("history.json").read_text()))
    for measure in ("loss", "accuracy"):
        history.plot(measure).save(stage.file(f"{measure}.svg"))


def _inspect(stage: DemoStage) -> None:
    model = stage.file("digits.tpm")
    stage.say("\n2  Export: one file; the IR as text, each node with the line that made it")
    stage.say(processes.output("inspect", model, "--text", "--entry", "predict"))
    facts = processes.answer("inspect", model)
    stage.say(f"   root digest {facts['digest']}")
    damaged = stage.file("damaged.tpm")
    data = bytearray(model.read_bytes())
    # One bit, the smallest damage that there can be.
    data[len(data) // 2] ^= 0x01
    damaged.write_bytes(bytes(data))
    stage.say(f"   one bit flipped in byte {len(data) // 2} of a copy:")
    refused = processes.triplane("inspect", damaged, "--verify", "--json")
    error = json.loads(refused.stdout)["error"]
    if error["family"] != "Corrupt":
        raise InvalidInput(f"the damaged copy was not refused as corrupt: {error}")
    stage.say(f"   refused: {error['message']}")
    stage.summary.add(
        "export", "model file", f"{len(data):,} bytes, digest {facts['digest'][:16]}...",
        model_bytes=len(data), digest=facts["digest"],
    )  # fmt: skip
    stage.summary.add("export", "a flipped bit", "refused, damaged part named", refusal=error)


def _convert(stage: DemoStage) -> None:
    stage.say("\n3  Convert: float and int8 bundles for this machine")
    common: list[str | Path] = [
        "convert", stage.file("digits.tpm"), "--target", "ort-x64",
        "--calibrate", stage.file("calibration.npz"), "--evaluate", stage.file("held_out.npz"),
    ]  # fmt: skip
    processes.output(*common, "--out", stage.file("digits.bundle"))
    text = processes.output(
        *common, "--quantize", "int8", "--out", stage.file("digits-int8.bundle"),
        "--plan", stage.file("digits.plan"), "--report", stage.file("report.svg"),
        "--report-json", stage.file("report.json"),
    )  # fmt: skip
    stage.say(text.rstrip())
    report = json.loads(stage.file("report.json").read_text())
    stage.summary.add("convert", "int8", report["verdict"], conversion=report)


def _serve(stage: DemoStage) -> None:
    stage.say("\n4  Serve: the bundle over gRPC, asked by the stock tritonclient, one digit a call")
    bundle = stage.file("digits.bundle")
    asked = first(stage.held_out, MOST_ASKED)
    with processes.started("edge", "serve", bundle, "--port", "0", "--metrics-port", "0") as (
        _,
        ready,
    ):
        answers = ask(
            f"127.0.0.1:{ready['port']}", ready["serving"][0]["model"],
            asked.x, asked.y,
        )  # fmt: skip
    stage.say(
        f"   {answers.calls} calls: accuracy {answers.accuracy:.3f}, median {answers.median_ms:.2f}"
        f" ms, 99th percentile {answers.p99_ms:.2f} ms"
    )
    stage.summary.add(
        "serve", "tritonclient", f"accuracy {answers.accuracy:.3f}, median "
        f"{answers.median_ms:.2f} ms a call", served_accuracy=answers.accuracy,
        call_median_ms=answers.median_ms, call_p99_ms=answers.p99_ms,
    )  # fmt: skip


def _changed(x: Array) -> Array:
    """x: (N, C, H, W) in 0..1 -> 1 - x, moved one pixel down and right; the edge becomes bright."""
    moved = np.ones_like(x)
    moved[..., 1:, 1:] = 1 - x[..., :-1, :-1]
    return moved


def _fine_tune(stage: DemoStage) -> None:
    stage.say("\n5  Fine-tune on the device: the camera now gives inverted, shifted digits")
    samples = stage.file("camera.npz")
    own, test = (first(d, MOST_ON_DEVICE) for d in (stage.train, stage.held_out))
    np.savez(samples, x=_changed(own.x), y=own.y, x_test=_changed(test.x), y_test=test.y)
    plan, amounts = stage.file("digits.plan"), (str(TUNING_STEPS), str(TUNING_BATCH))
    tuned = json.loads(processes.python(FINE_TUNE, plan, samples, *amounts))
    if tuned["foreign"]:
        raise InvalidInput(f"the fine-tuning process imported {tuned['foreign']}")
    stage.say(
        f"   {TUNING_STEPS} steps of the plan's local_update graph in a process with onnxruntime, "
        f"numpy, protobuf and triplane's runtime: accuracy {tuned['before']:.3f} -> "
        f"{tuned['after']:.3f}, peak memory {tuned['peak_rss_mb']:.0f} MB"
    )
    stage.summary.add(
        "fine-tune", "changed camera", f"{tuned['before']:.3f} -> {tuned['after']:.3f}, "
        f"{tuned['peak_rss_mb']:.0f} MB", camera_before=tuned["before"],
        camera_after=tuned["after"], fine_tune_peak_rss_mb=tuned["peak_rss_mb"],
    )  # fmt: skip
