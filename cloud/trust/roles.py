"""The roles, one row each: where their keys are, how long signatures last, what may be submitted.

Times are seconds since 1970; metadata has whole seconds, UTC. This package imports payload classes
from `tuf.api._payload` because `tuf.api.metadata` does not export them, as strict typing requires.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Literal, TypeVar

from tuf.api._payload import Root, Snapshot, Targets, Timestamp
from tuf.api.metadata import Metadata
from tuf.api.serialization import DeserializationError, SerializationError

from triplane.proto.errors import Corrupt, InvalidInput

DAY_S: Final = 86_400.0
MAX_METADATA_BYTES: Final = (4 << 20) - 4096  # one gRPC message, less its frame
MAX_VERSION: Final = (1 << 31) - 1
CLOCK_SLACK_S: Final = DAY_S  # of a signer's clock against the cloud's

T = TypeVar("T", Root, Timestamp, Snapshot, Targets)


class Lists(Enum):
    """What to do with the targets that the old keys had signed."""

    CARRIED = "carried on"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class MetadataRole:
    """One role of the metadata.

    keys: "online" if the cloud signs, "offline" if people do. submitted: it comes from outside and
    is not made by the repository. paths: what a delegated role may list.
    """

    name: str
    kind: type[Any]
    keys: Literal["online", "offline"]
    lifetime_s: float
    submitted: bool
    paths: str = ""


# fmt: off
ROLES: Final = {
    row.name: row
    for row in (
        MetadataRole("root",      Root,      "offline", 5 * 365 * DAY_S, submitted=True),
        MetadataRole("targets",   Targets,   "offline", 365 * DAY_S,     submitted=True),
        MetadataRole("release",   Targets,   "offline", 365 * DAY_S,     submitted=True,
                     paths="release/*"),
        MetadataRole("auto",      Targets,   "online",  365 * DAY_S,     submitted=True,
                     paths="auto/*"),
        MetadataRole("plans",     Targets,   "offline", 365 * DAY_S,     submitted=True,
                     paths="plans/*"),
        MetadataRole("snapshot",  Snapshot,  "online",  7 * DAY_S,       submitted=False),
        MetadataRole("timestamp", Timestamp, "online",  DAY_S,           submitted=False),
    )
}
# fmt: on
DELEGATED: Final = tuple(row for row in ROLES.values() if row.paths)
PINNED: Final = ("targets", *(row.name for row in DELEGATED))
"""Roles whose versions the snapshot pins."""
LATER: Final = ("plans",)
"""Delegated roles that the metadata of an older cloud does not have, until its keys are named."""
TOP: Final = ("root", "targets", "snapshot", "timestamp")


def submitted_role(name: str) -> MetadataRole:
    """Return a role whose metadata comes from outside; InvalidInput for any other name."""
    row = ROLES.get(name)
    if row is None or not row.submitted:
        known = [r.name for r in ROLES.values() if r.submitted]
        raise InvalidInput(f"metadata is submitted for one of {known}, got role {name[:100]!r}")
    return row


def moment(time_s: float) -> datetime:
    """Return a time as metadata has it: whole seconds, UTC."""
    return datetime.fromtimestamp(int(time_s), UTC)


def expiry(role: str, now_s: float) -> datetime:
    """Return when metadata of this role expires if it is signed now."""
    return moment(now_s + ROLES[role].lifetime_s)


def parse(kind: type[T], data: bytes, what: str) -> Metadata[T]:
    """Parse metadata of one kind. Corrupt: it is not, is too long or has no canonical form."""
    if len(data) > MAX_METADATA_BYTES:
        raise Corrupt(f"{what}: metadata is at most {MAX_METADATA_BYTES} bytes, got {len(data)}")
    try:
        metadata = Metadata[T].from_bytes(data)
        _ = metadata.signed_bytes
    except (DeserializationError, SerializationError) as error:
        cause = error.__cause__ or error
        raise Corrupt(f"{what} is not TUF metadata: {type(cause).__name__}: {cause}") from error
    if type(metadata.signed) is not kind:
        raise Corrupt(f"{what} is of type {metadata.signed.type!r}, not {kind.type!r}")
    version = metadata.signed.version
    if type(version) is not int or not 0 < version <= MAX_VERSION:
        raise Corrupt(f"{what}: a version is 1 to {MAX_VERSION}, got {str(version)[:40]}")
    return metadata
