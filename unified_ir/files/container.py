"""The zip container: stored, aligned members in one canonical layout, so every byte is checked.

Layout: `manifest.pb`, then the parts in the order of the manifest, then the central directory.
Members are stored uncompressed, start 64-byte aligned (padded by zipalign's extra field 0xD935),
and have the date 1980-01-01. A loader derives every byte of headers and directory from the manifest
and compares them. The CRC-32 in its zip header protects the manifest, a SHA-256 in the manifest
each part. Any unzip program opens such a file, but the loader refuses any other zip file.

The file is mapped into memory, and a part is hashed when it is first read. Replace a file only by
rename, as `write` does: a change in place would change what readers have mapped.
"""

import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from triplane.proto.disk import OS_DISK, Disk, atomic_file
from triplane.proto.errors import Corrupt, InvalidInput, NotFound, Unavailable
from triplane.unified_ir.files import digests, tensors
from triplane.unified_ir.files import manifest as manifests
from triplane.unified_ir.files.digests import Buffer
from triplane.unified_ir.files.layout import LOCAL, Layout, local_header
from triplane.unified_ir.files.manifest import (
    MANIFEST_NAME,
    MAX_FILE_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
    TensorEntry,
    is_tensor_part,
)

_HASH_CHUNK: Final = 8 << 20
_RELEASED_BYTES: Final = 64 << 20
"""After hashing a part above this size its pages are released; later use reads them again."""
_HOW_MADE: Final = {
    ("model", "bundle"): "; `triplane convert MODEL.tpm --out NAME.bundle` makes one from it",
    ("model", "plan"): "; `triplane convert MODEL.tpm --plan NAME.plan` makes one from it",
    ("bundle", "model"): "; give the .tpm that it was made from",
    ("plan", "model"): "; give the .tpm that it was made from",
}
"""Hints for a file of the wrong kind, by actual and expected kind."""
_READ_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PartData:
    """A part to write: its bytes in chunks, `size` bytes in total, and the tensors it holds."""

    name: str
    size: int
    chunks: Iterable[Buffer]
    tensors: tuple[TensorEntry, ...] = ()


def part(name: str, data: Buffer) -> PartData:
    """Return a part made of bytes in memory."""
    return PartData(name, memoryview(data).nbytes, (data,))


def file_part(name: str, source: Path) -> PartData:
    """Return a part of a file's bytes, read when it is written; the file must not change."""
    return PartData(name, source.stat().st_size, _chunks_of(source))


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_READ_CHUNK):
            yield chunk


def tensor_part(
    name: str,
    values: Mapping[str, tensors.Array | tensors.StoredTensor],
    roles: Mapping[str, str] | None = None,
) -> PartData:
    """Return a part of tensors, streamed from the arrays when it is written."""
    packed = tensors.pack(name, values, roles)
    return PartData(name, packed.size, packed, packed.entries)


def write(
    path: Path,
    kind: str,
    parts: Iterable[PartData],
    *,
    properties: Mapping[str, str] | None = None,
    parent: str = "",
    check: Callable[[Path], object] | None = None,
    disk: Disk = OS_DISK,
) -> str:
    """Write the file completely or not at all, and return its root digest.

    Parts are streamed, and hashed while they are written. The manifest comes last, into space that
    was reserved for it, since its size does not depend on the digests.

    check: reads the complete file as its readers will, before the file gets its name. A file that
    it refuses is removed, and an older file of that name stays. Hashing takes 0.5 to 1 s per GB and
    no memory, since the file is mapped.
    """
    path = Path(path)
    with atomic_file(path, disk) as file:
        digest = write_into(file, kind, parts, properties=properties, parent=parent)
        if check is not None:
            file.flush()
            _read_back(Path(file.name), path.name, check)
        return digest


