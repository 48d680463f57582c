"""From a module to a bundle: fold, quantize, check, measure, judge, and only then write.

Invariants: nothing is written unless every check passed and every stated budget holds; what is
written, but for `report.json`, depends on the module, the calibration samples and the arguments
alone, on one kind of machine. A conversion is refused only for a budget, never for being slow.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.convert.accuracy import measure_accuracy
from triplane.unified_ir.convert.adaptation import adapt_graph, adapt_steps
from triplane.unified_ir.convert.budgets import Budgets
from triplane.unified_ir.convert.checks import (
    check_against_reference,
    check_finite,
    check_served,
    first,
)
from triplane.unified_ir.convert.describe import Labels, check_names, describe, running_bytes
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
)
from triplane.unified_ir.convert.samples import (
    Given,
    as_labelled,
    as_samples,
    digest,
    generated,
)
from triplane.unified_ir.convert.shares import Shares, time_shares
from triplane.unified_ir.convert.targets import (
    Target,
    cpu_flags,
    int8_scheme,
    target_row,
)
from triplane.unified_ir.data import Dataset
from triplane.unified_ir.files.container import Container, is_container
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.graph import Array, Node
from triplane.unified_ir.onnx import OnnxTarget
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
from triplane.unified_ir.runtime import (
    Bundle,
    BundleSpec,
    Description,
    Session,
    write_bundle,
)
from triplane.unified_ir.runtime import (
    version as runtime_version,
)

GOLDENS: Final = 4
"""Samples kept in a bundle; one where rows of a call are rounded by a common range, since a node
with several threads shares out the rows, and each thread then has a range of its own."""
REFERENCE_SAMPLES: Final = 2
"""Samples on which the graph is held to the reference, which is slow."""
NOISE_SAMPLES: Final = 64
"""Samples on which rounding noise is measured."""
NO_VNNI_FLAGS: Final = "no int8 dot products"


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """One precision of the graph: its function, its bytes, a session on them."""

    frozen: Frozen
    artifact: Artifact
    session: Session


@dataclass(frozen=True, slots=True, eq=False)
class _Int8(_Form):
    """The integer form and what was learnt on the way; source: the float function it is made of."""

    source: Frozen
    sites: Sites
    scheme: Scheme
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

    calibration: what int8 learns its ranges from, an array (N, ...) or arrays by input name.
    evaluation: (samples, classes), for accuracy before and after. labels: class names of the first
    output, or by output. max_accuracy_drop: percentage points, needs an evaluation set.
    max_latency_ratio, max_size_ratio: int8 / float32. reduce_range: 7-bit weights, for processors
    without VNNI. model_digest: root digest of the model file, the bundle's parent; known where
    `module` is a path. name: by default the stem of the model file, or of `out`. progress: told
    each stage before its work.
    Raises InvalidInput, with nothing written, where a budget is passed or samples do not fit.
    """
    row = target_row(target)
    name = _name(module, out) if name is None else name
    check_names(name, version)
    if not isinstance(module, Module):
        module, model_digest = read_model(module)
    budgets = Budgets(max_accuracy_drop, max_latency_ratio, max_size_ratio)
    steps = _checked_steps(module, entry, quantize, calibration, budgets)
    frozen = freeze(module, entry) if steps else fold(freeze(module, entry))
    samples = _samples(calibration, frozen)
    labelled = None if evaluation is None else as_labelled(evaluation, frozen.inputs)
    scheme = None if quantize is None else int8_scheme(row, reduce_range=reduce_range)
    conversion = _Conversion(
        module, entry, row, name, version, labels, model_digest, steps, frozen, samples, labelled,
        scheme, _calibration_record(calibration, samples), progress,
    )  # fmt: skip
    forms = _forms(conversion)
    answers = _golden_answers(conversion, forms)
    report = _reported(conversion, forms)
    report = replace(report, notes=(*report.notes, *budgets.check(report)))
    if out is None:
        return report
    return _written(Path(out), _bundle(conversion, forms, answers, report), report)


