"""Which version of each model a node has committed to: one small file per model.

`models/NAME.json` holds one JSON object. The agent replaces it whole when a version has proved
itself, and the server loads what it names when it starts: whatever was killed, a committed version
comes back. A version on trial is in no pointer.
"""

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from triplane.proto.disk import OS_DISK, Disk, write_atomic
from triplane.proto.errors import Corrupt, InvalidInput

MAX_POINTER_BYTES: Final = 8 << 10
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Pointer:
    """A committed version. sha256: of the bundle's file, which is its name; digest: its root."""

    model: str
    version: int
    sha256: str
    digest: str
    target_path: str
    rollout: str
    attempt: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.model) or not all(
            _HEX.fullmatch(digest) for digest in (self.sha256, self.digest)
        ):
            raise InvalidInput(f"not a pointer: {self}")


def pointer_path(folder: Path, model: str) -> Path:
    """The file of a model's pointer."""
    if not _NAME.fullmatch(model):
        raise InvalidInput(f"not the name of a model: {model[:80]!r}")
    return folder / f"{model}.json"


def write_pointer(folder: Path, pointer: Pointer, disk: Disk = OS_DISK) -> None:
    """Commit: from the return on, this version comes back after any crash."""
    data = json.dumps(asdict(pointer), sort_keys=True).encode()
    write_atomic(pointer_path(folder, pointer.model), data, disk)


def read_pointer(path: Path) -> Pointer:
    """The pointer in a file. Corrupt where it holds none."""
    data = path.read_bytes()[: MAX_POINTER_BYTES + 1]
    try:
        given = json.loads(data)
        pointer = Pointer(**{field.name: given[field.name] for field in fields(Pointer)})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Corrupt(f"{path} is no pointer ({error}); deploy the model to this node again") from (
            error
        )
    types = {"version": int, "attempt": int}
    if len(data) > MAX_POINTER_BYTES or not all(
        isinstance(getattr(pointer, field.name), types.get(field.name, str))
        for field in fields(Pointer)
    ):
        raise Corrupt(f"{path} is no pointer; deploy the model to this node again")
    return pointer


def read_pointers(folder: Path) -> tuple[dict[str, Pointer], list[Corrupt]]:
    """Every pointer by model, and what could not be read."""
    found: dict[str, Pointer] = {}
    broken: list[Corrupt] = []
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("."):
            continue
        try:
            pointer = read_pointer(path)
            found[pointer.model] = pointer
        except Corrupt as error:
            broken.append(error)
    return found, broken
