"""From a module to a bundle: fold, quantize, check, measure, compare with budgets, then write.

Invariants: nothing is written unless every check passed and every given budget holds; on one kind
of machine, everything written except `report.json` depends only on the module, the calibration
samples and the arguments. A slow or inaccurate result fails a conversion only through a budget.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import runtime
from triplane.unified_ir.convert.adaptation import adapt_graph, adapt_steps
from triplane.unified_ir.convert.budgets import Budgets
from triplane.unified_ir.convert.checks import (
    check_against_reference,
    check_finite,
    check_served,
    first,
    measure_accuracy,
)
from triplane.unified_ir.convert.describe import (
    COPIES,
    FLOAT_TOLERANCE,
    INT8_TOLERANCE,
    Labels,
    check_names,
    class_names,
    constraints,
    preprocessing,
    running_bytes,
    tolerance,
)
from triplane.unified_ir.convert.fold import FOLDED, fold
from triplane.unified_ir.convert.latency import Latency, measure_latency
from triplane.unified_ir.convert.notes import Converted, attempt, notes
from triplane.unified_ir.convert.report import Accuracy, Layer, Report, Size
from triplane.unified_ir.convert.residency import (
    INTEGER,
    UNKNOWN,
    Resident,
    product_nodes,
    residency,
    time_shares,
)
from triplane.unified_ir.convert.samples import Given, as_labelled, as_samples, digest, generated
from triplane.unified_ir.convert.targets import Target, cpu_flags, int8_scheme, target_row
from triplane.unified_ir.data import Dataset
from triplane.unified_ir.files.container import Container, is_container
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.graph import Array, Node
from triplane.unified_ir.ir.meta import labels_of
from triplane.unified_ir.ops.check import load
from triplane.unified_ir.quantize import (
    IN_PARTS,
    Artifact,
    Frozen,
    Range,
    Samples,
    Scheme,
    Sites,
    artifact,
    expanded,
    find_sites,
    freeze,
    insert,
    noise,
    observe,
    site_ranges,
)
from triplane.unified_ir.runtime.session import saturates

GOLDENS: Final = 4
"""Number of golden samples in a bundle. It is 1 if an operator rounds all rows of a call by one
range: a node with several threads splits the rows, and each thread then uses a range of its own."""
REFERENCE_SAMPLES: Final = 2
"""Samples on which the graph is compared with the reference, which is slow."""
NOISE_SAMPLES: Final = 64
"""Samples on which rounding noise is measured."""
NO_VNNI_FLAGS: Final = "no int8 dot products"


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """The graph in one precision, with an open session."""

    artifact: Artifact
    session: runtime.Session


@dataclass(frozen=True, slots=True, eq=False)
class _Int8(_Graph):
    """The graph in int8. source: the float function that was quantized."""

    source: Frozen
    sites: Sites
    snr_db: Mapping[Node, float | None]
    ranges: Sequence[Range]


def convert(
    module: Module | str | Path,
    target: str = "ort-x64",
    *,
    entry: str = "predict",
    quantize: Literal["int8"] | None = None,
    calibration: Given | None = None,
    evaluation: tuple[Given, Array] | Dataset | None = None,
    name: str | None = None,
    version: str = "1",
    labels: Labels | None = None,
    max_accuracy_drop: float = 1.0,
    max_latency_ratio: float | None = None,
    max_size_ratio: float | None = None,
    reduce_range: bool = False,
    model_digest: str = "",
    out: str | Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Convert one entry of a module, or of a model file, for a target; write `out` when given.

    calibration: the samples from which int8 learns its ranges: an array (N, ...), arrays by input
    name, or a `Dataset`, whose inputs are taken by name, else in order. evaluation: (samples,
    classes), or a `Dataset` with them, for the accuracy before and after. labels: class names of
    the first output, or by output. max_accuracy_drop: percentage points, needs an evaluation set.
    max_latency_ratio, max_size_ratio: int8 / float32. reduce_range: 7-bit weights, for processors
    without VNNI. model_digest: root digest of the model file, the bundle's parent; it is computed
    if `module` is a path. name: by default the stem of the model file, or of `out`. progress:
    called with a description of each stage before it begins.
    Raises InvalidInput, and writes nothing, if a budget is exceeded or samples do not fit.
    """
    row = target_row(target)
    name = _name(module, out) if name is None else name
    check_names(name, version)
    if not isinstance(module, Module):
        module, model_digest = read_model(module)
    budgets = Budgets(max_accuracy_drop, max_latency_ratio, max_size_ratio)
    steps = _checked_steps(module, entry, quantize, calibration, budgets)
    # A node changes the weights of a start point, so they must not be folded into others.
    frozen = freeze(module, entry) if steps else fold(freeze(module, entry))
    names = labels_of(module.meta)
    samples, record = _samples(calibration, frozen, names)
    job = _Conversion(
        module=module, entry=entry, target=row, frozen=frozen, name=name, version=version,
        labels=labels, model_digest=model_digest, adapt_steps=steps,
        samples=samples, calibration=record, progress=progress,
        scheme=None if quantize is None else int8_scheme(row, reduce_range=reduce_range),
        labelled=None if evaluation is None
        else as_labelled(evaluation, frozen.inputs, names),
    )  # fmt: skip
    plain, int8 = _graphs(job)
    # Before the measurements, which take the most time: a result that is not finite is refused
    # first.
    spec = _bundle(job, int8 or plain, is_int8=int8 is not None)
    report = _reported(job, plain, int8)
    report = replace(report, notes=(*report.notes, *budgets.check(report)))
    return report if out is None else _written(job, Path(out), spec, report)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Conversion(Converted):
    """A conversion whose arguments are checked."""

    name: str
    version: str
    labels: Labels | None
    model_digest: str
    adapt_steps: int
    samples: Samples
    calibration: Mapping[str, Any]
    labelled: tuple[Samples, Array] | None
    progress: Callable[[str], None]


