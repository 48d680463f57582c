"""Read a record set: any rows in any order, gathered out of memory-mapped shards.

A reader sees what was committed when it opened the set, whatever a writer appends meanwhile. The
files must not be shortened while they are open: the system ends a process that touches a mapped
page which has no file behind it. (Triplane's writer only shortens what no reader maps.)
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, Unavailable
from triplane.unified_ir.data.columns import (
    Columns,
    Field,
    Rows,
)
from triplane.unified_ir.data.records.format import (
    HEAD,
    INDEX,
    MAX_HEAD_BYTES,
    MAX_INDEX_BYTES,
    MAX_SHARD_BYTES,
    BlockTable,
    RecordHead,
    RecordLayout,
    decode_head,
    shard_name,
)
from triplane.unified_ir.data.records.gather import RecordGather

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes of all."""
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class RecordShard:
    """Facts about a shard: its file's name, and the committed rows, bytes and blocks in it."""

    name: str
    rows: int
    bytes: int
    blocks: int


@dataclass(frozen=True)
class RecordSource:
    """A record set as the source of a pipeline.

    verify: compare each block with its checksum when it is first touched.
    """

    path: str
    verify: bool = True

    def open(self) -> RecordTable:
        """Open the set; see `RecordTable`."""
        return RecordTable(Path(self.path), verify=self.verify)


