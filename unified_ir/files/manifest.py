"""The manifest of a file: every part and tensor with its size and digest.

Decoding checks limits before it does any work: first the size of the manifest, then the number of
entries, then each name, rank and range. An accepted manifest is consistent: names are unique, and
tensors lie inside their parts and do not overlap.
"""

import re
from dataclasses import dataclass
from math import prod
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from triplane.proto import files_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.messages import message_from
from triplane.unified_ir.files import digests
from triplane.unified_ir.files.dtypes import BY_NAME

FORMAT_VERSION: Final = 1
KINDS: Final = ("model", "bundle", "plan", "checkpoint", "state", "update")
ROLES: Final = ("", "parameter", "buffer", "optimizer", "key", "personal")

MAX_MANIFEST_BYTES: Final = 8 << 20
MAX_PARTS: Final = 256
MAX_TENSORS: Final = 32_768
MAX_PROPERTIES: Final = 1_024
MAX_TENSOR_NAME_BYTES: Final = 512
MAX_PROPERTY_BYTES: Final = 64 << 10
MAX_RANK: Final = 16
MAX_FILE_BYTES: Final = 2**32 - 1
"""Version 1 uses zip's 32-bit fields; zip64 would need a later format version."""

PART_NAME: Final = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,99}", re.ASCII)
MANIFEST_NAME: Final = "manifest.pb"
_MAX_ENTRIES: Final = MAX_PARTS + MAX_TENSORS + MAX_PROPERTIES + 3

_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, slots=True)
class Part:
    """One member of the container."""

    name: str
    size: int
    sha256: bytes
    crc32: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one part; `offset` and `size` in bytes, `offset` from the part's start."""

    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    sha256: bytes
    role: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest; `parent` is a root digest in hexadecimal, or empty."""

    kind: str
    parts: tuple[Part, ...]
    tensors: tuple[TensorEntry, ...] = ()
    properties: tuple[tuple[str, str], ...] = ()
    parent: str = ""

    def part(self, name: str) -> Part:
        """Return the part with that name; Corrupt if the file does not have it."""
        for part in self.parts:
            if part.name == name:
                return part
        raise Corrupt(f"part {name!r} is missing; there are {[part.name for part in self.parts]}")

    def tensors_of(self, part: str) -> tuple[TensorEntry, ...]:
        """Return the tensors of one part in the order of its data."""
        return tuple(tensor for tensor in self.tensors if tensor.part == part)


def encode(manifest: Manifest) -> bytes:
    """Return the bytes to store; InvalidInput if the manifest breaks a rule of the format."""
    try:
        _check(manifest)
    except Corrupt as error:
        raise InvalidInput(str(error)) from error
    message = pb.Manifest(
        format_version=FORMAT_VERSION,
        kind=manifest.kind,
        parts=[message_from(pb.Part, part) for part in manifest.parts],
        tensors=[message_from(pb.Tensor, tensor) for tensor in manifest.tensors],
        properties=[pb.Property(key=key, value=value) for key, value in manifest.properties],
        parent_digest=digests.from_hex(manifest.parent) if manifest.parent else b"",
    )
    data = message.SerializeToString(deterministic=True)
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidInput(f"a manifest takes at most {MAX_MANIFEST_BYTES} bytes, got {len(data)}")
    return data


def decode(data: bytes) -> Manifest:
    """Return the manifest in `data`; Corrupt names the first rule it breaks."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise Corrupt(f"manifest: {len(data)} bytes, at most {MAX_MANIFEST_BYTES} are read")
    if count_fields(data) > _MAX_ENTRIES:
        raise Corrupt(f"manifest: more than {_MAX_ENTRIES} entries")
    message = parse(pb.Manifest(), data, "manifest")
    if message.format_version != FORMAT_VERSION:
        raise InvalidInput(
            f"the file has format version {message.format_version}, this program reads "
            f"{FORMAT_VERSION}; a newer triplane may read it"
        )
    manifest = _from_message(message)
    _check(manifest)
    return manifest


def parse(message: _M, data: bytes, what: str) -> _M:
    """Fill `message` from `data`; Corrupt if it has fields that this version does not know."""
    try:
        message.ParseFromString(data)
    except (DecodeError, RecursionError) as error:
        raise Corrupt(f"{what}: not a {type(message).__name__} message: {error}") from error
    size = message.ByteSize()
    # Protobuf keeps unknown fields silently. A signed file must not contain anything that this
    # reader does not look at; a newer format has a new version number.
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise Corrupt(f"{what}: has fields this version does not know")
    return message


def count_fields(data: bytes, limit: int = _MAX_ENTRIES) -> int:
    """Count the top-level fields of a serialized message, stopping just past `limit`.

    Two bytes on the wire can become a message object of a hundred bytes: counting first prevents a
    hostile manifest from taking fifty times its size in memory. Malformed bytes end the count; the
    real parser refuses them.
    """
    at = count = 0
    while at < len(data) and count <= limit:
        tag, at = _varint(data, at)
        count += 1
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(data, at)
                at += size
            case 5:
                at += 4
            case _:
                break
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    # A varint has at most ten bytes; without the bound a run of 0x80 bytes would build a huge
    # integer, in quadratic time.
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at


