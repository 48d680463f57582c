"""`triplane plan`: predict how a model is best split over devices, without the devices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.profiling import known_sizes, sizes_of
from triplane.unified_ir.cli.shell import (
    COUNT,
    OUTPUT_FILE,
    check_distinct_files,
    json_option,
    open_output,
    option,
)

if TYPE_CHECKING:
    from triplane.unified_ir.frontend import Cell
    from triplane.unified_ir.ir import Function, Module
    from triplane.unified_ir.passes.sharding import ParallelPlan

EPILOG = """\b
Examples:
  triplane plan digits.tpm --devices 4
  triplane plan digits.tpm --devices 8 --memory 16GiB --batch-size 512 --entry train_step
  triplane plan zoo:resnet18 --input 3x64x64 --train --devices 6 --batch-size 96 --explain Conv
  triplane plan net.py:Net --input 784 --devices 16 --topology cluster.json --out plan.svg
  triplane plan digits.tpm --entry predict --devices 4 --out-model planned.tpm

\b
Each row of the table is a layer. Its split says, for each operand of its largest node, into how
many slices each axis is cut: ((4,1),(1,1)) cuts the rows of the first matrix for four devices.
Devices form a mesh of one or two axes; every mesh of --devices is tried, also of 6 or 7.
The time is predicted: work, then communication, with nothing overlapped.

\b
A cell is traced with --input, the shape of one sample (axes by x; int64 for class numbers or words,
as int64:128). The shapes of a model file are known. --topology is a JSON object with any of
  devices_per_host, flops_per_s, memory_bytes_per_s,
  inside and between: the links in a host and between hosts, {"latency_s": , "bytes_per_s": }
"""
UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
                "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip
BATCH: Final = "N"
"""Symbol of the number of samples."""
MAX_INPUT: Final = 1 << 40
"""Most elements of one sample."""


class MemorySize(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes such as 16GiB or 800MB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?) ?([A-Za-z]{0,3})", value.strip())
        if match is None or match[2].upper() not in UNITS or not float(match[1]):
            self.fail(f"memory is a number with a unit, such as 16GiB or 800MB, got {value!r}",
                      param, ctx)  # fmt: skip
        return round(float(match[1]) * UNITS[match[2].upper()])


# fmt: off
OPTIONS: Final = (
    option("--devices N", "Devices to split over; any number.", COUNT, required=True),
    option("--memory SIZE", "Memory of one device, such as 16GiB; a plan that needs more is "
           "refused.", MemorySize()),
    option("--batch-size N", "Samples of the whole batch, over all devices.", COUNT, default=32),
    option("--sizes T=10", "Other sizes that the inputs leave open.", callback=sizes_of),
    option("--input SHAPE", "Shape of one sample of a cell, such as 3x224x224 or int64:128; may be "
           "repeated.", name="inputs", multiple=True),
    option("--train", "Plan a training step of a cell instead of `predict`: cross entropy of class "
           "numbers, with Adam.", is_flag=True),
    option("--entry NAME", "Function of a model file.  [default: train_step, else predict]"),
    option("--topology FILE", "JSON with the rates of devices and links.  [default: assumed rates]",
           click.Path(path_type=Path, exists=True, dir_okay=False)),
    option("--explain NODE", "Show what one node, layer or operator could do instead, and which "
           "rule decided."),
    option("--out FILE.svg", "Draw the plan.", OUTPUT_FILE),
    option("--out-model FILE.tpm", "Write the model file with the planned split of each node; "
           "the engine xla carries them out, and ONNX export writes them.", OUTPUT_FILE),
)
# fmt: on


@click.command("plan", epilog=EPILOG, params=[*OPTIONS])
@click.argument("model", metavar="FILE.py:Cell|MODEL.tpm")
@json_option
def command(**options: Any) -> None:
    """Predict how to split a model over devices: what is cut, sent and held, and the time it takes.

    It needs no device. The plan is the cheapest one by a model of costs that the rates describe.
    """
    output = open_output(options.pop("as_json"))
    model, out = options["model"], options["out"]
    check_distinct_files(
        [model, options["topology"]], {"--out": out, "--out-model": options["out_model"]}
    )
    if options["out_model"] is not None and Path(model).suffix != ".tpm":
        raise InvalidInput(
            f"--out-model writes a model file with its plan, and {model} is none; a cell has its "
            "strategies in code, ops.matmul.shard((4, 1), (1, 1))(a, b)"
        )
    if out is not None and out.suffix != ".svg":
        raise InvalidInput(f"--out writes a picture, NAME.svg, got {out.name!r}")
    with output.user_code():
        function = _function(options)
    record, lines = _planned(function, options)
    output.result(record, "\n".join(lines))


def _planned(function: Function, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from triplane.proto.disk import write_atomic
    from triplane.unified_ir.passes.sharding import Topology, plan, read_topology, report

    known_sizes(function.name, (p.type for p in function.params), options["sizes"])
    file = options["topology"]
    chosen = plan(
        function,
        options["devices"],
        sizes={BATCH: options["batch_size"], **options["sizes"]},
        memory_bytes=options["memory"],
        topology=Topology() if file is None else read_topology(file),
    )
    record = report.record(chosen)
    lines = list(report.table(chosen))
    if options["explain"] is not None:
        node = report.find_node(chosen, options["explain"])
        record["explained"] = report.alternatives_record(chosen, node)
        lines = list(report.explanation(chosen, node))
    if options["out"] is not None:
        write_atomic(options["out"], report.svg(chosen).encode())
        record["picture"] = str(options["out"])
    if options["out_model"] is not None:
        record["model"] = str(options["out_model"])
        _write_model(chosen, options)
    return record, lines


def _write_model(chosen: ParallelPlan, options: dict[str, Any]) -> None:
    """Write the model file again, its planned function with the plan's strategies."""
    from triplane.unified_ir.files.container import Container
    from triplane.unified_ir.ops.check import load, save

    module, source = load(options["model"]), Path(options["model"])
    name = module.entries[options["entry"] or _planned_entry(module)]
    functions = {**module.functions, name: chosen.with_strategies()}
    save(
        replace(module, functions=functions),
        options["out_model"],
        parent=Container(source, kind="model").digest,
    )


