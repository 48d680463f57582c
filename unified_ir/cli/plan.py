"""`triplane plan`: predict how a model is best split over devices, without the devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import pipeline_options
from triplane.unified_ir.cli.memory_size import MemorySize
from triplane.unified_ir.cli.profiling import known_sizes, sizes_of
from triplane.unified_ir.cli.shell import (
    COUNT,
    OUTPUT_FILE,
    check_distinct_files,
    check_suffix,
    json_option,
    open_output,
    option,
)

if TYPE_CHECKING:
    from triplane.unified_ir.frontend import Cell
    from triplane.unified_ir.ir import Function, Module
    from triplane.unified_ir.passes.sharding import ParallelPlan, Topology
    from triplane.unified_ir.train import Trainer

EPILOG = """\b
Examples:
  triplane plan digits.tpm --devices 4
  triplane plan digits.tpm --devices 8 --memory 16GiB --batch-size 512 --entry train_step
  triplane plan zoo:resnet18 --input 3x64x64 --train --devices 6 --batch-size 96 --explain Conv
  triplane plan net.py:Net --input 784 --devices 16 --topology cluster.json --out plan.svg
  triplane plan zoo:lenet --input 1x28x28 --train --stages 4 --microbatches 8
  triplane plan digits.tpm --devices 4 --out-model planned.tpm
  triplane plan zoo:resnet18 --input 3x64x64 --train --devices 8 --batch-size 256 --buckets
  triplane plan --measure machine.json

\b
Each row of the table is a layer. Its split says, for each operand of its largest node, into how
many slices each axis is cut: ((4,1),(1,1)) cuts the rows of the first matrix for four devices.
Devices form a mesh of one or two axes; every mesh of --devices is tried, also of 6 or 7.
The time is predicted: work, then communication, with nothing overlapped.

\b
A cell is traced with --input, the shape of one sample (axes by x; int64 for class numbers or words,
as int64:128). The shapes of a model file are known. --topology is a JSON object with any of
  devices_per_host, hosts_per_rack, flops_per_s, memory_bytes_per_s,
  inside, between and racks: the links in a host, between hosts and between racks,
  {"latency_s": , "bytes_per_s": }
