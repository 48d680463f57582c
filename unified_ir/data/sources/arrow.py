"""Parquet and Arrow IPC (.arrow, .feather) files as sources; the only module that imports pyarrow.

Sizes are checked against the file's metadata before values are decoded, and every batch is
validated in full before its offsets are used. Extension types are refused, except for tensors of a
fixed shape: nothing in a file selects code to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput, MissingExtra, TriplaneError
from triplane.unified_ir.data.columns import (
    BYTES,
    MAX_RANK,
    TEXT,
    Array,
    Column,
    Columns,
    Field,
    Ragged,
    Rows,
    field_of,
    joined,
    n_bytes,
    offsets_of,
    take,
)
from triplane.unified_ir.data.sources.ipc import stream_sizes
from triplane.unified_ir.data.sources.memory import check_missing, selection
from triplane.unified_ir.data.table import MAX_MEMORY_BYTES, ArrayTable
from triplane.unified_ir.files import bounded

MAX_ARROW_BYTES: Final = 1 << 44
MAX_PART_BYTES: Final = MAX_MEMORY_BYTES
"""Limit for a row group or a record batch, decoded: as much is in memory at once."""
BATCH_ROWS: Final = 1024
MAX_INNER: Final = 1 << 24
"""Limit for the elements of a list or tensor of a fixed size."""
_PARQUET: Final = b"PAR1"
_IPC_FILE: Final = b"ARROW1\0\0"
_FEATHER_1: Final = b"FEA1"
_OBJECT_BYTES: Final = 64  # of a text or bytes of Python, besides its characters
_EXTENSION: Final = b"ARROW:extension:name"
_TENSOR: Final = "arrow.fixed_shape_tensor"


@dataclass(frozen=True)
class ArrowSource:
    """The columns of a Parquet file, or of an Arrow IPC file or stream; needs the extra `arrow`.

    columns: those to read, by default all. Booleans, integers and floating point keep their type;
    strings, also dictionary-encoded ones, are text; binary is bytes; lists of a fixed size and
    tensors have their shape; lists of numbers are ragged. missing: the number to take for nulls in
    columns of integers and floating point; all other nulls are refused. What takes more than
    `MAX_MEMORY_BYTES` stays in the file: IPC without compression is mapped and read in any order,
    anything else is a `Feed`. A mapped file must not be cut or rewritten while it is in use.
    """

    path: str
    columns: tuple[str, ...] = ()
    missing: float | None = None

    def __post_init__(self) -> None:
        check_missing(self.missing)

    def names(self) -> tuple[str, ...]:
        """Return the names of all columns in the file. NotFound, InvalidInput or Corrupt."""
        every = replace(self, columns=())
        with _errors(self.path), _part_reader(every) as (_, parts):
            return tuple(parts.names)

    def open(self) -> ArrayTable | ArrowTable | ArrowFeed:
        """Read the metadata, and the columns if they fit in memory."""
        with _errors(self.path), _part_reader(self) as (schema, parts):
            fields = {name: _field(schema.field(name), self.path) for name in parts.names}
            feed = ArrowFeed(self, fields)
            announced = sum(parts.n_bytes)
            if announced > MAX_MEMORY_BYTES and parts.mapped is not None:
                return ArrowTable(feed, parts.mapped())
        blocks: list[Columns] = []
        total = 0
        # What runs of equal values expand to is only known once they are decoded.
        for block in feed.blocks(0) if announced <= MAX_MEMORY_BYTES else ():
            total += _block_bytes(block)
            if total > MAX_MEMORY_BYTES:
                return feed
            blocks.append(block)
        if announced > MAX_MEMORY_BYTES:
            return feed
        return ArrayTable(joined(blocks) if blocks else _empty(fields))


@dataclass(frozen=True, eq=False)
class ArrowFeed:
    """The rows of a file, decoded again for each epoch, one row group or record batch at a time."""

    source: ArrowSource
    schema: dict[str, Field]

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`."""
        at = 0
        with _errors(self.source.path), _part_reader(self.source) as (_, parts):
            for k, rows in enumerate(parts.rows):
                if at + rows <= start:
                    at += rows
                    parts.skip(k)
                    continue
                for batch in parts.batches(k):
                    # Arrow's readers trust offsets and indices; reading by wrong ones would crash.
                    batch.validate(full=True)
                    skipped = min(max(start - at, 0), batch.num_rows)
                    if skipped < batch.num_rows:
                        numbers = np.arange(at + skipped, at + batch.num_rows)
                        yield self.block(batch.slice(skipped), numbers)
                    at += batch.num_rows

    def block(self, batch: Any, numbers: Rows) -> Columns:
        """Return a validated batch as columns; numbers: those of its rows, for errors."""
        block = {}
        for name, field in self.schema.items():
            column = _ArrowConversion(self.source, name, numbers).column(batch.column(name))
            block[name] = column
            seen = (column.values if isinstance(column, Ragged) else column).dtype
            if seen != (field.dtype if field.is_number else object):
                raise Corrupt(f"{self.source.path}: column {name!r} was {field}, is {seen} now")
        return block


