"""A device's samples, from what its developer has: arrays, an npz file, or batches one by one.

The part that is held out is never learned from, and a sample keeps its part when more arrive: of
each block of consecutive samples one is held out, chosen by a fixed draw.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from zipfile import BadZipFile

import numpy as np

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.learn import Shard

DEFAULT_HELD_OUT: Final = 0.2
MAX_SHARD_BYTES: Final = 2 << 30
"""Of all samples together: they are held in memory."""
HELD_OUT_PREFIX: Final = "held_out."
"""Of arrays in an npz file that say themselves what is held out."""

Source = Shard | Mapping[str, Array] | str | Path | Iterable[Mapping[str, Array]]


def shard_of(source: Source, *, held_out: float = DEFAULT_HELD_OUT) -> Shard:
    """The samples of `source`, split where it does not say itself what is held out.

    source: a Shard, arrays by name ("x", "y") with one row per sample, the path of an npz file of
    such arrays (held-out ones named "held_out.x" if it has them), or an iterable of batches.
    held_out: share in [0, 1); 0 holds nothing out, and such a device does not evaluate.
    """
    if isinstance(source, Shard):
        return source
    if isinstance(source, str | Path):
        return _from_npz(Path(source), held_out)
    arrays = source if isinstance(source, Mapping) else _gathered(source)
    return split({name: np.asarray(x) for name, x in arrays.items()}, held_out)


def split(arrays: Mapping[str, Array], held_out: float) -> Shard:
    """Hold out one sample of each block of round(1 / held_out)."""
    if not 0 <= held_out < 1:
        raise InvalidInput(f"the share to hold out is in [0, 1), got {held_out}")
    n = len(Shard(arrays, {}).train[next(iter(arrays))])
    out = np.zeros(n, bool)
    if held_out:
        block = max(2, round(1 / held_out))
        words = Draws(0, 0, "", "held out").words(-(-n // block))
        at = np.arange(len(words)) * block + (words % np.uint64(block)).astype(np.intp)
        out[at[at < n]] = True
    return Shard(
        {name: x[~out] for name, x in arrays.items()}, {name: x[out] for name, x in arrays.items()}
    )


def _gathered(batches: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """All batches as one; InvalidInput beyond `MAX_SHARD_BYTES`."""
    kept: list[dict[str, Array]] = []
    size = 0
    for batch in batches:
        kept.append({name: np.asarray(x) for name, x in batch.items()})
        size += sum(x.nbytes for x in kept[-1].values())
        _check_size(size)
        if kept[-1].keys() != kept[0].keys():
            raise InvalidInput(
                f"batches have the same names, got {sorted(kept[0])} and {sorted(kept[-1])}"
            )
    if not kept:
        raise InvalidInput("the iterator gave no batch; a device has at least one sample")
    return {name: np.concatenate([batch[name] for batch in kept]) for name in kept[0]}


def _from_npz(path: Path, held_out: float) -> Shard:
    try:
        _check_size(path.stat().st_size)
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise TypeError("it holds one array without a name")
            arrays = {name: loaded[name] for name in loaded.files}
    except FileNotFoundError as error:
        raise NotFound(f"no samples at {path}; give an npz file with arrays x and y") from error
    except (ValueError, TypeError, OSError, BadZipFile) as error:
        raise InvalidInput(f"{path} is no npz file of plain arrays: {error}") from error
    train = {name: x for name, x in arrays.items() if not name.startswith(HELD_OUT_PREFIX)}
    if len(train) == len(arrays):
        return split(train, held_out)
    rest = arrays.keys() - train.keys()
    named = {name.removeprefix(HELD_OUT_PREFIX): arrays[name] for name in sorted(rest)}
    return Shard(train, named)


def _check_size(size: int) -> None:
    if size > MAX_SHARD_BYTES:
        raise InvalidInput(
            f"samples take at most {MAX_SHARD_BYTES} bytes, got {size}; give a part of them"
        )
