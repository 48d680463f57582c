"""The published metadata of one moment, verified along its chain of signatures.

It is verified root by root, then timestamp, snapshot and what the snapshot pins. Signatures,
versions and digests are checked; expiry is not, because the repository and the signers read old
metadata in order to replace it. (Nodes do check expiry; see the agent's trust.)
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from tuf.api._payload import (
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
    VerificationResult,
)
from tuf.api.exceptions import LengthOrHashMismatchError, UnsignedMetadataError
from tuf.api.metadata import Metadata

from triplane.cloud.trust.roles import LATER, MAX_VERSION, PINNED, T, parse
from triplane.proto.errors import Corrupt, NotFound
from triplane.proto.plan_statement import PLAN_ROLES, is_plan
from triplane.proto.roster import ROSTER_PATH, Roster
from triplane.proto.signed_fields import PLANS
from triplane.proto.targets import ROLES, SignedTarget, read_target

MAX_ROTATIONS: Final = 256
ROSTER: Final = "roster"
"""What expires beside the roles."""

Get = Callable[[str], bytes]
"""Returns a metadata file by name; raises NotFound if there is none."""


@dataclass(frozen=True)
class Chain:
    """Verified metadata. targets: the targets metadata by role."""

    root: Metadata[Root]
    timestamp: Metadata[Timestamp]
    snapshot: Metadata[Snapshot]
    targets: Mapping[str, Metadata[Targets]]

    def delegator(self, role: str) -> Root | Targets:
        """Return the metadata that names the keys of a role."""
        return self.root.signed if role in self.root.signed.roles else self.top

    @property
    def top(self) -> Targets:
        """The offline targets role."""
        return self.targets["targets"].signed

    @property
    def roles(self) -> dict[str, Metadata[Any]]:
        """The metadata of every role."""
        return {
            "root": self.root,
            "timestamp": self.timestamp,
            "snapshot": self.snapshot,
            **self.targets,
        }

    @property
    def expiries(self) -> dict[str, float]:
        """When the metadata of each role, and the roster, expire, in seconds since 1970."""
        ends = {role: m.signed.expires.timestamp() for role, m in self.roles.items()}
        return ends | ({ROSTER: float(self.roster.expires_s)} if self.roster else {})

    def is_named(self, role: str) -> bool:
        """Return whether the metadata names the keys of a role."""
        delegations = self.top.delegations
        delegated = (delegations.roles if delegations else None) or {}
        return role in self.root.signed.roles or role in delegated

    def version(self, role: str) -> int:
        """Return the version of a role; 0 for a delegated one that was never signed."""
        metadata = self.roles.get(role)
        return 0 if metadata is None else metadata.signed.version

    def verification(self, role: str, metadata: Metadata[Any]) -> VerificationResult:
        """Return which keys of a role signed some metadata of it."""
        return self.delegator(role).get_verification_result(
            role, metadata.signed_bytes, metadata.signatures
        )

    def is_signed(self, role: str) -> bool:
        """Return whether a published targets role has enough signatures of its present keys."""
        return role in self._signed_roles

    @cached_property
    def bundles(self) -> Mapping[tuple[str, int, str], SignedTarget]:
        """Signed bundles by (model, version, target): by people, or else by the auto key."""
        bundles: dict[tuple[str, int, str], SignedTarget] = {}
        # Reversed, so that `release` overwrites `auto`: what people signed has precedence.
        for role in reversed(ROLES):
            for signed in self._signed_targets(role):
                if not is_plan(signed.path):
                    bundles[signed.name.model, signed.name.version, signed.name.target] = signed
        return bundles

    @cached_property
    def plans(self) -> Mapping[str, SignedTarget]:
        """Signed plans by root digest: by people, or else by the auto key."""
        plans: dict[str, SignedTarget] = {}
        for role in reversed(PLAN_ROLES):
            for signed in self._signed_targets(role):
                if is_plan(signed.path):
                    plans[signed.statement.digest] = signed
        return plans

    @cached_property
    def roster(self) -> Roster | None:
        """The roster of devices that the role `plans` signed, if there is one."""
        return roster_in(self.targets[PLANS].signed.targets) if self.is_signed(PLANS) else None

    def _signed_targets(self, role: str) -> list[SignedTarget]:
        if not self.is_signed(role):
            return []
        entries = self.targets[role].signed.targets
        return [read_target(p, e.length, e.hashes, e.custom) for p, e in entries.items()]

    @cached_property
    def _signed_roles(self) -> frozenset[str]:
        return frozenset(role for role, m in self.targets.items() if self.verification(role, m))


def roster_in(plans: Mapping[str, TargetFile]) -> Roster | None:
    """Return the roster among the entries of the role `plans`, if there is one. Corrupt."""
    entry = plans.get(ROSTER_PATH)
    if entry is None:
        return None
    return read_target(ROSTER_PATH, entry.length, entry.hashes, entry.custom).roster


def newest_root(get: Get, trusted: bytes) -> Metadata[Root]:
    """Return the newest root, reached from a trusted one; each signs the next."""
    root = parse(Root, trusted, "the trusted root")
    verify(root.signed, "root", root, "the trusted root")
    for _ in range(MAX_ROTATIONS):
        name = f"{root.signed.version + 1}.root.json"
        try:
            data = get(name)
        except NotFound:
            return root
        following = parse(Root, data, name)
        if following.signed.version != root.signed.version + 1:
            raise Corrupt(f"{name} says version {following.signed.version}")
        # TUF 5.3: a new root is signed by the keys of the root before and by its own keys.
        verify(root.signed, "root", following, name)
        verify(following.signed, "root", following, name)
        root = following
    raise Corrupt(f"more than {MAX_ROTATIONS} roots follow the trusted one; start from a newer one")


def read(get: Get, root: Metadata[Root]) -> Chain:
    """Read what the timestamp names. Corrupt: a signature, version or digest is wrong.

    Targets roles are pinned by digest, but may lack signatures after a rotation of their keys; see
    `Chain.is_signed`.
    """
    timestamp = parse(Timestamp, get("timestamp.json"), "timestamp.json")
    verify(root.signed, "timestamp", timestamp, "timestamp.json")
    # The pin is checked before the signature, so that only one particular file is parsed.
    snapshot = _pinned(get, Snapshot, "snapshot", timestamp.signed.snapshot_meta)
    verify(root.signed, "snapshot", snapshot, "the snapshot")
    targets: dict[str, Metadata[Targets]] = {}
    for role in PINNED:
        pin = snapshot.signed.meta.get(f"{role}.json")
        if pin is None and role in LATER:
            continue  # nobody has signed it yet; see `rotating`
        if pin is None:
            raise Corrupt(f"snapshot {snapshot.signed.version} does not pin {role}.json")
        targets[role] = _pinned(get, Targets, role, pin)
    return Chain(root, timestamp, snapshot, targets)


def verify(delegator: Root | Targets, role: str, metadata: Metadata[T], what: str) -> None:
    """Raise Corrupt unless enough keys of the delegator signed it."""
    try:
        delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
    except (UnsignedMetadataError, ValueError) as error:
        raise Corrupt(f"{what} is not signed as its delegator requires: {error}") from error


def pin(version: int, data: bytes) -> MetaFile:
    """Return the entry of a snapshot or timestamp for a file: version, length, SHA-256."""
    return MetaFile(version, len(data), {"sha256": hashlib.sha256(data).hexdigest()})


def _pinned(get: Get, kind: type[T], role: str, meta: MetaFile) -> Metadata[T]:
    # Consistent snapshots: the version is part of the name, so a file is never replaced in place.
    name = f"{min(meta.version, MAX_VERSION)}.{role}.json"
    data = get(name)
    try:
        meta.verify_length_and_hashes(data)
    except LengthOrHashMismatchError as error:
        raise Corrupt(f"{name} is not the pinned file: {error}") from error
    metadata = parse(kind, data, name)
    if metadata.signed.version != meta.version:
        raise Corrupt(
            f"{name} says version {metadata.signed.version}, but {meta.version} is pinned"
        )
    return metadata
