"""Samples of a conversion: arrays checked once against the function's inputs.

Files are read within limits and never unpickled. Only the few golden inputs of a bundle keep any of
the values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data import Dataset, load
from triplane.unified_ir.data.by_name import PIPELINE, size_like
from triplane.unified_ir.data.choosing import class_numbers, row_bytes
from triplane.unified_ir.data.grouping import Batched
from triplane.unified_ir.data.views import source_rows
from triplane.unified_ir.files.npz import opened_npz
from triplane.unified_ir.files.pixels import as_input
from triplane.unified_ir.files.samples import check_finite, transpose_hint
from triplane.unified_ir.ir.dims import is_symbol
from triplane.unified_ir.ir.graph import Array, Value
from triplane.unified_ir.quantize import Samples

MAX_SAMPLES_BYTES: Final = 2**30
GENERATED: Final = 4

Given = Array | Mapping[str, Array] | Dataset


def as_samples(
    samples: Given, inputs: Sequence[Value], what: str, names: Sequence[str] = ()
) -> dict[str, Array]:
    """Return arrays by input name; InvalidInput names the input and the values seen.

    The first axis of every array must count the same samples, and values must be finite. float64
    becomes float32. The inputs of a `Dataset` are taken by name, else in their order. names: of the
    model's classes, by which characters of a text are numbered.
    """
    if isinstance(samples, Dataset):
        samples = _columns(samples, inputs, what, names)
    if not isinstance(samples, Mapping):
        if len(inputs) != 1:
            several = ", ".join(p.name for p in inputs)
            raise InvalidInput(f"{what} is one array, but the inputs are {several}; give a mapping")
        samples = {inputs[0].name: samples}
    wanted = {p.name for p in inputs}
    if samples.keys() != wanted:
        raise InvalidInput(f"{what} needs the arrays {sorted(wanted)}, got {sorted(samples)[:8]}")
    sizes: dict[str, int] = {}
    return {p.name: _checked(samples[p.name], p, sizes, what) for p in inputs}


def as_labelled(
    labelled: tuple[Given, Array] | Dataset, inputs: Sequence[Value], names: Sequence[str] = ()
) -> tuple[dict[str, Array], Array]:
    """Return (samples, classes) of an evaluation set; classes: (N,) int64.

    names: of the model's classes; named classes of a `Dataset` get the numbers of the same names.
    """
    x, y = (labelled, _classes(labelled, names)) if isinstance(labelled, Dataset) else labelled
    samples, y = as_samples(x, inputs, "the evaluation set", names), np.asarray(y)
    count = len(next(iter(samples.values())))
    if y.shape != (count,) or y.dtype.kind not in "iu":
        raise InvalidInput(
            f"labels must be ({count},) whole numbers, one per sample, got {y.dtype}{y.shape}; "
            "this measures accuracy, so it needs classes; `triplane evaluate BUNDLE --metric mae` "
            "scores a bundle by another metric"
        )
    return samples, y.astype(np.int64)


def _columns(
    dataset: Dataset, inputs: Sequence[Value], what: str, labels: Sequence[str]
) -> dict[str, Array]:
    """Return the input columns of a dataset by the model's names, within `MAX_SAMPLES_BYTES`."""
    names = [p.name for p in inputs]
    if len(dataset.inputs) != len(names):
        raise InvalidInput(
            f"the model takes {', '.join(names)}, but {what} has the inputs "
            f"{', '.join(dataset.inputs) or 'none'}; choose its columns: one --x for each input, "
            "or .roles(inputs)"
        )
    own = names if set(dataset.inputs) == set(names) else dataset.inputs
    _check_bytes(dataset, own, what, len(dataset))
    columns = [class_numbers(dataset, labels, name) for name in own]
    return {p.name: _as(x, p.type.dtype.numpy) for p, x in zip(inputs, columns, strict=True)}


