"""An update as a vector: the numbers of its tensors one after another, without a file's headers.

Devices and cloud know the tensors of an update from the plan and its state. A file repeats their
names, types and shapes with digests and headers, which takes ten times as long to check as the
numbers of a small update, and hashes the numbers of a large one three times. A vector comes with
one digest of all names, types and shapes instead, and begins with the lease for which it was made,
so that no two updates have the same bytes.

`decode_vector` takes untrusted bytes: digest and size are compared before any number is read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.files import BadUpdate, Like, is_finite

LEASE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """Where the tensors of an update are in its vector: name, type, shape, first byte, entries.

    digest: SHA-256 of `[["NAME", "TYPE", [SIZE, ...]], ...]` as JSON. size: bytes of the vector.
    """

    entries: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int, int], ...]
    digest: bytes
    size: int

    @classmethod
    def of(cls, like: Like) -> VectorLayout:
        """Return the layout of the updates with such tensors.

        Larger elements come first, so that each tensor is aligned.
        """
        ordered = sorted(like.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
        entries, at = [], LEASE_BYTES
        for name, (dtype, shape) in ordered:
            count = int(np.prod(shape, dtype=np.int64))
            entries.append((name, dtype.newbyteorder("<"), shape, at, count))
            at += count * dtype.itemsize
        facts = json.dumps([[name, dtype.name, shape] for name, (dtype, shape) in ordered])
        return cls(tuple(entries), hashlib.sha256(facts.encode()).digest(), at)


def vector_buffers(
    change: Mapping[str, Array], layout: VectorLayout, lease: str
) -> tuple[memoryview, ...]:
    """Return the vector of a change as views of its arrays, which must not change any more.

    lease: in hexadecimal. InvalidInput: it has other tensors than the layout.
    """
    wanted = {name: (dtype, shape) for name, dtype, shape, _, _ in layout.entries}
    if {name: (x.dtype.newbyteorder("<"), x.shape) for name, x in change.items()} != wanted:
        odd = sorted(change.keys() ^ wanted.keys())[:4]
        raise InvalidInput(f"an update holds the shared float tensors; it differs in {odd}")
    arrays = (np.asarray(change[name], dtype, order="C") for name, dtype, *_ in layout.entries)
    numbers = (x.reshape(-1).view(np.uint8).data for x in arrays)
    return (memoryview(bytes.fromhex(lease)), *numbers)


def encode_vector(change: Mapping[str, Array], layout: VectorLayout, lease: str) -> bytes:
    """Return the vector of a change; see `vector_buffers`."""
    return b"".join(vector_buffers(change, layout, lease))


def decode_vector(
    data: bytes | mmap.mmap, digest: bytes, layout: VectorLayout, lease: str
) -> dict[str, Array]:
    """Return the change in a vector as read-only views, finite. BadUpdate otherwise.

    digest: of the layout that the sender used. lease: in hexadecimal.
    """
    if digest != layout.digest:
        raise BadUpdate(
            "names",
            f"the vector has the layout {digest.hex()[:16]!r}, updates of this run have "
            f"{layout.digest.hex()[:16]!r}: names, types or shapes of its tensors differ",
        )
    if len(data) != layout.size:
        raise BadUpdate("shape", f"a vector has {layout.size} bytes here, got {len(data)}")
    if data[:LEASE_BYTES].hex() != lease:
        of = data[:LEASE_BYTES].hex()
        raise BadUpdate("foreign", f"the update is of lease {of!r}, the lease of {lease!r}")
    change = {
        name: np.frombuffer(data, dtype, count, at).reshape(shape)
        for name, dtype, shape, at, count in layout.entries
    }
    for name, x in change.items():
        if not is_finite(x):
            raise BadUpdate("nonfinite", f"{name!r} holds numbers that are not finite")
    return change
