"""Assign a sample to the training or the held-out part by its own bytes only.

    u(sample) = SHA-256(seed, bytes of the sample) in [0, 1),  held out where u < share

So a sample keeps its part when others are added, equal samples are in the same part, and no sample
that is scored was learned from, not even on another device with the same seed.
"""

from __future__ import annotations

import hashlib

import numpy as np

from triplane.unified_ir.federated.core.draws import Array


def places(x: Array, seed: str) -> Array:
    """Return u of each row of `x`: (N,) float64, uniform in [0, 1), multiples of 2^-53."""
    key = hashlib.sha256(f"triplane parts 1\n{seed}\n".encode()).digest()
    rows = np.ascontiguousarray(x)
    words = [hashlib.sha256(key + row.tobytes()).digest()[:8] for row in rows]
    numbers = np.frombuffer(b"".join(words), "<u8")
    # The top 53 bits, which a float64 holds exactly.
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def held_out(x: Array, share: float, seed: str) -> Array | None:
    """Return which rows of `x` are held out, (N,) bool: about that share.

    Each part gets at least one distinct row. Returns None if all rows are equal, since they cannot
    form two parts.
    """
    u = places(x, seed)
    if not len(u) or u.min() == u.max():
        return None
    chosen = u < share
    if not chosen.any():
        chosen = u == u.min()
    return ~(u == u.max()) if chosen.all() else np.asarray(chosen)