def _read_back(written: Path, name: str, check: Callable[[Path], object]) -> None:
    """Have `check` read the file under its temporary name; errors state the final name."""
    try:
        check(written)
    except (Corrupt, InvalidInput) as error:
        text = str(error).replace(written.name, name)
        message = f"{name} cannot be read back after writing, so it is not kept: {text}"
        raise Corrupt(message) from error


def verified(kind: str) -> Callable[[Path], None]:
    """Return a check for `write` that compares every byte of the file with its digests."""

    def check(path: Path) -> None:
        Container(path, kind=kind).verify()

    return check


def encoded(
    kind: str,
    parts: Iterable[PartData],
    *,
    properties: Mapping[str, str] | None = None,
    parent: str = "",
) -> bytes:
    """Return the bytes that `write` would write, for a small file that is not stored on disk."""
    file = BytesIO()
    write_into(file, kind, parts, properties=properties, parent=parent)
    return file.getvalue()


def write_into(
    file: BinaryIO,
    kind: str,
    parts: Iterable[PartData],
    *,
    properties: Mapping[str, str] | None = None,
    parent: str = "",
) -> str:
    """Write into an empty seekable file and return its root digest; the caller makes it durable."""
    parts = tuple(parts)
    draft = Manifest(
        kind=kind,
        parts=tuple(Part(data.name, data.size, bytes(digests.SIZE), 0) for data in parts),
        tensors=tuple(t for data in parts for t in data.tensors),
        properties=tuple(sorted((properties or {}).items())),
        parent=parent,
    )
    # The draft has digests of zeros. SHA-256 and CRC-32 have fixed sizes on the wire, so the final
    # manifest is exactly as long.
    room = len(manifests.encode(draft))
    layout = Layout(room, draft.parts)
    if layout.size > MAX_FILE_BYTES:
        raise InvalidInput(f"a file has at most {MAX_FILE_BYTES} bytes, this takes {layout.size}")
    written = tuple(
        Part(data.name, data.size, *_stream(file, offset, data))
        for offset, data in zip(layout.data[1:], parts, strict=True)
    )
    manifest = replace(draft, parts=written)
    stored = manifests.encode(manifest)
    assert len(stored) == room
    for offset, frame in Layout(room, manifest.parts).frames(zlib.crc32(stored)):
        file.seek(offset)
        file.write(frame)
    file.seek(layout.data[0])
    file.write(stored)
    return digests.sha256(stored).hex()


