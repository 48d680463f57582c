"""`triplane export`: write one function of a model file as an ONNX file for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.importing import SUFFIX
from triplane.unified_ir.cli.shell import (
    COUNT,
    OutputFile,
    check_distinct_files,
    json_option,
    open_output,
    option,
)

if TYPE_CHECKING:
    from triplane.unified_ir.engines.onnx_file import OnnxFile

SHOWN: Final = 8

EPILOG = """\b
Examples:
  triplane export digits.tpm digits.onnx
  triplane export digits.tpm digits.onnx --opset 17 --batch 1
  triplane export digits.tpm step.onnx --entry train_step     a step of training as ONNX

\b
The file takes its name once onnx.checker accepted it and onnxruntime computed the same from it as
from the model file. Weights are inside, up to 2 GB; beyond, they are in MODEL.onnx.data beside it.
Labels and other metadata are among the file's properties. State that the function changes is an
input NAME, whose default is the value in the model file, and an output NAME:next.
"""

OPTIONS: Final = (
    option("--entry NAME", "Function to export.", default="predict"),
    option("--opset N", "Opset of ai.onnx, 17 to 26.", click.IntRange(17, 26), default=21),
    option("--batch N", "A fixed batch size.  [default: any]", COUNT, show_default=False),
)


@click.command("export", epilog=EPILOG, params=[*OPTIONS])
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL.tpm")
@click.argument("out", type=OutputFile(), metavar="MODEL.onnx")
@json_option
def command(
    *, model: Path, out: Path, entry: str, opset: int, batch: int | None, as_json: bool
) -> None:
    """Export one function of MODEL.tpm as MODEL.onnx, for any runtime that reads ONNX."""
    from triplane.unified_ir.convert.conversion import open_model
    from triplane.unified_ir.engines.onnx_file import export_onnx

    output = open_output(as_json)
    check_distinct_files([model], {"MODEL.onnx": out})
    if out.suffix != SUFFIX:
        raise InvalidInput(f"an ONNX file is called NAME{SUFFIX}, got {out.name}")
    module, digest = open_model(model)
    file = export_onnx(module, out, entry=entry, opset=opset, batch=batch)
    record = _record(file, entry, digest)
    if file.data is not None:
        output.note(f"weights beyond 2 GB are in {file.data}; keep the two files together")
    output.result(record, "\n".join(_lines(record)))


def _record(file: OnnxFile, entry: str, digest: str) -> dict[str, Any]:
    return {
        "file": str(file.path),
        "data": None if file.data is None else str(file.data),
        "bytes": file.size_bytes,
        "entry": entry,
        "opset": file.opset,
        "inputs": [str(i) for i in file.inputs],
        "outputs": [str(o) for o in file.outputs],
        "state": list(file.state),
        "difference": file.difference,
        "model_digest": digest,
    }


def _lines(record: dict[str, Any]) -> list[str]:
    size, form = f"{record['bytes']:,} bytes", f"{record['entry']} in opset {record['opset']}"
    error = f"at most {record['difference']:.1g} from the model file"
    lines = [f"{record['file']}: {size}, {form}, {error}"]
    for side, values in (("in ", record["inputs"]), ("out", record["outputs"])):
        lines += [f"  {side}  {text}" for text in values[:SHOWN]]
        if len(values) > SHOWN:
            lines.append(f"  {side}  and {len(values) - SHOWN} more")
    if record["state"]:
        count = len(record["state"])
        lines.append(f"  {count} tensors of state are inputs with defaults; feed NAME:next as NAME")
    return lines
