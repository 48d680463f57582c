"""`triplane registry push`: upload files, register the version, wait for its bundles."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triplane.cloud.cli.connection import Calls, new_key, repeated
from triplane.cloud.cli.models import bundle_text
from triplane.cloud.cli.progress import reported
from triplane.cloud.cli.sample_files import sample_files
from triplane.cloud.cli.text import enum_text, record
from triplane.cloud.cli.text import size as size_text
from triplane.cloud.registry.encoding import push_request
from triplane.cloud.registry.names import check_name
from triplane.cloud.registry.values import ConversionRecipe, Lineage, Push
from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.proto.registry_pb2 import Bundle, GetBundleRequest, Version
from triplane.proto.transfer import upload
from triplane.unified_ir.cli.shell import CommandOutput

if TYPE_CHECKING:
    from triplane.unified_ir.ir import Module

BUNDLE_WAIT_S: Final = 3600.0
"""A conversion takes 30 min at most, and others may be waiting before it."""
BUNDLE_CALL_S: Final = 30.0
ASK_AGAIN_S: Final = 0.2
REGISTER_S: Final = 300.0
"""Time to register a small file: a child of the cloud opens it, after those that came before."""
REGISTER_BYTES_PER_S: Final = 8 << 20
"""Additional time for a larger file, which is read and hashed whole."""
LARGE_BYTES: Final = 256 << 20
"""Size from which computing a file's digest takes long enough to report."""
HELD_S: Final = 60.0
"""A cloud notices within 40 s that the sender of an unfinished upload is gone."""
HELD_PAUSE_S: Final = 2.0
NO_DIGEST: Final = bytes(32)
"""Stands for the digest of a file that was not read yet."""


def push_file(
    cloud: Calls,
    *,
    file: Path,
    name: str | None,
    aliases: tuple[str, ...],
    quantize: str | None,
    calibrate: str | None,
    evaluate: str | None,
    choice: Mapping[str, Any],
    max_accuracy_drop: float,
    entry: str,
    parent: str,
    note: str,
    targets: tuple[str, ...],
) -> tuple[dict[str, Any], str]:
    """Register the file as the next version and make its bundles for `targets`.

    calibrate, evaluate, choice: see `sample_files`.
    """
    if quantize and calibrate is None:
        raise InvalidInput(
            f"--quantize {quantize} learns its ranges from samples; give --calibrate DATA"
        )
    # Check everything but the digests before a byte is sent: an upload may take an hour.
    push = Push(
        model=name or _own_name(file),
        blob=NO_DIGEST,
        # One key for the whole push, so a repeated call never registers a second version.
        key=new_key(),
        aliases=aliases,
        recipe=ConversionRecipe(
            quantize=quantize or "",
            calibration=NO_DIGEST if calibrate else b"",
            entry=entry,
            max_accuracy_drop=max_accuracy_drop,
            evaluation=NO_DIGEST if evaluate else b"",
        ),
        lineage=Lineage(parent=parent, note=note),
    )
    _check_request(push, targets)
    module = _read_model(cloud.output, file)
    with sample_files(module, entry, calibrate, evaluate, choice) as samples:
        recipe = replace(
            push.recipe,
            calibration=_sent(cloud, samples.calibration),
            evaluation=_sent(cloud, samples.evaluation),
        )
    version = _registered(
        cloud, replace(push, blob=_sent(cloud, file), recipe=recipe), file.stat().st_size
    )
    bundles = [_converted_bundle(cloud, version, target) for target in targets]
    answer = record(version) | {"bundles": [record(bundle) for bundle in bundles]}
    return answer, _text(version, bundles)


def _own_name(file: Path) -> str:
    """Return the file's name without its suffix. InvalidInput: it cannot name a model."""
    try:
        check_name("model", file.stem)
    except InvalidInput as error:
        raise InvalidInput(f"{error}; name the model with --name") from error
    return file.stem


