"""Write record sets: collect samples into blocks, and commit them.

What is committed survives a crash at any instant; what is not is ignored and cut off later. A new
set takes its name with its first commit.
"""

from __future__ import annotations

import itertools
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from triplane.proto.disk import OS_DISK, Disk, refusal, write_atomic
from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.data.columns import Columns, Schema, schema_of
from triplane.unified_ir.data.records.appending import RecordAppender
from triplane.unified_ir.data.records.encoding import EncodedRows, cut, encoded, joined
from triplane.unified_ir.data.records.format import (
    HEAD,
    INDEX,
    MAX_BLOCK_ROWS,
    MAX_SHARD_BYTES,
    RecordHead,
    RecordLayout,
    check_metadata,
)
from triplane.unified_ir.data.records.reader import RecordTable

BLOCK_BYTES: Final = 256 << 10
"""A block is checked as a whole when one of its rows is first read, 0.1 ms at 2.5 GB/s."""
SHARD_BYTES: Final = 1 << 30
BLOCK_RANGE: Final = (1 << 10, 64 << 20)
SHARD_RANGE: Final = (1 << 10, MAX_SHARD_BYTES - (2 << 30))
"""A block that is larger than a shard has a shard of its own, and blocks have up to 2 GiB."""


class RecordWriter:
    """Writes a record set; `create` begins a new one, `open` adds to one.

    Leaving the `with` block without an error commits. Methods raise InvalidInput (a column differs
    from the schema, or a limit), Unavailable (the disk refused) or Corrupt (the disk did not keep
    what was written). After a failed write the writer refuses to go on; what was committed before
    is kept.
    """

    def __init__(
        self, path: Path, folder: Path, appender: RecordAppender, block_bytes: int
    ) -> None:
        self._path, self._folder, self._appender = path, folder, appender
        self._block_bytes = block_bytes
        self._refuses, self._is_closed = "", False
        self._keep(None)

    @classmethod
    def create(
        cls,
        path: str | Path,
        schema: Schema,
        *,
        metadata: Mapping[str, str] | None = None,
        block_bytes: int = BLOCK_BYTES,
        shard_bytes: int = SHARD_BYTES,
        disk: Disk = OS_DISK,
    ) -> Self:
        """Return the writer of a new set.

        path: the folder that the set becomes with its first commit. Before, it is a hidden folder
        beside it, which an error removes and a killed process leaves. metadata: texts to store with
        the set. block_bytes, shard_bytes: the sizes that end a block and a shard.

        InvalidInput: a schema that cannot be stored, or a limit. Conflict: the path exists.
        """
        path = Path(path)
        _check_sizes(block_bytes, shard_bytes)
        _check_absent(path)
        head = _first_head(schema, dict(metadata or {}))
        folder = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        with ExitStack() as cleanup:
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            try:
                folder.mkdir()
            except OSError as error:
                raise refusal(error, f"could not make {folder}: {error}") from error
            # An empty set is a set to add to, so that there is one way to begin.
            write_atomic(folder / INDEX, b"", disk)
            write_atomic(folder / HEAD, head, disk)
            writer = cls(path, folder, RecordAppender(folder, shard_bytes, disk), block_bytes)
            cleanup.pop_all()
        return writer

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        block_bytes: int = BLOCK_BYTES,
        shard_bytes: int = SHARD_BYTES,
        disk: Disk = OS_DISK,
    ) -> Self:
        """Return a writer that adds to a set, after cutting off what a crash left in it.

        NotFound: there is no set. Conflict: another writer has it. InvalidInput or Corrupt as for
        `RecordTable`.
        """
        path = Path(path)
        _check_sizes(block_bytes, shard_bytes)
        return cls(path, path, RecordAppender(path, shard_bytes, disk), block_bytes)

    def append(self, columns: Columns) -> None:
        """Add samples; they are certain to be kept once `commit` returns.

        InvalidInput names the column that differs from the schema, and nothing is added. A column
        that the schema calls ragged may be an array if its samples agree in size.
        """
        self._check()
        rows = encoded(self._appender.layout, columns)
        with self._failing():
            self._pending_bytes += int(rows.row_bytes.sum())
            self._pending_rows += len(rows)
            if self._pending_bytes < self._block_bytes and self._pending_rows < MAX_BLOCK_ROWS:
                self._pending.append(rows.copy())
                return
            blocks, rest = cut(joined([*self._pending, rows]), self._block_bytes)
            for block in blocks:
                self._appender.write_block(block)
            self._keep(rest)

    def commit(self) -> int:
        """Make everything appended so far durable and visible; return the number of rows."""
        self._check()
        with self._failing():
            if self._pending_rows:
                self._appender.write_block(joined(self._pending))
                self._keep(None)
            self._appender.commit()
            if self._folder != self._path:
                self._take_name()
        return self._appender.rows

    def close(self) -> None:
        """Release the set without a commit; a new set that has had none is removed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._refuses = self._refuses or "it is closed"
        try:
            self._appender.close()
        finally:
            if self._folder != self._path:
                shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and not self._refuses:
                self.commit()
        finally:
            self.close()

    def _keep(self, rows: EncodedRows | None) -> None:
        self._pending = [rows.copy()] if rows else []
        self._pending_rows = sum(len(p) for p in self._pending)
        self._pending_bytes = sum(int(p.row_bytes.sum()) for p in self._pending)

    def _take_name(self) -> None:
        RecordTable(self._folder)  # it must open before anybody sees it
        _check_absent(self._path)
        self._appender.move(self._path)
        self._folder = self._path

    def _check(self) -> None:
        if self._refuses:
            raise Conflict(
                f"the writer of {self._path} takes no more: {self._refuses}; go on with "
                "RecordWriter.open, from the last commit"
            )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        # After a failed write nobody knows which bytes are in the file.
        try:
            yield
        except BaseException as error:
            self._refuses = f"it failed ({error})"
            raise


def write_records(
    path: str | Path,
    blocks: Iterable[Columns],
    schema: Schema | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
    block_bytes: int = BLOCK_BYTES,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write blocks of samples as a new record set, complete or not at all; return its rows.

    schema: by default that of the first block; state it if samples of other blocks differ in a size
    that those of the first agree in. Errors are those of `RecordWriter`.
    """
    remaining = iter(blocks)
    if schema is None:
        first = next(remaining, None)
        if first is None:
            raise InvalidInput("there are no blocks; state the schema of an empty record set")
        schema, remaining = schema_of(first), itertools.chain([first], remaining)
    with RecordWriter.create(
        path, schema, metadata=metadata, block_bytes=block_bytes, shard_bytes=shard_bytes
    ) as writer:
        for block in remaining:
            writer.append(block)
        return writer.commit()


def _first_head(schema: Schema, metadata: dict[str, str]) -> bytes:
    check_metadata(metadata)
    RecordLayout.of(schema)
    return RecordHead(dict(schema), metadata).encode()


def _check_sizes(block_bytes: int, shard_bytes: int) -> None:
    ranges = {"block_bytes": (block_bytes, BLOCK_RANGE), "shard_bytes": (shard_bytes, SHARD_RANGE)}
    for name, (value, (least, most)) in ranges.items():
        if not least <= value <= most:
            raise InvalidInput(f"{name} is in {least}..{most}, got {value}")


def _check_absent(path: Path) -> None:
    if "\0" in str(path):
        raise InvalidInput(f"{str(path)!a} is not a path: it holds a NUL character")
    if path.exists() or path.is_symlink():
        raise Conflict(
            f"{path} exists; remove it, choose another name, or add to it with RecordWriter.open"
        )