def _function(options: dict[str, Any]) -> Function:
    """Return the function to plan: an entry of a model file, or a cell that is traced."""
    model, entry, inputs = options["model"], options["entry"], options["inputs"]
    if Path(model).suffix == ".tpm":
        if inputs or options["train"]:
            raise InvalidInput(
                f"{model} has its inputs and its training step; --input and --train are for "
                "FILE.py:Cell and zoo:NAME"
            )
        return _entry(model, entry)
    if entry is not None:
        raise InvalidInput(f"--entry is for a model file; {model} is planned as `predict`")
    if not inputs:
        raise InvalidInput(
            f"{model} is traced with the shape of one sample: add --input 784, or 3x224x224 for "
            "images, or int64:128 for a text of 128 words"
        )
    from triplane.unified_ir.cli.train import load_cell
    from triplane.unified_ir.train import step

    cell, types = load_cell(model), [_input_type(text) for text in inputs]
    function = step.predict(cell, types, "output")
    return _training_step(cell, types, function) if options["train"] else function


def _training_step(cell: Cell, types: list[Any], predict: Function) -> Function:
    """Return a step with cross entropy over the last axis of the cell's output, and Adam."""
    from triplane.unified_ir import nn, optim, train
    from triplane.unified_ir.ir.types import TensorSpec

    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.001))
    trainer.prepare(*types, TensorSpec(predict.results[0].type.shape[:-1], "int64"))
    return trainer.train_function()


def _entry(model: str, entry: str | None) -> Function:
    from triplane.unified_ir.ops.check import load

    module: Module = load(model)
    return module.entry(entry or _planned_entry(module))


def _planned_entry(module: Module) -> str:
    usual = (e for e in ("train_step", "predict") if e in module.entries)
    return next(usual, next(iter(module.entries), ""))


def _input_type(text: str) -> Any:
    """Return the type of a batch for the shape of one sample."""
    from triplane.unified_ir.ir.types import TensorSpec

    kind, colon, shape = text.rpartition(":")
    sizes = shape.split("x")
    if not all(s.isdecimal() and 0 < int(s) <= MAX_INPUT for s in sizes):
        raise InvalidInput(f"--input is a shape such as 3x224x224 or int64:128, got {text!r}")
    return TensorSpec((BATCH, *map(int, sizes)), kind if colon else "float32")
