"""The cloud's metadata: read by nodes, changed by submitted versions and by the online keys.

A submitted version is verified completely before anything changes. A publication writes the new
files under names that nobody reads yet, and the timestamp last. Readers in this process get the
timestamp and the newest root from memory, replaced in one assignment, so a reader sees the old
state or the new one. A crash between two writes leaves the old state or, once a new root is
written, a state that opening the repository completes.

Calls may come from any thread. They wait for the disk: from an event loop, run them in a thread.
"""

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tuf.api._payload import Root, Snapshot, TargetFile, Targets, Timestamp
from tuf.api.metadata import Metadata

from triplane.cloud.trust import chain as chains
from triplane.cloud.trust.auto_plans import without_old_plans
from triplane.cloud.trust.chain import Chain
from triplane.cloud.trust.checks import (
    check,
    read_plan_policy,
    read_policy,
    valid_signatures,
)
from triplane.cloud.trust.initial import TRUSTED_ROOT
from triplane.cloud.trust.keys import KeyFolder, add_signatures
from triplane.cloud.trust.roles import (
    MAX_VERSION,
    PINNED,
    ROLES,
    Lists,
    MetadataRole,
    expiry,
    parse,
    submitted_role,
)
from triplane.proto.disk import OS_DISK, Disk, write_atomic
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.plan_statement import (
    PLAN_POLICY_PATH,
    PlanPolicy,
    PlanStatement,
)
from triplane.proto.roster import Roster
from triplane.proto.signed_fields import AUTO
from triplane.proto.targets import (
    POLICY_PATH,
    Policy,
    SignedTarget,
    TargetName,
    bundle_target,
    plan_target,
    read_target,
)

KEPT_VERSIONS: Final = 8
"""Number of superseded versions of each file kept for nodes in the middle of a refresh."""
FRESH_SHARE: Final = 0.25
"""Share of its lifetime after which online metadata is signed again."""
MAX_OVERTAKEN: Final = 10_000
"""Largest lead of a node's version that is trusted: more could exhaust the numbers."""
REMEMBERED: Final = {"timestamp": ("timestamp",), "snapshot": ("snapshot", "timestamp")}
"""The roles from whose signatures a node learns the newest version of an online role."""

_NONE: Final[Mapping[str, int]] = MappingProxyType({})
_NAME: Final = re.compile(
    r"(?:[1-9][0-9]{0,9}\.(?:root|snapshot|targets|release|auto|plans)|timestamp|root)\.json"
)


@dataclass(frozen=True, slots=True)
class Submitted:
    """The outcome of a submission. signatures: valid ones, of `threshold` needed."""

    published: bool
    signatures: int
    threshold: int
    version: int


@dataclass(frozen=True, slots=True)
class Pending:
    """The version that the next signer of a role starts from."""

    metadata: bytes
    published: bool
    signatures: int
    threshold: int