def _graphs(job: _Conversion) -> tuple[_Graph, _Int8 | None]:
    """Return the graph in float32, compared with the module, and in int8 where that is asked."""
    packed = artifact(job.frozen, job.target.onnx)
    plain = _Graph(packed, packed.session())
    few = first(job.frozen, job.samples, REFERENCE_SAMPLES)
    job.progress("checking the graph against the model's meaning")
    check_against_reference(job.module, job.entry, plain.session, few)
    if job.scheme is None:
        return plain, None
    job.progress(f"int8: observing ranges on {_count(job.samples):,} samples")
    return plain, _quantized(job, job.scheme)


def _quantized(job: _Conversion, scheme: Scheme) -> _Int8:
    # Operators such as HardSwish have no integer kernel, but their parts have.
    source = expanded(job.frozen, IN_PARTS)
    sites = find_sites(source, job.target.operators)
    if not sites.integer:
        raise InvalidInput(
            "int8 needs a Conv, Gemm, MatMul or LSTM that can run on integers, but "
            f"{_reasons(sites)}; convert without quantize"
        )
    seen = observe(source, sites.roots, job.samples)
    ranges = site_ranges(sites, seen)
    target = job.target.onnx_int8
    packed = artifact(insert(source, sites, ranges, scheme), target)
    products = [node for node in product_nodes(source.function) if node in sites.integer]
    outputs = [node.outputs[0] for node in products]
    # All samples determine the ranges; a few are enough to measure the noise.
    few = first(source, job.samples, NOISE_SAMPLES)
    levels = noise(source, sites, ranges, scheme, outputs, few, target=target)
    snr_db = dict(zip(products, levels, strict=True))
    return _Int8(packed, packed.session(), source, sites, snr_db, tuple(seen.values()))


def _reasons(sites: Sites) -> str:
    """Return why no product can be quantized."""
    reasons = [f"{node.op.name}: {reason}" for node, reason in sites.refused.items()]
    return "; ".join(dict.fromkeys(reasons)) or "there is none outside loops and branches"


def _bundle(job: _Conversion, shipped: _Graph, *, is_int8: bool) -> runtime.BundleSpec:
    """Return the contents of the bundle except for the report and the graph of adaptation."""
    form = shipped.artifact
    inputs = first(job.frozen, job.samples, 1 if form.operators else GOLDENS)
    outputs = shipped.session.run(inputs)
    check_finite(outputs)
    # Computed, not measured, because the signer converts again and must get the same bytes.
    memory_bytes = COPIES * form.size_bytes + running_bytes(job.frozen.function, inputs)
    accepted = tolerance(outputs, INT8_TOLERANCE if is_int8 else FLOAT_TOLERANCE)
    return runtime.BundleSpec(
        description=_described(job, shipped.session, memory_bytes, accepted),
        model=form.model,
        weights=form.weights,
        golden_inputs=inputs,
        golden_outputs=outputs,
    )