def _as(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return a column in the type of an input; whole numbers become floats that equal them."""
    x = as_input(x, dtype)
    if x.dtype.kind not in "iu" or dtype.kind != "f":
        return x
    cast = x.astype(dtype)
    return cast if (cast == x).all() else x


def raw_columns(dataset: Dataset, inputs: Sequence[Value]) -> dict[str, Array]:
    """Return the columns of a dataset's source that are inputs, as they are before any step.

    The samples are those that the dataset gives, in its order, so that its targets belong to them.
    """
    stored = replace(dataset, steps=())
    names = [p.name for p in inputs]
    if missing := [name for name in names if name not in stored.schema]:
        raise InvalidInput(
            f"{dataset.origin.name} has no column {missing[0]!r}, which the model takes; it has "
            f"{', '.join(stored.schema)}"
        )
    plain = unbatched(dataset)
    _check_bytes(stored, names, dataset.origin.name, max(len(stored), len(plain)))
    rows = source_rows(plain.view(), dataset.origin.table)
    if rows is None:
        raise InvalidInput(
            f"the samples of {dataset.origin.name} are not rows of its source: windows are made of "
            "several rows, and a repeated zip of shuffled datasets pairs others each time; write "
            "them as records first: `triplane data convert`"
        )
    return {name: np.asarray(stored.column(name))[rows] for name in names}


def unbatched(dataset: Dataset) -> Dataset:
    """Return the dataset without the steps that put samples together in batches."""
    return replace(dataset, steps=tuple(s for s in dataset.steps if not isinstance(s, Batched)))


def _check_bytes(dataset: Dataset, names: Sequence[str], what: str, count: int) -> None:
    if (total := row_bytes(dataset, names) * count) > MAX_SAMPLES_BYTES:
        raise InvalidInput(
            f"{what} takes {total} bytes in memory; at most {MAX_SAMPLES_BYTES} are supported. A "
            "few hundred typical samples are enough: .take(500)"
        )


def _classes(dataset: Dataset, names: Sequence[str]) -> Array:
    """Return the classes of a dataset, by the names of the model's classes where both have some."""
    if len(dataset.targets) != 1:
        raise InvalidInput(
            "an evaluation set has one column of classes, got the targets "
            f"{', '.join(dataset.targets) or 'none'}; name it: --y, or .roles(inputs, target)"
        )
    return class_numbers(dataset, names)


def generated(inputs: Sequence[Value]) -> dict[str, Array]:
    """Return a few samples for goldens if none were given: uniform in 0..1; integers are 0."""
    # A fixed seed: goldens must be the same when the signer converts again.
    rng = np.random.default_rng(0)
    samples = {}
    for p in inputs:
        unknown = sorted(p.type.symbols - set(_batch_symbol(p)))
        if unknown:
            raise InvalidInput(
                f"input {p.name!r} is {p.type}: sizes {', '.join(unknown)} are open, so no sample "
                "can be made up; give calibration"
            )
        shape = p.type.concrete(dict.fromkeys(_batch_symbol(p), GENERATED))
        uniform = rng.random(shape) if p.type.dtype.is_float else np.zeros(shape)
        samples[p.name] = uniform.astype(p.type.dtype.numpy)
    return samples


def _batch_symbol(p: Value) -> list[str]:
    return [str(d) for d in p.type.shape[:1] if is_symbol(d)]


def digest(samples: Samples) -> str:
    """Return the SHA-256 over names, types, shapes and bytes, which identifies a calibration."""
    state = hashlib.sha256()
    for name in sorted(samples):
        x = samples[name]
        state.update(f"{name} {x.dtype.str} {x.shape}\n".encode())
        # Without a copy of the samples, which may take a gigabyte.
        state.update(np.ascontiguousarray(x).data)
    return state.hexdigest()


def read_samples(
    source: str | Path, inputs: Sequence[Value], names: Sequence[str] = (), **options: Any
) -> dict[str, Array]:
    """Read samples from an .npz file, or anything else that `data.load` takes.

    names: of the model's classes, by which the characters of a text are numbered. Without
    `options`, those of `data.load`, an .npz has one array per input under its name; a single input
    may also be called x.
    """
    path = Path(source)
    if not _is_plain_npz(path, options):
        return as_samples(_loaded(source, inputs, options), inputs, str(source), names)
    with opened_npz(path, total_bytes=MAX_SAMPLES_BYTES) as npz:
        keys = {p.name: p.name for p in inputs}
        if len(inputs) == 1 and inputs[0].name not in npz.names and "x" in npz.names:
            # So that a file made for training also serves as calibration set.
            keys[inputs[0].name] = "x"
        missing = [name for name, key in keys.items() if key not in npz.names]
        if missing:
            raise NotFound(
                f"{path} has no array {missing[0]!r}; it needs {_names(inputs)}. Other names are "
                "chosen with --x NAME, once for each input"
            )
        scaled = {p.name: as_input(npz.array(keys[p.name]), p.type.dtype.numpy) for p in inputs}
    return as_samples(scaled, inputs, str(path))


def read_labelled(
    source: str | Path, inputs: Sequence[Value], names: Sequence[str] = (), **options: Any
) -> tuple[dict[str, Array], Array]:
    """Read (samples, classes) like `read_samples`, with the classes from y; see `as_labelled`."""
    path = Path(source)
    if not _is_plain_npz(path, options):
        return as_labelled(_loaded(source, inputs, options), inputs, names)
    with opened_npz(path, total_bytes=MAX_SAMPLES_BYTES) as npz:
        if "y" not in npz.names:
            raise NotFound(
                f"{path} has no array 'y'; an evaluation set needs {_names(inputs)} and y"
            )
        labels = npz.array("y")
    return as_labelled((read_samples(path, inputs), labels), inputs)


def _loaded(source: str | Path, inputs: Sequence[Value], options: Mapping[str, Any]) -> Dataset:
    """Load samples; for a model that takes bytes, bytes stay as they are unless asked otherwise.

    Images of a folder get the size that the model takes.
    """
    takes_bytes = all(p.type.dtype.numpy == np.uint8 for p in inputs)
    if takes_bytes and options.get("pixels") is None and Path(source).suffix != PIPELINE:
        options = {**options, "pixels": False}
    return load(source, **with_size(options, source, inputs))


def with_size(
    options: Mapping[str, Any], source: str | Path, inputs: Sequence[Value]
) -> dict[str, Any]:
    """Return options of `data.load`, with the size of `inputs` for the images of a folder."""
    size = options.get("size") or size_like(source, [p.type.shape for p in inputs])
    return {**options, "size": size}


def _is_plain_npz(path: Path, options: Mapping[str, Any]) -> bool:
    """Return whether the arrays are found by the model's own names."""
    stated = [value for value in options.values() if value not in (None, ())]
    return path.suffix == ".npz" and path.exists() and not stated


def _names(inputs: Sequence[Value]) -> str:
    alone = len(inputs) == 1 and inputs[0].name != "x"
    return ", ".join(p.name for p in inputs) + (" (or x)" if alone else "")


def _checked(x: Array, p: Value, sizes: dict[str, int], what: str) -> Array:
    x = np.asarray(x)
    if x.dtype == np.float64 and p.type.dtype.numpy == np.float32:
        x = x.astype(np.float32)
    fits = x.dtype == p.type.dtype.numpy and x.ndim == p.type.rank and x.ndim > 0
    for axis, dim in enumerate(p.type.shape if fits else ()):
        expected = sizes.setdefault(str(dim), x.shape[axis]) if is_symbol(dim) else dim
        # A fixed batch size: the samples are cut into batches, which must come out even.
        multiple = axis == 0 and isinstance(dim, int) and x.shape[0] % dim == 0
        fits = fits and (expected == x.shape[axis] or multiple or not isinstance(expected, int))
    if not fits or not x.size:
        batch = p.type.shape[0] if p.type.rank else None
        even = f" in whole batches of {batch}" if isinstance(batch, int) else ""
        raise InvalidInput(
            f"{what}: {p.name} is {p.type} with at least one sample{even}, got {x.dtype}{x.shape}"
            f"{transpose_hint(x.shape, p.type.shape)}"
        )
    check_finite(x, f"{p.name} of {what}", what="samples")
    return x
