"""`triplane sign`: work and output; the checks are in `triplane.cloud.trust.signing`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.remote import remote_at
from triplane.cloud.trust.signing import SigningResult, sign_release
from triplane.unified_ir.cli.shell import CommandOutput


def sign(
    cloud: Calls,
    reference: str,
    target: str,
    keys: Path,
    output: CommandOutput,
    *,
    model_digest: bytes = b"",
) -> tuple[dict[str, Any], str]:
    """The record and the text of what was signed. model_digest: the only one to sign, if known."""
    with remote_at(cloud) as remote:
        signed = sign_release(
            remote, reference, target, keys, model_digest=model_digest, progress=output.note
        )
    done = signed.submitted
    record = {
        "published": done.published,
        "signatures": done.signatures,
        "threshold": done.threshold,
        "version": done.version,
        "targets": [
            {
                "path": signed_target.path,
                "sha256": signed_target.sha256.hex(),
                "length": signed_target.length,
                "model_digest": signed_target.custom["model_digest"],
            }
            for signed_target in signed.targets
        ],
    }
    return record, _text(signed)


def _text(signed: SigningResult) -> str:
    done = signed.submitted
    lines = [
        f"{target.path}: sha256 {target.sha256.hex()}, of model {target.custom['model_digest']}"
        for target in signed.targets
    ]
    if done.published:
        lines.append("signed and published; nodes accept it")
    else:
        lines.append(
            f"{done.signatures} of {done.threshold} signatures; the other signers run the same "
            "command"
        )
    return "\n".join(lines)
