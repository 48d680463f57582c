"""Which buckets were chosen by measured times; checkpoints hold it.

Another measurement may choose others, and another grouping may give other last bits, so a resumed
run takes those of its checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from triplane.proto.errors import Corrupt
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.passes.sharding.buckets import DIGITS, BucketPlan, GradientBuckets

MAX_CHOICES: Final = 1024
"""Lists of gradients in one checkpoint."""
CHECKPOINT: Final = "as in the checkpoint"
_WAY_OUT: Final = "resume from an older checkpoint, or with other buckets, such as one"
_DIGEST: Final = re.compile(f"[0-9a-f]{{{DIGITS}}}")


class BucketChoices:
    """For each list of gradients, by its digest, the numbers before which its buckets end."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[int, ...]] = {}
        self._loaded: set[str] = set()

    def __str__(self) -> str:
        return ", ".join(f"{k} {list(v)}" for k, v in sorted(self._ends.items())) or "none"

    def of(self, buckets: GradientBuckets) -> BucketPlan | None:
        """Return the buckets chosen for these gradients, if any; Corrupt if they cannot be."""
        ends = self._ends.get(buckets.digest)
        if ends is None:
            return None
        if ends[-1] != len(buckets.tensors):
            raise Corrupt(
                f"the checkpoint's buckets end at gradient {ends[-1]} of {len(buckets.tensors)}; "
                f"{_WAY_OUT}"
            )
        loaded = buckets.digest in self._loaded
        return buckets.ending_at(CHECKPOINT if loaded else "as measured before", ends)

    def keep(self, buckets: GradientBuckets, plan: BucketPlan) -> None:
        """Keep what was chosen for these gradients."""
        self._ends[buckets.digest] = tuple(plan.ends)

    def state(self) -> dict[str, Array]:
        """Return what a checkpoint holds."""
        return {key: np.array(ends, np.int64) for key, ends in self._ends.items()}

    def load(self, state: Mapping[str, Array]) -> bool:
        """Take what a checkpoint holds, before what is here; return whether anything changed.

        Corrupt: these are no buckets.
        """
        if len(state) > MAX_CHOICES:
            raise Corrupt(f"the checkpoint has {len(state)} choices of buckets, over {MAX_CHOICES}")
        ends = {key: _checked(key, array) for key, array in state.items()}
        changed = any(self._ends.get(key) != new for key, new in ends.items())
        self._ends |= ends
        self._loaded |= ends.keys()
        return changed


def _checked(key: str, ends: Array) -> tuple[int, ...]:
    if not _DIGEST.fullmatch(key) or ends.dtype != np.int64 or ends.ndim != 1 or not ends.size:
        raise Corrupt(
            f"the checkpoint's choice of buckets {key[:DIGITS]!r} is {ends.dtype}{ends.shape}; "
            f"{_WAY_OUT}"
        )
    # Compared in pairs: a difference may wrap around to a positive number.
    if ends[0] <= 0 or (ends[1:] <= ends[:-1]).any():
        raise Corrupt(
            f"the checkpoint's buckets do not follow each other: {ends[:8].tolist()}; {_WAY_OUT}"
        )
    return tuple(ends.tolist())