@dataclass(frozen=True, slots=True, eq=False)
class _Conversion:
    """What is converted for which target, every argument checked; scheme: of int8, else None."""

    module: Module
    entry: str
    row: Target
    name: str
    version: str
    labels: Labels | None
    model_digest: str
    steps: int
    frozen: Frozen
    samples: Samples
    labelled: tuple[Samples, Array] | None
    scheme: Scheme | None
    calibration: dict[str, Any]
    progress: Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Forms:
    """The graph in float32, and in int8 where that is wanted."""

    plain: _Form
    int8: _Int8 | None

    @property
    def shipped(self) -> _Form:
        """The one that goes into the bundle."""
        return self.int8 or self.plain


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """Golden inputs of a bundle, what the shipped graph answers, and the description of both."""

    inputs: Samples
    outputs: dict[str, Array]
    description: Description


def _forms(job: _Conversion) -> _Forms:
    """The graphs, the float one held to the module's meaning."""
    plain = _form(job.frozen, job.row.onnx)
    few = first(job.frozen, job.samples, REFERENCE_SAMPLES)
    job.progress("checking the graph against the model's meaning")
    check_against_reference(job.module, job.entry, plain.session, few)
    if job.scheme is None:
        return _Forms(plain, None)
    job.progress(f"int8: observing ranges on {len(next(iter(job.samples.values())))} samples")
    return _Forms(plain, _quantized(job.frozen, job.row, job.scheme, job.samples))


def _golden_answers(job: _Conversion, forms: _Forms) -> _Answers:
    form = forms.shipped
    inputs = first(job.frozen, job.samples, 1 if form.artifact.operators else GOLDENS)
    outputs = form.session.run(inputs)
    check_finite(outputs)
    return _Answers(inputs, outputs, _described(job, forms, inputs, outputs))


def _described(
    job: _Conversion, forms: _Forms, inputs: Samples, outputs: dict[str, Array]
) -> Description:
    return describe(
        job.module,
        job.row,
        forms.shipped.session,
        outputs,
        name=job.name,
        version=job.version,
        labels=job.labels,
        is_int8=forms.int8 is not None,
        size_bytes=forms.shipped.artifact.size_bytes,
        running_bytes=running_bytes(job.frozen.function, inputs),
        model_digest=job.model_digest,
        adapt_steps=job.steps,
    )


def _reported(job: _Conversion, forms: _Forms) -> Report:
    """What the conversion measured; parts that inform and fail become notes."""
    plain, int8 = forms.plain, forms.int8
    resident, failed = attempt("the list of kernels", lambda: residency(forms.shipped.artifact))
    resident = resident or Resident({}, {}, {}, ())
    job.progress("timing float32" + (" and int8 in turn" if int8 else ""))
    latency = _latency(job.frozen, job.row, plain, int8, job.samples)
    if job.labelled is not None:
        job.progress(f"measuring accuracy on {len(job.labelled[1])} samples")
    shares, without_shares = _integer_shares(job, int8)
    return Report(
        name=job.name,
        version=job.version,
        target=job.row.name,
        precision="int8" if int8 else "float32",
        size=_size(plain, int8),
        latency=latency,
        accuracy=_accuracy(job.frozen, plain, forms.shipped, job.labelled),
        layers=_layers(job.frozen, int8, resident, job.row),
        residency=resident,
        machine=_machine(),
        calibration=job.calibration,
        shares=shares,
        notes=(*notes(_converted(job, int8)), *failed, *without_shares),
    )


def _integer_shares(job: _Conversion, int8: _Int8 | None) -> tuple[Shares | None, tuple[str, ...]]:
    if int8 is None:
        return None, ()
    one = first(job.frozen, job.samples, 1)
    return attempt("the share of time on integers", lambda: time_shares(int8.artifact, one))


