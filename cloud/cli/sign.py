"""`triplane sign`: repeat a conversion away from the cloud, and sign a bundle that is the same."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from triplane.cloud.cli.connection import Answer, Calls, calls_cloud
from triplane.cloud.cli.options import DIGEST, keys_option
from triplane.unified_ir.convert.targets import TARGET_LIST

EPILOG = """\b
Example, on a machine other than the cloud's, with the offline folder plugged in:
  triplane sign digits@3 --target ort-x64 --keys /media/usb/triplane-keys --identity ~/signer
  triplane sign digits@3 --model-digest 4f1c...  --keys DIR        only if it is the model you know

\b
What happens: the model file and its recipe are downloaded and verified, the conversion is repeated
on this machine, and the digest of its content is compared with that of the cloud's bundle. Only
then are the bundle's length and SHA-256 signed, so a bundle that somebody manipulated in the cloud
is detected. Another kind of processor can compute other last bits from the same model: sign
bundles for ort-arm64 on such a machine.
The comparison proves that the bundle was made of this model file. Whether that is the model you
trained, only you can tell: `triplane inspect MODEL.tpm` prints its digest where you trained it, and
--model-digest refuses any other.
If the release role needs several signatures, each signer runs this command; the bundle waits until
there are enough.
"""


@click.command("sign", epilog=EPILOG)
@click.argument("reference", metavar="MODEL[@VERSION|@ALIAS]")
@click.option(
    "--target", default="ort-x64", show_default=True, metavar="NAME",
    help=f"Target of the bundle, the kind of machine: {TARGET_LIST}.",
)  # fmt: skip
@keys_option()
@click.option(
    "--model-digest", type=DIGEST, default="", metavar="HEX",
    help="Root digest of the model file that you reviewed; another file is not signed.",
)  # fmt: skip
@calls_cloud
def command(cloud: Calls, *, reference: str, target: str, keys: Path, model_digest: str) -> Answer:
    """Sign a bundle, after repeating its conversion.

    Nodes accept the bundle of a version only with the signatures of the release role.
    """
    from triplane.cloud.cli.remote import remote_at
    from triplane.cloud.trust.signing import sign_release

    known = bytes.fromhex(model_digest)
    with remote_at(cloud) as remote:
        signed = sign_release(
            remote, reference, target, keys, model_digest=known, progress=cloud.output.note
        )
    targets = [
        {
            "path": signed_target.path,
            "sha256": signed_target.sha256.hex(),
            "length": signed_target.length,
            "model_digest": signed_target.custom["model_digest"],
        }
        for signed_target in signed.targets
    ]
    submitted = signed.submitted
    lines = [f"{t['path']}: sha256 {t['sha256']}, of model {t['model_digest']}" for t in targets]
    if submitted.published:
        lines.append("signed and published; nodes accept it")
    else:
        lines.append(
            f"{submitted.signatures} of {submitted.threshold} signatures; the other signers run "
            "the same command"
        )
    return asdict(submitted) | {"targets": targets}, "\n".join(lines)
