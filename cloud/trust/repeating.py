"""Repeat a conversion and compare the result with the cloud's bundle.

The conversion runs in the same kind of child process, under the same limits, as in the cloud. All
parts that it determines are compared by digest; measured figures (the report) are not. Golden
outputs depend on the last bits of a processor's arithmetic, so another kind of processor may differ
there and nowhere else.
"""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from triplane.cloud.registry.conversions import ConversionLimits, Conversions, Files
from triplane.proto.errors import Conflict, Corrupt
from triplane.proto.targets import SignedTarget, TargetName, bundle_target
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.files.manifest import Manifest
from triplane.unified_ir.runtime.bundle import Bundle

LIMITS: Final = ConversionLimits(convert_s=3600.0)
GOLDENS: Final = "goldens.safetensors"
NOT_COMPARED: Final = "report.json"


def checked_target(
    name: TargetName,
    files: Files,
    bundle: Path,
    work: Path,
    progress: Callable[[str], None] = lambda _: None,
    limits: ConversionLimits = LIMITS,
) -> SignedTarget:
    """Return what may be signed for `bundle`, whose content is the one that conversion gives here.

    It runs its own event loop, so do not call it from one. Conflict names the parts that differ.
    Corrupt: the model or the bundle is damaged, or is not the one its name says. Errors of the
    conversion are raised as the child reports them.
    """
    theirs = _read(bundle, name)
    model = Container(files.model, kind="model")
    if theirs.description.model_digest != model.digest:
        raise Corrupt(
            f"the bundle of {name} says it was made of the model file "
            f"{theirs.description.model_digest[:12]}, the version's is {model.digest[:12]}"
        )
    progress(f"repeating the conversion of {name}")
    here = asyncio.run(_repeated(name, files, bytes.fromhex(model.digest), work, limits))
    # Part by part and not by the digest of the file, so that the message can name what differs.
    different = differences(Container(bundle, kind="bundle").manifest, here)
    if different:
        raise Conflict(f"{name} is not signed: {_verdict(different)}")
    with bundle.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        length = file.tell()
    return bundle_target(
        name,
        length=length,
        sha256=digest,
        model_digest=bytes.fromhex(model.digest),
        content_digest=bytes.fromhex(theirs.content_digest),
    )


def differences(cloud: Manifest, here: Manifest) -> dict[str, str]:
    """Return what differs, by part, among the parts that a conversion determines."""
    sides = [
        {part.name: part for part in manifest.parts if part.name != NOT_COMPARED}
        for manifest in (cloud, here)
    ]
    different: dict[str, str] = {}
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        theirs, ours = (side.get(name) for side in sides)
        if theirs is None or ours is None:
            different[name] = (
                "only in the cloud's bundle" if theirs else "only in the one made here"
            )
        elif (theirs.size, theirs.sha256) != (ours.size, ours.sha256):
            different[name] = (
                f"{theirs.size} bytes {theirs.sha256.hex()[:12]} there, "
                f"{ours.size} bytes {ours.sha256.hex()[:12]} here"
            )
    if cloud.parent != here.parent:
        different["parent digest"] = f"{cloud.parent[:12]} there, {here.parent[:12]} here"
    return different


async def _repeated(
    name: TargetName, files: Files, model_digest: bytes, work: Path, limits: ConversionLimits
) -> Manifest:
    conversions = Conversions(work, limits)
    async with conversions.convert(
        files, version=name.version, target=name.target, model_digest=model_digest
    ) as converted:
        return Container(converted.path, kind="bundle").manifest


def _verdict(different: dict[str, str]) -> str:
    parts = "; ".join(f"{name}: {what}" for name, what in different.items())
    if set(different) == {GOLDENS}:
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
        raise Corrupt(f"the bundle says {said[0]}@{said[1]}+{said[2]}, expected {name}")
    return bundle