class Container:
    """A file, mapped; its directory is checked on opening, its parts when they are read.

    digest: the root digest in hexadecimal.
    """

    def __init__(
        self,
        path: Path,
        *,
        kind: str,
        expected_digest: str | None = None,
        data: bytes | None = None,
    ) -> None:
        """Map `path` and check its directory, its kind and, when given, its root digest.

        data: the file's bytes, if they are in memory; `path` is then only a name in messages.
        NotFound: no such file. InvalidInput: another kind of file, or a newer format.
        Corrupt: anything else that is not exactly what `write` produces.
        """
        self.path = Path(path)
        self._map = _mapped(self.path) if data is None else data
        try:
            stored = _stored_manifest(self._map)
            self.digest = digests.sha256(stored).hex()
            # Before the manifest is parsed: bytes with another digest do not reach the parser.
            if expected_digest is not None and not digests.same(self.digest, expected_digest):
                raise Corrupt(f"manifest: root digest is {self.digest}, not {expected_digest}")
            self.manifest = manifests.decode(stored)
            self._data = _check_frames(self._map, stored, self.manifest.parts)
        except Corrupt as error:
            raise self._corrupt(str(error)) from error
        if self.manifest.kind != kind:
            raise InvalidInput(
                f"{self.path.name} is a {self.manifest.kind} file, not a {kind}"
                f"{_HOW_MADE.get((self.manifest.kind, kind), '')}"
            )
        self._read: dict[str, memoryview] = {}

    def part(self, name: str) -> memoryview:
        """Return the bytes of a part, hashed on first use; Corrupt names a damaged one."""
        if name not in self._read:
            row = self.manifest.part(name)
            data = self._bytes(row)
            sha = digests.sha256_of(self._chunks(row))
            if not digests.same(sha, row.sha256):
                raise self._corrupt(f"part {name!r} is damaged{self._damage(row)}")
            self._read[name] = data
        return self._read[name]

    def tensors(self, name: str) -> dict[str, tensors.StoredTensor]:
        """Return read-only views of the tensors of a part; they must match the manifest."""
        stored = tensors.unpack(self.part(name), f"{self.path.name}: part {name!r}")
        at = len(self.part(name)) - sum(t.data.nbytes for t in stored.values())
        actual = []
        for key, t in stored.items():
            actual.append((key, t.dtype, t.shape, at))
            at += t.data.nbytes
        listed = self.manifest.tensors_of(name)
        if actual != [(t.name, t.dtype, t.shape, t.offset) for t in listed]:
            raise self._corrupt(f"part {name!r}: its tensors are not those of the manifest")
        return stored

    def verify(self) -> None:
        """Hash every part and check every header of tensors; Corrupt names what is damaged.

        A part's digest covers its tensors; their own digests name damage and compare files.
        """
        for row in self.manifest.parts:
            self.part(row.name)
            if is_tensor_part(row.name):
                self.tensors(row.name)

    def trust(self) -> None:
        """Accept the parts without hashing: the whole file was compared with a digest before."""
        self._read |= {row.name: self._bytes(row) for row in self.manifest.parts}

    def release(self) -> None:
        """Release the memory of what was read; later use reads it from the file again."""
        if isinstance(self._map, mmap.mmap):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, row: Part) -> memoryview:
        offset = self._data[row.name]
        return memoryview(self._map)[offset : offset + row.size].toreadonly()

    def _chunks(self, row: Part) -> Iterator[memoryview]:
        """Yield the bytes of a part in order; a large part does not stay in memory."""
        begin, end = self._data[row.name], self._data[row.name] + row.size
        view = memoryview(self._map)
        for at in range(begin, end, _HASH_CHUNK):
            yield view[at : min(at + _HASH_CHUNK, end)]
            # Otherwise hashing a bundle of gigabytes would count as memory of the process and push
            # other pages out; what is used later is read from the file again.
            if row.size > _RELEASED_BYTES and isinstance(self._map, mmap.mmap):
                page = at - at % mmap.PAGESIZE
                size = min(at + _HASH_CHUNK, end) - page
                self._map.madvise(mmap.MADV_DONTNEED, page, size)

    def _damage(self, row: Part) -> str:
        data = self._bytes(row)
        hurt = [
            t.name
            for t in self.manifest.tensors_of(row.name)
            if digests.sha256(data[t.offset : t.offset + t.size]) != t.sha256
        ]
        return f" in tensor {', '.join(map(repr, hurt[:4]))}" if hurt else ""

    def _corrupt(self, message: str) -> Corrupt:
        return Corrupt(f"{self.path.name}: {message}")


def release_mapped(arrays: Iterable[tensors.Array]) -> None:
    """Release the memory of views of mapped files; later use reads it from the files again."""
    for x in arrays:
        base: object = x
        while isinstance(base, np.ndarray):
            base = base.base
        owner = base.obj if isinstance(base, memoryview) else None
        if isinstance(owner, mmap.mmap):
            owner.madvise(mmap.MADV_DONTNEED)


def _stream(file: BinaryIO, offset: int, data: PartData) -> tuple[bytes, int]:
    """Write the part's chunks at `offset`; return their SHA-256 and CRC-32."""
    file.seek(offset)
    crc = size = 0

    def counted() -> Iterable[Buffer]:
        nonlocal crc, size
        for chunk in data.chunks:
            crc = zlib.crc32(chunk, crc)
            size += memoryview(chunk).nbytes
            # Stop at the announced size: more would overwrite the part after it.
            if size > data.size:
                break
            file.write(chunk)
            yield chunk

    sha = digests.sha256_of(counted())
    if size != data.size:
        raise InvalidInput(f"part {data.name!r} announced {data.size} bytes and gave {size}")
    return sha, crc


