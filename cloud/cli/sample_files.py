"""The files of samples that a push uploads: an .npz as it is, other data converted to one.

The cloud reads .npz files alone, so that it needs no columns, sizes or extras of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from triplane.proto.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from triplane.unified_ir.ir import Module
    from triplane.unified_ir.ir.graph import Array, Value

    Reader = Callable[..., Mapping[str, Array]]

NPZ: Final = ".npz"
CLASSES: Final = "y"
"""Name of the array of classes in an evaluation set."""


@dataclass(frozen=True, slots=True)
class SampleFiles:
    """The .npz files of a push; None for those that it has not."""

    calibration: Path | None
    evaluation: Path | None


@contextmanager
def sample_files(
    module: Module,
    entry: str,
    calibrate: str | None,
    evaluate: str | None,
    choice: Mapping[str, Any],
) -> Iterator[SampleFiles]:
    """Return the files while the block runs; others than .npz are written to a temporary folder.

    calibrate, evaluate: sources as `data.load` takes them, with the options `choice`. The same
    samples give the same bytes, so an interrupted upload continues.
    """
    with TemporaryDirectory(prefix="triplane-push-") as name:
        folder = Path(name)
        yield SampleFiles(
            _file(module, entry, calibrate, choice, _calibration, folder / f"calibration{NPZ}"),
            _file(module, entry, evaluate, choice, _evaluation, folder / f"evaluation{NPZ}"),
        )


def _file(
    module: Module,
    entry: str,
    source: str | None,
    choice: Mapping[str, Any],
    read: Reader,
    out: Path,
) -> Path | None:
    """Return the source if it is an .npz whose columns are not chosen, else `out`, written here."""
    from triplane.unified_ir.ir.meta import labels_of

    if source is None:
        return None
    inputs = module.inputs(entry)
    if not _is_npz(source, choice):
        return _written(out, read(source, inputs, labels_of(module.meta), **choice))
    file = _existing(source)
    read(file, inputs)  # as the cloud will, after the upload
    return file


def _calibration(*args: Any, **choice: Any) -> Mapping[str, Array]:
    from triplane.unified_ir.convert.samples import read_samples

    choice.pop(CLASSES, None)
    return read_samples(*args, **choice)


def _evaluation(
    source: str | Path, inputs: Sequence[Value], *args: Any, **choice: Any
) -> Mapping[str, Array]:
    from triplane.unified_ir.convert.samples import read_labelled

    if CLASSES in {p.name for p in inputs}:
        raise InvalidInput(
            f"an evaluation set has the classes under the name {CLASSES!r}, which is an input of "
            "this model; rename the input"
        )
    arrays, classes = read_labelled(source, inputs, *args, **choice)
    return {**arrays, CLASSES: classes}


def _is_npz(source: str, choice: Mapping[str, Any]) -> bool:
    return Path(source).suffix == NPZ and all(value in (None, ()) for value in choice.values())


def _existing(source: str) -> Path:
    if not Path(source).is_file():
        raise NotFound(f"no file {source}")
    return Path(source)


def _written(path: Path, arrays: Mapping[str, Array]) -> Path:
    from triplane.unified_ir.files.npz import write_npz

    with path.open("wb") as file:
        write_npz(file, arrays)
    return path