def _described(
    job: _Conversion, session: runtime.Session, memory_bytes: int, accepted: runtime.Tolerance
) -> runtime.Description:
    return runtime.Description(
        name=job.name,
        version=job.version,
        target=job.target.name,
        inputs=session.inputs,
        outputs=session.outputs,
        labels=class_names(job.module, session.outputs, job.labels),
        preprocessing=preprocessing(job.module),
        constraints=constraints(job.target, memory_bytes),
        tolerance=accepted,
        model_digest=job.model_digest,
        adapt_steps=job.adapt_steps,
    )


def _reported(job: _Conversion, plain: _Graph, int8: _Int8 | None) -> Report:
    """Measure the graphs. Parts of the report that only inform become notes if they fail."""
    shipped, one = int8 or plain, first(job.frozen, job.samples, 1)
    # Saves the optimized graph and reads it back, which can fail for reasons that do not concern
    # the bundle.
    resident, failed = attempt("the list of kernels", partial(residency, shipped.artifact))
    resident = resident or Resident({}, {}, {}, ())
    latency, accuracy = _measured(job, plain, int8, one)
    shares, without_shares = None, list[str]()
    if int8 is not None:
        job = replace(job, ranges=int8.ranges, operators=int8.artifact.operators)
        time = partial(time_shares, int8.artifact, one)
        shares, without_shares = attempt("the share of time on integers", time)
    return Report(
        name=job.name,
        version=job.version,
        target=job.target.name,
        precision="int8" if int8 else "float32",
        size=_size(plain, int8),
        latency=latency,
        accuracy=accuracy,
        layers=_layers(job, int8, resident),
        residency=resident,
        machine=_machine(),
        calibration=job.calibration,
        shares=shares,
        notes=(*notes(job), *failed, *without_shares),
    )


def _measured(
    job: _Conversion, plain: _Graph, int8: _Int8 | None, feeds: Mapping[str, Array]
) -> tuple[Latency, Accuracy | None]:
    job.progress("timing float32" + (" and int8 in turn" if int8 else ""))
    # The control is a second session of the float graph: the spread of control / float32 is what
    # the machine's noise alone makes of a ratio of 1.
    control, quantized = plain.artifact.session(), int8.session if int8 else None
    here = job.target.is_here
    latency = measure_latency(plain.session, control, quantized, feeds, on_target=here)
    if job.labelled is None:
        return latency, None
    job.progress(f"measuring accuracy on {len(job.labelled[1])} samples")
    shipped = (int8 or plain).session
    return latency, measure_accuracy(job.frozen, plain.session, shipped, *job.labelled)


def _samples(
    calibration: Given | None, frozen: Frozen, names: Sequence[str]
) -> tuple[Samples, dict[str, Any]]:
    """Return the calibration samples and what the report says of them; made up where none are."""
    if calibration is None:
        return generated(frozen.inputs), {}
    samples = as_samples(calibration, frozen.inputs, "the calibration set", names)
    return samples, {"samples": _count(samples), "sha256": digest(samples)}


def _count(samples: Samples) -> int:
    return len(next(iter(samples.values())))


def read_model(path: str | Path) -> tuple[Module, str]:
    """Return (module, root digest) of a model file; Corrupt names the damaged part."""
    return load(path), Container(Path(path), kind="model").digest


def open_model(path: Path) -> tuple[Module, str]:
    """Read a model like `read_model`; InvalidInput if the file is not a container of Triplane."""
    if path.is_file() and not is_container(path):
        raise InvalidInput(
            f"{path.name} is not a model file, or its beginning is damaged; `triplane train` and "
            "`triplane import` write model files (NAME.tpm)"
        )
    return read_model(path)


def _name(module: Module | str | Path, out: str | Path | None) -> str:
    # A module in memory has no file name.
    named = out if isinstance(module, Module) else module
    return "model" if named is None else Path(named).stem


