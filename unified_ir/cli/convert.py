"""`triplane convert`: from a model file to a bundle for one kind of machine, with a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli import data_options
from triplane.unified_ir.cli.importing import model_or_onnx
from triplane.unified_ir.cli.shell import (
    NOT_NEGATIVE,
    OUTPUT_FILE,
    check_distinct_files,
    check_suffix,
    json_option,
    open_output,
    option,
)
from triplane.unified_ir.convert.targets import TARGET_LIST

if TYPE_CHECKING:
    from collections.abc import Callable

    from triplane.unified_ir.convert import Report
    from triplane.unified_ir.ir import Module

EPILOG = f"""\b
Examples:
  triplane convert digits.tpm --out digits.bundle
  triplane convert digits.tpm --quantize int8 --calibrate digits --evaluate digits --out d.bundle
  triplane convert digits.tpm --quantize int8 --calibrate samples.npz \\
      --evaluate held_out.npz --out digits.bundle --report report.svg
  triplane convert gait.tpm --quantize int8 --calibrate steps.csv --x 'ch*:2x64' --out g.bundle
  triplane convert digits.tpm --calibrate digits --raw-inputs --out d.bundle    takes raw bytes
  triplane convert digits.tpm --plan digits.plan
  triplane convert resnet.onnx --out resnet.bundle           an ONNX model is imported first

\b
int8 stores weights in a quarter of the bytes and is faster for larger networks; small ones become
slower, and the first line of the report says so. It needs --calibrate: a few hundred typical
inputs (such as an .npz with one array per input, or x; no labels needed), from which it learns
ranges. A slower or less accurate result is refused only if it exceeds a --max option; only
--max-accuracy-drop has a default, and it needs --evaluate (such as an .npz with x and y). --x, --y
and the form of samples hold for both.