class RecordTable:
    """An open record set, a `Table`.

    path: its folder. verify: compare each block with its checksum when it is first touched, once
    per open set. Raises NotFound, InvalidInput (a limit, what is not supported), Corrupt or
    Unavailable.
    """

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        self.path = Path(path)
        self._head = read_head(self.path)
        self._layout = RecordLayout.of(self._head.schema)
        entries = read_index(self.path, self._head, self._layout)
        self._blocks = checked_blocks(self.path, self._head, self._layout, entries)
        self._maps = [
            _mapped(self.path / shard_name(k), int(size))
            for k, size in enumerate(self._blocks.shard_sizes)
        ]
        stored = {column.name: column for column in self._layout.fixed + self._layout.variable}
        self._columns = [stored[name] for name in self._head.schema]
        self._verify = verify
        self._starts, self._bases = self._blocks.starts, self._blocks.bases
        self._ends = self._starts[1:]
        # The address of a row's record is this of its block, plus row * row_bytes.
        self._records = self._bases - self._starts[:-1] * self._layout.row_bytes
        # Offsets are checked even without checksums, since slices follow them.
        self._pending = np.full(len(self._bases), verify or bool(self._layout.variable))
        self._has_pending = bool(self._pending.any())

    @property
    def schema(self) -> Mapping[str, Field]:
        """See `Table`."""
        return self._head.schema

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts that were stored with the records."""
        return self._head.metadata

    @property
    def shards(self) -> tuple[RecordShard, ...]:
        """Facts about each shard."""
        sizes = self._blocks.shard_sizes
        blocks = np.bincount(self._blocks.shards, minlength=len(sizes))
        rows = self._starts[np.cumsum(blocks)] - self._starts[np.cumsum(blocks) - blocks]
        return tuple(
            RecordShard(shard_name(k), int(rows[k]), int(size), int(blocks[k]))
            for k, size in enumerate(sizes)
        )

    def __len__(self) -> int:
        return self._head.rows

    def take(self, rows: Rows) -> Columns:
        """See `Table`. Corrupt: a block does not match its checksum; the message names it."""
        rows = np.asarray(rows, np.int64)
        # A negative number is a large one without its sign: one pass instead of two.
        if len(rows) and rows.view(np.uint64).max() >= len(self):
            raise InvalidInput(
                f"{self.path} has the rows 0..{len(self) - 1}, got {rows.min()}..{rows.max()}"
            )
        block = self._ends.searchsorted(rows, "right")
        if self._has_pending:
            self._check(block)
        at = self._records[block] + rows * self._layout.row_bytes
        shard = None if len(self._maps) == 1 else self._blocks.shards[block]
        gather = RecordGather(self._maps, self._blocks, self._layout, block, rows, at, shard)
        try:
            return {column.name: gather.column(column) for column in self._columns}
        except UnicodeDecodeError as error:
            raise Corrupt(f"{self.path}: a text is not valid UTF-8: {error}") from error

    def verify(self, progress: Progress | None = None) -> None:
        """Compare every block with its checksum; Corrupt names the first that differs."""
        done, total = 0, int(self._blocks.sizes.sum())
        for k, size in enumerate(self._blocks.sizes):
            self._check_block(k, verify=True)
            done += int(size)
            if progress is not None:
                progress(done, total)

    def _check(self, block: Rows) -> None:
        touched = block[self._pending[block]]
        if len(touched):
            for k in np.unique(touched):
                self._check_block(int(k), verify=self._verify)
            self._has_pending = bool(self._pending.any())

    def _check_block(self, k: int, *, verify: bool) -> None:
        shard, base = int(self._blocks.shards[k]), int(self._bases[k])
        content = self._maps[shard][base : base + int(self._blocks.sizes[k])]
        what = (
            f"{self.path / shard_name(shard)}: block {k} (rows {self._starts[k]}.."
            f"{self._starts[k + 1] - 1})"
        )
        if verify:
            check_crc32(content, int(self._blocks.crc32[k]), what)
        self._check_offsets(k, content, what)
        self._pending[k] = False

    def _check_offsets(self, k: int, content: memoryview, what: str) -> None:
        # Without this a small file could announce overlapping rows of any total size.
        rows, elements = int(self._blocks.rows[k]), self._blocks.elements[k]
        count = len(elements) * (rows + 1)
        tables = np.frombuffer(content, "<u4", count, rows * self._layout.row_bytes)
        tables = tables.reshape(len(elements), rows + 1)
        is_ordered = (tables[:, 1:] >= tables[:, :-1]).all(axis=1)
        is_valid = is_ordered & (tables[:, 0] == 0) & (tables[:, -1] == elements)
        if not is_valid.all():
            name = self._layout.variable[int(np.argmin(is_valid))].name
            raise Corrupt(f"{what}: the offsets of column {name!r} do not ascend from 0 to its end")


def is_records(path: Path) -> bool:
    """Return whether the folder looks like a record set; opening it checks the rest."""
    return (path / HEAD).is_file() and (path / INDEX).is_file()


def read_head(path: Path) -> RecordHead:
    """Return the head of the record set in a folder."""
    file = path / HEAD
    descriptor = open_file(file)
    if descriptor is None:
        raise NotFound(f"{path} is not a record set: it has no file {HEAD!r}")
    with os.fdopen(descriptor, "rb") as opened:
        data = read_bytes(opened, MAX_HEAD_BYTES + 1, file)
    if len(data) > MAX_HEAD_BYTES:
        raise InvalidInput(f"{file} has more than {MAX_HEAD_BYTES} bytes, the limit of a head")
    return decode_head(data, str(file))


def read_index(path: Path, head: RecordHead, layout: RecordLayout) -> NDArray[Any]:
    """Return the entries of the committed blocks, which match their checksum."""
    file, n_bytes = path / INDEX, head.blocks * layout.entry.itemsize
    if n_bytes > MAX_INDEX_BYTES:
        raise InvalidInput(f"{file} has {n_bytes} bytes; at most {MAX_INDEX_BYTES} are read")
    with committed_file(file, n_bytes) as opened:
        data = read_bytes(opened, n_bytes, file)
    check_crc32(data, head.index_crc32, str(file))
    return np.frombuffer(data, layout.entry, head.blocks)


def checked_blocks(
    path: Path, head: RecordHead, layout: RecordLayout, entries: NDArray[Any]
) -> BlockTable:
    """Return the blocks of the index; Corrupt if they contradict the head or a limit."""
    blocks = BlockTable.of(entries, layout, str(path / INDEX))
    if blocks.starts[-1] != head.rows:
        raise Corrupt(
            f"{path / INDEX}: its blocks have {blocks.starts[-1]} rows, the head says {head.rows}"
        )
    if blocks.shard_sizes.max(initial=0) > MAX_SHARD_BYTES:
        raise InvalidInput(f"{path}: a shard has at most {MAX_SHARD_BYTES} bytes")
    return blocks


def open_file(path: Path) -> int | None:
    """Return a descriptor of a regular file, which is no link; None if there is none."""
    try:
        # A link could lead out of the folder, and opening a pipe would wait for its other end.
        descriptor = os.open(path, _FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise InvalidInput(f"{str(path)!a} is not a path: {error}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidInput(f"{path} is a link; a record set has its own files") from error
        raise Unavailable(f"{path} could not be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidInput(f"{path} is not a regular file")
    return descriptor


def read_bytes(file: BinaryIO, n_bytes: int, path: Path) -> bytes:
    """Read up to so many bytes; Unavailable if the disk refuses."""
    try:
        return file.read(n_bytes)
    except OSError as error:
        raise Unavailable(f"{path} could not be read: {error.strerror}") from error


def check_crc32(content: bytes | memoryview, stored: int, what: str) -> None:
    """Raise Corrupt unless the bytes have that checksum."""
    computed = zlib.crc32(content)
    if computed != stored:
        raise Corrupt(
            f"{what} does not match its checksum: {stored:#010x} stored, {computed:#010x} "
            "computed; restore the file from a copy"
        )


def committed_file(path: Path, n_bytes: int) -> BinaryIO:
    """Open a file that must have at least the committed bytes."""
    descriptor = open_file(path)
    if descriptor is None:
        raise Corrupt(f"{path} is missing, and {n_bytes} bytes of it are committed")
    size = os.fstat(descriptor).st_size
    if size < n_bytes:
        os.close(descriptor)
        raise Corrupt(
            f"{path} has {size} bytes, of which {n_bytes} are committed; restore it from a copy"
        )
    return os.fdopen(descriptor, "rb")


def _mapped(path: Path, n_bytes: int) -> memoryview:
    with committed_file(path, n_bytes) as file:
        if not n_bytes:  # an empty map is not allowed
            return memoryview(b"")
        try:
            return memoryview(mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise Unavailable(f"{path} could not be mapped into memory: {error}") from error