def _converted(job: _Conversion, int8: _Int8 | None) -> Converted:
    return Converted(
        module=job.module,
        entry=job.entry,
        target=job.row,
        frozen=job.frozen,
        scheme=job.scheme,
        ranges=int8.ranges if int8 else (),
        operators=int8.artifact.operators if int8 else (),
    )


def _bundle(job: _Conversion, forms: _Forms, answers: _Answers, report: Report) -> BundleSpec:
    form = forms.shipped.artifact
    return BundleSpec(
        description=answers.description,
        model=form.model,
        weights=form.weights,
        golden_inputs=answers.inputs,
        golden_outputs=answers.outputs,
        report=report.record(),
        adapt=adapt_graph(job.module, form.weights, job.row.onnx) if job.steps else None,
    )


def read_model(path: str | Path) -> tuple[Module, str]:
    """(module, root digest) of a model file; Corrupt names the damaged part."""
    return load(path), Container(Path(path), kind="model").digest


def open_model(path: Path) -> tuple[Module, str]:
    """As `read_model`; InvalidInput where the file is of another kind than Triplane's."""
    if path.is_file() and not is_container(path):
        raise InvalidInput(
            f"{path.name} is not a model file, or its beginning is damaged; `triplane train` and "
            "`triplane import` write model files (NAME.tpm)"
        )
    return read_model(path)


def _name(module: Module | str | Path, out: str | Path | None) -> str:
    named = out if isinstance(module, Module) else module
    return "model" if named is None else Path(named).stem


def _checked_steps(
    module: Module, entry: str, quantize: str | None, calibration: Any, budgets: Budgets
) -> int:
    """How many steps of adaptation the model begins; InvalidInput where arguments do not fit."""
    if not module.inputs(entry):
        raise InvalidInput(f"{entry!r} takes no input; a bundle answers what it is given")
    _check_arguments(quantize, calibration, budgets)
    steps = adapt_steps(module)
    _check_adapts(steps, quantize)
    return steps


def _check_arguments(quantize: str | None, calibration: Any, budgets: Budgets) -> None:
    if quantize not in {None, "int8"}:
        raise InvalidInput(f"quantize is 'int8' or None for float32, got {quantize!r}")
    if quantize == "int8" and calibration is None:
        raise InvalidInput(
            "int8 learns the range of each tensor from samples; give calibration (--calibrate): "
            "some hundred typical inputs"
        )
    if quantize is None and (budgets.latency_ratio, budgets.size_ratio) != (None, None):
        raise InvalidInput(
            "max_latency_ratio and max_size_ratio compare int8 with float32; ask for quantize "
            "(--quantize int8)"
        )


def _check_adapts(steps: int, quantize: str | None) -> None:
    if steps and quantize is not None:
        raise InvalidInput(
            f"the model is a start point for {steps} steps of adaptation, which need its weights "
            "in float32; convert it without quantize"
        )


def _samples(calibration: Given | None, frozen: Frozen) -> dict[str, Array]:
    if calibration is None:
        return generated(frozen.inputs)
    return as_samples(calibration, frozen.inputs, "the calibration set")


def _form(frozen: Frozen, target: OnnxTarget) -> _Form:
    packed = artifact(frozen, target)
    return _Form(frozen, packed, packed.session())


def _quantized(frozen: Frozen, row: Target, scheme: Scheme, samples: Samples) -> _Int8:
    frozen = expanded(frozen, IN_PARTS)
    sites = find_sites(frozen, row.operators)
    if not sites.integer:
        raise InvalidInput(
            "int8 needs a Conv, Gemm, MatMul or LSTM that it can compute on integers; here "
            f"{_reasons(sites)}: convert without quantize"
        )
    seen = observe(frozen, sites.roots, samples)
    ranges = site_ranges(sites, seen)
    inserted = insert(frozen, sites, ranges, scheme)
    products = [node for node in product_nodes(frozen.function) if node in sites.integer]
    watched = [node.outputs[0] for node in products]
    few = first(frozen, samples, NOISE_SAMPLES)
    levels = noise(frozen, sites, ranges, scheme, watched, few, target=row.onnx_int8)
    form = _form(inserted, row.onnx_int8)
    snr_db = dict(zip(products, levels, strict=True))
    seen_ranges = tuple(seen.values())
    return _Int8(inserted, form.artifact, form.session, frozen, sites, scheme, snr_db, seen_ranges)