def _check_request(push: Push, targets: Sequence[str]) -> None:
    """Refuse what the cloud would refuse after the upload and `Push` does not check."""
    from triplane.unified_ir.convert.targets import target_row

    try:
        push.lineage.note.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("--note is not valid UTF-8; write it in UTF-8") from error
    for target in targets:
        target_row(target)


def _read_model(output: CommandOutput, file: Path) -> Module:
    """Read the file as the cloud will, before a byte of it is sent."""
    from triplane.unified_ir.convert.conversion import open_model

    if file.stat().st_size >= LARGE_BYTES:
        output.note(f"checking {file.name} ({size_text(file.stat().st_size)})")
    return open_model(file)[0]


def register_within_s(size_bytes: int) -> float:
    """Return how long a cloud may take to check and register a file of that size, in seconds."""
    return REGISTER_S + size_bytes / REGISTER_BYTES_PER_S


def _registered(cloud: Calls, push: Push, size_bytes: int) -> Version:
    """Register the version; if the connection breaks, repeat the call under the same key."""
    cloud.output.note(f"the cloud checks {push.model} ({size_text(size_bytes)}) and registers it")
    request, within_s = push_request(push), register_within_s(size_bytes)
    return repeated(lambda: cloud.registry.Push(request, timeout=within_s))


def _sent(cloud: Calls, file: Path | None) -> bytes:
    """Upload a file and return its digest; empty for no file."""
    if file is None:
        return b""
    if file.stat().st_size >= LARGE_BYTES:
        cloud.output.note(f"reading {file.name} ({size_text(file.stat().st_size)}) for its digest")
    until_s = time.monotonic() + HELD_S
    while True:
        try:
            with reported(cloud.output, f"uploading {file.name}") as progress:
                return upload(cloud.channel, file, progress)
        except Conflict as error:
            # The cloud may still hold the upload of a killed sender, until its keepalive notices.
            if time.monotonic() >= until_s:
                raise
            cloud.output.note(f"{error}; the cloud may not know yet that its sender is gone")
            time.sleep(HELD_PAUSE_S)


def _converted_bundle(cloud: Calls, version: Version, target: str) -> Bundle:
    reference = f"{version.model}@{version.version}"
    cloud.output.note(f"converting {reference} for {target}")
    return wait_for_bundle(cloud, reference, target)


def wait_for_bundle(cloud: Calls, reference: str, target: str) -> Bundle:
    """Return the finished bundle; poll while it is being converted."""
    request = GetBundleRequest(reference=reference, target=target)
    deadline_s = time.monotonic() + BUNDLE_WAIT_S
    while time.monotonic() < deadline_s:
        bundle = _poll(cloud, request)
        state = enum_text(bundle, "state") if bundle else "converting"
        if bundle and state == "ready":
            return bundle
        if bundle and state == "failed":
            raise InvalidInput(f"{reference} does not convert for {target}: {bundle.reason}")
        time.sleep(ASK_AGAIN_S)
    raise Unavailable(
        f"the bundle of {reference} for {target} was not ready within {BUNDLE_WAIT_S:.0f} s; the "
        f"conversion continues, check it with: triplane registry show {reference}"
    )


def _poll(cloud: Calls, request: GetBundleRequest) -> Bundle | None:
    """Return the bundle in its current state; None if the call's deadline passed first."""
    import grpc

    try:
        return cloud.registry.GetBundle(request, timeout=BUNDLE_CALL_S)
    except grpc.RpcError as error:
        # A conversion outlasts a call; the loop in `wait_for_bundle` asks again.
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return None


def _text(version: Version, bundles: Sequence[Bundle]) -> str:
    reference = f"{version.model}@{version.version}"
    lines = [f"{reference}: digest {version.model_digest.hex()}"]
    lines += [f"  {bundle_text(bundle)}" for bundle in bundles]
    lines.append(
        f"Next, where the keys are: triplane sign {reference} --keys DIR; then: "
        f"triplane deploy {reference} --to SELECTOR"
    )
    return "\n".join(lines)
