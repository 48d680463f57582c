"""Labelled samples on which nodes measure a version that no person released.

Each node reads them, and so does the person who signs the policy that names them, since nodes
refuse every version whose golden set cannot be read.
"""

from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from triplane.proto.errors import Corrupt, TriplaneError
from triplane.unified_ir.files.npz import opened_npz

MAX_SAMPLES: Final = 10_000
MAX_NPZ_BYTES: Final = 256 << 20
PLAIN: Final = ("x", "y")
EPISODES: Final = ("support.x", "support.y", "query.x", "query.y")

GoldenSet = dict[str, npt.NDArray[Any]]


def golden_set(path: Path, *, episodes: bool) -> GoldenSet:
    """Return `x` (N, ...) and `y` (N,) of an .npz, or episodes of a start point.

    An episode set holds `support.x`, `support.y`, `query.x` and `query.y`, each (E, N, ...). Labels
    are whole numbers. Corrupt: arrays are missing, or there is not one label for each sample.
    """
    wanted = EPISODES if episodes else PLAIN
    try:
        with opened_npz(path, file_bytes=MAX_NPZ_BYTES) as npz:
            arrays = {name: npz.array(name) for name in wanted}
    except TriplaneError as error:
        reason = str(error).replace(str(path), path.name)  # the cloud is sent no path of the node
        raise Corrupt(
            f"the golden set holds no arrays {', '.join(wanted)}, which a "
            f"{'start point' if episodes else 'model'} is judged by: {reason}"
        ) from error
    _check_lengths(arrays)
    return arrays


def has_episodes(path: Path) -> bool:
    """Return whether an .npz is for start points. Corrupt: it is not an .npz."""
    with opened_npz(path, file_bytes=MAX_NPZ_BYTES) as npz:
        return not set(PLAIN) <= set(npz.names) and set(EPISODES) <= set(npz.names)


def _check_lengths(arrays: GoldenSet) -> None:
    """Raise Corrupt unless every sample has a label, and there are not too many."""
    for name, y in arrays.items():
        if not name.endswith("y"):
            continue
        x = arrays[name[:-1] + "x"]
        depth = 1 if name == "y" else 2
        whole = y.ndim == depth and y.dtype.kind in "iu" and x.shape[:depth] == y.shape
        if not whole or not 1 <= y.size <= MAX_SAMPLES:
            raise Corrupt(
                f"the golden set has {name} {y.dtype}{y.shape} for samples {x.shape}; needed are 1 "
                f"to {MAX_SAMPLES} whole numbers, one for each sample"
            )
    if len({len(y) for y in arrays.values()}) != 1:
        raise Corrupt("the golden set has support and query sets of different numbers of episodes")
