"""What the messages of an Arrow IPC stream announce, read before any of them is decoded.

A compressed buffer states its size in its first 8 bytes, and pyarrow allocates what is stated. So
the list of buffers is read here, from the flatbuffer of each message (Arrow Columnar Format 1.5,
Message.fbs), and the statements are summed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any, Final

from triplane.proto.errors import Corrupt, InvalidInput

MAX_MESSAGES: Final = 1 << 20
_DICTIONARY_BATCH: Final = 2
_RECORD_BATCH: Final = 3
_BUFFER: Final = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What a record batch takes: n_bytes once decoded, with the dictionaries before it."""

    rows: int
    n_bytes: int
    is_compressed: bool


def stream_sizes(reader: Any, what: str) -> list[BatchSize]:
    """Return the size of each record batch.

    reader: pyarrow's reader of messages. Raises Corrupt, or InvalidInput for too many messages.
    """
    sizes: list[BatchSize] = []
    dictionary_bytes = 0
    for n, message in enumerate(reader):
        if n >= MAX_MESSAGES:
            raise InvalidInput(
                f"{what} has more than {MAX_MESSAGES} messages; write larger batches"
            )
        try:
            kind, size = _announced(memoryview(message.metadata), message.body)
        except (struct.error, ValueError, IndexError) as error:
            raise Corrupt(f"{what}: message {n} is damaged: {error}") from error
        if size.rows < 0:
            raise Corrupt(f"{what}: message {n} announces {size.rows} rows")
        if kind == _DICTIONARY_BATCH:
            dictionary_bytes += size.n_bytes
        if kind == _RECORD_BATCH:
            sizes.append(replace(size, n_bytes=size.n_bytes + dictionary_bytes))
    return sizes


def _announced(metadata: memoryview, body: Any) -> tuple[int, BatchSize]:
    """Return (kind, size) of a message."""
    message = _FlatbufferTable(metadata, struct.unpack_from("<I", metadata)[0])
    kind = message.scalar(1, "<B")
    if kind not in {_DICTIONARY_BATCH, _RECORD_BATCH}:
        return kind, BatchSize(0, 0, is_compressed=False)
    batch = message.table(2)
    if kind == _DICTIONARY_BATCH:
        batch = batch.table(1)
    is_compressed = batch.position(3) is not None
    content = memoryview(body if body is not None else b"")
    total = 0
    for offset, length in batch.structs(2, _BUFFER):
        if not 0 <= offset <= offset + length <= len(content):
            raise ValueError(f"a buffer at {offset} of {length} bytes is outside the message")
        total += _decoded_bytes(content[offset : offset + length]) if is_compressed else length
    return kind, BatchSize(batch.scalar(0, "<q"), total, is_compressed)


def _decoded_bytes(buffer: memoryview) -> int:
    if not buffer:
        return 0
    (announced,) = struct.unpack_from("<q", buffer)
    if announced < -1:
        raise ValueError(f"a buffer announces {announced} bytes")
    return len(buffer) - 8 if announced == -1 else int(announced)


class _FlatbufferTable:
    """A table of a flatbuffer. Offsets beyond its bytes raise struct.error or ValueError."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - self._read("<i", at)

    def position(self, k: int) -> int | None:
        """Return where field k is, None if it is absent."""
        if 4 + 2 * k >= self._read("<H", self._vtable):
            return None
        offset = self._read("<H", self._vtable + 4 + 2 * k)
        return self._at + offset if offset else None

    def scalar(self, k: int, kind: str) -> int:
        """Return the number in field k, 0 if it is absent."""
        position = self.position(k)
        return 0 if position is None else self._read(kind, position)

    def table(self, k: int) -> _FlatbufferTable:
        """Return the table in field k."""
        return _FlatbufferTable(self._data, self._pointer(k))

    def structs(self, k: int, kind: struct.Struct) -> list[tuple[Any, ...]]:
        """Return the elements of the vector in field k, none if it is absent."""
        if self.position(k) is None:
            return []
        at = self._pointer(k)
        end = at + 4 + self._read("<I", at) * kind.size
        if end > len(self._data):
            raise ValueError("a list is longer than the message")
        return list(kind.iter_unpack(self._data[at + 4 : end]))

    def _pointer(self, k: int) -> int:
        position = self.position(k)
        if position is None:
            raise ValueError(f"field {k} is absent")
        return position + self._read("<I", position)

    def _read(self, kind: str, at: int) -> int:
        if at < 0:
            raise ValueError(f"an offset of {at}")
        return int(struct.unpack_from(kind, self._data, at)[0])
