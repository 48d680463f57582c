"""The bytes of a record set: limits, the head, the index, and where each value lies in a block.

A record set is a folder: `head` (columns, metadata, what is committed), `index` (an entry for each
block) and `shard-00000`, `shard-00001`, ... (blocks, one behind the other). Numbers are
little-endian, checksums are CRC-32 (`zlib.crc32`). Decision 0058 has the layout and its reasons.

A block of n rows holds n records, each of them the row's values in the columns of fixed size; then
n + 1 offsets (uint32, in elements) of each variable column; then their elements.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.data.columns import BYTES, TEXT, Field, Rows, Schema

HEAD: Final = "head"
INDEX: Final = "index"
LOCK: Final = "lock"
MAGIC: Final = b"TPRECORD"
VERSION: Final = 1
PREAMBLE: Final = struct.Struct("<8sIII")
"""Magic, version, bytes of the JSON behind it, and their CRC-32."""

MAX_HEAD_BYTES: Final = 1 << 20
MAX_COLUMNS: Final = 1_000
MAX_NAME_CHARS: Final = 256
MAX_RECORD_BYTES: Final = 1 << 30
MAX_BLOCK_BYTES: Final = 1 << 31
MAX_BLOCK_ROWS: Final = 1 << 20
MAX_BLOCKS: Final = 1 << 24
MAX_INDEX_BYTES: Final = 1 << 30
MAX_SHARDS: Final = 512
"""An open shard takes a file descriptor, of which a process has 1024 by default."""
MAX_SHARD_BYTES: Final = 1 << 40

DTYPES: Final = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
_ELEMENT: Final = {TEXT: np.dtype(np.uint8), BYTES: np.dtype(np.uint8)}
OFFSET_BYTES: Final = 4


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05d}"


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column as it is stored.

    name, field: as in the schema. dtype: of an element. shape: of one row if the column is fixed,
    of one element along the first axis if it is variable; item_bytes: the bytes of that. before:
    the column's place in a record, in bytes, or the number of variable columns before it.
    """

    name: str
    field: Field
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    item_bytes: int
    before: int

    @property
    def is_variable(self) -> bool:
        """Whether rows differ in their bytes."""
        return self.field.is_ragged or not self.field.is_number


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where the columns of a schema lie in a block. row_bytes: of a record."""

    fixed: tuple[StoredColumn, ...]
    variable: tuple[StoredColumn, ...]
    row_bytes: int

    @classmethod
    def of(cls, schema: Schema) -> RecordLayout:
        """Return the layout; InvalidInput names the column that cannot be stored."""
        if not 0 < len(schema) <= MAX_COLUMNS:
            raise InvalidInput(f"records have 1 to {MAX_COLUMNS} columns, got {len(schema)}")
        fixed: list[StoredColumn] = []
        variable: list[StoredColumn] = []
        row_bytes = 0
        for name, field in schema.items():
            if field.is_ragged or not field.is_number:
                variable.append(_stored(name, field, len(variable)))
            else:
                fixed.append(_stored(name, field, row_bytes))
                row_bytes += fixed[-1].item_bytes
        if row_bytes > MAX_RECORD_BYTES:
            raise InvalidInput(
                f"a record has {row_bytes} bytes of fixed size; at most {MAX_RECORD_BYTES} are "
                "stored"
            )
        return cls(tuple(fixed), tuple(variable), row_bytes)

    @property
    def entry(self) -> np.dtype[Any]:
        """The element type of the index; elements: of each variable column, along its axis."""
        number = np.dtype("<u4")
        return np.dtype(
            [
                ("shard", number),
                ("rows", number),
                ("crc32", number),
                ("elements", number, (len(self.variable),)),
            ]
        )

    def block_bytes(self, rows: Rows, elements: Rows) -> Rows:
        """Return the bytes of blocks of `rows` (B,) rows with `elements` (B, variable)."""
        items = np.array([column.item_bytes for column in self.variable], np.int64)
        tables = OFFSET_BYTES * len(self.variable) * (rows + 1)
        return rows * self.row_bytes + tables + elements @ items


def _stored(name: str, field: Field, before: int) -> StoredColumn:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidInput(
            f"a column's name has 1 to {MAX_NAME_CHARS} characters, got {len(name)}: {name[:40]!r}"
        )
    dtype = _ELEMENT.get(field.dtype) or DTYPES.get(field.dtype)
    if dtype is None:
        raise InvalidInput(
            f"column {name!r} holds {field.dtype}; records store {', '.join(DTYPES)}, text and "
            "bytes; convert it with astype"
        )
    shape = tuple(size for size in field.shape if size is not None)
    # A size of 0 does not excuse the others: numpy refuses (0, 2^40, 2^40) too.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize > MAX_RECORD_BYTES:
        raise InvalidInput(
            f"column {name!r} holds {field}; a value has at most {MAX_RECORD_BYTES} bytes"
        )
    item_bytes = math.prod(shape) * dtype.itemsize
    if field.is_ragged and not item_bytes:
        raise InvalidInput(f"column {name!r} holds {field}: its elements have no bytes")
    return StoredColumn(name, field, dtype, shape, item_bytes, before)


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What is committed: the columns, and so many blocks and rows of the index and the shards.

    index_crc32: of the entries of these blocks.
    """

    schema: Mapping[str, Field]
    metadata: Mapping[str, str]
    blocks: int = 0
    rows: int = 0
    index_crc32: int = 0

    def encode(self) -> bytes:
        """Return the bytes of the file; InvalidInput if they exceed the limit."""
        document = {
            "columns": [[name, f.dtype, list(f.shape)] for name, f in self.schema.items()],
            "metadata": dict(self.metadata),
            "blocks": self.blocks,
            "rows": self.rows,
            "index_crc32": self.index_crc32,
        }
        text = json.dumps(document, separators=(",", ":")).encode()
        if len(text) + PREAMBLE.size > MAX_HEAD_BYTES:
            raise InvalidInput(
                f"columns and metadata take {len(text)} bytes; at most "
                f"{MAX_HEAD_BYTES - PREAMBLE.size} are stored: shorten the metadata"
            )
        return PREAMBLE.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text


