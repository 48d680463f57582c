"""The two files of a run that hold tensors: a shared state, and a device's update.

A state belongs to one plan (its root digest is the parent). An update states the run, round and
lease to which it belongs, and its compression. It can hold only parameters and buffers, so no
personal tensor leaves a device in it. Both are containers (`files/container.py`): hashed, with
limits.

`read_update` takes untrusted bytes. It limits the file, compares names, types and shapes with the
shared state, and only then reads numbers. Each refusal is a `BadUpdate` with a word of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.disk import OS_DISK, Disk
from triplane.proto.errors import Conflict, Corrupt, InvalidInput
from triplane.unified_ir.federated.core.compress import Compressor
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.learn import BUFFER, PARAMETER, SHARED_ROLES
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container, PartData
from triplane.unified_ir.files.dtypes import BY_NAME

STATE: Final = "state.safetensors"
CHANGE: Final = "change.safetensors"
UPDATE: Final = "update"
FACTS: Final = ("compression", "lease", "round", "run")
"""The properties of an update, exactly."""
PER_TENSOR_BYTES: Final = 4 << 10
"""Limit for name, digests and headers of one tensor in a container, for `most_bytes`."""
MAX_ROUND: Final = 1 << 32
INLINE_BYTES: Final = 64 << 10
"""States and updates up to this size are sent in the messages of a session."""

Like = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Type and shape by name of the tensors that an update must hold."""

# fmt: off
KINDS: Final[Mapping[str, str]] = {
    "oversized":   "more bytes than the lease allows",
    "damaged":     "not the bytes of an update",
    "foreign":     "of another run, round or lease",
    "compression": "compressed by another method than requested, or invalid",
    "personal":    "holds what must not leave a device",
    "names":       "other tensors than the shared ones",
    "shape":       "a tensor of another type or shape",
    "nonfinite":   "a number that is infinite or none",
}
# fmt: on


class BadUpdate(InvalidInput):
    """An update that cannot count. kind: the word of `KINDS` under which it is counted."""

    def __init__(self, kind: str, message: str) -> None:
        assert kind in KINDS
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Written:
    """A written update. remainder: what compression lost, for this device's next update."""

    digest: str
    remainder: dict[str, Array]


def like_of(state: Mapping[str, Array]) -> Like:
    """Return the tensors of an update of this shared state: its float tensors."""
    return {
        name: (x.dtype, x.shape) for name, x in state.items() if np.issubdtype(x.dtype, np.floating)
    }


def most_bytes(like: Like) -> int:
    """Return a limit for the size of an update of such tensors with any compression."""
    values = sum(_nbytes(dtype, shape) for dtype, shape in like.values())
    indices = sum(_nbytes(np.dtype(np.uint32), shape) for _, shape in like.values())
    return values + indices + PER_TENSOR_BYTES * (3 * len(like) + 1)


def write_state(
    path: Path, tensors: Mapping[str, Array], roles: Mapping[str, str], *, plan: str
) -> str:
    """Write a shared state, whole or not at all, and return its digest. plan: its root digest."""
    return container.write(path, "state", [_state_part(tensors, roles)], parent=plan)


def encode_state(tensors: Mapping[str, Array], roles: Mapping[str, str], *, plan: str) -> bytes:
    """Return the bytes that `write_state` would write."""
    return container.encoded("state", [_state_part(tensors, roles)], parent=plan)


def _state_part(tensors: Mapping[str, Array], roles: Mapping[str, str]) -> PartData:
    if odd := sorted(n for n in tensors if roles.get(n) not in SHARED_ROLES):
        raise InvalidInput(f"a shared state may hold only parameters and buffers, got {odd[:4]}")
    return container.tensor_part(STATE, tensors, {name: roles[name] for name in tensors})


