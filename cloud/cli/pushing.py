"""What `triplane registry push` does: files up, the version registered, bundles waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from triplane.cloud.cli.connection import Calls, new_key
from triplane.cloud.cli.models import bundle_text
from triplane.cloud.cli.progress import reported
from triplane.cloud.cli.text import enum_text, record
from triplane.proto.errors import InvalidInput, Unavailable
from triplane.proto.registry_pb2 import (
    Bundle,
    GetBundleRequest,
    Lineage,
    PushRequest,
    Recipe,
    Version,
)
from triplane.proto.transfer import upload
from triplane.unified_ir.cli.shell import Output

BUNDLE_WAIT_S: Final = 900.0
BUNDLE_CALL_S: Final = 30.0
ASK_AGAIN_S: Final = 0.2


def push_file(
    cloud: Calls,
    output: Output,
    *,
    file: Path,
    name: str | None,
    aliases: tuple[str, ...],
    quantize: str | None,
    calibrate: Path | None,
    evaluate: Path | None,
    max_accuracy_drop: float,
    entry: str,
    parent: str,
    note: str,
    targets: tuple[str, ...],
) -> tuple[dict[str, Any], str]:
    """The record and the text of the new version."""
    if quantize and calibrate is None:
        raise InvalidInput(
            f"--quantize {quantize} learns its ranges from samples; give --calibrate SAMPLES.npz"
        )
    recipe = Recipe(
        quantize=quantize or "",
        calibration=_sent(cloud, output, calibrate),
        entry=entry,
        max_accuracy_drop=max_accuracy_drop,
        evaluation=_sent(cloud, output, evaluate),
    )
    request = PushRequest(
        model=name or file.stem,
        blob=_sent(cloud, output, file),
        key=new_key(),
        aliases=aliases,
        recipe=recipe,
        lineage=Lineage(parent=parent, source="push", note=note),
    )
    version = cloud.registry.Push(request)
    bundles = [_made(cloud, output, version, target) for target in targets]
    answer = record(version) | {"bundles": [record(bundle) for bundle in bundles]}
    return answer, _text(version, bundles)


def _sent(cloud: Calls, output: Output, file: Path | None) -> bytes:
    if file is None:
        return b""
    with reported(output, f"uploading {file.name}") as progress:
        return upload(cloud.channel, file, progress)


def _made(cloud: Calls, output: Output, version: Version, target: str) -> Bundle:
    reference = f"{version.model}@{version.version}"
    output.note(f"converting {reference} for {target}")
    return wait_for_bundle(cloud, reference, target)


def wait_for_bundle(cloud: Calls, reference: str, target: str) -> Bundle:
    """The finished bundle; asks again while it is being converted."""
    request = GetBundleRequest(reference=reference, target=target)
    deadline_s = time.monotonic() + BUNDLE_WAIT_S
    while time.monotonic() < deadline_s:
        bundle = _asked(cloud, request)
        state = enum_text(bundle, "state") if bundle else "converting"
        if bundle and state == "ready":
            return bundle
        if bundle and state == "failed":
            raise InvalidInput(f"{reference} does not convert for {target}: {bundle.reason}")
        time.sleep(ASK_AGAIN_S)
    raise Unavailable(
        f"the bundle of {reference} for {target} was not ready within {BUNDLE_WAIT_S:.0f} s; the "
        f"conversion goes on, look with: triplane registry show {reference}"
    )


def _asked(cloud: Calls, request: GetBundleRequest) -> Bundle | None:
    """The bundle as far as it is; None where the call's deadline passed first."""
    import grpc

    try:
        return cloud.registry.GetBundle(request, timeout=BUNDLE_CALL_S)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return None


def _text(version: Version, bundles: Sequence[Bundle]) -> str:
    reference = f"{version.model}@{version.version}"
    lines = [f"{reference}: digest {version.model_digest.hex()}"]
    lines += [f"  {bundle_text(bundle)}" for bundle in bundles]
    lines.append(f"Next: triplane deploy {reference} --to SELECTOR")
    return "\n".join(lines)
