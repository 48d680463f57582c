"""Pointers: the committed version of each model of a node, one small file per model.

`models/NAME.json` holds one JSON object. The agent replaces it atomically when a version has passed
its probation, and the server loads the versions in the pointers when it starts. So a committed
version comes back after any crash. No pointer names a version on probation.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from triplane.proto.disk import OS_DISK, Disk, write_atomic
from triplane.proto.errors import Corrupt, InvalidInput

MAX_POINTER_BYTES: Final = 8 << 10
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_CHECK: Final = "check"
_OPTIONAL: Final = {"source": "", "size": 0}


@dataclass(frozen=True, slots=True)
class Pointer:
    """A committed version. sha256: name and digest of the bundle's file; digest: its root digest.

    source: SHA-256 of the signed bundle that it comes from, which is not `sha256` if the node has
    adapted it. size: bytes of the bundle's file. Both are empty in files of older releases.
    """

    model: str
    version: int
    sha256: str
    digest: str
    target_path: str
    rollout: str
    attempt: int
    source: str = ""
    size: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.model) or not all(
            _HEX.fullmatch(digest)
            for digest in (self.sha256, self.digest, self.source or self.sha256)
        ):
            raise InvalidInput(f"not a pointer: {self}")


def pointer_path(folder: Path, model: str) -> Path:
    """Return the path of a model's pointer."""
    if not _NAME.fullmatch(model):
        raise InvalidInput(f"not the name of a model: {model[:80]!r}")
    return folder / f"{model}.json"


def write_pointer(folder: Path, pointer: Pointer, disk: Disk = OS_DISK) -> None:
    """Commit a version durably: it comes back after any crash from now on."""
    fields_of = asdict(pointer)
    data = json.dumps({**fields_of, _CHECK: _check(fields_of)}, sort_keys=True).encode()
    write_atomic(pointer_path(folder, pointer.model), data, disk)


def _check(fields: Mapping[str, object]) -> str:
    """Return a short digest of the fields, so that a flipped bit cannot name another version."""
    text = json.dumps({k: v for k, v in fields.items() if k != _CHECK}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_pointer(path: Path) -> Pointer:
    """Read a pointer from a file. Corrupt if it is not one."""
    try:
        data = path.read_bytes()[: MAX_POINTER_BYTES + 1]
        parsed = _OPTIONAL | json.loads(data)
        pointer = Pointer(**{field.name: parsed[field.name] for field in fields(Pointer)})
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Corrupt(
            f"{path} is not a pointer file ({error}); deploy the model to this node again"
        ) from error
    types = {"version": int, "attempt": int, "size": int}
    is_whole = (
        len(data) <= MAX_POINTER_BYTES
        and path.name == f"{pointer.model}.json"
        and parsed.get(_CHECK, _check(parsed)) == _check(parsed)
        and all(
            isinstance(getattr(pointer, field.name), types.get(field.name, str))
            for field in fields(Pointer)
        )
    )
    if not is_whole:
        raise Corrupt(f"{path} is not a pointer file or damaged; deploy the model here again")
    return pointer


def read_pointers(folder: Path) -> tuple[dict[str, Pointer], list[Corrupt]]:
    """Return every pointer by model, and the errors of damaged ones."""
    pointers: dict[str, Pointer] = {}
    broken: list[Corrupt] = []
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("."):
            continue
        try:
            pointers[path.stem] = read_pointer(path)  # a valid pointer has its model's name
        except Corrupt as error:
            broken.append(error)
    return pointers, broken
