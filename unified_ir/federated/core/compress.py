"""Compression of updates with error feedback.

A row maps one tensor to named arrays and back. `Compressor` returns what was lost as a remainder,
which is added to the device's next update (Seide et al. 2014; Karimireddy et al. 2019), so the sent
updates and the last remainder add up to the sum of the changes. Arrays are named `NAME` or
`NAME:PART`; no tensor of a model has a colon in its name. Buffers are sent uncompressed (`plain`),
because a running variance that is rounded may fall below zero.

Unpacking takes untrusted arrays: callers limit their sizes, everything else is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array, Draws

LEVELS: Final = 127
"""Levels of int8 in each direction."""
MAX_INDEX: Final = 2**32 - 1
CHUNK: Final = 1 << 16
"""Entries quantized at a time. It must not change: another number would give other draws."""

Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class CompressionRow:
    """One way to write a tensor. parts: suffixes of its arrays, "" for the bare name.

    lose: subtracts what its arrays represent from the tensor, in place; None if nothing is lost.
    """

    name: str
    parts: tuple[str, ...]
    pack: Callable[[Array, float, Draws], tuple[Array, ...]]
    unpack: Callable[..., Array]
    lose: Callable[..., None] | None
    shape: Callable[..., tuple[int, ...]]
    dtype: Callable[..., np.dtype[Any]]


class Compressor:
    """Packs updates by a row of `COMPRESSIONS`. keep: share of entries that `top-k` sends.

    plain: tensors that are sent uncompressed with any row.
    """

    def __init__(self, name: str, *, keep: float = 1.0, plain: Collection[str] = ()) -> None:
        self.row, self.plain = row_of(name), frozenset(plain)
        if not 0 < keep <= 1:
            raise InvalidInput(f"the share of entries to keep must be in (0, 1], got {keep}")
        self.keep = keep

    def pack(
        self, change: Arrays, remainder: Arrays, rng: Draws
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return (arrays to send, what they lose of `change` and the earlier remainder).

        The loss is written into the arrays of `change`: a device has no memory for another copy of
        its parameters.
        """
        arrays: dict[str, Array] = {}
        lost: dict[str, Array] = {}
        # Sorted, because the tensors share one stream of draws.
        for name in sorted(change):
            x = np.ascontiguousarray(change[name]).reshape(change[name].shape)
            if name in remainder:
                np.add(x, remainder[name], out=x)
            row = self.row_for(name)
            parts = row.pack(x, self.keep, rng)
            arrays |= dict(zip(self.names(name), parts, strict=True))
            if row.lose is not None:
                row.lose(x, *parts)
                lost[name] = x
        return arrays, lost

    def unpack(self, arrays: Arrays) -> dict[str, Array]:
        """Return the change that `arrays` represent; InvalidInput unless `pack` could make them."""
        stems = sorted({name.partition(":")[0] for name in arrays})
        wanted = [name for stem in stems for name in self.names(stem)]
        if sorted(wanted) != sorted(arrays):
            raise InvalidInput(
                f"compression {self.row.name!r} writes {_some(wanted)}, got {_some(arrays)}"
            )
        return {
            stem: self.row_for(stem).unpack(*(arrays[name] for name in self.names(stem)))
            for stem in stems
        }

    def names(self, stem: str) -> list[str]:
        """Return the names of the arrays that represent the tensor `stem`."""
        return [f"{stem}:{part}" if part else stem for part in self.row_for(stem).parts]

    def row_for(self, stem: str) -> CompressionRow:
        """Return the row that writes the tensor `stem`."""
        return COMPRESSIONS[""] if stem in self.plain else self.row


def row_of(name: str) -> CompressionRow:
    """Return the row of that name; InvalidInput lists the existing ones."""
    if name not in COMPRESSIONS:
        raise InvalidInput(
            f"compression is one of {', '.join(map(repr, COMPRESSIONS))}, got {name[:80]!r}"
        )
    return COMPRESSIONS[name]


# q = floor(x / s + u), u uniform in [0, 1), s = max|x| / 127: E[s q] = x and |x - s q| <= s.


def _quantize(x: Array, _keep: float, rng: Draws) -> tuple[Array, ...]:
    # max|x| without the copy that np.abs would make.
    largest = max(float(np.max(x, initial=0.0)), -float(np.min(x, initial=0.0)))
    scale = np.asarray(largest / LEVELS, x.dtype)
    # Also where max|x| / 127 is too small for the type and becomes 0.
    if not scale > 0:
        return np.zeros(x.shape, np.int8), np.zeros((), x.dtype)
    q = np.empty(x.shape, np.int8)
    source, target = x.reshape(-1), q.reshape(-1)
    for at in range(0, x.size, CHUNK):
        part = source[at : at + CHUNK]
        level = np.floor(part / scale.astype(np.float64) + rng.uniform(part.size))
        target[at : at + CHUNK] = np.clip(level, -LEVELS, LEVELS)
    return q, scale