def decode_head(data: bytes, what: str) -> RecordHead:
    """Return the head that the bytes hold; Corrupt, or InvalidInput for what is not supported."""
    if len(data) < PREAMBLE.size or not data.startswith(MAGIC):
        raise Corrupt(f"{what} is not the head of a record set: it starts with {data[:8]!r}")
    _, version, n_bytes, crc32 = PREAMBLE.unpack_from(data)
    if version != VERSION:
        raise InvalidInput(f"{what} has format version {version}; version {VERSION} is read")
    text = data[PREAMBLE.size :]
    if len(text) != n_bytes:
        raise Corrupt(f"{what}: {n_bytes} bytes announced, {len(text)} present; is it complete?")
    if zlib.crc32(text) != crc32:
        raise Corrupt(
            f"{what} does not match its checksum: {crc32:#010x} stored, {zlib.crc32(text):#010x} "
            "computed; restore it from a copy"
        )
    try:
        return _head_from(json.loads(text))
    except InvalidInput as error:
        raise InvalidInput(f"{what}: {error}") from error
    # RecursionError: a document of nothing but opening brackets.
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Corrupt(f"{what} does not hold the head of a record set: {error}") from error


def _head_from(document: Any) -> RecordHead:
    columns, metadata = document["columns"], document["metadata"]
    if not isinstance(columns, list) or len(columns) > MAX_COLUMNS:
        raise ValueError(f"the columns are no list of at most {MAX_COLUMNS}")
    schema = {}
    for name, dtype, shape in columns:
        if not isinstance(name, str) or name in schema:
            raise ValueError(f"column {str(name)[:40]!r} has no name of its own")
        schema[name] = _field_from(dtype, shape)
    RecordLayout.of(schema)
    check_metadata(metadata)
    numbers = [document[key] for key in ("blocks", "rows", "index_crc32")]
    limits = (MAX_BLOCKS, MAX_BLOCKS * MAX_BLOCK_ROWS, 0xFFFFFFFF)
    for number, limit in zip(numbers, limits, strict=True):
        if type(number) is not int or not 0 <= number <= limit:
            raise ValueError(f"a count or checksum is in 0..{limit}, got {str(number)[:40]}")
    return RecordHead(schema, metadata, *numbers)