Without it the rates are assumed, those of data-centre GPUs. --measure writes those of this machine.
"""
BATCH: Final = "N"
"""Symbol of the number of samples."""
MAX_INPUT: Final = 1 << 40
"""Most elements of one sample."""


# fmt: off
OPTIONS: Final = (
    option("--devices N", "Devices to split over; any number.", COUNT),
    option("--memory SIZE", "Memory of one device, such as 16GiB; a plan that needs more is "
           "refused.", MemorySize()),
    option("--stages N", "Cut the layers into a pipeline of N stages, one a device, instead.",
           COUNT),
    option("--microbatches M", "With --stages: equal parts of a batch that follow each other.  "
           "[default: four for each stage, or fewer that divide the batch]", COUNT),
    option("--batch-size N", "Samples of the whole batch, over all devices.", COUNT, default=32),
    option("--sizes T=10", "Other sizes that the inputs leave open.", callback=sizes_of),
    option("--input SHAPE", "Shape of one sample of a cell, such as 3x224x224 or int64:128; may be "
           "repeated.", name="inputs", multiple=True),
    option("--train", "Plan a training step of a cell instead of `predict`: cross entropy of class "
           "numbers, with Adam.", is_flag=True),
    option("--entry NAME", "Function of a model file.  [default: train_step, loss with --stages, "
           "predict with --out-model; else predict]"),
    option("--topology FILE", "JSON with the rates of devices and links.  [default: assumed rates]",
           click.Path(path_type=Path, exists=True, dir_okay=False)),
    option("--buckets", "Show how the gradients of a data-parallel training step are grouped into "
           "all-reduces, by predicted times; `triplane train --buckets auto` measures them.",
           is_flag=True),
    option("--measure FILE.json", "Measure the devices that JAX finds, and write what --topology "
           "reads.", OUTPUT_FILE),
    option("--explain NODE", "Show what one node, layer or operator could do instead, and which "
           "rule decided."),
    option("--out FILE.svg", "Draw the plan.", OUTPUT_FILE),
    option("--out-model FILE.tpm", "Write the model file with the planned split of each node. "
           "`triplane train` trains by that of predict; the engine xla and ONNX export read that "
           "of any function.", OUTPUT_FILE),
)
# fmt: on


_OF_PLANS: Final = (
    "model", "devices", "memory", "stages", "microbatches", "sizes", "inputs", "train", "entry",
    "topology", "buckets", "explain", "out", "out_model",
)  # fmt: skip
"""Parameters that --measure does not take."""


@click.command("plan", epilog=EPILOG, params=[*OPTIONS])
@click.argument("model", metavar="FILE.py:Cell|MODEL.tpm", required=False)
@json_option
def command(**options: Any) -> None:
    """Predict how to split a model over devices: what is cut, sent and held, and the time it takes.

    It needs no device. The plan is the cheapest one by a model of costs that the rates describe.
    """
    output = open_output(options.pop("as_json"))
    _check(options)
    if options["measure"] is not None:
        output.result(*_measured(options["measure"]))
        return
    with output.user_code():
        function = _function(options)
    record, lines = _kind(options)(function, options)
    output.result(record, "\n".join(lines))


def _check(options: dict[str, Any]) -> None:
    """Refuse options that do not go together, before a model is read."""
    model, out, out_model = options["model"], options["out"], options["out_model"]
    if options["measure"] is not None:
        if any(options[name] for name in _OF_PLANS) or _is_stated("batch_size"):
            raise InvalidInput(
                "--measure times this machine's devices; it takes no model and no option of a plan"
            )
        return
    if model is None:
        raise InvalidInput(
            "plan needs a model and a number of devices, as in: triplane plan digits.tpm --devices "
            "4; --measure FILE.json measures this machine instead"
        )
    check_distinct_files([model, options["topology"]], {"--out": out, "--out-model": out_model})
    if out_model is not None and Path(model).suffix != ".tpm":
        raise InvalidInput(
            f"--out-model writes a model file with its plan, and {model} is none; a cell has its "
            "strategies in code, ops.matmul.shard((4, 1), (1, 1))(a, b)"
        )
    check_suffix("--out-model", out_model, "model file")
    if out is not None and out.suffix != ".svg":
        raise InvalidInput(f"--out writes a picture, NAME.svg, got {out.name!r}")
    if BATCH in options["sizes"] and _is_stated("batch_size"):
        raise InvalidInput(f"--batch-size is the size {BATCH}, so leave {BATCH} out of --sizes")
    pipeline_options.check(options)


def _is_stated(name: str) -> bool:
    """Return whether an option with a default is on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def _kind(options: dict[str, Any]) -> Any:
    """Return what is planned: stages, buckets of gradients, or the split of each node."""
    if options["stages"] is not None:
        return pipeline_options.planned
    return _buckets if options["buckets"] else _planned