def _mapped(path: Path) -> mmap.mmap:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer. `fstat` on the open file, not
        # `stat` on the path, which could name another file by then.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise NotFound(f"no file at {path}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise Unavailable(f"could not open {path}: {error}") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput(f"{path} is not a regular file")
        if not 0 < status.st_size <= MAX_FILE_BYTES:
            raise Corrupt(
                f"{path.name}: {status.st_size} bytes; a file of Triplane has 1 to {MAX_FILE_BYTES}"
            )
        try:
            return mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # the kernel's pseudo-files; emptied since `fstat`
            raise Unavailable(f"could not map {path}: {error}") from error
    finally:
        os.close(handle)


def _stored_manifest(data: mmap.mmap | bytes) -> bytes:
    """Return the manifest's bytes, its header and CRC-32 checked; nothing else is read."""
    # The manifest is the first member, and its data starts at an offset that depends only on its
    # name.
    start = Layout(0, ()).data[0]
    if len(data) < start or data[:4] != b"PK\3\4":
        raise Corrupt("this is not a file of Triplane, or the header of its manifest is damaged")
    size = LOCAL.unpack_from(data)[7]
    # Checked before the slice: the size comes from an unchecked header.
    if size > min(MAX_MANIFEST_BYTES, len(data) - start):
        name = _first_member(data)
        if name != MANIFEST_NAME:
            raise Corrupt(
                "this is not a file of Triplane, or the header of its manifest is damaged: it is "
                f"an archive that begins with {name!r}, not with {MANIFEST_NAME!r}"
            )
        raise Corrupt(
            f"manifest: its header is damaged: it announces {size} bytes, more than "
            f"{MAX_MANIFEST_BYTES} or than the file holds"
        )
    stored = data[start : start + size]
    if data[:start] != local_header(Part(MANIFEST_NAME, size, b"", 0), zlib.crc32(stored), start):
        raise Corrupt("manifest: its bytes or its header are damaged")
    return stored


def _first_member(data: mmap.mmap | bytes) -> str:
    """Return the name in the first header of a zip archive, shortened."""
    start = LOCAL.size
    size = int.from_bytes(data[26:28], "little")
    return bytes(data[start : start + min(size, 80)]).decode(errors="replace")


def is_container(path: Path) -> bool:
    """Return whether the file begins as `write` begins every file; nothing is verified."""
    start = local_header(Part(MANIFEST_NAME, 0, b"", 0), 0, Layout(0, ()).data[0])
    with path.open("rb") as file:
        head = file.read(len(start))
    name = slice(LOCAL.size, LOCAL.size + len(MANIFEST_NAME))
    return head[:4] == start[:4] and head[name] == start[name]


def _check_frames(
    data: mmap.mmap | bytes, stored: bytes, parts: tuple[Part, ...]
) -> dict[str, int]:
    """Compare every byte that is not data with what the manifest implies; return data offsets."""
    layout = Layout(len(stored), parts)
    if layout.size != len(data):
        change = "cut off" if len(data) < layout.size else "extended"
        raise Corrupt(
            f"container directory: the file was {change}: it has {len(data)} bytes, its manifest "
            f"describes {layout.size}"
        )
    where = [f"header of part {row.name!r}" for row in layout.parts] + ["container directory"]
    for name, (offset, frame) in zip(where, layout.frames(zlib.crc32(stored)), strict=True):
        # Comparison instead of parsing: of a hostile file, no header field but the size of the
        # manifest is ever interpreted.
        if data[offset : offset + len(frame)] != frame:
            raise Corrupt(f"{name}: is damaged")
    return {row.name: at for row, at in zip(layout.parts, layout.data, strict=True)}
