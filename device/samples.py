"""A device's samples, from arrays, a file or folder, a `Dataset`, or an iterable of batches.

Invalid samples are refused here, naming the place, rather than by every task of a run. The held-out
part is never used for learning. A sample stays in its part when more samples are added: one of each
block of consecutive samples is held out, chosen by a fixed draw. Of windows that share rows, the
last ones are held out; when rows are added, no window that was learned from comes into that part.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard

import numpy as np

from triplane.device.dataset_shard import DatasetShard
from triplane.device.home import checked_form
from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.unified_ir.federated.core.defaults import HELD_OUT
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.files.npz import opened_npz

if TYPE_CHECKING:
    from triplane.unified_ir.data import Dataset

MAX_SHARD_BYTES: Final = 2 << 30
"""Total size of all samples, which are held in memory."""
MAX_BATCHES: Final = 1 << 20
"""Largest number of batches, so that an endless iterator is noticed even if batches are small."""
MAX_BLOCK: Final = 1 << 32
"""Largest block of samples of which one is held out."""
HELD_OUT_PREFIX: Final = "held_out."
"""Prefix of the held-out arrays in an npz file."""
NUMBERS: Final = "biuf"
"""Kinds of elements that a graph takes, as numpy names them."""
AT_ONCE: Final = 1 << 20
"""Bytes of an array that are checked at once, so that the check needs little memory."""

BATCH_ROWS: Final = 1024
"""Samples that are read at once from a dataset of unknown length."""
NPZ: Final = ".npz"
PIPELINE: Final = ".json"

Source: TypeAlias = (
    "Shard | Mapping[str, Array] | str | Path | Dataset | Iterable[Mapping[str, Array]]"
)


def shard_of(
    source: Source,
    *,
    held_out: float = HELD_OUT,
    x: Sequence[str] = (),
    y: Sequence[str] = (),
    form: Mapping[str, Any] | None = None,
) -> Shard:
    """Return the samples of `source`; split them unless it has held-out samples itself.

    source: a Shard, arrays by name ("x", "y") with one row per sample, the path of an npz file of
    such arrays (held-out ones named "held_out.x" if it has them) or of other data that
    `triplane.unified_ir.data.load` reads, a `Dataset` with inputs and targets of these names, or an
    iterable of batches that ends. held_out: share in [0, 1), rounded to the nearest 1/n, or 1 - 1/n
    above a half; with 0 the device cannot evaluate. x, y: for a path, the columns of inputs and
    target; a single one is named x or y. form: for a path, more options of `data.load`, those of
    `home.FORM`. Columns and named classes of data get the model's names and numbers from each plan
    (`dataset_shard`). InvalidInput: samples are not finite numbers, or differ in size or names.
    """
    if isinstance(source, Shard):
        return _checked(source)
    if isinstance(source, str | Path):
        return _from_path(Path(source).expanduser(), held_out, x, y, form or {})
    if _is_dataset(source):
        return _from_dataset(source, held_out)
    arrays = _named(source) if isinstance(source, Mapping) else _concatenated(source)
    return split(arrays, held_out)


def _is_dataset(source: object) -> TypeGuard["Dataset"]:
    # Not imported for this, to save a device memory: a Dataset exists only where its module does.
    module = sys.modules.get("triplane.unified_ir.data.dataset")
    return module is not None and isinstance(source, module.Dataset)


def _from_path(
    path: Path, held_out: float, x: Sequence[str], y: Sequence[str], form: Mapping[str, Any]
) -> Shard:
    if path.suffix == NPZ and not (x or y or form):
        return _from_npz(path, held_out)
    if not path.exists():
        raise NotFound(f"no samples at {path}; give a file with columns x and y")
    from triplane.unified_ir.data import load

    dataset = load(path, x=_under("x", x, y), y=_under("y", y, x), **checked_form(form))
    return _from_dataset(dataset, held_out, numbered=path.suffix == PIPELINE)


def _under(name: str, choices: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Return the choices of columns; a single one without a name gets this one, if it is free."""
    alone = len(choices) == 1 and "=" not in choices[0]
    is_free = all(choice.split(":")[0] != name for choice in others)
    return (f"{name}={choices[0]}",) if alone and is_free else tuple(choices)