def _dequantize(q: Array, scale: Array) -> Array:
    if q.dtype != np.int8 or scale.shape != () or not np.issubdtype(scale.dtype, np.floating):
        raise InvalidInput(f"int8 writes int8 and one scale, got {q.dtype} and {scale.dtype}")
    return np.asarray(np.multiply(q, scale, dtype=scale.dtype))


def _lose_levels(x: Array, q: Array, scale: Array) -> None:
    rest, sent = x.reshape(-1), q.reshape(-1)
    for at in range(0, x.size, CHUNK):
        rest[at : at + CHUNK] -= _dequantize(sent[at : at + CHUNK], scale)


# The k = ceil(keep * size) entries that are largest in absolute value; of equal ones the first.


def _pick(x: Array, keep: float, _rng: Draws) -> tuple[Array, ...]:
    flat = x.reshape(-1)
    if flat.size > MAX_INDEX:
        raise InvalidInput(f"top-k indexes at most {MAX_INDEX} entries, got {flat.size}")
    index = _largest(flat, math.ceil(keep * flat.size))
    return index, flat[index], np.asarray(x.shape, np.int64).reshape(-1)


def _lose_picked(x: Array, index: Array, _value: Array, _shape: Array) -> None:
    x.reshape(-1)[index] = 0


def _largest(flat: Array, k: int) -> Array:
    if k >= len(flat):
        return np.arange(len(flat), dtype=np.uint32)
    edge = _kth_largest(flat, k)
    above, equal, left = [], [], k
    for at in range(0, len(flat), CHUNK):
        part = np.abs(flat[at : at + CHUNK])
        above.append((np.flatnonzero(part > edge) + at).astype(np.uint32))
        equal.append((np.flatnonzero(part == edge)[:left] + at).astype(np.uint32))
        left -= len(equal[-1])
    larger = np.concatenate(above)
    return np.sort(np.concatenate([larger, np.concatenate(equal)[: k - len(larger)]]))


def _kth_largest(flat: Array, k: int) -> Array:
    """Return the k-th largest absolute value, by 16 bits at a time.

    In chunks, because a device has no memory for another array as long as its parameters. Without
    their sign, the bits of floating-point numbers are ordered as their absolute values.
    """
    kind = np.dtype(f"u{flat.itemsize}")
    unsigned, bits = flat.view(kind), 8 * flat.itemsize
    prefix = 0
    for shift in range(bits - 16, -1, -16):
        counts = np.zeros(1 << 16, np.int64)
        for at in range(0, len(flat), CHUNK):
            part = unsigned[at : at + CHUNK] & kind.type((1 << (bits - 1)) - 1)
            if shift + 16 < bits:
                part = part[part >> kind.type(shift + 16) == prefix]
            digits = (part >> kind.type(shift)) & kind.type(0xFFFF)
            counts += np.bincount(digits.astype(np.intp), minlength=1 << 16)
        above = np.cumsum(counts[::-1])  # from the largest digit down
        digit = (1 << 16) - 1 - int(np.searchsorted(above, k))
        k -= int(above[-1 - digit] - counts[digit])
        prefix = prefix << 16 | digit
    return np.array(prefix, kind).view(flat.dtype)


def _scatter(index: Array, value: Array, shape: Array) -> Array:
    sizes = _picked_shape(index, value, shape)
    n = math.prod(sizes)
    at = index.astype(np.int64)
    # Strictly rising, so no entry is set twice, and the last one bounds all others.
    if len(at) and (at[-1] >= n or (np.diff(at) <= 0).any()):
        raise InvalidInput(f"top-k indices must rise strictly and stay below {n}")
    flat = np.zeros(n, value.dtype)
    flat[at] = value
    return flat.reshape(sizes)


def _picked_shape(index: Array, value: Array, shape: Array) -> tuple[int, ...]:
    if index.dtype != np.uint32 or index.ndim != 1 or value.shape != index.shape:
        raise InvalidInput("top-k writes as many uint32 indices as values, each a vector")
    if shape.dtype != np.int64 or shape.ndim != 1 or (shape < 0).any():
        raise InvalidInput("top-k writes the shape as a vector of int64 sizes")
    return tuple(int(size) for size in shape)


# fmt: off
COMPRESSIONS: Final[Mapping[str, CompressionRow]] = {
    row.name: row
    for row in (
        CompressionRow("",      ("",),  lambda x, _keep, _rng: (x,),     lambda x: x, None,
            lambda x: x.shape,                     lambda x: x.dtype),
        CompressionRow("int8",  ("q", "scale"),               _quantize, _dequantize, _lose_levels,
            lambda q, _scale: q.shape,             lambda _q, scale: scale.dtype),
        CompressionRow("top-k", ("index", "value", "shape"),  _pick,     _scatter,    _lose_picked,
            _picked_shape,                         lambda _i, value, _s: value.dtype),
    )
}
# fmt: on


def _some(names: Any) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return f"{[name[:80] for name in listed[:4]]}{more}"
