"""`triplane import`: convert an ONNX model with its weights to a model file."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.shell import (
    OUTPUT_FILE,
    check_distinct_files,
    check_suffix,
    json_option,
    open_output,
    option,
)

if TYPE_CHECKING:
    from triplane.unified_ir.ir import Module

SUFFIX: Final = ".onnx"
SHOWN: Final = 3
"""Number of names that a line shows."""

EPILOG = """\b
Examples:
  triplane import resnet.onnx --out resnet.tpm
  triplane import detector.onnx --shape image=N,3,H,W --out detector.tpm
  triplane import resnet.onnx --output /avgpool/Flatten_output_0 --out features.tpm

\b
  triplane import llama.onnx --frozen "*.embed_tokens.*" --out llama.tpm
  triplane import gpt2.onnx --tie "*" --out gpt2.tpm

\b
Opsets 7 to 26, any IR version; weights may be in files beside the model. How the graph uses a
tensor decides whether it becomes a parameter, or a buffer (running statistics, masks, position
tables); --trainable and --frozen override this. `triplane train resnet.onnx` trains them further.
If a node cannot be imported, the error names its operator and opset, and nothing is written.
"""


# fmt: off
OPTIONS: Final = (
    option("--out", "The model file to write (NAME.tpm).", OUTPUT_FILE, required=True),
    option("--shape INPUT=SIZES", "Sizes of an input, numbers or names: image=N,3,224,224; may be "
           "repeated.", name="shapes", multiple=True),
    option("--output NAME", "A value to use as output instead of the model's outputs; may be "
           "repeated.", name="outputs", multiple=True),
    option("--trainable PATTERN", "Weights to train however they are used, by name with * for any "
           "part; may be repeated. Running statistics are not trained.", multiple=True),
    option("--frozen PATTERN",
           "Weights not to train; --trainable takes precedence; may be repeated.", multiple=True),
    option("--tie PATTERN", "Weights to share where they are equal, by name with * for any part; "
           "may be repeated.", multiple=True),
)
# fmt: on


@click.command("import", epilog=EPILOG, params=[*OPTIONS])
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL.onnx")
@json_option
def command(*, model: Path, out: Path, as_json: bool, **options: tuple[str, ...]) -> None:
    """Import MODEL.onnx into one model file that trains, converts and deploys like any other."""
    from triplane.unified_ir.onnx import import_onnx
    from triplane.unified_ir.ops.check import save

    output = open_output(as_json)
    check_distinct_files([model], {"--out": out})
    check_suffix("--out", out, "model file")
    shapes, outputs = _shapes(options.pop("shapes")), list(options.pop("outputs")) or None
    module = import_onnx(model, shapes=shapes, outputs=outputs, **options)
    digest = save(module, out)
    record = {"model": str(out), "digest": digest, "bytes": out.stat().st_size}
    record |= _record(module, options["trainable"])
    output.result(record, "\n".join(_lines(record)))


def model_or_onnx(path: Path) -> tuple[Module, str]:
    """Return the module of a model file or an ONNX model; only the former has a root digest."""
    from triplane.unified_ir.convert.conversion import open_model
    from triplane.unified_ir.onnx import import_onnx

    # "": an imported module was never in a file, so it has no digest that could be a parent.
    return (import_onnx(path), "") if path.suffix == SUFFIX else open_model(path)


def _record(module: Module, trainable: tuple[str, ...]) -> dict[str, Any]:
    from triplane.unified_ir.ir import Role
    from triplane.unified_ir.onnx.twins import equal_weights

    function = module.entry("predict")
    results = zip(function.result_names, function.results, strict=True)
    return {
        "nodes": sum(1 for _ in function.walk()),
        "inputs": {p.name: str(p.type) for p in module.inputs("predict")},
        "outputs": {name: str(value.type) for name, value in results},
        "parameters": sum(t.array.size for t in module.state.values() if t.role == "parameter"),
        "roles": {
            str(role): [name for name, t in module.state.items() if t.role is role]
            for role in (Role.PARAMETER, Role.BUFFER)
        },
        "statistics": [
            name
            for name in _statistics(module)
            if any(fnmatchcase(name, pattern) for pattern in trainable)
        ],
        "equal": [list(group) for group in equal_weights(module.state)],
    }


def _lines(record: dict[str, Any]) -> list[str]:
    trained, kept = (record["roles"][name] for name in ("parameter", "buffer"))
    return [
        f"{record['model']}: {record['nodes']} nodes, {record['parameters']:,} parameters",
        f"  trained: {len(trained)} tensors; not trained: {len(kept)} ({_some(kept)})",
        *_notes(record),
        *(f"  in   {name}: {type_}" for name, type_ in record["inputs"].items()),
        *(f"  out  {name}: {type_}" for name, type_ in record["outputs"].items()),
        f"root digest  {record['digest']}",
    ]


def _statistics(module: Module) -> list[str]:
    """Return the names of the running statistics that batch normalization reads."""
    norms = (n for n in module.entry("predict").walk() if n.op.name == "BatchNormalization")
    names = {v.name for node in norms for v in node.inputs[3:5] if v is not None}
    return [name for name in module.state if name in names]


def _notes(record: dict[str, Any]) -> Iterator[str]:
    """Return lines about weights whose training may differ from what the user expects."""
    if record["statistics"]:
        yield (
            "  --trainable matches running statistics, which have no gradients and do not change: "
            f"{_some(record['statistics'])}"
        )
    for group in record["equal"]:
        yield (
            f"  {len(group)} tensors are equal bit for bit: {_some(group)}; they train separately "
            "(--tie makes them one weight)"
        )


def _some(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(names[:SHOWN]) or "none"
    return f"{shown}, ... see --json" if len(names) > SHOWN else shown


def _shapes(texts: tuple[str, ...]) -> dict[str, tuple[int | str, ...]]:
    shapes: dict[str, tuple[int | str, ...]] = {}
    for text in texts:
        # The last "=", because names of inputs may contain one.
        name, equals, sizes = text.rpartition("=")
        parts = [part.strip() for part in sizes.split(",")] if sizes.strip() else []
        if not equals or not name or not all(parts):
            raise InvalidInput(f"--shape is INPUT=SIZES such as image=N,3,224,224, got {text!r}")
        if name in shapes:
            raise InvalidInput(f"--shape names {name!r} twice; name each input once")
        shapes[name] = tuple(int(p) if p.isdecimal() else p for p in parts)
    return shapes