def _from_dataset(dataset: "Dataset", held_out: float, *, numbered: bool = True) -> Shard:
    """Return inputs and targets in two parts; see `DatasetShard`."""
    from triplane.unified_ir.data.choosing import class_columns

    if held_out and dataset.overlap:
        # Windows that share rows with held-out ones would be learned from; see `Dataset.split`.
        shard = _checked(Shard(*map(_arrays_of, dataset.split(held_out))))
    else:
        shard = split(_arrays_of(dataset), held_out)
    names = class_columns(dataset)
    return DatasetShard(
        shard.train, shard.held_out, len(dataset.inputs), dataset.origin.name,
        dict.fromkeys(names, dataset.labels), numbered,
    )  # fmt: skip


def _arrays_of(dataset: "Dataset") -> dict[str, Array]:
    """Return inputs and targets by name, within `MAX_SHARD_BYTES`; float64 becomes float32."""
    from triplane.unified_ir.data.choosing import row_bytes

    names = (*dataset.inputs, *dataset.targets)
    size = row_bytes(dataset, names)
    if dataset.samples is None or dataset.is_batched:
        arrays = _concatenated(_batches_of(dataset, names))
    else:
        _check_size(size * dataset.samples)
        arrays = {name: np.asarray(dataset.column(name)) for name in names}
    # Tables hold float64; a graph computes in float32.
    return {k: a.astype(np.float32) if a.dtype == np.float64 else a for k, a in arrays.items()}


def _batches_of(dataset: "Dataset", names: Sequence[str]) -> Iterator[dict[str, Array]]:
    for batch in dataset.in_batches(BATCH_ROWS).opened().batches(0):
        yield {name: np.asarray(batch[name]) for name in names}


