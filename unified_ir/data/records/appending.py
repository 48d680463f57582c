"""Append blocks to the files of a record set, and commit them.

Shards and index only grow. A commit syncs them, reads back what it wrote, and then replaces the
head, which says how much of them is committed. What lies behind that was left by a crash: readers
ignore it, and the next appender cuts it off.
"""

from __future__ import annotations

import itertools
import os
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from triplane.proto.disk import AppendFile, Disk, lock_file, refusal, write_atomic
from triplane.proto.errors import Conflict, Corrupt, InvalidInput
from triplane.unified_ir.data.records.encoding import EncodedRows
from triplane.unified_ir.data.records.format import (
    HEAD,
    INDEX,
    LOCK,
    MAX_BLOCKS,
    MAX_INDEX_BYTES,
    MAX_SHARDS,
    BlockTable,
    RecordLayout,
    shard_name,
)
from triplane.unified_ir.data.records.reader import (
    check_crc32,
    checked_blocks,
    committed_file,
    read_bytes,
    read_head,
    read_index,
)


@dataclass(frozen=True, slots=True)
class _NewBlock:
    """A block that is written but not committed, and its bytes of the index."""

    shard: int
    offset: int
    size: int
    rows: int
    crc32: int
    entry: bytes


class RecordAppender:
    """The open files of a record set; one appender at a time.

    shard_bytes: the size that ends a shard. layout: of the set's schema. Conflict: another one has
    the set. Unavailable: the disk refused. Corrupt: the files are damaged, or the disk did not keep
    what was written.
    """

    def __init__(self, folder: Path, shard_bytes: int, disk: Disk) -> None:
        read_head(folder)  # NotFound, before the lock creates its file
        self._folder, self._shard_bytes, self._disk = folder, shard_bytes, disk
        self._new: list[_NewBlock] = []
        self._shard: AppendFile | None = None
        self._lock = _locked(folder)
        with ExitStack() as cleanup:
            cleanup.callback(self._lock.close)
            # Only now, since the last appender may have committed just before it released the set.
            self._head = read_head(folder)
            self.layout = RecordLayout.of(self._head.schema)
            entries = read_index(folder, self._head, self.layout)
            blocks = checked_blocks(folder, self._head, self.layout, entries)
            _cut_tails(folder, entries.nbytes, blocks, disk)
            sizes = blocks.shard_sizes.tolist()
            self._number, self._offset = len(sizes) - 1, sizes[-1] if sizes else 0
            self._index = AppendFile(folder / INDEX, disk)
            cleanup.pop_all()

    @property
    def rows(self) -> int:
        """The number of committed rows."""
        return self._head.rows

    def move(self, folder: Path) -> None:
        """Rename the set's folder."""
        try:
            self._disk.replace(self._folder, folder)
            self._folder = folder
            self._disk.sync_folder(folder.parent)
        except OSError as error:
            raise refusal(error, f"could not rename {self._folder} to {folder}: {error}") from error

    def close(self) -> None:
        """Release the set; blocks that are not committed are lost."""
        with ExitStack() as cleanup:
            cleanup.callback(self._lock.close)
            cleanup.callback(self._index.close)
            if self._shard is not None:
                cleanup.callback(self._shard.close)

    def write_block(self, rows: EncodedRows) -> None:
        """Write rows as the next block. InvalidInput: a limit of the set."""
        parts, elements = rows.content(self.layout)
        size = sum(len(part) for part in parts)
        shard = self._shard_for(size)
        crc32 = 0
        for part in parts:
            crc32 = zlib.crc32(part.data, crc32)
            shard.write(part.data)
        entry = np.zeros(1, self.layout.entry)
        entry["shard"], entry["rows"], entry["crc32"] = self._number, len(rows), crc32
        entry["elements"] = elements
        self._new.append(
            _NewBlock(self._number, self._offset, size, len(rows), crc32, entry.tobytes())
        )
        self._offset += size
        self._check_limits()

    def _shard_for(self, size: int) -> AppendFile:
        """Return the shard that takes a block of so many bytes, a new one if the last is full."""
        if self._number < 0 or (self._offset and self._offset + size > self._shard_bytes):
            if self._shard is not None:
                self._shard.sync()
                self._shard.close()
            self._shard, self._offset = None, 0
            self._number += 1
        if self._shard is None:
            path = self._folder / shard_name(self._number)
            self._shard = AppendFile(path, self._disk)
            if self._shard.size != self._offset:
                raise Corrupt(f"{path} has {self._shard.size} bytes, {self._offset} are committed")
        return self._shard

    def _check_limits(self) -> None:
        blocks = self._head.blocks + len(self._new)
        if self._number >= MAX_SHARDS:
            raise InvalidInput(
                f"{self._folder} would have more than {MAX_SHARDS} shards; raise shard_bytes, now "
                f"{self._shard_bytes}, and add the rest with RecordWriter.open"
            )
        if blocks > min(MAX_BLOCKS, MAX_INDEX_BYTES // self.layout.entry.itemsize):
            raise InvalidInput(
                f"{self._folder} would have {blocks} blocks, beyond the limits of its index "
                f"({MAX_BLOCKS} blocks, {MAX_INDEX_BYTES} bytes); raise block_bytes "
                "and write the set again"
            )

    def commit(self) -> None:
        """Make the blocks that were written durable and visible."""
        if not self._new:
            return
        entries = b"".join(block.entry for block in self._new)
        head = replace(
            self._head,
            blocks=self._head.blocks + len(self._new),
            rows=self._head.rows + sum(block.rows for block in self._new),
            index_crc32=zlib.crc32(entries, self._head.index_crc32),
        )
        if self._shard is not None:
            self._shard.sync()
        self._index.write(entries)
        self._index.sync()
        self._read_back(entries)
        # Everything that the head refers to is durable before the head is.
        write_atomic(self._folder / HEAD, head.encode(), self._disk)
        if read_head(self._folder) != head:
            raise Corrupt(f"{self._folder / HEAD} does not read as it was written")
        self._head, self._new = head, []

    def _read_back(self, entries: bytes) -> None:
        for number, blocks in itertools.groupby(self._new, key=lambda block: block.shard):
            path = self._folder / shard_name(number)
            with committed_file(path, 0) as file:
                for block in blocks:
                    file.seek(block.offset)
                    what = f"{path}: {block.size} bytes at {block.offset}, just written,"
                    check_crc32(read_bytes(file, block.size, path), block.crc32, what)
        path, start = self._folder / INDEX, self._head.blocks * self.layout.entry.itemsize
        with committed_file(path, start + len(entries)) as file:
            file.seek(start)
            if read_bytes(file, len(entries), path) != entries:
                raise Corrupt(f"{path} does not read as it was written")


def _locked(folder: Path) -> BinaryIO:
    path = folder / LOCK
    if path.is_symlink():
        raise InvalidInput(f"{path} is a link; a record set has its own files")
    try:
        return lock_file(path)
    except BlockingIOError as error:
        raise Conflict(f"{folder} is being written by another writer; wait for its end") from error
    except OSError as error:
        raise refusal(error, f"could not lock {path}: {error}") from error


def _cut_tails(folder: Path, index_bytes: int, blocks: BlockTable, disk: Disk) -> None:
    """Cut files to what is committed, and remove the shards and temporary heads beyond."""
    committed = {INDEX: index_bytes}
    committed |= {shard_name(k): int(size) for k, size in enumerate(blocks.shard_sizes)}
    try:
        for name, size in committed.items():
            with committed_file(folder / name, size) as file:
                is_longer = os.fstat(file.fileno()).st_size > size
            if is_longer:
                os.truncate(folder / name, size)
        for path in [*folder.glob("shard-*"), *folder.glob(f".{HEAD}.*.tmp")]:
            if path.name not in committed:
                disk.remove(path)
    except OSError as error:
        raise refusal(error, f"could not cut {folder} to its last commit: {error}") from error