class MetadataRepository:
    """The metadata in a folder, and the keys that the cloud itself signs with."""

    def __init__(
        self,
        metadata_folder: Path,
        online_keys_folder: Path,
        disk: Disk = OS_DISK,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open what `initialize` wrote and complete a publication that was cut off.

        Corrupt: metadata on the disk is damaged; restore the folder from a copy.
        """
        self._folder, self._disk, self._clock = metadata_folder, disk, clock
        self._keys = KeyFolder(online_keys_folder, disk)
        self._pending_folder = metadata_folder / "pending"
        disk.make_folder(self._pending_folder)
        self._lock = threading.Lock()
        self._on_published: list[Callable[[str], None]] = []
        root, self._chain = self._open()
        self._timestamp = self._file("timestamp.json")
        # A crash came after the new root was written and before its timestamp: publish it now.
        if root.signed.version != self._chain.root.signed.version:
            self._publish({"root": root}, clock())

    # Reading

    def get(self, name: str) -> bytes:
        """Return a published file; `root.json` is the newest root. NotFound, InvalidInput."""
        if not _NAME.fullmatch(name):
            raise InvalidInput(
                f"metadata files are timestamp.json, root.json and VERSION.ROLE.json, "
                f"got {name[:100]!r}"
            )
        newest = self._chain.root.signed.version
        if name == "timestamp.json":
            return self._timestamp
        if name == TRUSTED_ROOT:
            name = f"{newest}.root.json"
        # It may be on the disk already, but readers must not see it before the timestamp.
        if name.endswith(".root.json") and int(name.split(".")[0]) > newest:
            raise NotFound(f"{name} is not published; the newest root is {newest}")
        return self._file(name)

    def policy(self) -> Policy:
        """Return the policy, which says what the auto role may release."""
        return read_policy(self._chain.top)

    def find_signed(self, model: str, version: int, target: str) -> SignedTarget | None:
        """Return the bundle that people signed, or else the auto key, or None."""
        return self._chain.bundles.get((model, version, target))

    def signed_bundles(self) -> Mapping[tuple[str, int, str], SignedTarget]:
        """Return all signed bundles, as `find_signed` finds them, by (model, version, target)."""
        return self._chain.bundles

    def golden_sets(self) -> set[bytes]:
        """Return the digests of samples that published, superseded or waiting targets list."""
        with self._lock:
            waiting = self._pending_file(ROLES["targets"])
            files = [
                *self._folder.glob("*.targets.json"),
                *([waiting] if waiting.is_file() else []),
            ]
            return {name for file in files for name in golden_sets(file.read_bytes())}

    def expiries(self) -> dict[str, float]:
        """Return when what is published expires; see `Chain.expiries`."""
        return self._chain.expiries

    def versions(self) -> dict[str, int]:
        """Return the published version of each role except the root."""
        return {r: m.signed.version for r, m in self._chain.roles.items() if r != "root"}

    def pending(self, role: str) -> Pending:
        """Return the version of a role that waits for signatures, or else the published one."""
        row = submitted_role(role)
        with self._lock:
            waiting = self._waiting(row)
            if waiting is not None:
                _, have, need = valid_signatures(row, waiting, self._chain)
                return Pending(waiting.to_bytes(), published=False, signatures=have, threshold=need)
            published = self._published(row)
            # A role of which nothing was signed yet has no file.
            version = published.version
            data = self._file(f"{version}.{role}.json") if version else b""
            return Pending(data, True, published.signatures, published.threshold)

    # Changing

    def on_published(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the role after a submitted or automatic version was published."""
        self._on_published.append(callback)

    def submit(self, role: str, data: bytes, auto: Lists = Lists.CARRIED) -> Submitted:
        """Accept a new version of a role with at least one valid signature.

        It is published at the threshold; below it, it is stored until further signatures arrive.
        auto: what becomes of the list of `auto` when new targets replace its keys. Dropped is what
        somebody else may have signed; the cloud must have the new key (NotFound).
        Submitting the published version again is no error. InvalidInput: it breaks a rule, and
        nothing changed. Conflict: another version with more signatures waits.
        """
        row = submitted_role(role)
        try:
            metadata = parse(row.kind, data, role)
        except Corrupt as error:
            raise InvalidInput(str(error)) from error
        with self._lock:
            # A repeated submission, whose first answer may have been lost.
            published = self._chain.roles.get(role)
            if published is not None and metadata.signed_bytes == published.signed_bytes:
                submitted = self._published(row)
            else:
                submitted = self._submit(row, metadata, auto)
        # Outside the lock: callbacks may call this repository.
        if submitted.published:
            self._tell(role)
        return submitted

    def sign_auto(
        self,
        model: str,
        version: int,
        target: str,
        *,
        length: int,
        sha256: bytes,
        model_digest: bytes,
        content_digest: bytes,
    ) -> SignedTarget:
        """Sign a bundle with the online key and publish it.

        Conflict: the policy has no rule for the model, so nodes would refuse; or the same version
        was signed with other content.
        """
        target_file = bundle_target(
            TargetName(AUTO, model, version, target),
            length=length,
            sha256=sha256,
            model_digest=model_digest,
            content_digest=content_digest,
        )
        with self._lock:
            is_new = self._sign_auto(target_file)
        if is_new:
            self._tell(AUTO)
        return target_file

    def plan_policy(self) -> PlanPolicy:
        """Return the policy for plans, which says what the auto role may sign of them."""
        return read_plan_policy(self._chain.top)

    def find_plan(self, digest: str) -> SignedTarget | None:
        """Return the plan of this root digest that people signed, or else the auto key, or None."""
        return self._chain.plans.get(digest)

    def roster(self) -> Roster | None:
        """Return the roster of devices, if people have signed one that is valid now."""
        roster = self._chain.roster
        return None if roster is None or roster.is_expired(self._clock()) else roster

    def sign_auto_plan(
        self,
        statement: PlanStatement,
        *,
        length: int,
        sha256: bytes,
        keep: Container[str] = (),
    ) -> SignedTarget:
        """Sign a plan with the online key and publish it.

        keep: digests of plans that are in use. Conflict: the policy does not allow it, so devices
        would refuse it.
        """
        refusal = self.plan_policy().refusal(statement)
        if refusal:
            raise Conflict(f"the plan policy does not allow it: {refusal}")
        target = plan_target(AUTO, statement, length=length, sha256=sha256)
        with self._lock:
            listed = dict(self._chain.targets[AUTO].signed.targets)
            entry = listed.get(target.path)
            is_new = not self._chain.is_signed(AUTO) or entry != target_file(target)
            if is_new:
                listed[target.path] = target_file(target)
                self._publish_auto(without_old_plans(listed, {target.path}, keep))
        if is_new:
            self._tell(AUTO)
        return target

    def is_behind(self, seen: Mapping[str, int], sha256: bytes) -> bool:
        """Return whether a node has seen higher versions, or the same timestamp with other content.

        sha256: digest of the timestamp that it has.
        """
        ours = self.versions()
        if any(version > ours.get(role, version) for role, version in seen.items()):
            return True
        same = seen.get("timestamp") == ours["timestamp"]
        return bool(sha256) and same and sha256 != hashlib.sha256(self._timestamp).digest()

    def overtake(self, seen: Mapping[str, int]) -> bool:
        """Publish what the online keys sign under higher versions than a node has seen.

        A cloud that was restored from a backup continues with the version numbers of the backup.
        Nodes refuse versions below those that they know, and keep their own at an equal one. Only
        the numbers change, by `MAX_OVERTAKEN` at most; what offline keys sign does not change.
        Returns False if the node is too far ahead.
        """
        now_s = self._clock()
        with self._lock:
            ours, ahead = self.versions(), self._followed(seen)
            if not ahead:
                return False
            changed = {}
            if ahead.get(AUTO, 0) > ours[AUTO] and self._can_sign_auto():
                changed[AUTO] = self._again(now_s, ahead[AUTO])
            self._publish(changed, now_s, least=ahead)
            return True

    def lead(self, seen: Mapping[str, int]) -> int:
        """Return by how much `overtake` would raise a version."""
        ours = self.versions()
        return max((v - ours[role] for role, v in self._followed(seen).items()), default=0)

    def _followed(self, seen: Mapping[str, int]) -> dict[str, int]:
        ours = self.versions()
        return {
            role: version
            for role, version in seen.items()
            if role in {"timestamp", "snapshot", AUTO}
            and 0 <= version - ours[role] <= MAX_OVERTAKEN
        }

    def keep_fresh(self, now_s: float | None = None) -> float:
        """Sign online metadata again before it expires; return when to call again."""
        now = self._clock() if now_s is None else now_s
        with self._lock:
            stale = {role for role, due in self._due().items() if due <= now}
            if stale:
                changed = {AUTO: self._again(now)} if AUTO in stale else {}
                self._publish(changed, now, renew_snapshot=bool(stale - {"timestamp"}))
            return min(self._due().values())

    # All methods below are called with the lock held.

    def _open(self) -> tuple[Metadata[Root], Chain]:
        """Return the newest root, and the chain under it (after a crash: under the root before)."""
        first = self._file("1.root.json")
        root = chains.newest_root(self._file, first)
        try:
            return root, chains.read(self._file, root)
        except Corrupt:
            if root.signed.version == 1:
                raise
        before = parse(Root, self._file(f"{root.signed.version - 1}.root.json"), "root")
        return root, chains.read(self._file, before)

    def _published(self, row: MetadataRole) -> Submitted:
        """Describe the published version and its signatures."""
        metadata = self._chain.roles.get(row.name)
        if metadata is None:
            return Submitted(True, 0, 1, 0)
        result = self._chain.verification(row.name, metadata)
        return Submitted(True, len(result.signed), result.threshold, metadata.signed.version)

    def _submit(self, row: MetadataRole, metadata: Metadata[Any], auto: Lists) -> Submitted:
        now_s = self._clock()
        check(row, metadata, self._chain, now_s)
        keyids, have, _ = valid_signatures(row, metadata, self._chain)
        if not keyids:
            signers = ", ".join(keyid[:12] for keyid in metadata.signatures) or "none"
            raise InvalidInput(
                f"no signature of {row.name} {metadata.signed.version} is valid for a key of the "
                f"role; signed by key ids: {signers}"
            )
        merged = self._merged(row, metadata, have)
        keyids, have, need = valid_signatures(row, merged, self._chain)
        # Keep valid signatures only: anybody can add others, without a limit.
        kept = Metadata(merged.signed, {k: merged.signatures[k] for k in sorted(keyids)})
        version = kept.signed.version
        if have < need:
            write_atomic(self._pending_file(row), kept.to_bytes(), self._disk)
            return Submitted(False, have, need, version)
        # Publish, then remove: after a crash in between, `_waiting` ignores what was overtaken.
        changed = {row.name: kept}
        if row.name == "targets" and auto is Lists.DROPPED:
            # In one publication, so that no crash leaves the old list to `keep_fresh`.
            changed[AUTO] = self._emptied_auto(kept.signed, now_s)
        self._publish(changed, now_s)
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(self._pending_file(row))
        return Submitted(True, have, need, version)

    def _merged(self, row: MetadataRole, metadata: Metadata[Any], have: int) -> Metadata[Any]:
        waiting = self._waiting(row)
        if waiting is None:
            return metadata
        if waiting.signed_bytes == metadata.signed_bytes:
            return Metadata(metadata.signed, waiting.signatures | metadata.signatures)
        _, more, need = valid_signatures(row, waiting, self._chain)
        if have < more:
            raise Conflict(
                f"another {row.name} {metadata.signed.version} waits with {more} of {need} "
                f"signatures, this one has {have}; sign the one that waits"
            )
        return metadata

    def _waiting(self, row: MetadataRole) -> Metadata[Any] | None:
        """Return the pending version, unless it was overtaken by a published one."""
        try:
            data = self._pending_file(row).read_bytes()
        except FileNotFoundError:
            return None
        pending = parse(row.kind, data, str(self._pending_file(row)))
        is_next = pending.signed.version == self._chain.version(row.name) + 1
        return pending if is_next else None

    def _sign_auto(self, target: SignedTarget) -> bool:
        name = target.name
        if name.model not in self.policy().models:
            raise Conflict(
                f"the release policy has no rule for model {name.model!r}, so every node would "
                f"refuse {target.path}; sign a policy that lists it, or release it by hand"
            )
        entry = self._chain.targets[AUTO].signed.targets.get(target.path)
        before = None
        if entry is not None and self._chain.is_signed(AUTO):
            before = read_target(target.path, entry.length, entry.hashes, entry.custom)
        if before == target:
            return False
        # A version never changes; signing other content would let the cloud's key rewrite it.
        if before is not None and before.custom != target.custom:
            raise Conflict(f"{target.path} is signed with other content; push a new version")
        listed = dict(self._chain.targets[AUTO].signed.targets)
        self._publish_auto(listed | {target.path: target_file(target)})
        return True

    def _publish_auto(self, targets: Mapping[str, TargetFile]) -> None:
        now_s = self._clock()
        again = self._again(now_s)
        again.signed.targets = dict(targets)
        self._publish({AUTO: self._signed(AUTO, again.signed, self._chain.top)}, now_s)

    def _again(self, now_s: float, least: int = 0) -> Metadata[Targets]:
        """Return the next version of the auto role, above `least`, with an unchanged list."""
        before = self._chain.targets[AUTO].signed
        signed = Targets(
            version=_next(AUTO, max(before.version, least)),
            expires=expiry(AUTO, now_s),
            targets=dict(before.targets),
        )
        return self._signed(AUTO, signed, self._chain.top)

    def _emptied_auto(self, top: Targets, now_s: float) -> Metadata[Targets]:
        """Return the next version of the auto role with an empty list, by the keys of `top`."""
        version = _next(AUTO, self._chain.version(AUTO))
        return self._signed(AUTO, Targets(version=version, expires=expiry(AUTO, now_s)), top)

    def _due(self) -> dict[str, float]:
        """Return when each online role must be signed again: at once if its keys were replaced."""
        ends = self.expiries()
        # The key of `auto` was replaced; nodes refuse its list until the new key has signed it.
        if not self._chain.is_signed(AUTO):
            ends[AUTO] = 0.0
        return {
            row.name: ends[row.name] - (1 - FRESH_SHARE) * row.lifetime_s
            for row in ROLES.values()
            if row.keys == "online" and (row.name != AUTO or self._can_sign_auto())
        }

    def _can_sign_auto(self) -> bool:
        role = self._chain.top.get_delegated_role(AUTO)
        return len(self._keys.signers().keys() & set(role.keyids)) >= role.threshold

    def _publish(
        self,
        changed: Mapping[str, Metadata[Any]],
        now_s: float,
        *,
        renew_snapshot: bool = True,
        least: Mapping[str, int] = _NONE,
    ) -> None:
        """Write new versions, a snapshot that pins them and a timestamp; then let readers see them.

        least: numbers that the versions of snapshot and timestamp must exceed.
        """
        chain = self._chain
        targets = dict(chain.targets) | {k: v for k, v in changed.items() if k in PINNED}
        after = replace(chain, root=changed.get("root", chain.root), targets=targets)
        files = {f"{m.signed.version}.{role}.json": m.to_bytes() for role, m in changed.items()}
        root_file = {k: files.pop(k) for k in list(files) if k.endswith(".root.json")}
        if renew_snapshot:
            after = replace(after, snapshot=self._snapshot(after, changed, now_s, least))
            files[f"{after.snapshot.signed.version}.snapshot.json"] = after.snapshot.to_bytes()
        after = replace(after, timestamp=self._stamp(after, now_s, least))
        timestamp = after.timestamp.to_bytes()
        # The order is the protocol: numbered files, which nobody reads yet, then the root, and the
        # timestamp as the commit point.
        for name, data in (files | root_file | {"timestamp.json": timestamp}).items():
            write_atomic(self._folder / name, data, self._disk)
        # Memory last: every file that readers can ask for from now on is on the disk.
        self._chain, self._timestamp = after, timestamp
        self._prune(after)

    def _snapshot(
        self,
        after: Chain,
        changed: Mapping[str, Metadata[Any]],
        now_s: float,
        least: Mapping[str, int],
    ) -> Metadata[Snapshot]:
        meta = dict(self._chain.snapshot.signed.meta)
        for role in changed.keys() & set(PINNED):
            new = changed[role]
            meta[f"{role}.json"] = chains.pin(new.signed.version, new.to_bytes())
        version = self._version("snapshot", after.root.signed, least)
        signed = Snapshot(version=version, expires=expiry("snapshot", now_s), meta=meta)
        return self._signed("snapshot", signed, after.root.signed)

    def _stamp(self, after: Chain, now_s: float, least: Mapping[str, int]) -> Metadata[Timestamp]:
        pin = chains.pin(after.snapshot.signed.version, after.snapshot.to_bytes())
        version = self._version("timestamp", after.root.signed, least)
        signed = Timestamp(version=version, expires=expiry("timestamp", now_s), snapshot_meta=pin)
        return self._signed("timestamp", signed, after.root.signed)

    def _version(self, role: str, root: Root, least: Mapping[str, int]) -> int:
        """Return the next version, or 1 if all keys are new: nodes forget what the old ones signed.

        They learn the version of a snapshot from the timestamp as well.
        """
        roles = self._chain.root.signed.roles
        kept = [r for r in REMEMBERED[role] if set(roles[r].keyids) & set(root.roles[r].keyids)]
        published = self._chain.roles[role].signed.version
        return _next(role, max(published, least.get(role, 0))) if kept else 1

    def _signed(self, role: str, signed: Any, delegator: Root | Targets) -> Metadata[Any]:
        keys = delegator.get_delegated_role(role)
        signers = self._keys.of(keys.keyids, role)
        if len(signers) < keys.threshold:
            raise Conflict(
                f"{role} needs {keys.threshold} signatures, the cloud has {len(signers)} of its "
                "keys"
            )
        return add_signatures(Metadata(signed), signers)

    def _prune(self, after: Chain) -> None:
        versions = {role: m.signed.version for role, m in after.targets.items()}
        versions["snapshot"] = after.snapshot.signed.version
        for role, version in versions.items():
            with contextlib.suppress(OSError):
                self._disk.remove(self._folder / f"{version - KEPT_VERSIONS}.{role}.json")

    def _file(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(f"there is no metadata file {name}") from error

    def _pending_file(self, row: MetadataRole) -> Path:
        return self._pending_folder / f"{row.name}.json"

    def _tell(self, role: str) -> None:
        for callback in self._on_published:
            callback(role)


def golden_sets(data: bytes) -> set[bytes]:
    """Return the digests of the samples that targets metadata lists."""
    listed = parse(Targets, data, "targets").signed.targets
    return {
        read_target(path, entry.length, entry.hashes, None).sha256
        for path, entry in listed.items()
        if path not in {POLICY_PATH, PLAN_POLICY_PATH}
    }


def target_file(target: SignedTarget) -> TargetFile:
    """Return the entry of targets metadata for a target."""
    hashes = {"sha256": target.sha256.hex()}
    return TargetFile(target.length, hashes, target.path, {"custom": dict(target.custom)})


def _next(role: str, version: int) -> int:
    if version >= MAX_VERSION:
        raise Conflict(f"{role} is at version {version}, the highest; replace its key to go on")
    return version + 1
