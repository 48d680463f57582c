"""Store the first root that a machine trusts, at its enrolment.

All later trust follows from this root, so it must not come from somebody in between. It comes over
TLS from the cloud's main port, which must have a server certificate of the authority that the token
pins. There remains a cloud that is compromised before the machine enrols. Against that `root`
helps: a copy of the root from the folder of the offline keys, from which the cloud's metadata must
follow.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from triplane.proto.channels import connect
from triplane.proto.credentials import IdentityFolder
from triplane.proto.disk import OS_DISK, write_atomic
from triplane.proto.errors import Conflict, Corrupt, Unavailable
from triplane.proto.identity import Token
from triplane.proto.signed.metadata import fetch_over
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed.trust import BOOTSTRAP, Trust, bootstrap
from triplane.proto.unreachable import unreachable_cause

Fetch = Callable[[str], bytes]


def require_one_cloud(identity: IdentityFolder, token: Token, machine: str) -> None:
    """Raise Conflict if the machine has an identity and the token is of another cloud.

    machine: "node" or "device", for the message.
    """
    if not (identity.path / "cert.pem").is_file():
        return
    authority = x509.load_pem_x509_certificate(identity.authority_pem)
    if authority.fingerprint(SHA256()) != token.pin:
        raise Conflict(
            f"{identity.path.parent} is a {machine} of another cloud ({identity.cloud}) than the "
            f"token's; choose another folder with --home, or stop that {machine} and remove its "
            "folder"
        )


def fetch_root(folder: Path, identity: IdentityFolder, machine: str, root: Path | None) -> None:
    """Store the first root of trust in `folder`, unless it has one, from the cloud's main port.

    root: file of the first root, to trust instead of the cloud's own or of the stored one.
    Corrupt: the cloud's metadata does not follow from it. Unavailable: the main port does not
    answer.
    """
    with connect(identity) as channel:
        try:
            _store_root(folder, fetch_over(channel), root)
        except Unavailable as error:
            raise Unavailable(
                f"{identity.name} has its certificate, but the cloud's main port {identity.cloud} "
                f"does not answer as the cloud ({unreachable_cause(str(error)) or error}), so the "
                f"{machine} has no root of trust yet. "
                "Make the port reachable from this machine, and run the same command again"
            ) from error


def _store_root(folder: Path, fetch: Fetch, root: Path | None) -> None:
    if root is None:
        bootstrap(folder, fetch)
        return
    data = root.read_bytes()
    with tempfile.TemporaryDirectory(prefix="triplane-root-") as temporary:
        trial = Path(temporary)
        try:
            bootstrap(trial, lambda _: data)
        except AttemptRefused as refusal:
            raise Corrupt(f"{root} is not a root file: {refusal.text}") from refusal
        # Try the chain in a temporary folder, so that a wrong root leaves no trace in the home.
        freshness = Trust(trial, fetch).refresh()
    if freshness.error is not None:
        raise freshness.error
    if freshness.refusals:
        raise Corrupt(
            f"the cloud's metadata does not follow from {root}: {freshness.refusals[-1].text}; it "
            "belongs to another cloud, or this cloud is controlled by somebody else"
        )
    # Also in the place of a root from an earlier enrolment: the one brought by hand decides, and
    # metadata of another chain beside it does not verify any more.
    OS_DISK.make_folder(folder)
    write_atomic(folder / BOOTSTRAP, data)