def _field_from(dtype: Any, shape: Any) -> Field:
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in _ELEMENT):
        raise InvalidInput(f"records hold {', '.join(DTYPES)}, text and bytes, not {str(dtype)!a}")
    if not isinstance(shape, list):
        raise TypeError("a shape is no list")
    for size in shape:
        if size is not None and (type(size) is not int or size < 0):
            raise ValueError(f"a size is a whole number from 0 or null, got {str(size)[:40]}")
    return Field(dtype, tuple(shape))


def check_metadata(metadata: Any) -> None:
    """Raise InvalidInput unless `metadata` maps texts to texts."""
    if not isinstance(metadata, Mapping) or not all(
        isinstance(x, str) for pair in metadata.items() for x in pair
    ):
        raise InvalidInput("metadata maps texts to texts; put other values into JSON text")


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The blocks of the index. All arrays are (B,) int64, and their sums fit.

    shards: the shard of each block. rows, sizes: of the block, sizes in bytes. crc32: of its bytes.
    elements: (B, variable columns).
    """

    shards: Rows
    rows: Rows
    crc32: Rows
    elements: Rows
    sizes: Rows

    @classmethod
    def of(cls, entries: NDArray[Any], layout: RecordLayout, what: str) -> BlockTable:
        """Return the table after checking every entry; Corrupt names the first bad block."""
        shards, rows = entries["shard"].astype(np.int64), entries["rows"].astype(np.int64)
        elements = entries["elements"].astype(np.int64)
        items = np.array([column.item_bytes for column in layout.variable], np.int64)
        # Each product below is then at most 2^51, and no sum of them overflows.
        fits = (elements <= MAX_BLOCK_BYTES // items).all(axis=1)
        fits &= (rows > 0) & (rows <= MAX_BLOCK_ROWS)
        steps = np.diff(shards, prepend=np.int64(-1 if len(shards) and shards[0] == 0 else -9))
        fits &= ((steps == 0) | (steps == 1)) & (shards < MAX_SHARDS)
        _all(fits, what)
        sizes = layout.block_bytes(rows, elements)
        _all(sizes <= MAX_BLOCK_BYTES, what)
        return cls(shards, rows, entries["crc32"].astype(np.int64), elements, sizes)

    @cached_property
    def starts(self) -> Rows:
        """The first row of each block, and the number of all rows: (B + 1,)."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.rows)])

    @cached_property
    def bases(self) -> Rows:
        """The offset of each block in its shard."""
        before = np.cumsum(self.sizes) - self.sizes
        return before - before[np.searchsorted(self.shards, self.shards)]

    @cached_property
    def shard_sizes(self) -> Rows:
        """The committed bytes of each shard."""
        shards = np.arange(self.shards[-1] + 1 if len(self.shards) else 0)
        last = np.searchsorted(self.shards, shards, side="right") - 1
        return self.bases[last] + self.sizes[last]


def _all(fits: NDArray[np.bool_], what: str) -> None:
    if not fits.all():
        raise Corrupt(
            f"{what}: the entry of block {int(np.argmin(fits))} is out of range: a block has 1 to "
            f"{MAX_BLOCK_ROWS} rows and at most {MAX_BLOCK_BYTES} bytes, in at most {MAX_SHARDS} "
            "shards that follow each other"
        )