def split(arrays: Mapping[str, Array], held_out: float) -> Shard:
    """Hold out one sample of each block of round(1 / held_out); above a half, all but one."""
    if not 0 <= held_out < 1:
        raise InvalidInput(f"the share to hold out is in [0, 1), got {held_out}")
    # `Shard` raises InvalidInput unless all arrays have the same number of rows.
    whole = _checked(Shard(arrays, {}))  # before the split, since errors count the samples
    n = len(whole.train[next(iter(arrays))])
    out = np.zeros(n, bool)
    if held_out:
        block = min(max(2, round(1 / min(held_out, 1 - held_out))), MAX_BLOCK)
        words = Draws(0, 0, "", "held out").words(-(-n // block))
        # One fixed draw for each block: appended samples never move an old one to the other part,
        # which would let held-out samples leak into learning.
        at = np.arange(len(words)) * block + (words % np.uint64(block)).astype(np.intp)
        out[at[at < n]] = True
    if held_out > 0.5:
        out = ~out
    return Shard(
        {name: x[~out] for name, x in arrays.items()}, {name: x[out] for name, x in arrays.items()}
    )


def _named(batch: Any) -> dict[str, Array]:
    if not isinstance(batch, Mapping):
        raise InvalidInput(
            'samples are arrays by name, as in {"x": images, "y": labels}, a file of them, a '
            f"Dataset, or batches of that form; got {type(batch).__name__}"
        )
    arrays = {}
    for name, x in batch.items():
        if not isinstance(name, str):
            raise InvalidInput(f"arrays are named by strings, as 'x' and 'y', got {name!r}")
        try:
            arrays[name] = np.asarray(x)
        except ValueError as error:
            raise InvalidInput(
                f"{name!r} is not an array of samples of one shape: {error}"
            ) from error
    return arrays


def _concatenated(batches: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """Return all batches as one. InvalidInput beyond `MAX_SHARD_BYTES`."""
    parts: list[dict[str, Array]] = []
    size = 0
    for number, batch in enumerate(_batches(batches), 1):
        arrays = _named(batch)
        size += sum(x.nbytes for x in arrays.values())
        # Checked for each batch: an endless iterator must fail before it has filled the memory.
        _check_size(size)
        if number > MAX_BATCHES:
            raise InvalidInput(f"an iterator gives at most {MAX_BATCHES} batches; let it end")
        _check_rows(arrays, number)
        parts.append(arrays)
        _check_alike(parts[0], arrays, number)
    if not parts:
        raise InvalidInput("the iterator gave no batch; a device has at least one sample")
    return {name: np.concatenate([batch[name] for batch in parts]) for name in parts[0]}


def _batches(source: Any) -> Iterable[Any]:
    """Return an iterable of batches; any other object as one batch, which is then refused."""
    # A single array is iterable, too, but its rows are not batches.
    return source if isinstance(source, Iterable) and not hasattr(source, "dtype") else (source,)


def _check_rows(arrays: Mapping[str, Array], number: int) -> None:
    rows = {name: x.shape[:1] for name, x in arrays.items()}
    if len(set(rows.values())) > 1 or () in rows.values():
        raise InvalidInput(
            f"arrays of a batch agree in their first axis, which counts samples (one sample is a "
            f"batch of 1); batch {number} has {rows}"
        )


def _check_alike(first: Mapping[str, Array], batch: Mapping[str, Array], number: int) -> None:
    if batch.keys() != first.keys():
        raise InvalidInput(
            f"batches have the same names, got {sorted(first)} and, in batch {number}, "
            f"{sorted(batch)}"
        )
    for name, x in batch.items():
        if (x.dtype, x.shape[1:]) != (first[name].dtype, first[name].shape[1:]):
            raise InvalidInput(
                f"samples of all batches have one shape and type; {name!r} began as "
                f"{first[name].dtype}{list(first[name].shape[1:])} and is "
                f"{x.dtype}{list(x.shape[1:])} in batch {number}"
            )


def _from_npz(path: Path, held_out: float) -> Shard:
    limits = {"file_bytes": MAX_SHARD_BYTES, "total_bytes": MAX_SHARD_BYTES}
    try:
        with opened_npz(path, **limits) as npz:
            arrays = {name: npz.array(name) for name in npz.names}
    except NotFound as error:
        raise NotFound(f"no samples at {path}; give an npz file with arrays x and y") from error
    except (Corrupt, MemoryError) as error:
        raise InvalidInput(f"{path} is not an npz file of plain arrays: {error}") from error
    train = {name: x for name, x in arrays.items() if not name.startswith(HELD_OUT_PREFIX)}
    if len(train) == len(arrays):
        return split(train, held_out)
    rest = arrays.keys() - train.keys()
    named = {name.removeprefix(HELD_OUT_PREFIX): arrays[name] for name in sorted(rest)}
    return _checked(Shard(train, named))


def _checked(shard: Shard) -> Shard:
    """Return the shard after checking that both parts have the same names and finite numbers."""
    if shard.held_out and shard.held_out.keys() != shard.train.keys():
        raise InvalidInput(
            f"samples that are held out have the names of the others, {sorted(shard.train)}; got "
            f"{sorted(shard.held_out)}"
        )
    for arrays in (shard.train, shard.held_out):
        for name, x in arrays.items():
            _check_numbers(name, np.asarray(x))
    return shard


def _check_numbers(name: str, x: Array) -> None:
    if x.dtype.kind not in NUMBERS:
        raise InvalidInput(f"samples are numbers, {name!r} is {x.dtype}; encode it first")
    if x.dtype.kind != "f":
        return
    rows = max(1, AT_ONCE // max(1, x[:1].nbytes))
    for at in range(0, len(x), rows):
        bad = ~np.isfinite(x[at : at + rows]).reshape(len(x[at : at + rows]), -1).all(axis=1)
        if bad.any():
            sample = at + int(bad.argmax())
            raise InvalidInput(
                f"samples must be finite; {name!r} of sample {sample} has {_defect(x[sample])}; "
                "fill in missing values, or leave such samples out"
            )


def _defect(row: Array) -> str:
    return "NaN" if np.isnan(row).any() else "an infinity"


def _check_size(size: int) -> None:
    if size > MAX_SHARD_BYTES:
        raise InvalidInput(
            f"samples may take at most {MAX_SHARD_BYTES} bytes, got {size}; use fewer (an iterator "
            "of batches has to end)"
        )