class ArrowTable:
    """The record batches of a mapped file, read in any order."""

    def __init__(self, feed: ArrowFeed, batches: list[Any]) -> None:
        self._feed, self._batches = feed, batches
        self._starts = offsets_of(np.array([batch.num_rows for batch in batches], np.int64))
        self._valid: set[int] = set()

    @property
    def schema(self) -> dict[str, Field]:
        """See `Table`."""
        return self._feed.schema

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        with _errors(self._feed.source.path):
            which = np.searchsorted(self._starts, rows, side="right") - 1
            blocks, places = [_empty(self.schema)], [np.empty(0, np.int64)]
            for k in np.unique(which):
                here = np.flatnonzero(which == k)
                batch = self._batch(int(k)).take(_pyarrow().array(rows[here] - self._starts[k]))
                blocks.append(self._feed.block(batch, rows[here]))
                places.append(here)
        return take(joined(blocks), np.argsort(np.concatenate(places)))

    def _batch(self, k: int) -> Any:
        """Return a batch, validated when it is first used: all at once would read the file."""
        batch = self._batches[k]
        if k not in self._valid:
            batch.validate(full=True)
            self._valid.add(k)
        return batch


@dataclass(frozen=True)
class _Parts:
    """The row groups or record batches of an open file.

    n_bytes: decoded bytes of each. skip and batches are called for each part once, in order.
    mapped: returns all record batches without reading them, None if they must be decoded.
    """

    names: tuple[str, ...]
    rows: list[int]
    n_bytes: list[int]
    skip: Callable[[int], object]
    batches: Callable[[int], Iterator[Any]]
    mapped: Callable[[], list[Any]] | None = None


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """Raise what pyarrow raises on a damaged file as Corrupt."""
    pa = _pyarrow()
    try:
        yield
    except TriplaneError:
        raise
    except MemoryError as error:
        raise InvalidInput(f"{path} needs more memory than there is: {error}") from error
    except pa.ArrowNotImplementedError as error:
        raise InvalidInput(f"{path} uses what is not supported: {error}") from error
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
    ) as error:
        raise Corrupt(f"{path} cannot be decoded: {error}; is it complete?") from error


@contextmanager
def _part_reader(source: ArrowSource) -> Iterator[tuple[Any, _Parts]]:
    """Open a file and check the sizes of its parts; yield (schema of pyarrow, parts)."""
    path = Path(source.path)
    with bounded.opened(path, limit_bytes=MAX_ARROW_BYTES) as file:
        magic = file.read(len(_IPC_FILE))
    if not magic:
        raise Corrupt(f"{path} is empty")
    if magic.startswith(_FEATHER_1):
        raise InvalidInput(f"{path} is Feather version 1; write it as version 2")
    with _pyarrow().memory_map(source.path) as mapped:
        if magic.startswith(_PARQUET):
            schema, parts = _parquet(source, mapped)
        else:
            schema, parts = _ipc(source, mapped, len(magic) if magic == _IPC_FILE else 0)
        for rows, size in zip(parts.rows, parts.n_bytes, strict=True):
            if rows < 0 or size < 0:
                raise Corrupt(f"{path} announces {rows} rows of {size} bytes")
            if size > MAX_PART_BYTES:
                raise InvalidInput(
                    f"{path} has a row group or record batch of {size} bytes; at most "
                    f"{MAX_PART_BYTES} are read, write it with smaller ones"
                )
        yield schema, parts