def _reasons(sites: Sites) -> str:
    """Why no product can be quantized."""
    reasons = [f"{node.op.name}: {reason}" for node, reason in sites.refused.items()]
    return "; ".join(dict.fromkeys(reasons)) or "is none outside loops and branches"


def _size(plain: _Form, int8: _Int8 | None) -> Size:
    return Size(
        float32=plain.artifact.size_bytes,
        float32_weights=plain.artifact.weight_bytes,
        int8=int8.artifact.size_bytes if int8 else None,
        int8_weights=int8.artifact.weight_bytes if int8 else None,
    )


def _latency(
    frozen: Frozen, row: Target, plain: _Form, int8: _Int8 | None, samples: Samples
) -> Latency:
    return measure_latency(
        plain.session,
        plain.artifact.session(),
        int8.session if int8 else None,
        first(frozen, samples, 1),
        on_target=row.is_here,
    )


def _accuracy(
    frozen: Frozen, plain: _Form, shipped: _Form, labelled: tuple[Samples, Array] | None
) -> Accuracy | None:
    if labelled is None:
        return None
    return measure_accuracy(frozen, plain.session, shipped.session, *labelled)


def _layers(
    frozen: Frozen, int8: _Int8 | None, resident: Resident, row: Target
) -> tuple[Layer, ...]:
    """One row per product, in the function's order."""
    nodes = product_nodes((int8.source if int8 else frozen).function)
    alike = len(nodes) == len(resident.products)
    kernels = resident.products if alike else (UNKNOWN,) * len(nodes)
    return tuple(
        Layer(
            name=_layer_name(node),
            op=node.op.name,
            location=str(node.meta.location or ""),
            kernel=kernel,
            int8=kernel in INTEGER,
            reason=_reason(node, kernel, int8, row),
            snr_db=int8.snr_db.get(node) if int8 else None,
        )
        for node, kernel in zip(nodes, kernels, strict=True)
    )


def _layer_name(node: Node) -> str:
    """The cell's path, else the weight's name, else the operator."""
    weight = node.inputs[1].name if node.inputs[1] is not None else ""
    for suffix in (*FOLDED, ".weight"):
        weight = weight.removesuffix(suffix)
    return node.meta.scope or weight or node.op.name


def _reason(node: Node, kernel: str, int8: _Int8 | None, row: Target) -> str:
    """Why a product stays in float; empty where it does not."""
    if int8 is None or kernel in INTEGER:
        return ""
    if node in int8.sites.refused:
        return int8.sites.refused[node]
    if not row.is_here:
        return f"this machine's onnxruntime has no integer kernel for it; {row.name} may"
    return "onnxruntime found no integer kernel for it"


def _machine() -> dict[str, str]:
    flags = sorted(f for f in cpu_flags() if "vnni" in f or f in {"amx_int8", "i8mm", "asimddp"})
    return {
        "architecture": platform.machine(),
        "runtime": f"onnxruntime {runtime_version()}",
        "threads": "1 thread",
        "int8_instructions": " ".join(flags) or NO_VNNI_FLAGS,
    }


def _calibration_record(calibration: Given | None, samples: Samples) -> dict[str, Any]:
    if calibration is None:
        return {}
    return {"samples": len(next(iter(samples.values()))), "sha256": digest(samples)}


def _written(out: Path, spec: BundleSpec, report: Report) -> Report:
    root = write_bundle(out, spec, check=check_served)
    bundle = Bundle.load(out, expected_digest=root)
    return replace(report, digest=root, content_digest=bundle.content_digest, path=out)
