"""Assign a sample to a part by its own bytes, independently of other samples.

    u(sample) = SHA-256(seed, bytes of the sample) in [0, 1),  held out where u < share

So a sample keeps its place when others are added, equal samples are in one part, and nothing that
is scored was learned from, not even on another device of the same seed.
"""

from __future__ import annotations

import hashlib

import numpy as np

from triplane.unified_ir.federated.core.draws import Array


def places(x: Array, seed: str) -> Array:
    """u of each row of `x`: (N,) float64, uniform in [0, 1), a multiple of 2^-53."""
    key = hashlib.sha256(f"triplane parts 1\n{seed}\n".encode()).digest()
    rows = np.ascontiguousarray(x)
    words = [hashlib.sha256(key + row.tobytes()).digest()[:8] for row in rows]
    numbers = np.frombuffer(b"".join(words), "<u8")
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def held_out(x: Array, share: float, seed: str) -> Array | None:
    """(N,) bool: which rows of `x` are never learned from; about that share, at least one distinct.

    At least one distinct row stays to learn from. None where all rows are equal: no two parts can
    be made of them.
    """
    u = places(x, seed)
    if not len(u) or u.min() == u.max():
        return None
    chosen = u < share
    if not chosen.any():
        chosen = u == u.min()
    return ~(u == u.max()) if chosen.all() else np.asarray(chosen)
