"""python-tuf's client, fetching through a callable and writing through `Disk`.

Two methods of the client are overridden: the one that writes a file, because it does not sync, and
the one that downloads a file, to check version numbers first.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import grpc
from tuf.api import exceptions as errors
from tuf.api._payload import Root, Signed, Snapshot, Targets, Timestamp, VerificationResult
from tuf.api.metadata import Metadata
from tuf.api.serialization import DeserializationError, SerializationError
from tuf.ngclient.config import UpdaterConfig
from tuf.ngclient.fetcher import FetcherInterface
from tuf.ngclient.updater import Updater

from triplane.proto.disk import Disk, write_atomic
from triplane.proto.errors import NotFound
from triplane.proto.metadata_pb2 import GetRequest
from triplane.proto.metadata_pb2_grpc import MetadataStub
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.status import error_from

MAX_VERSION_JUMP: Final = 1_000_000
"""Largest step between two refreshes: an honest cloud would publish for two years, each minute."""
CONFIG: Final = UpdaterConfig(
    max_root_rotations=256,
    max_delegations=4,
    root_max_length=128 << 10,
    timestamp_max_length=16 << 10,
    snapshot_max_length=64 << 10,
    targets_max_length=4 << 20,
)

FETCH_DEADLINE_S: Final = 30.0

_TOO_LARGE: Final = "larger than max"  # how grpc words what its receiving side refuses
_BASE: Final = "metadata/"
_NOT_FOUND: Final = 404  # what the client takes for "no newer root"
_TYPES: Final[dict[str, type[Signed]]] = {
    "root": Root,
    "timestamp": Timestamp,
    "snapshot": Snapshot,
}


def fetch_over(channel: grpc.Channel) -> Callable[[str], bytes]:
    """Return a function that fetches a file from the cloud's metadata service.

    It raises AttemptRefused for an answer over the message limit.
    """
    stub = MetadataStub(channel)

    def fetch(name: str) -> bytes:
        try:
            return stub.Get(GetRequest(name=name), timeout=FETCH_DEADLINE_S).metadata
        except grpc.RpcError as error:
            failure = error_from(error)
            if _TOO_LARGE in str(failure):
                text = f"{name} is larger than any message may be: {failure}"
                raise AttemptRefused("endless-data", text) from error
            raise failure from error

    return fetch


class Fetcher(FetcherInterface):
    """Fetches files by name with a callable. `last`: name and bytes of the newest one."""

    def __init__(self, fetch: Callable[[str], bytes]) -> None:
        self._get = fetch
        self.last = ("", b"")

    def _fetch(self, url: str) -> Iterator[bytes]:
        name = url.removeprefix(_BASE)
        self.last = (name, b"")
        try:
            data = self._get(name)
        except NotFound as error:
            # The client looks for root N+1 until it gets a 404, which ends the search (TUF
            # specification, 5.3).
            raise errors.DownloadHTTPError(str(error), _NOT_FOUND) from error
        self.last = (name, data)
        return iter([data])


class Client(Updater):
    """One refresh of the metadata in a folder, from the bootstrap root on."""

    def __init__(self, folder: Path, fetcher: Fetcher, bootstrap: bytes, disk: Disk) -> None:
        self._disk = disk
        super().__init__(str(folder), _BASE, fetcher=fetcher, config=CONFIG, bootstrap=bootstrap)

    @property
    def top(self) -> Targets:
        """The verified offline targets role."""
        return self._trusted_set.targets

    @property
    def ends_s(self) -> float:
        """Time at which the first of the top roles expires, in seconds since 1970."""
        of = self._trusted_set
        roles = (of.root, of.timestamp, of.snapshot, of.targets)
        return min(signed.expires.timestamp() for signed in roles)

    @property
    def time(self) -> datetime:
        """The time at which expiry is judged."""
        return self._trusted_set.reference_time

    def judge_by(self, time: datetime) -> None:
        """Judge expiry at this time instead of the clock's."""
        # python-tuf takes the time once, when it is constructed; a node's clock may have been set
        # back.
        self._trusted_set.reference_time = time

    def lists(self, role: str, path: str) -> bool:
        """Return whether the verified metadata of a role lists the target."""
        metadata = self._trusted_set.get(role)
        return isinstance(metadata, Targets) and path in metadata.targets

    def seen(self, role: str) -> str:
        """Return a role and its verified version, for messages."""
        metadata = self._trusted_set.get(role)
        return f"the role {role}" + (f" (version {metadata.version})" if metadata else "")

    def expired(self) -> list[str]:
        """Return the expired roles among those loaded so far, with their times."""
        now = self._trusted_set.reference_time
        return [
            f"{role} {signed.version} expired {signed.expires:%Y-%m-%d %H:%M:%S}"
            for role in ("root", "timestamp", "snapshot")
            if (signed := self._trusted_set.get(role)) is not None and signed.is_expired(now)
        ]

    def judged(self, role: str, metadata: Metadata[Any]) -> VerificationResult:
        """Verify a role's signatures by its delegator's keys and, for a root, by its own."""
        payload, signatures = metadata.signed_bytes, metadata.signatures
        trusted = self._trusted_set
        delegator = trusted.root if role in trusted.root.roles else trusted.targets
        result = delegator.get_verification_result(role, payload, signatures)
        # A new root needs signatures of the old root's keys and of its own (TUF specification,
        # 5.3.4).
        if result and role == "root":
            return metadata.signed.get_verification_result(role, payload, signatures)  # type: ignore[no-any-return]
        return result

    def pinned_version(self, role: str) -> int:
        """Return the version of a role that verified metadata names; 0 if none does yet."""
        trusted = self._trusted_set
        if role == "snapshot":
            return trusted.timestamp.snapshot_meta.version
        meta = trusted.snapshot.meta.get(f"{role}.json") if "snapshot" in trusted else None
        return meta.version if meta else 0

    @property
    def root_version(self) -> int:
        """The version of the newest verified root."""
        return self._trusted_set.root.version

    def _persist_file(self, filename: str, data: bytes) -> None:
        write_atomic(Path(filename), data, self._disk)

    def _download_metadata(self, rolename: str, length: int, version: int | None = None) -> bytes:
        data = super()._download_metadata(rolename, length, version)
        # Checked before the client stores the file: once it has stored a huge number, every honest
        # version would count as a rollback.
        if rolename in {"timestamp", "snapshot"} and rolename in self._trusted_set:
            known = versions_in(self._trusted_set[rolename])
            _check_jumps(rolename, known, versions_in(parsed(rolename, data).signed))
        return data


