"""The canonical zip frame: all bytes of a file that are not data, derived from its manifest.

Members are stored uncompressed; their data is 64-byte aligned by zipalign's padding field 0xD935,
their date is 1980-01-01, their mode 0644. There are no comments, no zip64 records, and nothing
between members. Field names are those of PKWARE's APPNOTE.TXT, section 4.3.
"""

import struct
from collections.abc import Iterable
from typing import Final

from triplane.unified_ir.files.manifest import MANIFEST_NAME, Part

ALIGNMENT: Final = 64
LOCAL: Final = struct.Struct("<4sHHHHHLLLHH")
_CENTRAL: Final = struct.Struct("<4sHHHHHHLLLHHHHHLL")
_END: Final = struct.Struct("<4sHHHHLLH")
_EXTRA: Final = struct.Struct("<HHH")
_ALIGN_ID: Final = 0xD935
# "version needed to extract" 2.0; made by Unix (3), whose attributes carry the file mode
_VERSION: Final = 20
_MADE_BY: Final = 3 << 8 | _VERSION
_DATE: Final = 1 << 5 | 1
_ATTRIBUTES: Final = 0o100644 << 16


class Layout:
    """Offsets of headers and data, from the manifest's size and the parts; 0 is the manifest."""

    def __init__(self, manifest_size: int, parts: tuple[Part, ...]) -> None:
        self.parts = (Part(MANIFEST_NAME, manifest_size, b"", 0), *parts)
        self.headers: list[int] = []
        self.data: list[int] = []
        at = 0
        for row in self.parts:
            self.headers.append(at)
            bare = at + LOCAL.size + len(row.name) + _EXTRA.size
            # -n mod A is the distance to the next multiple of A.
            self.data.append(bare + -bare % ALIGNMENT)
            at = self.data[-1] + row.size
        self.directory = at
        self.size = at + _END.size + sum(_CENTRAL.size + len(row.name) for row in self.parts)

    def frames(self, manifest_crc: int) -> Iterable[tuple[int, bytes]]:
        """Yield (offset, bytes) of all that is not data: local headers, then the directory."""
        crcs = [manifest_crc, *(row.crc32 for row in self.parts[1:])]
        for row, crc, header, data in zip(self.parts, crcs, self.headers, self.data, strict=True):
            yield header, local_header(row, crc, data - header)
        yield self.directory, self._directory(crcs)

    def _directory(self, crcs: list[int]) -> bytes:
        records = b"".join(
            _central(row, crc, header)
            for row, crc, header in zip(self.parts, crcs, self.headers, strict=True)
        )
        count = len(self.parts)
        end = _END.pack(b"PK\5\6", 0, 0, count, count, len(records), self.directory, 0)
        return records + end


def local_header(row: Part, crc: int, room: int) -> bytes:
    """Return the `room` bytes before a member's data: header, name, padding field."""
    name = row.name.encode()
    extra = room - LOCAL.size - len(name)
    head = LOCAL.pack(
        b"PK\3\4", _VERSION, 0, 0, 0, _DATE, crc, row.size, row.size, len(name), extra
    )
    # Extra field: id, size of what follows these four bytes, the alignment, zeros.
    pad = _EXTRA.pack(_ALIGN_ID, extra - 4, ALIGNMENT) + bytes(extra - _EXTRA.size)
    return head + name + pad


def _central(row: Part, crc: int, header: int) -> bytes:
    name = row.name.encode()
    return _CENTRAL.pack(
        b"PK\1\2", _MADE_BY, _VERSION, 0, 0, 0, _DATE, crc, row.size, row.size,
        len(name), 0, 0, 0, 0, _ATTRIBUTES, header,
    ) + name  # fmt: skip
