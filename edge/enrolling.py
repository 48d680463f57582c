"""Make a machine a node: get its identity for a token, then the first root that it trusts.

A node trusts two things after this, and the enrolment port, which has no TLS, can forge neither.
The authority is the one whose SHA-256 is in the token. The first root comes over TLS from the main
port, which must have a server certificate of that authority for its address. The cloud issues such
certificates only to itself (those of nodes and people are client certificates, whatever their
names), so an impostor who names another address gets a failed handshake. There remains a cloud that
is compromised before the node enrols. Against that `root` helps: a copy of the root from the folder
of the offline keys, from which the cloud's metadata must follow.
"""

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from triplane.edge.agent.metadata import fetch_over
from triplane.edge.agent.refusal import AttemptRefused
from triplane.edge.agent.trust import BOOTSTRAP, Trust, bootstrap
from triplane.edge.home import NodeHome
from triplane.proto.channels import connect
from triplane.proto.errors import Conflict, Corrupt, Unavailable
from triplane.proto.identity import IdentityFolder, Token
from triplane.proto.identity import enrol as enrol_at
from triplane.proto.logs import quiet_grpc
from triplane.proto.unreachable import unreachable_cause

Fetch = Callable[[str], bytes]


def enrol(node: NodeHome, token: str, address: str, root: Path | None = None) -> IdentityFolder:
    """Make `node` an enrolled node of the cloud whose enrolment port is at `address`.

    root: file of the first root, to trust instead of the cloud's own. It can be repeated after an
    interruption. Conflict: the home belongs to another cloud. Corrupt: an impostor answers, or the
    cloud's metadata does not follow from `root`. Unavailable: the main port does not answer.
    """
    quiet_grpc()
    # Before the token is used up: two clouds must not share a home, whose root of trust is fixed.
    _require_one_cloud(node, Token.parse(token))
    node.make()
    identity = _identity(node, token, address)
    with connect(identity) as channel:
        try:
            _store_root(node, fetch_over(channel), root)
        except Unavailable as error:
            raise Unavailable(
                f"{identity.name} has its certificate, but the cloud's main port {identity.cloud} "
                f"does not answer as the cloud ({unreachable_cause(str(error)) or error}), so the "
                "node has no root of trust yet. "
                "Make the port reachable from this machine, and run the same command again"
            ) from error
    return identity


def _require_one_cloud(node: NodeHome, token: Token) -> None:
    if not (node.trust / BOOTSTRAP).exists():
        return
    authority = x509.load_pem_x509_certificate(node.identity.authority_pem)
    if authority.fingerprint(SHA256()) != token.pin:
        raise Conflict(
            f"{node.path} is a node of another cloud ({node.identity.cloud}) than the token's; "
            "choose another folder with --home, or stop that node and remove its folder"
        )


def _identity(node: NodeHome, token: str, address: str) -> IdentityFolder:
    """Return the identity for the token, or the one that it gave in an interrupted attempt."""
    try:
        return enrol_at(token, address, node.identity.path, kind="node")
    except Conflict as error:
        if not node.is_enrolled:
            raise
        # The token was used by an interrupted attempt of this node, which has stored its
        # certificate.
        identity = node.identity.load()
        if (node.trust / BOOTSTRAP).exists():
            ends = f"{datetime.fromtimestamp(identity.expires_s, UTC):%Y-%m-%d}"
            raise Conflict(
                f"{node.path} is enrolled already, as {identity.name} of {identity.cloud}, with a "
                f"certificate until {ends}, and this token is used up; start the node with: "
                f"triplane edge up --home {node.path}"
            ) from error
        return identity


def _store_root(node: NodeHome, fetch: Fetch, root: Path | None) -> None:
    if root is None:
        bootstrap(node.trust, fetch)
        return
    data = root.read_bytes()
    with tempfile.TemporaryDirectory(prefix="triplane-root-") as folder:
        trial = Path(folder)
        try:
            bootstrap(trial, lambda _: data)
        except AttemptRefused as refusal:
            raise Corrupt(f"{root} is not a root file: {refusal.text}") from refusal
        # Try the chain in a temporary folder, so that a wrong root leaves no trace in the node's
        # home.
        freshness = Trust(trial, fetch).refresh()
    if freshness.error is not None:
        raise freshness.error
    if freshness.refusals:
        raise Corrupt(
            f"the cloud's metadata does not follow from {root}: {freshness.refusals[-1].text}; it "
            "belongs to another cloud, or this cloud is controlled by somebody else"
        )
    bootstrap(node.trust, lambda _: data)
