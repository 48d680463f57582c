"""Load a Dataset by name: `digits`, or a file or folder of a known kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data.choosing import ColumnChoice, Preparation, preparation, wanted
from triplane.unified_ir.data.columns import Field
from triplane.unified_ir.data.dataset import Dataset, of_source
from triplane.unified_ir.data.form import from_json
from triplane.unified_ir.data.sources.digits import DigitsSource
from triplane.unified_ir.data.sources.npy import NpySource
from triplane.unified_ir.data.sources.npz import NpzSource
from triplane.unified_ir.files.npz import opened_npz

Reader = Callable[[Path, Sequence[ColumnChoice]], tuple[Dataset, ...]]
"""From a path and the choices of columns to the datasets of its parts."""

DIGITS: Final = "digits"
PIPELINE: Final = ".json"
TRAINING_KEYS: Final = ("x_train", "y_train")
HELD_OUT_KEYS: Final = ("x_test", "y_test")


def digits() -> Dataset:
    """Return the 1,797 handwritten digits of 8 by 8 pixels that ship with the package.

    x: (1797, 1, 8, 8) in 0..1. `digits().split()` gives the usual 1437 to train and 360 held out.
    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository 1998, doi:10.24432/C50P49, CC BY 4.0; unchanged (see digits.txt).
    """
    return load(DIGITS)


def load(
    source: str | Path,
    *,
    x: Sequence[str] = (),
    y: Sequence[str] = (),
    keep: Sequence[str] = (),
    pixels: bool | None = None,
    window: int | None = None,
) -> Dataset:
    """Return the dataset that `source` names; its training part if it has two.

    source: the name digits, or the path of a file or folder, see `KINDS`. x, y: the columns of
    inputs and targets, by default x and y (see `choosing`); texts in y become classes. keep: more
    columns to keep. pixels: whether bytes are pixels, which become x / 255; None: those in two axes
    or more are, and the dataset's `notes` say so. window: characters of a sample of text. Raises
    NotFound, InvalidInput (a kind or size that is not supported) or Corrupt.
    """
    choice = {"x": x, "y": y, "keep": keep, "pixels": pixels, "window": window}
    first = _parts(source, _wanted(choice))[0]
    return _prepared(source, first, choice).of(first)


def load_split(
    source: str | Path, *, fraction: float = 0.2, seed: int = 0, group: str = "", **choice: Any
) -> tuple[Dataset, Dataset]:
    """Return (train, held out): the two parts of the source, else `fraction` of it split off.

    Sources with two parts: MNIST's `train-*` and `t10k-*` files in one folder, an .npz with keys
    x_train ... y_test, or a folder that contains `train` and `test`. group: a column whose values,
    such as persons, are held out whole. choice: as `load` takes it.
    """
    if group and not _is_pipeline(source):
        choice["keep"] = (*choice.get("keep", ()), group)
    parts = _parts(source, _wanted(choice))
    # Of the training part alone: classes that only the held-out part has must be refused.
    prepared = _prepared(source, parts[0], choice)
    if len(parts) == 1:
        return prepared.of(parts[0]).split(fraction, seed=seed, group=group or None)
    if group:
        raise InvalidInput(f"{source} has a held-out part of its own, so no {group!r} is held out")
    return prepared.of(parts[0]), prepared.of(parts[1])


def load_both(source: str | Path, held_out: str | Path, **choice: Any) -> tuple[Dataset, Dataset]:
    """Return the datasets of a source and of another that holds samples of the same kind.

    choice: as `load` takes it, for both. Texts in both have the numbers that `source` gives them.
    InvalidInput: the classes of the two differ.
    """
    train, other = (_parts(path, _wanted(choice))[0] for path in (source, held_out))
    prepared = _prepared(source, train, choice)
    return prepared.of(train), _prepared(held_out, other, choice).numbered_as(prepared).of(other)


def _prepared(source: str | Path, dataset: Dataset, choice: Mapping[str, Any]) -> Preparation:
    if not _is_pipeline(source):
        return preparation(dataset, **choice)
    if stated := [name for name, value in choice.items() if value not in (None, (), [])]:
        raise InvalidInput(
            f"{source} is a pipeline, whose steps and roles are in the file; leave out "
            f"{', '.join(stated)}"
        )
    return Preparation((), dataset.inputs, dataset.targets, dataset.labels, dataset.notes)


def _wanted(choice: Mapping[str, Any]) -> list[ColumnChoice]:
    return wanted(*(choice.get(key, ()) for key in ("x", "y", "keep")))


def _is_pipeline(source: str | Path) -> bool:
    return Path(source).suffix == PIPELINE


def _parts(source: str | Path, choices: Sequence[ColumnChoice]) -> tuple[Dataset, ...]:
    """Return the datasets of a source with its own columns, without any step."""
    if source == DIGITS:
        return (of_source(DigitsSource(), DIGITS),)
    path = Path(source)
    if not path.exists():
        raise NotFound(f"{path} does not exist; data is {ways()}")
    if path.is_dir():
        return _folder_parts(path)
    for suffix, (_, read) in KINDS.items():
        if path.name.lower().endswith(suffix):
            return read(path, choices)
    raise InvalidInput(f"{path.name} is not a supported kind of data; data is {ways()}")


def _folder_parts(path: Path) -> tuple[Dataset, ...]:
    raise InvalidInput(f"{path} is a folder")


def _npz_parts(path: Path, choices: Sequence[ColumnChoice]) -> tuple[Dataset, ...]:
    with opened_npz(path) as npz:
        names = npz.names
    if all(key in names for key in (*TRAINING_KEYS, *HELD_OUT_KEYS)) and "x" not in names:
        return tuple(
            _renamed(of_source(NpzSource(str(path), keys), path.name), keys)
            for keys in (TRAINING_KEYS, HELD_OUT_KEYS)
        )
    # Only these are read: an archive may hold others of any size.
    wanted = [c.matching(dict.fromkeys(names, Field("uint8"))) for c in choices]
    columns = tuple(dict.fromkeys(name for group in wanted for name in group))
    return (of_source(NpzSource(str(path), columns), path.name),)


def _renamed(dataset: Dataset, keys: tuple[str, str]) -> Dataset:
    from triplane.unified_ir.data.transforms import Rename

    return dataset.then(Rename(keys[0], "x")).then(Rename(keys[1], "y"))


def _npy_parts(path: Path, _: Sequence[ColumnChoice]) -> tuple[Dataset, ...]:
    return (of_source(NpySource(str(path)), path.name),)


def _pipeline_parts(path: Path, _: Sequence[ColumnChoice]) -> tuple[Dataset, ...]:
    return (from_json(path.read_text(), folder=path.parent),)


KINDS: Final[Mapping[str, tuple[str, Reader]]] = {
    ".npz": ("an .npz file of arrays", _npz_parts),
    ".npy": ("an .npy file, mapped", _npy_parts),
    PIPELINE: ("a pipeline as JSON (see data.md)", _pipeline_parts),
}
"""Suffix of a file -> what it is, and how it is read."""


def ways() -> str:
    """Return the kinds of data that can be loaded by name, for messages."""
    kinds = ", ".join(text for text, _ in KINDS.values())
    return f"the name digits, {kinds}, or a folder with one sub-folder per class"