def _planned(function: Function, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from triplane.proto.disk import write_atomic
    from triplane.unified_ir.passes.sharding import plan, report
    from triplane.unified_ir.passes.sharding.problem import with_strategies_outside

    is_kept = options["out_model"] is not None
    chosen = plan(
        # What is written keeps the gradients of its cells.
        function if is_kept else with_strategies_outside(function),
        options["devices"],
        sizes=_sizes(function, options),
        memory_bytes=options["memory"],
        topology=_topology(options),
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
    name = module.entries[options["entry"] or _planned_entry(module, "predict")]
    functions = {**module.functions, name: chosen.with_strategies()}
    save(
        replace(module, functions=functions),
        options["out_model"],
        parent=Container(source, kind="model").digest,
    )


def _sizes(function: Function, options: dict[str, Any]) -> dict[str, int]:
    """Return a number for each size that the inputs leave open."""
    known_sizes(function.name, (p.type for p in function.params), options["sizes"])
    return {BATCH: options["batch_size"], **options["sizes"]}


def _topology(options: dict[str, Any]) -> Topology:
    from triplane.unified_ir.passes.sharding import Topology, read_topology

    file = options["topology"]
    return Topology() if file is None else read_topology(file)


def _buckets(function: Function, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from triplane.unified_ir.passes.sharding import buckets
    from triplane.unified_ir.passes.sharding.batch_split import split_batch

    for name in ("memory", "explain", "out", "out_model"):
        if options[name] is not None:
            flag = name.replace("_", "-")
            raise InvalidInput(
                f"--{flag} belongs to a plan, and --buckets shows none; leave it out"
            )
    devices, topology = options["devices"], _topology(options)
    sizes = _sizes(function, options)
    split = split_batch(function, devices, sizes=sizes, topology=topology)
    groups = buckets.planned_buckets(split, topology.link((devices,), 0))
    head = [f"{function.name} on {devices} devices, data parallel", topology.source, ""]
    rates = {"topology": {"source": topology.source, **topology.json()}}
    record = {"function": function.name, "sizes": sizes, **rates, **buckets.record(groups)}
    return record, [*head, *buckets.table(groups)]


def _measured(file: Path) -> tuple[dict[str, Any], str]:
    """Measure this machine and write the file; return the record and a line for each rate."""
    from triplane.proto.disk import write_atomic
    from triplane.unified_ir.engines.xla import measure
    from triplane.unified_ir.passes.sharding.report import bytes_text, time_text

    topology, names = measure.measured_topology()
    record = measure.record(topology, names)
    write_atomic(file, (json.dumps(record, indent=2) + "\n").encode())
    lines = [
        f"{file}: measured on {record['measured']['devices']}",
        f"float32 products    {topology.flops_per_s / 1e9:.3g} GFLOP/s for each device, all busy",
        f"memory              {bytes_text(topology.memory_bytes_per_s)}/s",
        f"links               {time_text(topology.inside.latency_s)} and "
        f"{bytes_text(topology.inside.bytes_per_s)}/s, between devices of this host"
        if "inside" in record
        else "links               not measured: JAX finds one device",
        "links between hosts and racks are not measured; the file may be given `between`, `racks`",
    ]
    return {"file": str(file), **record}, "\n".join(lines)


def _function(options: dict[str, Any]) -> Function:
    """Return the function to plan: an entry of a model file, or a cell that is traced."""
    model, entry, inputs = options["model"], options["entry"], options["inputs"]
    if Path(model).suffix == ".tpm":
        if inputs or options["train"]:
            raise InvalidInput(
                f"{model} has its inputs and its training step; --input and --train are for "
                "FILE.py:Cell and zoo:NAME"
            )
        # What is written is for training, which derives its step from `predict`.
        usual = "predict" if options["out_model"] is not None else "train_step"
        return _entry(model, entry, "loss" if options["stages"] else usual)
    if entry is not None:
        raise InvalidInput(f"--entry is for a model file; {model} is planned as `predict`")
    if not inputs:
        raise InvalidInput(
            f"{model} is traced with the shape of one sample: add --input 784, or 3x224x224 for "
            "images, or int64:128 for a text of 128 words"
        )
    from triplane.unified_ir.cli.train import load_cell
    from triplane.unified_ir.train import step
    from triplane.unified_ir.train.pipelined import forward_of

    cell, types = load_cell(model), [_input_type(text) for text in inputs]
    function = step.predict(cell, types, "output")
    if not options["train"]:
        return function
    trainer = _trainer(cell, types, function)
    return trainer.train_function() if options["stages"] is None else forward_of(trainer)


def _trainer(cell: Cell, types: list[Any], predict: Function) -> Trainer:
    """Return a trainer with cross entropy over the last axis of the cell's output, and Adam."""
    from triplane.unified_ir import nn, optim, train
    from triplane.unified_ir.ir.types import TensorSpec

    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.001))
    trainer.prepare(*types, TensorSpec(predict.results[0].type.shape[:-1], "int64"))
    return trainer


def _entry(model: str, entry: str | None, usual: str) -> Function:
    from triplane.unified_ir.ops.check import load

    module: Module = load(model)
    return module.entry(entry or _planned_entry(module, usual))


def _planned_entry(module: Module, usual: str) -> str:
    names = (e for e in (usual, "predict") if e in module.entries)
    return next(names, next(iter(module.entries), ""))


def _input_type(text: str) -> Any:
    """Return the type of a batch for the shape of one sample."""
    from triplane.unified_ir.ir.types import TensorSpec

    kind, colon, shape = text.rpartition(":")
    sizes = shape.split("x")
    if not all(s.isdecimal() and 0 < int(s) <= MAX_INPUT for s in sizes):
        raise InvalidInput(f"--input is a shape such as 3x224x224 or int64:128, got {text!r}")
    return TensorSpec((BATCH, *map(int, sizes)), kind if colon else "float32")