def _parquet(source: ArrowSource, mapped: Any) -> tuple[Any, _Parts]:
    from pyarrow import parquet

    # Text stays encoded by its dictionary, which may expand it a million times.
    plain = parquet.ParquetFile(mapped, pre_buffer=False)
    texts = [f.name for f in plain.schema_arrow if _pyarrow().types.is_string(f.type)
             or _pyarrow().types.is_binary(f.type)]  # fmt: skip
    file = parquet.ParquetFile(mapped, pre_buffer=False, read_dictionary=texts)
    names = selection(source.path, _names(file.schema_arrow, source.path), source.columns)
    groups = [file.metadata.row_group(k) for k in range(file.metadata.num_row_groups)]
    parts = _Parts(
        names,
        [group.num_rows for group in groups],
        [_group_bytes(group, names) for group in groups],
        lambda _: None,
        lambda k: file.iter_batches(BATCH_ROWS, row_groups=[k], columns=names, use_threads=False),
    )
    return file.schema_arrow, parts


def _group_bytes(group: Any, names: tuple[str, ...]) -> int:
    """Return what a row group takes once decoded, by the larger of both statements of the file.

    Statements about single columns are not asked for: pyarrow 26 ends the process where they are
    damaged (an exception of C++ that no one catches).
    """
    return int(max(8 * group.num_rows * len(names), group.total_byte_size))


def _ipc(source: ArrowSource, mapped: Any, start: int) -> tuple[Any, _Parts]:
    from pyarrow import ipc

    # A file in IPC format holds a stream behind its magic. The footer is not read: it could point
    # to other messages than those whose sizes are checked here.
    mapped.seek(start)
    sizes = stream_sizes(ipc.MessageReader.open_stream(mapped), source.path)
    mapped.seek(start)
    stream = ipc.open_stream(mapped)
    names = selection(source.path, _names(stream.schema, source.path), source.columns)

    def batches(_: int) -> Iterator[Any]:
        batch = stream.read_next_batch()
        # Dictionaries and offsets are checked before the batch is cut.
        batch.validate(full=True)
        for at in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(at, BATCH_ROWS)

    parts = _Parts(
        names,
        [size.rows for size in sizes],
        [size.n_bytes for size in sizes],
        lambda _: stream.read_next_batch(),
        batches,
        None if any(size.is_compressed for size in sizes) else lambda: list(stream),
    )
    return stream.schema, parts


def _names(schema: Any, path: str) -> list[str]:
    if len(set(schema.names)) != len(schema.names):
        raise InvalidInput(f"{path} has several columns of one name: {schema.names[:8]}")
    return list(schema.names)


def _field(field: Any, path: str) -> Field:
    """Return what a column of pyarrow's becomes."""
    extension = (field.metadata or {}).get(_EXTENSION, b"").decode("utf-8", "replace")
    if isinstance(field.type, _pyarrow().BaseExtensionType):
        extension = field.type.extension_name
    if extension not in {"", _TENSOR}:
        raise InvalidInput(
            f"{path}: column {field.name!r} has the extension type {extension[:80]!r}, which is "
            "not read; write its storage, or name the columns to read"
        )
    try:
        return _field_of(field.type)
    except (InvalidInput, TypeError, KeyError) as error:
        raise InvalidInput(
            f"{path}: column {field.name!r} is {str(field.type)[:80]}; numbers, strings, binary, "
            "and lists of numbers are read. Cast it when you write it, or name the columns to read"
        ) from error


def _field_of(kind: Any) -> Field:
    types = _pyarrow().types
    if isinstance(kind, _pyarrow().FixedShapeTensorType):
        if kind.permutation not in (None, list(range(len(kind.shape)))):
            raise InvalidInput("a permuted tensor")
        inner, shape = _field_of(kind.value_type), tuple(kind.shape)
    elif types.is_dictionary(kind):
        return _field_of(kind.value_type)
    elif types.is_fixed_size_list(kind):
        inner, shape = _field_of(kind.value_type), (kind.list_size,)
    elif types.is_list(kind) or types.is_large_list(kind):
        inner, shape = _field_of(kind.value_type), (None,)
    else:
        return Field(_scalar(kind))
    if not inner.is_number or inner.is_ragged or not 0 < len(shape) + len(inner.shape) <= MAX_RANK:
        raise InvalidInput("a list of other than numbers")
    if not all(n is None or 0 < n <= MAX_INNER for n in shape):
        raise InvalidInput("a size of a list")
    return Field(inner.dtype, (*shape, *inner.shape))