def limit_bytes(role: str) -> int:
    """Return the size limit of a role's file."""
    return int(getattr(CONFIG, f"{role if role in _TYPES else 'targets'}_max_length"))


def parsed(role: str, data: bytes) -> Metadata[Any]:
    """Parse metadata of a role without verifying it. AttemptRefused if it is not metadata."""
    kind = _TYPES.get(role, Targets)
    try:
        metadata = Metadata[Any].from_bytes(data)
        # Serializing may fail for values that parse, so it is tried here, where errors are
        # translated.
        _ = metadata.signed_bytes
    except (DeserializationError, SerializationError) as error:
        cause = error.__cause__ or error
        text = f"{role}: {len(data)} bytes are not metadata ({type(cause).__name__}: {cause})"
        raise AttemptRefused("malformed", text[:400]) from error
    if type(metadata.signed) is not kind:
        raise AttemptRefused("malformed", f"{role}: metadata of type {metadata.signed.type!r}")
    return metadata


def versions_in(signed: Any) -> dict[str, int]:
    """Return the versions that a timestamp or snapshot names, including its own."""
    if isinstance(signed, Timestamp):
        return {"timestamp": signed.version, "snapshot": signed.snapshot_meta.version}
    pins = {name.removesuffix(".json"): meta.version for name, meta in signed.meta.items()}
    return {"snapshot": signed.version} | pins


def _check_jumps(role: str, known: dict[str, int], versions: dict[str, int]) -> None:
    for name, version in versions.items():
        before = known.get(name, version)
        if version - before > MAX_VERSION_JUMP:
            raise AttemptRefused(
                "fast-forward",
                f"{role}: {name} jumps from version {before} to {version}; at most "
                f"{MAX_VERSION_JUMP} are allowed, so that a stolen key cannot use the numbers up",
            )
