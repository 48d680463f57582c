"""The files of samples that a push uploads: an .npz as it is, other data converted to one.

The cloud reads .npz files alone, so that it needs no columns, sizes or extras of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from triplane.proto.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from triplane.unified_ir.ir import Module
    from triplane.unified_ir.ir.graph import Array

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
    with TemporaryDirectory(prefix="triplane-push-") as folder:
        yield SampleFiles(
            _calibration(module, entry, calibrate, choice, Path(folder)),
            _evaluation(module, entry, evaluate, choice, Path(folder)),
        )


def _calibration(
    module: Module, entry: str, source: str | None, choice: Mapping[str, Any], folder: Path
) -> Path | None:
    from triplane.unified_ir.convert.describe import labels_of
    from triplane.unified_ir.convert.samples import read_samples

    if source is None:
        return None
    if _is_npz(source, choice):
        file = _existing(source)
        read_samples(file, module.inputs(entry))  # as the cloud will, after the upload
        return file
    unlabelled = {name: value for name, value in choice.items() if name != CLASSES}
    arrays = read_samples(source, module.inputs(entry), labels_of(module), **unlabelled)
    return _written(folder / f"calibration{NPZ}", arrays)


def _evaluation(
    module: Module, entry: str, source: str | None, choice: Mapping[str, Any], folder: Path
) -> Path | None:
    from triplane.unified_ir.convert.describe import labels_of
    from triplane.unified_ir.convert.samples import read_labelled

    if source is None:
        return None
    if _is_npz(source, choice):
        file = _existing(source)
        read_labelled(file, module.inputs(entry))
        return file
    arrays, classes = read_labelled(source, module.inputs(entry), labels_of(module), **choice)
    if CLASSES in arrays:
        raise InvalidInput(
            f"an evaluation set has the classes under the name {CLASSES!r}, which is an input of "
            "this model; rename the input"
        )
    return _written(folder / f"evaluation{NPZ}", {**arrays, CLASSES: classes})


def _is_npz(source: str, choice: Mapping[str, Any]) -> bool:
    return Path(source).suffix == NPZ and all(value in (None, ()) for value in choice.values())


def _existing(source: str) -> Path:
    if not Path(source).is_file():
        raise NotFound(f"no file {source}")
    return Path(source)


def _written(path: Path, arrays: Mapping[str, Array]) -> Path:
    import numpy as np

    np.savez(path, allow_pickle=False, **arrays)
    return path
