"""Tensors in a safetensors part: written in one canonical way, read strictly and without a copy.

Canonical form: the header is compact JSON, padded with spaces so that the data starts 64-byte
aligned in the part. Tensors are ordered by decreasing element size, then by name, and packed
densely, so each is naturally aligned. Any safetensors reader opens it. The reader here accepts
every valid file, in any order and with any padding of the header, but without overlaps, holes or
bytes after the last tensor. Views are read-only.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import digests
from triplane.unified_ir.files.digests import Buffer
from triplane.unified_ir.files.dtypes import BY_NAME, BY_SAFETENSORS
from triplane.unified_ir.files.manifest import (
    MAX_TENSORS,
    TensorEntry,
    check_shape,
    check_tensor_name,
)

MAX_HEADER_BYTES: Final = 4 << 20
ALIGNMENT: Final = 64
METADATA: Final = "__metadata__"

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """An array with its dtype's name: `data` holds bfloat16 as uint16 and fp8 as uint8."""

    dtype: str
    data: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.data.shape


def as_tensor(value: Array | StoredTensor, name: str = "tensor") -> StoredTensor:
    """Return `value` with the name of its dtype; InvalidInput if a file cannot hold it."""
    tensor = value if isinstance(value, StoredTensor) else StoredTensor(value.dtype.name, value)
    row = BY_NAME.get(tensor.dtype)
    if row is None or tensor.data.dtype.newbyteorder("<") != row.storage:
        raise InvalidInput(f"{name}: a file can hold {', '.join(BY_NAME)}, not {value.dtype}")
    return tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """A safetensors part ready to stream: its size in bytes, its entries, its chunks in order."""

    size: int
    entries: tuple[TensorEntry, ...]
    header: bytes
    arrays: tuple[Array, ...]

    def __iter__(self) -> Iterator[Buffer]:
        yield self.header
        for x in self.arrays:
            yield _bytes_of(x)


def _arrange(
    tensors: Mapping[str, Array | StoredTensor],
) -> tuple[bytes, list[tuple[str, str, Array, int]]]:
    """Return the header, and (name, dtype, array, offset in the part) in canonical order."""
    if METADATA in tensors:
        raise InvalidInput(
            f"a tensor cannot be named {METADATA}, which safetensors reserves for metadata"
        )
    named = [(name, as_tensor(value, name)) for name, value in tensors.items()]
    named.sort(key=lambda item: (-BY_NAME[item[1].dtype].storage.itemsize, item[0]))
    arrays = tuple(np.asarray(t.data, BY_NAME[t.dtype].storage, order="C") for _, t in named)
    begins = tuple(accumulate((x.nbytes for x in arrays), initial=0))[:-1]
    header = _header(
        {
            name: {
                "dtype": BY_NAME[tensor.dtype].safetensors,
                "shape": list(tensor.shape),
                "data_offsets": [begin, begin + x.nbytes],
            }
            for (name, tensor), x, begin in zip(named, arrays, begins, strict=True)
        }
    )
    return header, [
        (name, tensor.dtype, x, len(header) + begin)
        for (name, tensor), x, begin in zip(named, arrays, begins, strict=True)
    ]


def pack(
    part: str, tensors: Mapping[str, Array | StoredTensor], roles: Mapping[str, str] | None = None
) -> Packed:
    """Lay out `tensors` as the part `part`, hashing each; `roles` by tensor name."""
    roles, (header, placed) = roles or {}, _arrange(tensors)
    entries = tuple(
        TensorEntry(
            part, name, dtype, x.shape, offset, x.nbytes,
            digests.sha256(_bytes_of(x)), roles.get(name, ""),
        )
        for name, dtype, x, offset in placed
    )  # fmt: skip
    size = len(header) + sum(entry.size for entry in entries)
    return Packed(size, entries, header, tuple(x for _, _, x, _ in placed))


def offsets(tensors: Mapping[str, Array | StoredTensor]) -> dict[str, tuple[int, int]]:
    """Return (offset in the part, length) in bytes by name, as ONNX external data wants them."""
    return {name: (offset, x.nbytes) for name, _, x, offset in _arrange(tensors)[1]}


