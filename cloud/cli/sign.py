"""`triplane sign`: repeat a conversion away from the cloud, and sign what came out the same."""

from __future__ import annotations

from pathlib import Path

import click

from triplane.cloud.cli.connection import calls, client_options
from triplane.cloud.cli.options import DIGEST
from triplane.unified_ir.cli.shell import open_output

EPILOG = """\b
Example, on a machine that is not the cloud's, with the offline folder plugged in:
  triplane sign digits@3 --target ort-x64 --keys /media/usb/triplane-keys --identity ~/signer
  triplane sign digits@3 --model-digest 4f1c...  --keys DIR        only if it is the model you know

\b
What happens: the model file and its recipe are downloaded and checked, the conversion is repeated
here, and the digest of its content is compared with that of the cloud's bundle. Only then is the
bundle's length and SHA-256 signed. A cloud that slipped something in is found out by the
comparison. The same model can convert to other last bits on another kind of processor: sign
bundles for ort-arm64 on such a machine.
That the bundle is this model's is checked; that the model is the one you trained, only you can say:
`triplane inspect MODEL.tpm` prints its digest where you trained it; give it as --model-digest.
Where the release role needs several signatures, each signer runs this command; the bundle waits
until they are enough.
"""


@click.command("sign", short_help="Sign a bundle, after repeating its conversion.", epilog=EPILOG)
@click.argument("reference", metavar="MODEL[@VERSION|@ALIAS]")
@click.option(
    "--target", default="ort-x64", show_default=True, metavar="NAME", help="Kind of machine."
)
@click.option(
    "--keys", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR", help="The offline folder that `triplane cloud init` wrote.",
)  # fmt: skip
@click.option(
    "--model-digest", type=DIGEST, default="", metavar="HEX",
    help="Root digest of the model file that you reviewed; another is not signed.",
)  # fmt: skip
@client_options
def command(
    *,
    reference: str,
    target: str,
    keys: Path,
    model_digest: str,
    identity: Path | None,
    as_json: bool,
) -> None:
    """Sign the bundle of a version for one kind of machine, so that nodes accept it."""
    from triplane.cloud.cli.signing import sign

    output = open_output(as_json)
    with calls(identity) as cloud:
        record, text = sign(
            cloud, reference, target, keys, output, model_digest=bytes.fromhex(model_digest)
        )
    output.result(record, text)
