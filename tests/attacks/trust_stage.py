"""A real repository, a real node, and a link between them that an attacker holds."""

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuf.api._payload import MetaFile, TargetFile, Targets
from tuf.api.metadata import Metadata

from triplane.cloud.trust import MetadataRepository, initialize
from triplane.cloud.trust.initial import policy_file
from triplane.cloud.trust.keys import read_private
from triplane.cloud.trust.roles import expiry
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed.trust import Trust, bootstrap
from triplane.proto.targets import Policy, Rule, TargetName, bundle_target

DAY_S = 86_400.0
BUNDLE = b"a bundle's bytes"
GOLDEN = b"labelled samples"


class Clock:
    """Time that tests move."""

    def __init__(self, now_s: float | None = None) -> None:
        self.now_s = float(int(time.time())) if now_s is None else now_s

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Stage:
    """Cloud, keys and one node.

    forged: what the attacker answers instead of the cloud, by name; silent: what he never answers.
    """

    path: Path
    clock: Clock
    repository: MetadataRepository
    forged: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    bootstrap: bytes = b""

    @property
    def online(self) -> Path:
        return self.path / "online"

    @property
    def offline(self) -> Path:
        return self.path / "offline"

    def fetch(self, name: str) -> bytes:
        self.asked.append(name)
        return self.forged[name] if name in self.forged else self.repository.get(name)

    def node(self, name: str = "node", clock: Clock | None = None) -> Trust:
        """A node that enrols, or the same one after a restart."""
        bootstrap(self.path / name, self.fetch)
        return Trust(self.path / name, self.fetch, clock or self.clock)

    def reopened(self) -> MetadataRepository:
        return MetadataRepository(self.path / "metadata", self.online, clock=self.clock)

    def next_targets(self, role: str, targets=None) -> Metadata:
        """An unsigned next version of a targets role, with more targets."""
        before = Metadata[Targets].from_bytes(self.repository.pending(role).metadata)
        signed = before.signed
        signed.version += 1
        signed.expires = expiry(role, self.clock())
        signed.targets |= {t.path: t for t in targets or []}
        return Metadata(signed)

    def release(self, *targets: TargetFile, keys=("release",)):
        """Sign and submit, as `triplane sign` does after its comparison."""
        made = signed_by(self.offline, self.next_targets("release", targets), *keys)
        return self.repository.submit("release", made.to_bytes())

    def allow(self, **rules: Rule):
        """Sign a policy with the offline key."""
        made = self.next_targets("targets")
        made.signed.targets = {"policy.json": policy_file(Policy(rules))}
        for rule in rules.values():
            made.signed.targets[rule.golden] = TargetFile.from_data(rule.golden, GOLDEN, ["sha256"])
        return self.repository.submit(
            "targets", signed_by(self.offline, made, "targets").to_bytes()
        )

    def sign_auto(self, model="digits", version=2):
        return self.repository.sign_auto(
            model,
            version,
            "ort-x64",
            length=len(BUNDLE),
            sha256=hashlib.sha256(BUNDLE).digest(),
            model_digest=bytes(32),
            content_digest=bytes(32),
        )


def stage(path: Path, **options) -> Stage:
    clock = Clock()
    initialize(path / "metadata", path / "online", path / "offline", now_s=clock(), **options)
    return Stage(path, clock, MetadataRepository(path / "metadata", path / "online", clock=clock))


def bundle_entry(path: str, data: bytes = BUNDLE) -> TargetFile:
    """A complete entry of targets metadata for a bundle."""
    name = TargetName.parse(path)
    target = bundle_target(
        name,
        length=len(data),
        sha256=hashlib.sha256(data).digest(),
        model_digest=bytes(32),
        content_digest=bytes(32),
    )
    hashes = {"sha256": target.sha256.hex()}
    return TargetFile(target.length, hashes, path, {"custom": dict(target.custom)})


def signed_by(folder: Path, metadata: Metadata, *names: str) -> Metadata:
    """Signed with the keys in files of these names, and no others."""
    metadata.signatures.clear()
    for name in names:
        metadata.sign(read_private(folder / f"{name}.pem"), append=True)
    return metadata


def forge_chain(stage: Stage, **changed: Metadata) -> None:
    """Serve forged metadata as a thief of the online keys can: freshly pinned and stamped.

    changed: roles' metadata, or `snapshot` and `timestamp` functions on the unsigned payload.
    """
    snapshot = load(stage, "snapshot")
    timestamp = load(stage, "timestamp")
    snapshot.signed.version += 1
    timestamp.signed.version += 1
    for role, metadata in changed.items():
        data = metadata.to_bytes()
        version = metadata.signed.version
        snapshot.signed.meta[f"{role}.json"] = pinned(version, data)
        stage.forged[f"{version}.{role}.json"] = data
    serve(stage, snapshot, timestamp)


def serve(stage: Stage, snapshot: Metadata, timestamp: Metadata) -> None:
    """Sign both with the online keys and put them on the link."""
    data = signed_by(stage.online, snapshot, "snapshot").to_bytes()
    timestamp.signed.snapshot_meta = pinned(snapshot.signed.version, data)
    stage.forged[f"{snapshot.signed.version}.snapshot.json"] = data
    stage.forged["timestamp.json"] = signed_by(stage.online, timestamp, "timestamp").to_bytes()


def load(stage: Stage, role: str) -> Metadata[Any]:
    """The published metadata of a role."""
    repository = stage.repository
    if role == "timestamp":
        return Metadata.from_bytes(repository.get("timestamp.json"))
    version = newest(stage, role)
    return Metadata.from_bytes(repository.get(f"{version}.{role}.json"))


def newest(stage: Stage, role: str) -> int:
    if role == "root":
        return Metadata.from_bytes(stage.repository.get("root.json")).signed.version
    version = load(stage, "timestamp").signed.snapshot_meta.version
    if role == "snapshot":
        return version
    return load(stage, "snapshot").signed.meta[f"{role}.json"].version


def pinned(version: int, data: bytes) -> MetaFile:
    return MetaFile(version, len(data), {"sha256": hashlib.sha256(data).hexdigest()})


def refusal(node: Trust) -> AttemptRefused:
    """The one refusal of a refresh that must not succeed."""
    found = node.refresh()
    assert not found.is_fresh
    return found.refusals[-1]


def edited(data: bytes, change) -> bytes:
    """JSON changed without signing it again."""
    document = json.loads(data)
    change(document)
    return json.dumps(document).encode()
