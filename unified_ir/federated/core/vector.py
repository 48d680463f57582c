"""A small update as a vector: the numbers of its tensors one after another, without a file.

Devices and cloud know the tensors of an update from the plan and its state. A file repeats their
names, types and shapes with digests and headers, which takes ten times as long to check as the
numbers of a small update. A vector comes with one digest of all names, types and shapes instead.

`decode_vector` takes untrusted bytes: digest and size are compared before any number is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.files import BadUpdate, Like, is_finite


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
        entries, at = [], 0
        for name, (dtype, shape) in ordered:
            count = int(np.prod(shape, dtype=np.int64))
            entries.append((name, dtype.newbyteorder("<"), shape, at, count))
            at += count * dtype.itemsize
        facts = json.dumps([[name, dtype.name, shape] for name, (dtype, shape) in ordered])
        return cls(tuple(entries), hashlib.sha256(facts.encode()).digest(), at)


def encode_vector(change: Mapping[str, Array], layout: VectorLayout) -> bytes:
    """Return the vector of a change. InvalidInput: it has other tensors than the layout."""
    wanted = {name: (dtype, shape) for name, dtype, shape, _, _ in layout.entries}
    if {name: (x.dtype.newbyteorder("<"), x.shape) for name, x in change.items()} != wanted:
        odd = sorted(change.keys() ^ wanted.keys())[:4]
        raise InvalidInput(f"an update holds the shared float tensors; it differs in {odd}")
    return b"".join(
        np.asarray(change[name], dtype).tobytes() for name, dtype, _, _, _ in layout.entries
    )


def decode_vector(data: bytes, digest: bytes, layout: VectorLayout) -> dict[str, Array]:
    """Return the change in a vector as read-only views, finite. BadUpdate otherwise.

    digest: of the layout that the sender used.
    """
    if digest != layout.digest:
        raise BadUpdate(
            "names",
            f"the vector has the layout {digest.hex()[:16]!r}, updates of this run have "
            f"{layout.digest.hex()[:16]!r}: names, types or shapes of its tensors differ",
        )
    if len(data) != layout.size:
        raise BadUpdate("shape", f"a vector has {layout.size} bytes here, got {len(data)}")
    change = {
        name: np.frombuffer(data, dtype, count, at).reshape(shape)
        for name, dtype, shape, at, count in layout.entries
    }
    for name, x in change.items():
        if not is_finite(x):
            raise BadUpdate("nonfinite", f"{name!r} holds numbers that are not finite")
    return change
