"""The child that opens model files: `python -m triplane.cloud.registry.converting`.

It reads one order (a line of JSON) from standard input and answers with one line on standard
output. It applies the order's limits to itself before it opens anything, and ends with its whole
process group when standard input closes, which happens when the cloud ends. Bytes of a model file
are never parsed in the cloud's own process.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

from triplane.proto.errors import Corrupt
from triplane.proto.sandbox import serve_order

DEFAULT_DROP_POINTS: Final = 1.0
"""The converter's own default, for which 0 in a recipe stands."""


def check(order: dict[str, Any]) -> dict[str, Any]:
    """Verify every byte of a model file, the types of its functions, and its samples."""
    from triplane.unified_ir.convert.conversion import read_model

    module, digest = read_model(Path(order["model"]))
    _samples(order, module)
    return {"model_digest": digest}


def convert(order: dict[str, Any]) -> dict[str, Any]:
    """Make the bundle at `order["out"]`, and its report at `order["report"]`.

    The measured figures of a report are those of `order["kept_report"]`, if that is given.
    """
    from triplane.unified_ir.convert.conversion import convert as run
    from triplane.unified_ir.convert.conversion import read_model
    from triplane.unified_ir.runtime.bundle import Bundle, encoded_report, write_with_report

    module, digest = read_model(Path(order["model"]))
    # The file is read again, maybe years after its check, so make sure that it is the same one.
    if digest != order["model_digest"]:
        raise Corrupt(
            f"the stored model file is {digest}, the version's is {order['model_digest']}"
        )
    calibration, evaluation = _samples(order, module)
    quantize: Literal["int8"] | None = order["quantize"] or None
    out = Path(order["out"])
    run(
        module,
        order["target"],
        entry=order["entry"],
        quantize=quantize,
        calibration=calibration,
        evaluation=evaluation,
        name=order["name"],
        version=order["version"],
        max_accuracy_drop=order["max_accuracy_drop"] or DEFAULT_DROP_POINTS,
        model_digest=digest,
        out=out,
    )
    if order["kept_report"]:
        measured = out.rename(out.with_suffix(".measured"))
        write_with_report(measured, out, Path(order["kept_report"]).read_bytes())
    bundle = Bundle.load(out)
    Path(order["report"]).write_bytes(encoded_report(bundle.report))
    return {
        "size": out.stat().st_size,
        "root_digest": bundle.digest,
        "content_digest": bundle.content_digest,
        "needs": asdict(bundle.description.constraints),
    }


def _samples(order: dict[str, Any], module: Any) -> tuple[Any, Any]:
    """Load the recipe's samples for the entry, validated against its inputs."""
    from triplane.unified_ir.convert.samples import read_labelled, read_samples

    inputs = module.inputs(order["entry"])
    calibration, evaluation = order["calibration"], order["evaluation"]
    return (
        read_samples(calibration, inputs) if calibration else None,
        read_labelled(evaluation, inputs) if evaluation else None,
    )


WORK: Final = {"check": check, "convert": convert}

if __name__ == "__main__":
    serve_order(WORK)
