"""Repeat a conversion and compare the cloud's bundle with what its model and recipe give.

`python -m triplane.cloud.trust.repeating` is the child that converts, so that a conversion which
runs away or dies takes nothing with it. Everything a conversion determines is compared, by digest
of each part; measured figures (the report) are not. Golden outputs hold the last bits of a
processor's arithmetic, so another kind of processor may differ there and nowhere else.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from triplane.proto.errors import Conflict, Corrupt, TriplaneError, Unavailable
from triplane.proto.targets import SignedTarget, TargetName, bundle_target
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.files.manifest import Manifest
from triplane.unified_ir.runtime.bundle import Bundle

CONVERSION_TIMEOUT_S: Final = 3600.0
DEFAULT_ACCURACY_DROP: Final = 1.0
GOLDENS: Final = "goldens.safetensors"
NOT_COMPARED: Final = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Everything that determines a bundle, as files here. Fields as in `registry.Recipe`."""

    model: Path
    name: TargetName
    entry: str = "predict"
    quantize: str = ""
    calibration: Path | None = None
    evaluation: Path | None = None
    max_accuracy_drop: float = 0.0


def checked_target(
    conversion: Conversion,
    bundle: Path,
    work: Path,
    progress: Callable[[str], None] = lambda _: None,
    timeout_s: float = CONVERSION_TIMEOUT_S,
) -> SignedTarget:
    """Return what may be signed for `bundle`: it has the content that the conversion gives here.

    Conflict names the parts that differ. Corrupt: model or bundle are damaged, or are others than
    their names say. Conversion errors are raised as they are told.
    """
    given = _read(bundle, conversion.name)
    model = Container(conversion.model, kind="model")
    if given.description.model_digest != model.digest:
        raise Corrupt(
            f"the bundle of {conversion.name} says it was made of the model file "
            f"{given.description.model_digest[:12]}, the version's is {model.digest[:12]}"
        )
    repeated = work / "repeated.bundle"
    progress(f"repeating the conversion of {conversion.name}")
    convert_in_child(conversion, repeated, timeout_s)
    here = Container(repeated, kind="bundle").manifest
    found = differences(Container(bundle, kind="bundle").manifest, here)
    if found:
        raise Conflict(f"{conversion.name} is not signed: {_verdict(found)}")
    with bundle.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        length = file.tell()
    return bundle_target(
        conversion.name,
        length=length,
        sha256=digest,
        model_digest=bytes.fromhex(model.digest),
        content_digest=bytes.fromhex(given.content_digest),
    )


def differences(cloud: Manifest, here: Manifest) -> dict[str, str]:
    """By part, what differs, of all that a conversion determines."""
    sides = [
        {part.name: part for part in manifest.parts if part.name != NOT_COMPARED}
        for manifest in (cloud, here)
    ]
    found: dict[str, str] = {}
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        theirs, ours = (side.get(name) for side in sides)
        if theirs is None or ours is None:
            found[name] = "only in the cloud's bundle" if theirs else "only in the one made here"
        elif (theirs.size, theirs.sha256) != (ours.size, ours.sha256):
            found[name] = (
                f"{theirs.size} bytes {theirs.sha256.hex()[:12]} there, "
                f"{ours.size} bytes {ours.sha256.hex()[:12]} here"
            )
    if cloud.parent != here.parent:
        found["parent digest"] = f"{cloud.parent[:12]} there, {here.parent[:12]} here"
    return found


def convert_in_child(conversion: Conversion, out: Path, timeout_s: float) -> None:
    """Convert in a process of its own; raises what the child names, Unavailable where it died."""
    order = asdict(conversion) | {"name": asdict(conversion.name), "out": out}
    command = [sys.executable, "-m", "triplane.cloud.trust.repeating"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(order, default=str),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"the conversion took longer than {timeout_s:.0f} s") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-1:]) or f"status {done.returncode}"
        raise Unavailable(f"the conversion of {conversion.name} cannot be repeated here: {tail}")


def _verdict(found: dict[str, str]) -> str:
    parts = "; ".join(f"{name}: {what}" for name, what in found.items())
    if set(found) == {GOLDENS}:
        return (
            f"only the golden outputs differ ({parts}), as they do between kinds of processors; "
            "sign it on a machine of the kind that converted it"
        )
    return (
        f"its content is not what the model and the recipe give here ({parts}). Either the cloud's "
        "software differs from the one here, or somebody changed the bundle"
    )


def _read(path: Path, name: TargetName) -> Bundle:
    bundle = Bundle.load(path)
    said = (bundle.name, bundle.version, bundle.target)
    if said != (name.model, str(name.version), name.target):
        raise Corrupt(f"the bundle says {said[0]}@{said[1]}+{said[2]}, wanted is {name}")
    return bundle


def main() -> None:
    """Convert what standard input describes."""
    from triplane.unified_ir.convert.conversion import convert, read_model
    from triplane.unified_ir.convert.samples import read_labelled, read_samples

    order: dict[str, Any] = json.load(sys.stdin)
    name = TargetName(**order["name"])
    module, digest = read_model(Path(order["model"]))
    inputs = module.inputs(order["entry"])
    calibration, evaluation = order["calibration"], order["evaluation"]
    quantize: Literal["int8"] | None = order["quantize"] or None
    convert(
        module,
        name.target,
        entry=order["entry"],
        quantize=quantize,
        calibration=read_samples(calibration, inputs) if calibration else None,
        evaluation=read_labelled(evaluation, inputs) if evaluation else None,
        name=name.model,
        version=str(name.version),
        max_accuracy_drop=order["max_accuracy_drop"] or DEFAULT_ACCURACY_DROP,
        model_digest=digest,
        out=Path(order["out"]),
    )


if __name__ == "__main__":
    try:
        main()
    except TriplaneError as error:
        sys.exit(f"{type(error).__name__}: {error}".replace("\n", " "))
