"""Make a machine a node: get its identity for a token, then the first root that it trusts.

A node trusts two things after this, and the enrolment port, which has no TLS, can forge neither.
The authority is the one whose SHA-256 is in the token. The first root comes over TLS from the main
port, which must have a server certificate of that authority for its address. The cloud issues such
certificates only to itself (those of nodes and people are client certificates, whatever their
names), so an impostor who names another address gets a failed handshake. See
`proto/signed/enrolling.py`.
"""

from datetime import UTC, datetime
from pathlib import Path

from triplane.edge.home import NodeHome
from triplane.proto.errors import Conflict
from triplane.proto.identity import IdentityFolder, Token
from triplane.proto.identity import enrol as enrol_at
from triplane.proto.logs import quiet_grpc
from triplane.proto.signed.enrolling import fetch_root, require_one_cloud
from triplane.proto.signed.trust import BOOTSTRAP


def enrol(node: NodeHome, token: str, address: str, root: Path | None = None) -> IdentityFolder:
    """Make `node` an enrolled node of the cloud whose enrolment port is at `address`.

    root: file of the first root, to trust instead of the cloud's own. It can be repeated after an
    interruption. Conflict: the home belongs to another cloud. Corrupt: an impostor answers, or the
    cloud's metadata does not follow from `root`. Unavailable: the main port does not answer.
    """
    quiet_grpc()
    # Before the token is used up: two clouds must not share a home, whose root of trust is fixed.
    require_one_cloud(node.identity, Token.parse(token), "node")
    node.make()
    identity = _identity(node, token, address)
    fetch_root(node.trust, identity, "node", root)
    return identity


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