def read_state(
    path: Path, *, plan: str, data: bytes | None = None, verified: bool = False
) -> dict[str, Array]:
    """Return the tensors of a state as read-only views of the file.

    data: the file's bytes, if they are in memory; `path` is then only a name. verified: all bytes
    were compared with a digest, so the part is not hashed again.
    Conflict: it belongs to another plan. Corrupt: it is damaged. InvalidInput: it is no state, or
    not finite.
    """
    file = Container(path, kind="state", data=data)
    if file.manifest.parent != plan:
        raise Conflict(f"the state is of plan {file.manifest.parent[:16]}, not {plan[:16]}")
    _only_part(file, STATE)
    if odd := [t.name for t in file.manifest.tensors if t.role not in SHARED_ROLES]:
        raise Corrupt(f"a shared state may hold only parameters and buffers, got {odd[:4]}")
    if verified:
        file.trust()
    tensors = {name: tensor.data for name, tensor in file.tensors(STATE).items()}
    if odd := [name for name, x in tensors.items() if not is_finite(x)]:
        raise InvalidInput(f"{odd[0]!r} of the state holds numbers that are not finite")
    return tensors


def write_update(
    path: Path, change: Mapping[str, Array], *, disk: Disk = OS_DISK, **options: Any
) -> Written:
    """Compress `change` and write it; equal arguments give equal bytes. See `encode_update`."""
    parts, properties, lost = _update(change, **options)
    return Written(container.write(path, UPDATE, parts, properties=properties, disk=disk), lost)


def encode_update(change: Mapping[str, Array], **options: Any) -> tuple[bytes, dict[str, Array]]:
    """Return (the bytes of an update, what compression lost) without writing a file.

    options: run, round, lease (in hexadecimal), compression, keep, seed; remainder: what earlier
    updates of this device lost; device: name that seeds the rounding, so that equal runs give equal
    changes, by default the lease; buffers: tensors of `change` that are sent uncompressed.
    """
    parts, properties, lost = _update(change, **options)
    return container.encoded(UPDATE, parts, properties=properties), lost


def _update(
    change: Mapping[str, Array],
    *,
    run: str,
    round: int,  # noqa: A002 -- the word of the domain
    lease: str,
    compression: str,
    keep: float,
    seed: int,
    remainder: Mapping[str, Array] | None = None,
    device: str = "",
    buffers: Collection[str] = (),
) -> tuple[list[PartData], dict[str, str], dict[str, Array]]:
    # Seeded, so that a device that repeats its work after a crash sends the same bytes.
    draws = Draws(seed, round, device or lease, "compression")
    compressor = Compressor(compression, keep=keep, plain=buffers)
    arrays, lost = compressor.pack(change, remainder or {}, draws)
    roles = {name: BUFFER if name in buffers else PARAMETER for name in arrays}
    properties = {"compression": compression, "lease": lease, "round": str(round), "run": run}
    part = container.tensor_part(CHANGE, arrays, roles)
    return [part], properties, lost


def read_update(
    path: Path,
    like: Like,
    *,
    run: str,
    lease: str,
    max_bytes: int,
    round: int | None = None,  # noqa: A002 -- the word of the domain
    compression: str | None = None,
    buffers: Collection[str] = (),
    data: bytes | None = None,
    verified: bool = False,
) -> dict[str, Array]:
    """Return the change in an update: exactly the tensors of `like`, finite. BadUpdate otherwise.

    round, compression: checked if given. buffers: tensors of `like` that are sent uncompressed.
    data, verified: see `read_state`.
    """
    size = path.stat().st_size if data is None else len(data)
    # First of all: the limit bounds the work of every check that follows.
    if size > max_bytes:
        raise BadUpdate("oversized", f"an update has at most {max_bytes} bytes here, got {size}")
    try:
        file = Container(path, kind=UPDATE, data=data)
        _only_part(file, CHANGE)
    except (Corrupt, InvalidInput) as error:
        raise BadUpdate("damaged", f"no update: {error}") from error
    properties = dict(file.manifest.properties)
    _check_properties(properties, {"run": run, "lease": lease, "round": round})
    compressor = _compressor(properties["compression"], compression, buffers)
    # From the manifest alone; no array of the update has been touched so far.
    parts = _checked_names(file, compressor, like)
    try:
        if verified:
            file.trust()
        arrays = {name: tensor.data for name, tensor in file.tensors(CHANGE).items()}
    except Corrupt as error:
        raise BadUpdate("damaged", f"no update: {error}") from error
    return {
        name: _opened(compressor, name, [arrays[part] for part in parts[name]], like[name])
        for name in sorted(like)
    }