def unpack(data: Buffer, what: str) -> dict[str, StoredTensor]:
    """Return read-only views of every tensor in `data`, in the order of their bytes.

    Corrupt starts with `what` and names the tensor. Nothing past the header is read.
    """
    view = memoryview(data).toreadonly()
    header_size = _header_size(view, what)
    base = 8 + header_size
    rows = _parse_header(bytes(view[8:base]), what)
    entries = sorted(
        (_entry(name, row, what) for name, row in rows.items()), key=lambda e: (e.offset, e.size)
    )
    at = 0
    for e in entries:
        # Dense and in order: no overlap, and no hole in which bytes could hide.
        if e.offset != at:
            raise Corrupt(
                f"{what}: tensor {e.name!r} starts at {e.offset}, the one before ends {at}"
            )
        at += e.size
    if base + at != len(view):
        raise Corrupt(f"{what}: tensors take {at} bytes, the data has {len(view) - base}")
    tensors = {}
    for e in entries:
        start = base + e.offset
        flat = np.frombuffer(view[start : start + e.size], BY_NAME[e.dtype].storage)
        tensors[e.name] = StoredTensor(e.dtype, flat.reshape(e.shape))
    return tensors


def _header(rows: Mapping[str, object]) -> bytes:
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES or len(rows) > MAX_TENSORS:
        raise InvalidInput(f"{len(rows)} tensors need a header of {len(text)} bytes: too many")
    return len(text).to_bytes(8, "little") + text


def _bytes_of(x: Array) -> Buffer:
    return x.reshape(-1).view(np.uint8).data


def _header_size(view: memoryview, what: str) -> int:
    if len(view) < 8:
        raise Corrupt(f"{what}: {len(view)} bytes are too few for a header")
    size = int.from_bytes(view[:8], "little")
    if not 2 <= size <= min(MAX_HEADER_BYTES, len(view) - 8):
        raise Corrupt(f"{what}: header of {size} bytes (limit {MAX_HEADER_BYTES}, and the file)")
    return size


def _parse_header(text: bytes, what: str) -> dict[str, Any]:
    # The format requires it; json.loads would also accept white space before.
    if not text.startswith(b"{"):
        raise Corrupt(f"{what}: the header is not a JSON object")
    try:
        # A key that occurs twice would be read differently by other parsers.
        rows = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{what}: the header is not JSON of tensors: {error}") from error
    metadata = rows.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Corrupt(f"{what}: __metadata__ must map text to text")
    if len(rows) > MAX_TENSORS:
        raise Corrupt(f"{what}: {len(rows)} tensors, at most {MAX_TENSORS}")
    return rows  # type: ignore[no-any-return] # JSON


def _unique(pairs: Any) -> dict[str, Any]:
    by_key = dict(pairs)
    if len(by_key) != len(pairs):
        raise ValueError("a key occurs twice")
    return by_key


def _entry(name: str, row: Any, what: str) -> TensorEntry:
    """Return a checked row of the header; its offset counts from the start of the data."""
    where = f"{what}: tensor {name[:80]!r}"
    check_tensor_name(name, where)
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise Corrupt(f"{where} must have dtype, shape and data_offsets")
    dtype = BY_SAFETENSORS.get(row["dtype"]) if isinstance(row["dtype"], str) else None
    if dtype is None:
        raise Corrupt(f"{where}: dtype must be one of {', '.join(BY_SAFETENSORS)}")
    shape, offsets = row["shape"], row["data_offsets"]
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise Corrupt(f"{where}: shape and data_offsets must be lists of sizes")
    check_shape(tuple(shape), where)
    begin, end = offsets
    if end - begin != prod(shape) * dtype.storage.itemsize:
        raise Corrupt(f"{where}: {dtype.name}{tuple(shape)} does not take {end - begin} bytes")
    return TensorEntry("", name, dtype.name, tuple(shape), begin, end - begin, b"")


def _is_sizes(value: Any) -> bool:
    # Not `isinstance`, which would accept JSON's true and false.
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
