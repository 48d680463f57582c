"""What a conversion is shown: arrays checked once against the function's inputs.

Files are read within limits and never unpickled. The values end up in no bundle but as its few
golden inputs.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.data import Dataset, load
from triplane.unified_ir.data.bounded import opened
from triplane.unified_ir.data.npz import DAMAGE, END
from triplane.unified_ir.files.pixels import as_input
from triplane.unified_ir.ir.dims import is_symbol
from triplane.unified_ir.ir.graph import Array, Value
from triplane.unified_ir.quantize import Samples

MAX_FILE_BYTES: Final = 1 << 30
MAX_ARRAY_BYTES: Final = 1 << 30
"""Of one array, before it becomes float32."""
MAX_MEMBERS: Final = 64
MAX_HEADER_BYTES: Final = 10_000
GENERATED: Final = 4
MAX_DIRECTORY_BYTES: Final = 64 << 10
"""Of the archive's list of members, which `zipfile` reads whole."""

Given = Array | Mapping[str, Array] | Dataset


def as_samples(samples: Given, inputs: Sequence[Value], what: str) -> dict[str, Array]:
    """Arrays by input name; InvalidInput names the input and what was seen.

    Every first axis counts the same samples; float64 becomes float32; values are finite.
    """
    if isinstance(samples, Dataset):
        samples = samples.x
    if not isinstance(samples, Mapping):
        if len(inputs) != 1:
            names = ", ".join(p.name for p in inputs)
            raise InvalidInput(f"{what} is one array, but the inputs are {names}; give a mapping")
        samples = {inputs[0].name: samples}
    wanted = {p.name for p in inputs}
    if samples.keys() != wanted:
        raise InvalidInput(f"{what} needs the arrays {sorted(wanted)}, got {sorted(samples)[:8]}")
    sizes: dict[str, int] = {}
    return {p.name: _checked(samples[p.name], p, sizes, what) for p in inputs}


def as_labelled(
    labelled: tuple[Given, Array] | Dataset, inputs: Sequence[Value]
) -> tuple[dict[str, Array], Array]:
    """(samples, classes) of an evaluation set; y: (N,) whole numbers."""
    x, y = (labelled.x, labelled.y) if isinstance(labelled, Dataset) else labelled
    samples, y = as_samples(x, inputs, "the evaluation set"), np.asarray(y)
    count = len(next(iter(samples.values())))
    if y.shape != (count,) or y.dtype.kind not in "iu":
        raise InvalidInput(
            f"labels are ({count},) whole numbers, one per sample, got {y.dtype}{y.shape}"
        )
    return samples, y.astype(np.int64)


def generated(inputs: Sequence[Value]) -> dict[str, Array]:
    """A few samples for goldens where none were given: uniform in 0..1, whole numbers 0."""
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
    """SHA-256 over names, types, shapes and bytes: which calibration a conversion saw."""
    state = hashlib.sha256()
    for name in sorted(samples):
        x = samples[name]
        state.update(f"{name} {x.dtype.str} {x.shape}\n".encode())
        state.update(np.ascontiguousarray(x).data)
    return state.hexdigest()


def read_samples(source: str | Path, inputs: Sequence[Value]) -> dict[str, Array]:
    """Samples from an .npz file, or from whatever else `data.load` takes (`digits`, folders).

    The file has one array per input under its name; a single input may also be called x.
    """
    path = Path(source)
    if path.suffix != ".npz" or not path.exists():
        return as_samples(load(source), inputs, str(source))
    arrays = _read(path, {p.name for p in inputs} | ({"x"} if len(inputs) == 1 else set()))
    if len(inputs) == 1 and inputs[0].name not in arrays and "x" in arrays:
        arrays[inputs[0].name] = arrays.pop("x")
    arrays = {p.name: arrays[p.name] for p in inputs if p.name in arrays}
    missing = [p.name for p in inputs if p.name not in arrays]
    if missing:
        raise NotFound(f"{path} has no array {missing[0]!r}; it needs {_names(inputs)}")
    scaled = {p.name: as_input(arrays[p.name], p.type.dtype.numpy) for p in inputs}
    return as_samples(scaled, inputs, str(path))


