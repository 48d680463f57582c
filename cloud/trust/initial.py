"""The first version of every role, and the keys that sign it.

Online keys (snapshot, timestamp, auto) go to a folder of the cloud. Offline ones (root, targets,
release, plans) go to a folder that people take away, together with `root.json`, against which
signers verify the cloud's metadata. If the root keys are lost, every node must be enrolled again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from securesystemslib.signer._crypto_signer import CryptoSigner
from securesystemslib.signer._key import Key
from tuf.api import _payload as tuf
from tuf.api.metadata import Metadata

from triplane.cloud.trust.chain import pin
from triplane.cloud.trust.keys import KeyFolder, add_signatures
from triplane.cloud.trust.roles import DELEGATED, ROLES, TOP, T, expiry
from triplane.proto.disk import OS_DISK, Disk, write_atomic
from triplane.proto.errors import Conflict, InvalidInput
from triplane.proto.plan_statement import PLAN_POLICY_PATH, PlanPolicy
from triplane.proto.targets import POLICY_PATH, Policy

TRUSTED_ROOT: Final = "root.json"
MAX_SIGNERS: Final = 16

Signers = Mapping[str, list[CryptoSigner]]


@dataclass(frozen=True, slots=True)
class Initialized:
    """New signed metadata. offline: the private keys to take away from the cloud."""

    root: bytes
    online: tuple[Path, ...]
    offline: tuple[Path, ...]


def initialize(
    metadata_folder: Path,
    online_keys_folder: Path,
    offline_keys_folder: Path,
    *,
    now_s: float,
    keys: Mapping[str, int] | None = None,
    thresholds: Mapping[str, int] | None = None,
    disk: Disk = OS_DISK,
) -> Initialized:
    """Make keys and version 1 of every role; the timestamp is written last.

    keys: number of keys by role, 1 by default; thresholds: how many of them must sign. Several keys
    of an offline role are one file each, to be given to as many people.
    Conflict: metadata exists already. InvalidInput: a threshold that no set of keys can meet.
    """
    counts, needed = keys or {}, thresholds or {}
    _check_counts(counts, needed)
    if any(metadata_folder.glob("*.root.json")):
        raise Conflict(
            f"{metadata_folder} has metadata already; nodes that trust it refuse any other"
        )
    folders = {
        "online": KeyFolder(online_keys_folder, disk),
        "offline": KeyFolder(offline_keys_folder, disk),
    }
    before = {place: set(folder.path.glob("*.pem")) for place, folder in folders.items()}
    signers = {
        row.name: _make_keys(folders[row.keys], row.name, counts.get(row.name, 1))
        for row in ROLES.values()
    }
    files = _documents(signers, needed, now_s)
    disk.make_folder(metadata_folder)
    # In order: the timestamp, which makes the others visible, comes last.
    for name, data in files.items():
        write_atomic(metadata_folder / name, data, disk)
    root = files["1.root.json"]
    write_atomic(offline_keys_folder / TRUSTED_ROOT, root, disk)
    new_files = {p: sorted(set(f.path.glob("*.pem")) - before[p]) for p, f in folders.items()}
    return Initialized(root, tuple(new_files["online"]), tuple(new_files["offline"]))


def _check_counts(counts: Mapping[str, int], needed: Mapping[str, int]) -> None:
    unknown = (set(counts) | set(needed)) - set(ROLES)
    if unknown:
        raise InvalidInput(f"roles are {list(ROLES)}, got {sorted(unknown)}")
    for role in ROLES:
        count, threshold = counts.get(role, 1), needed.get(role, 1)
        if not 1 <= threshold <= count <= MAX_SIGNERS:
            raise InvalidInput(
                f"{role}: a threshold is 1 to the number of keys, of which there are at most "
                f"{MAX_SIGNERS}; got {threshold} of {count}"
            )


def _make_keys(folder: KeyFolder, role: str, count: int) -> list[CryptoSigner]:
    names = [role] if count == 1 else [f"{role}-{i + 1}" for i in range(count)]
    return [folder.make(name) for name in names]


def _documents(signers: Signers, needed: Mapping[str, int], now_s: float) -> dict[str, bytes]:
    """Return files by name, in the order in which to write them."""
    top = tuf.Targets(expires=expiry("targets", now_s), delegations=_delegations(signers, needed))
    top.targets[POLICY_PATH] = policy_file(Policy({}))
    targets = {row.name: tuf.Targets(expires=expiry(row.name, now_s)) for row in DELEGATED}
    files = {
        f"1.{role}.json": _signed(signed, signers[role])
        for role, signed in ({"targets": top} | targets).items()
    }
    pins = {name.removeprefix("1."): pin(1, data) for name, data in files.items()}
    files["1.root.json"] = _signed(_root(signers, needed, now_s), signers["root"])
    snapshot = tuf.Snapshot(expires=expiry("snapshot", now_s), meta=pins)
    files["1.snapshot.json"] = _signed(snapshot, signers["snapshot"])
    timestamp = tuf.Timestamp(
        expires=expiry("timestamp", now_s), snapshot_meta=pin(1, files["1.snapshot.json"])
    )
    files["timestamp.json"] = _signed(timestamp, signers["timestamp"])
    return files


def policy_file(policy: Policy) -> tuf.TargetFile:
    """Return the entry of the policy, which contains the policy's text itself, under `custom`."""
    return _text_file(POLICY_PATH, policy.text())


def plan_policy_file(policy: PlanPolicy) -> tuf.TargetFile:
    """Return the entry of the policy for plans; see `policy_file`."""
    return _text_file(PLAN_POLICY_PATH, policy.text())


def _text_file(path: str, text: str) -> tuf.TargetFile:
    entry = tuf.TargetFile.from_data(path, text.encode(), ["sha256"])
    entry.unrecognized_fields["custom"] = {"text": text}
    return entry


def _root(signers: Signers, needed: Mapping[str, int], now_s: float) -> tuf.Root:
    root = tuf.Root(expires=expiry("root", now_s), consistent_snapshot=True)
    for role in TOP:
        for signer in signers[role]:
            root.add_key(signer.public_key, role)
        root.roles[role].threshold = needed.get(role, 1)
    return root


def _delegations(signers: Signers, needed: Mapping[str, int]) -> tuf.Delegations:
    public = [signer.public_key for row in DELEGATED for signer in signers[row.name]]
    keys: dict[str, Key] = {key.keyid: key for key in public}
    roles = {
        row.name: tuf.DelegatedRole(
            row.name,
            [signer.public_key.keyid for signer in signers[row.name]],
            needed.get(row.name, 1),
            terminating=True,
            paths=[row.paths],
        )
        for row in DELEGATED
    }
    return tuf.Delegations(keys, roles)


def _signed(payload: T, signers: list[CryptoSigner]) -> bytes:
    return add_signatures(Metadata(payload), signers).to_bytes()