def _check_properties(seen: Mapping[str, str], wanted: Mapping[str, Any]) -> None:
    if sorted(seen) != list(FACTS):
        message = f"an update has the properties {', '.join(FACTS)}; this one {list(seen)[:8]}"
        raise BadUpdate("damaged", message)
    for name, value in wanted.items():
        if value is not None and seen[name] != str(value):
            raise BadUpdate(
                "foreign", f"the update is of {name} {seen[name][:80]!r}, the lease of {value!r}"
            )


def _compressor(used: str, wanted: str | None, buffers: Collection[str]) -> Compressor:
    if wanted is not None and used != wanted:
        raise BadUpdate("compression", f"the run asks for {wanted!r}, the update has {used[:80]!r}")
    try:
        return Compressor(used, plain=buffers)
    except InvalidInput as error:
        raise BadUpdate("compression", str(error)) from error


def _checked_names(file: Container, compressor: Compressor, like: Like) -> dict[str, list[str]]:
    """Return the names of each tensor's arrays; checks the manifest before numbers are read."""
    listed = file.manifest.tensors_of(CHANGE)
    if private := [t.name for t in listed if t.role not in SHARED_ROLES]:
        raise BadUpdate(
            "personal", f"an update holds shared tensors only; {private[0][:80]!r} has another role"
        )
    parts = {name: compressor.names(name) for name in like}
    # Every array is limited by the tensor for which it stands, before its bytes are read.
    largest = {part: most_part_bytes(*like[name]) for name in like for part in parts[name]}
    if odd := sorted({t.name for t in listed} ^ largest.keys()):
        raise BadUpdate(
            "names", f"the update and the shared state differ in tensor {odd[0][:80]!r}"
        )
    for t in listed:
        if BY_NAME[t.dtype].storage.itemsize * int(np.prod(t.shape)) > largest[t.name]:
            raise BadUpdate("shape", f"{t.name!r} is {t.dtype}{t.shape}, more than its tensor")
    return parts


def most_part_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return the limit for each array of a compressed tensor."""
    return max(_nbytes(np.promote_types(dtype, np.uint32), shape), 8 * len(shape), 8)


def _opened(
    compressor: Compressor, name: str, parts: list[Array], expected: tuple[np.dtype[Any], Any]
) -> Array:
    row = compressor.row_for(name)
    try:
        # Type and shape are computed from the parts without unpacking them: the shape that a
        # hostile top-k update states could take terabytes.
        sent = (row.dtype(*parts), row.shape(*parts))
        x = row.unpack(*parts) if sent == expected else None
    except InvalidInput as error:
        raise BadUpdate("compression", f"{name!r}: {error}") from error
    if x is None:
        raise BadUpdate("shape", f"{name!r} is {expected[0]}{expected[1]} here, sent is {sent}")
    if not is_finite(x):
        raise BadUpdate("nonfinite", f"{name!r} holds numbers that are not finite")
    return x


def _only_part(file: Container, name: str) -> None:
    parts = [part.name for part in file.manifest.parts]
    if parts != [name]:
        raise Corrupt(f"{file.path.name}: requires the part {name!r}, got {parts[:4]}")


def is_finite(x: Array) -> bool:
    """Return whether all numbers are finite."""
    return not np.issubdtype(x.dtype, np.floating) or bool(np.isfinite(x).all())


def _nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))