{data_options.CHOICES}"""


# fmt: off
OPTIONS: Final = (
    option("--target NAME", f"Kind of machine: {TARGET_LIST}.", default="ort-x64"),
    option("--entry NAME", "Function to convert.", default="predict"),
    option("--quantize", "Quantize float32 to integers.", click.Choice(["int8"])),
    option("--calibrate DATA", f"Typical inputs: {data_options.KINDS}."),
    option("--evaluate DATA", "Samples with their classes, to measure accuracy before and after."),
    *data_options.choices(),
    data_options.window_group(),
    *data_options.forms(),
    option("--raw-inputs", "Put the steps from the raw samples of --calibrate (or --evaluate) to "
           "inputs in front of the model, such as pixels / 255: callers send raw samples.",
           is_flag=True),
    option("--out", "The bundle to write; without it, only the report.", OUTPUT_FILE),
    option("--plan", "Also write a plan for training on devices.", OUTPUT_FILE),
    option("--name NAME", "The bundle's name.  [default: that of the model file]"),
    option("--model-version VERSION",
           "The bundle's version; a server uses the newest unless a call names one.", default="1"),
    option("--max-accuracy-drop POINTS",
           "Percentage points that int8 may lose on --evaluate.", NOT_NEGATIVE, default=1.0),
    option("--max-latency-ratio RATIO", "Limit of int8 / float32 time.", NOT_NEGATIVE),
    option("--max-size-ratio RATIO", "Limit of int8 / float32 bytes.", NOT_NEGATIVE),
    option("--reduce-range", "7-bit weights: exact on x64 processors without VNNI, a little less "
           "precise elsewhere.", is_flag=True),
    option("--report", "Write the report's charts as SVG.", OUTPUT_FILE),
    option("--report-json", "Write the report as JSON.", OUTPUT_FILE),
)
# fmt: on


@click.command("convert", epilog=EPILOG, params=[*OPTIONS])
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL")
@json_option
def command(**options: Any) -> None:
    """Convert MODEL (.tpm, or .onnx) for one kind of machine and report the cost.

    The converted graph is compared with the model before anything is written; the bundle holds it
    with its weights, golden samples that a node checks before serving, and the report.
    """
    output = open_output(options["as_json"])
    _check_files(options)
    # The default must not force everybody to give --evaluate; a limit that was typed must be
    # checked.
    stated = click.get_current_context().get_parameter_source("max_accuracy_drop")
    unmeasured = options["quantize"] is not None and options["evaluate"] is None
    if unmeasured and stated is not ParameterSource.DEFAULT:
        raise InvalidInput("--max-accuracy-drop needs labelled data; give --evaluate too")
    module, digest = model_or_onnx(options["model"])
    wants_plan = options["plan"] is not None
    if wants_plan:
        from triplane.unified_ir.convert.plan import export_plan, plan_entries

        plan_entries(module)  # refuse before the bundle is written: all is written, or nothing
    record: dict[str, Any] = {}
    texts = []
    # With --plan alone nothing is converted, measured or reported.
    if not wants_plan or options["out"] is not None or options["quantize"] is not None:
        report = _converted(module, digest, options, output.note)
        record = _record(report)
        texts.append(report.text().rstrip())
        _save_reports(report, record, options)
    if wants_plan:
        plan_digest = export_plan(module, options["plan"], model_digest=digest)
        record["plan"] = {"path": str(options["plan"]), "digest": plan_digest}
        texts.append(f"plan: {options['plan']}, digest {plan_digest}")
    output.result(record, "\n".join(texts))


def _check_files(options: dict[str, Any]) -> None:
    check_distinct_files(
        [options[name] for name in ("model", "calibrate", "evaluate")],
        {
            f"--{name.replace('_', '-')}": options[name]
            for name in ("out", "plan", "report", "report_json")
        },
    )
    check_suffix("--out", options["out"], "bundle")
    check_suffix("--plan", options["plan"], "plan")


def _converted(
    module: Module, digest: str, options: dict[str, Any], progress: Callable[[str], None]
) -> Report:
    from triplane.unified_ir.convert import convert
    from triplane.unified_ir.convert.samples import read_labelled, read_samples
    from triplane.unified_ir.ir.meta import labels_of

    calibration, evaluation = None, None
    if options["raw_inputs"]:
        module, calibration, evaluation = _with_raw_inputs(module, options)
    else:
        inputs = module.inputs(options["entry"])
        choice, names = data_options.reading_by_group(options), labels_of(module.meta)
        if options["calibrate"] is not None:
            unlabelled = {name: value for name, value in choice.items() if name != "y"}
            calibration = read_samples(options["calibrate"], inputs, names, **unlabelled)
        if options["evaluate"] is not None:
            evaluation = read_labelled(options["evaluate"], inputs, names, **choice)
    same = ("entry", "quantize", "max_accuracy_drop", "max_latency_ratio", "max_size_ratio",
            "reduce_range", "out")  # fmt: skip
    return convert(
        module,
        options["target"],
        calibration=calibration,
        evaluation=evaluation,
        name=options["model"].stem if options["name"] is None else options["name"],
        version=options["model_version"],
        model_digest=digest,
        progress=progress,
        **{name: options[name] for name in same},
    )


def _with_raw_inputs(
    module: Module, options: dict[str, Any]
) -> tuple[Module, Any, tuple[Any, Any] | None]:
    """Return the module that takes raw samples, and raw samples for calibration and evaluation."""
    from triplane.unified_ir import data
    from triplane.unified_ir.convert import with_pipeline
    from triplane.unified_ir.convert.samples import raw_columns, unbatched, with_size
    from triplane.unified_ir.data.choosing import class_numbers
    from triplane.unified_ir.ir.meta import labels_of

    entry, choice = options["entry"], data_options.reading_by_group(options)
    sources = [options[name] for name in ("calibrate", "evaluate")]
    inputs = module.inputs(entry)
    read = [s and data.load(s, **with_size(choice, s, inputs)) for s in sources]
    prepared = [dataset for dataset in read if dataset is not None]
    if not prepared:
        raise InvalidInput("--raw-inputs needs --calibrate or --evaluate, whose steps it takes")
    raw = with_pipeline(module, prepared[0], entry)
    inputs = raw.inputs(entry)
    calibration, evaluation = (None if d is None else raw_columns(d, inputs) for d in read)
    if read[1] is None:
        return raw, calibration, None
    return raw, calibration, (evaluation, class_numbers(unbatched(read[1]), labels_of(module.meta)))


def _record(report: Report) -> dict[str, Any]:
    record = report.record()
    if report.path is not None:
        record["bundle"] = {
            "path": str(report.path),
            "digest": report.digest,
            "content_digest": report.content_digest,
        }
    return record


def _save_reports(report: Report, record: dict[str, Any], options: dict[str, Any]) -> None:
    import json

    from triplane.proto.disk import write_atomic

    if options["report"] is not None:
        write_atomic(options["report"], report.svg().encode())
    if options["report_json"] is not None:
        write_atomic(options["report_json"], json.dumps(record, indent=2).encode())