def read_labelled(source: str | Path, inputs: Sequence[Value]) -> tuple[dict[str, Array], Array]:
    """(samples, classes): as `read_samples`, with classes from the array y."""
    path = Path(source)
    if path.suffix != ".npz" or not path.exists():
        return as_labelled(load(source), inputs)
    labels = _read(path, {"y"})
    if "y" not in labels:
        raise NotFound(f"{path} has no array 'y'; an evaluation set needs {_names(inputs)} and y")
    return as_labelled((read_samples(path, inputs), labels["y"]), inputs)


def _names(inputs: Sequence[Value]) -> str:
    alone = len(inputs) == 1 and inputs[0].name != "x"
    return ", ".join(p.name for p in inputs) + (" (or x)" if alone else "")


def _read(path: Path, wanted: set[str]) -> dict[str, Array]:
    """The wanted arrays of an npz file that has them."""
    with opened(path, limit_bytes=MAX_FILE_BYTES) as file:
        _check_directory(path, file)
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.namelist()
                if len(members) > MAX_MEMBERS:
                    raise InvalidInput(f"{path} has {len(members)} arrays; at most {MAX_MEMBERS}")
                names = sorted(name for name in wanted if f"{name}.npy" in members)
                return {name: _member(path, archive, name) for name in names}
        except TriplaneError:
            raise
        except DAMAGE as error:
            raise Corrupt(f"{path} is no whole npz file: {error}") from error


def _check_directory(path: Path, file: IO[bytes]) -> None:
    file.seek(-min(END.size, path.stat().st_size), 2)
    tail = file.read(END.size)
    if len(tail) < END.size or not tail.startswith(b"PK\5\6"):
        raise Corrupt(f"{path} is no whole npz file: no end record in its last {END.size} bytes")
    if END.unpack(tail)[5] > MAX_DIRECTORY_BYTES:
        raise InvalidInput(f"{path} lists its members in over {MAX_DIRECTORY_BYTES} bytes")


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> Array:
    what = f"{path}: {name}"
    with archive.open(f"{name}.npy") as member:
        shape, fortran, dtype = _header(member, what)
        if dtype.kind not in "biuf":
            raise InvalidInput(f"{what} holds {dtype}, no plain numbers; objects are not read")
        count = math.prod(shape)
        if count * dtype.itemsize > MAX_ARRAY_BYTES:
            raise InvalidInput(f"{what} announces {dtype}{shape}; at most {MAX_ARRAY_BYTES} bytes")
        data = member.read(count * dtype.itemsize + 1)
    if len(data) != count * dtype.itemsize:
        raise Corrupt(f"{what}: {len(data)} bytes for {dtype}{shape}")
    flat = np.frombuffer(data, dtype)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def _header(member: IO[bytes], what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise InvalidInput(f"{what} is npy format {version}; write it with numpy.savez")
        return np.lib.format.read_array_header_1_0(member, max_header_size=MAX_HEADER_BYTES)
    except InvalidInput:
        raise
    except (ValueError, TypeError, SyntaxError) as error:
        raise Corrupt(f"{what} has no npy header: {error}") from error


def _checked(x: Array, p: Value, sizes: dict[str, int], what: str) -> Array:
    x = np.asarray(x)
    if x.dtype == np.float64 and p.type.dtype.numpy == np.float32:
        x = x.astype(np.float32)
    fits = x.dtype == p.type.dtype.numpy and x.ndim == p.type.rank and x.ndim > 0
    for axis, dim in enumerate(p.type.shape if fits else ()):
        expected = sizes.setdefault(str(dim), x.shape[axis]) if is_symbol(dim) else dim
        multiple = axis == 0 and isinstance(dim, int) and x.shape[0] % dim == 0
        fits = fits and (expected == x.shape[axis] or multiple or not isinstance(expected, int))
    if not fits or not x.size:
        raise InvalidInput(
            f"{what}: {p.name} is {p.type} with at least one sample, got {x.dtype}{x.shape}"
        )
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise InvalidInput(f"{what}: {p.name} holds NaN or infinity")
    return x