def _checked_steps(
    module: Module, entry: str, quantize: str | None, calibration: Any, budgets: Budgets
) -> int:
    """Return the module's steps of adaptation; InvalidInput if arguments do not fit."""
    if not module.inputs(entry):
        raise InvalidInput(f"{entry!r} takes no input; a bundle computes outputs from inputs")
    _check_arguments(quantize, calibration, budgets)
    steps = adapt_steps(module)
    if steps and quantize is not None:
        raise InvalidInput(
            f"the model is a start point for {steps} steps of adaptation, which need its weights "
            "in float32; convert it without quantize"
        )
    return steps


def _check_arguments(quantize: str | None, calibration: Any, budgets: Budgets) -> None:
    if quantize not in {None, "int8"}:
        raise InvalidInput(f"quantize must be 'int8', or None for float32; got {quantize!r}")
    if quantize == "int8" and calibration is None:
        raise InvalidInput(
            "int8 learns the range of each tensor from samples; give calibration (--calibrate): "
            "a few hundred typical inputs"
        )
    if quantize is None and (budgets.latency_ratio, budgets.size_ratio) != (None, None):
        raise InvalidInput(
            "max_latency_ratio and max_size_ratio compare int8 with float32; they need quantize "
            "(--quantize int8)"
        )


def _size(plain: _Graph, int8: _Int8 | None) -> Size:
    return Size(
        float32=plain.artifact.size_bytes,
        float32_weights=plain.artifact.weight_bytes,
        int8=int8.artifact.size_bytes if int8 else None,
        int8_weights=int8.artifact.weight_bytes if int8 else None,
    )


def _layers(job: _Conversion, int8: _Int8 | None, resident: Resident) -> tuple[Layer, ...]:
    """Return one row per product, in the function's order."""
    nodes = product_nodes((int8.source if int8 else job.frozen).function)
    # If the emitted graph has another number of products, kernels cannot be matched to nodes by
    # their order.
    alike = len(nodes) == len(resident.products)
    kernels = resident.products if alike else (UNKNOWN,) * len(nodes)
    return tuple(
        Layer(
            name=_layer_name(node),
            op=node.op.name,
            location=str(node.meta.location or ""),
            kernel=kernel,
            int8=kernel in INTEGER,
            reason=_reason(node, int8, job.target) if kernel not in INTEGER else "",
            snr_db=int8.snr_db.get(node) if int8 else None,
        )
        for node, kernel in zip(nodes, kernels, strict=True)
    )


def _layer_name(node: Node) -> str:
    """Return the cell's path, else the weight's name, else the operator."""
    weight = node.inputs[1].name if node.inputs[1] is not None else ""
    for suffix in (*FOLDED, ".weight"):
        weight = weight.removesuffix(suffix)
    return node.meta.scope or weight or node.op.name


def _reason(node: Node, int8: _Int8 | None, target: Target) -> str:
    """Return why int8 left a product in float; empty in a float32 bundle."""
    if int8 is None or node in int8.sites.refused:
        return int8.sites.refused[node] if int8 else ""
    if not target.is_here:
        return f"this machine's onnxruntime has no integer kernel for it; {target.name} may"
    if saturates():  # then products are computed in float where exact kernels do not load
        return "sums of 8-bit products saturate on this processor; try --reduce-range"
    return "onnxruntime found no integer kernel for it"


def _machine() -> dict[str, str]:
    flags = sorted(f for f in cpu_flags() if "vnni" in f or f in {"amx_int8", "i8mm", "asimddp"})
    return {
        "architecture": platform.machine(),
        "runtime": f"onnxruntime {runtime.version()}",
        "threads": "1 thread",
        "int8_instructions": " ".join(flags) or NO_VNNI_FLAGS,
    }


def _written(job: _Conversion, out: Path, spec: runtime.BundleSpec, report: Report) -> Report:
    """Write the bundle and return the report with its digests."""
    if job.adapt_steps:
        spec = replace(spec, adapt=adapt_graph(job.module, spec.weights, job.target.onnx))
    spec = replace(spec, report=report.record())
    # `check_served` runs the goldens before the file gets its name, so a bundle that a node would
    # refuse never appears under `out`.
    root = runtime.write_bundle(out, spec, check=check_served)
    bundle = runtime.Bundle.load(out, expected_digest=root)
    return replace(report, digest=root, content_digest=bundle.content_digest, path=out)