def _scalar(kind: Any) -> str:
    types = _pyarrow().types
    if types.is_string(kind) or types.is_large_string(kind):
        return TEXT
    if types.is_binary(kind) or types.is_large_binary(kind):
        return BYTES
    if types.is_fixed_size_binary(kind) and kind.byte_width > 0:
        return BYTES
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return str(np.dtype(kind.to_pandas_dtype()))
    raise InvalidInput("another type")


@dataclass(frozen=True)
class _ArrowConversion:
    """Turn an array of pyarrow's, validated, into a column; numbers: those of its rows."""

    source: ArrowSource
    name: str
    numbers: Rows

    def column(self, array: Any) -> Column:
        """Return (N, ...), `Ragged`, or objects."""
        types = _pyarrow().types
        if types.is_list(array.type) or types.is_large_list(array.type):
            self._check_nulls(array)
            offsets = array.offsets.to_numpy().astype(np.int64)
            # flatten() leaves out what other slices of the buffer use.
            return Ragged(self._array(array.flatten()), offsets - offsets[0])
        return self._array(array)

    def _array(self, array: Any) -> Array:
        types = _pyarrow().types
        if isinstance(array, _pyarrow().ExtensionArray):
            return self._fixed(array.storage).reshape(len(array), *array.type.shape)
        if types.is_fixed_size_list(array.type):
            return self._fixed(array)
        if types.is_dictionary(array.type):
            self._check_nulls(array)
            values = self._array(array.dictionary)
            return np.asarray(values[array.indices.to_numpy(zero_copy_only=False)])
        if _scalar(array.type) in {TEXT, BYTES}:
            self._check_nulls(array)
            column = np.empty(len(array), object)
            column[:] = array.to_pylist()
            return column
        return np.asarray(self._filled(array).to_numpy(zero_copy_only=False))

    def _fixed(self, array: Any) -> Array:
        self._check_nulls(array)
        values = self._array(array.flatten())
        return values.reshape(len(array), array.type.list_size, *values.shape[1:])

    def _filled(self, array: Any) -> Any:
        missing = self.source.missing
        if missing is None or _pyarrow().types.is_boolean(array.type) or not array.null_count:
            self._check_nulls(array)
            return array
        dtype = np.dtype(array.type.to_pandas_dtype())
        limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
        is_exact = dtype.kind == "f" or float(missing).is_integer()
        if not (is_exact and limits.min <= missing <= limits.max):
            raise InvalidInput(
                f"{self.source.path}: column {self.name!r} holds {dtype}, which cannot represent "
                f"missing={missing}"
            )
        return array.fill_null(_pyarrow().scalar(dtype.type(missing), array.type))

    def _check_nulls(self, array: Any) -> None:
        if array.null_count:
            row = array.is_null().to_numpy(zero_copy_only=False).argmax()
            place = f"row {self.numbers[row]}"
            if len(array) != len(self.numbers):
                place = f"a list in the rows {self.numbers.min()}..{self.numbers.max()}"
            raise InvalidInput(
                f"{self.source.path}: column {self.name!r} is null in {place}; write a value for "
                "it, or, for numbers, state missing="
            )


def _block_bytes(block: Columns) -> int:
    objects = sum(len(c) for c in block.values() if not field_of(c).is_number)
    return n_bytes(block) + _OBJECT_BYTES * objects


def _empty(fields: dict[str, Field]) -> Columns:
    empty: Columns = {}
    for name, field in fields.items():
        inner = tuple(n for n in field.shape if n is not None)
        values = np.empty((0, *inner), field.dtype if field.is_number else object)
        empty[name] = Ragged(values, np.zeros(1, np.int64)) if field.is_ragged else values
    return empty


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtra(
            "pyarrow is not installed; it comes with: pip install 'triplane[arrow]'"
        ) from error
    return pa
