"""The newest versions of what people sign, kept beside their keys.

Metadata that was replaced stays validly signed. Without this file, an intruder in the cloud could
show a signer an older list, and the next signature would carry on what had been withdrawn.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from triplane.cloud.trust.roles import MAX_VERSION, ROLES
from triplane.proto.disk import OS_DISK, Disk, refusal, write_atomic
from triplane.proto.errors import Corrupt
from triplane.proto.signed_fields import is_count

SEEN_FILE: Final = "seen.json"
MAX_SEEN_BYTES: Final = 1 << 20
OFFLINE: Final = frozenset(row.name for row in ROLES.values() if row.keys == "offline")


class SeenVersions:
    """The versions by role that a folder of keys has seen of one cloud.

    root: the trusted root beside the keys, which tells clouds apart.
    """

    def __init__(self, keys_folder: Path, root: bytes, disk: Disk = OS_DISK) -> None:
        """Read the file; Corrupt if it is damaged.

        Do this before the cloud is asked, whose answer may otherwise be older than what another
        signer with this folder writes meanwhile.
        """
        self._path, self._disk = keys_folder / SEEN_FILE, disk
        self._cloud = hashlib.sha256(root).hexdigest()
        self._known = self._read().get(self._cloud, {})

    def require(self, versions: Mapping[str, int], past: Mapping[str, int]) -> None:
        """Raise Corrupt if a version is older than the newest that was seen, and note them.

        past: by role, the version up to which the signer accepts older ones, because the cloud was
        restored from a backup.
        """
        for role, version in versions.items():
            newest = self._known.get(role, 0)
            if version < newest and past.get(role, 0) < newest:
                raise Corrupt(
                    f"the cloud shows {role} {version}, and the keys in {self._path.parent} have "
                    f"seen {role} {newest}: it was restored from a backup, or an intruder shows "
                    "what was replaced since, to have it signed again. Only if you know of a "
                    f"backup: triplane cloud keys renew --role {role} --past {newest} --keys "
                    f"{self._path.parent}; then sign again what is missing"
                )
        self.note(versions)

    def note(self, versions: Mapping[str, int]) -> None:
        """Store the versions that are newer than those known. Unavailable: it cannot be written."""
        with self._alone():
            self._note(versions)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder: two signers at the same time would lose what the other one noted."""
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _note(self, versions: Mapping[str, int]) -> None:
        everything = self._read()
        known = everything.get(self._cloud, {})
        newer = {
            role: version
            for role, version in versions.items()
            if role in OFFLINE and version > known.get(role, 0)
        }
        if not newer:
            return
        everything[self._cloud] = known | newer
        try:
            write_atomic(self._path, json.dumps(everything, sort_keys=True).encode(), self._disk)
        except OSError as error:
            raise refusal(
                error,
                f"{self._path} cannot be written ({error}), so an intruder in the cloud could "
                "later show an older list to these keys; make the folder writable",
            ) from error

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            with self._path.open("rb") as file:
                known: Any = json.loads(file.read(MAX_SEEN_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged() from error
        if not isinstance(known, dict) or not all(map(_is_versions, known.values())):
            raise self._damaged()
        return known

    def _damaged(self) -> Corrupt:
        return Corrupt(
            f"{self._path} cannot be read; take it from the second copy of the folder, or remove "
            "it if you know that the cloud shows the newest lists (triplane cloud keys show)"
        )


def _is_versions(x: Any) -> bool:
    return isinstance(x, dict) and all(is_count(version, 0, MAX_VERSION) for version in x.values())
