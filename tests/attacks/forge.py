"""Hostile files: sound wherever the attack does not need them broken."""

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from triplane.proto import files_pb2 as pb
from triplane.unified_ir.files import digests
from triplane.unified_ir.files.layout import Layout
from triplane.unified_ir.files.manifest import Part


def manifest(parts: dict[str, bytes], kind: str = "model") -> pb.Manifest:
    """Return a true manifest of `parts`, to be bent by the caller."""
    made = pb.Manifest(format_version=1, kind=kind)
    for name, data in parts.items():
        made.parts.add(
            name=name, size=len(data), sha256=digests.sha256(data), crc32=zlib.crc32(data)
        )
    return made


def add_tensor(message: pb.Manifest, **changes) -> None:
    """List one float32 tensor of 4 elements at the start of `t.safetensors`, with changes."""
    row = {
        "part": "t.safetensors", "name": "a", "dtype": "float32", "shape": [4],
        "offset": 0, "size": 16, "sha256": bytes(32),
    }  # fmt: skip
    message.tensors.add(**{**row, **changes})


def write(path: Path, message: pb.Manifest | bytes, data: dict[str, bytes] | None = None) -> None:
    """Write a container whose frames agree with `message`, whatever it says.

    data: the parts' bytes by name, written where the layout puts them; zeros where absent.
    """
    stored = message if isinstance(message, bytes) else message.SerializeToString()
    listed = () if isinstance(message, bytes) else message.parts
    rows = tuple(Part(row.name, row.size, row.sha256, row.crc32) for row in listed)
    layout = Layout(len(stored), rows)
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, frame in layout.frames(zlib.crc32(stored)):
            file.seek(offset)
            file.write(frame)
        for chunk, offset in zip((stored, *(data or {}).values()), layout.data, strict=False):
            file.seek(offset)
            file.write(chunk)


def flips(path: Path, positions: Iterable[int] | None = None) -> Iterator[int]:
    """Yield each position while one bit of its byte is flipped in place, then mend it."""
    handle = os.open(path, os.O_RDWR)
    try:
        for at in range(os.fstat(handle).st_size) if positions is None else positions:
            byte = os.pread(handle, 1, at)
            os.pwrite(handle, bytes([byte[0] ^ 1 << at % 8]), at)
            yield at
            os.pwrite(handle, byte, at)
    finally:
        os.close(handle)


def truncations(path: Path) -> Iterator[int]:
    """Yield each smaller size, the largest first, while the file has it."""
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        yield size