def _from_message(message: pb.Manifest) -> Manifest:
    for part in message.parts:
        # CRC-32 is a fixed-size field that is always written, 0 included, because the size of the
        # manifest must not depend on its value.
        if not part.HasField("crc32"):
            raise Corrupt(f"manifest: part {part.name!r} has no crc32")
    for t in message.tensors:
        if len(t.shape) > MAX_RANK:  # before it becomes a tuple of millions
            raise Corrupt(f"manifest: tensor {t.name[:80]!r}: rank {len(t.shape)} out of range")
    return Manifest(
        kind=message.kind,
        parts=tuple(Part(p.name, p.size, p.sha256, p.crc32) for p in message.parts),
        tensors=tuple(
            TensorEntry(t.part, t.name, t.dtype, tuple(t.shape), t.offset, t.size, t.sha256, t.role)
            for t in message.tensors
        ),
        properties=tuple((p.key, p.value) for p in message.properties),
        parent=message.parent_digest.hex(),
    )


def _check(manifest: Manifest) -> None:
    if manifest.kind not in KINDS:
        raise Corrupt(f"manifest: kind must be one of {KINDS}, got {manifest.kind[:80]!r}")
    if len(manifest.parent) not in {0, 2 * digests.SIZE}:
        raise Corrupt(f"manifest: parent digest of {len(manifest.parent) // 2} bytes, not 32")
    _check_parts(manifest.parts)
    _check_tensors(manifest)
    _check_properties(manifest.properties)


def _check_parts(parts: tuple[Part, ...]) -> None:
    if len(parts) > MAX_PARTS:
        raise Corrupt(f"manifest: {len(parts)} parts, at most {MAX_PARTS}")
    seen = {MANIFEST_NAME}
    for part in parts:
        if not PART_NAME.fullmatch(part.name):
            raise Corrupt(f"manifest: part name {part.name[:120]!r} must match {PART_NAME.pattern}")
        if part.name in seen:
            raise Corrupt(f"manifest: two parts are named {part.name!r}")
        if part.size > MAX_FILE_BYTES or len(part.sha256) != digests.SIZE:
            raise Corrupt(f"manifest: part {part.name!r} has a size or digest out of range")
        seen.add(part.name)


def _check_tensors(manifest: Manifest) -> None:
    if len(manifest.tensors) > MAX_TENSORS:
        raise Corrupt(f"manifest: {len(manifest.tensors)} tensors, at most {MAX_TENSORS}")
    sizes = {part.name: part.size for part in manifest.parts if is_tensor_part(part.name)}
    ends = dict.fromkeys(sizes, 0)
    seen = set()
    for tensor in manifest.tensors:
        if tensor.part not in sizes or (tensor.part, tensor.name) in seen:
            raise Corrupt(f"manifest: tensor {tensor.name[:80]!r} has no part or occurs twice")
        _check_tensor(tensor)
        # Tensors are listed in the order of their offsets, so the end of the last one is enough to
        # compare.
        if tensor.offset < ends[tensor.part] or tensor.offset + tensor.size > sizes[tensor.part]:
            raise Corrupt(f"manifest: tensor {tensor.name!r} overlaps another or leaves its part")
        ends[tensor.part] = tensor.offset + tensor.size
        seen.add((tensor.part, tensor.name))


def is_tensor_part(name: str) -> bool:
    """Return whether a part holds tensors, each listed in the manifest."""
    return name.endswith(".safetensors")


def _check_tensor(tensor: TensorEntry) -> None:
    where = f"manifest: tensor {tensor.name[:80]!r}"
    check_tensor_name(tensor.name, where)
    if tensor.dtype not in BY_NAME or tensor.role not in ROLES:
        raise Corrupt(f"{where} has unknown dtype {tensor.dtype!r} or role {tensor.role!r}")
    check_shape(tensor.shape, where)
    if prod(tensor.shape) * BY_NAME[tensor.dtype].storage.itemsize != tensor.size:
        raise Corrupt(f"{where}: {tensor.dtype}{tensor.shape} does not take {tensor.size} bytes")
    if len(tensor.sha256) != digests.SIZE:
        raise Corrupt(f"{where} has a digest of {len(tensor.sha256)} bytes, not {digests.SIZE}")


def check_tensor_name(name: str, where: str) -> None:
    """Refuse empty, overlong and unprintable names; a name is shown, never used as a path."""
    if not (name and name.isprintable()) or len(name.encode()) > MAX_TENSOR_NAME_BYTES:
        raise Corrupt(f"{where}: a name has 1 to {MAX_TENSOR_NAME_BYTES} printable bytes")


def check_shape(shape: tuple[int, ...], where: str) -> None:
    """Refuse ranks and sizes that no file can hold, even if a size of 0 makes their product 0."""
    fits = len(shape) <= MAX_RANK and all(0 <= dim <= MAX_FILE_BYTES for dim in shape)
    # A shape such as (0, 2^60) takes no bytes, but numpy and other readers may multiply its sizes.
    if not fits or prod(dim or 1 for dim in shape) > MAX_FILE_BYTES:
        raise Corrupt(f"{where}: rank {len(shape)}, shape {shape[:MAX_RANK]} out of range")


def _check_properties(properties: tuple[tuple[str, str], ...]) -> None:
    keys = [key for key, _ in properties]
    # Sorted, so that equal contents have equal bytes and digests.
    if len(keys) > MAX_PROPERTIES or keys != sorted(set(keys)):
        raise Corrupt(f"manifest: {len(keys)} properties, not sorted, unique, <= {MAX_PROPERTIES}")
    for key, value in properties:
        if not key or len(key) + len(value) > MAX_PROPERTY_BYTES:
            raise Corrupt(f"manifest: property {key[:80]!r} is empty or too long")
