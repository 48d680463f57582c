"""Load a Dataset by name: `digits`, or a file or folder of a known kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data.choosing import ColumnChoice, ColumnPreparation, preparation, wanted
from triplane.unified_ir.data.columns import Field
from triplane.unified_ir.data.dataset import Dataset, of_source, with_default_roles
from triplane.unified_ir.data.form import MAX_TEXT, from_json
from triplane.unified_ir.data.records import RecordSource, is_records
from triplane.unified_ir.data.sources.arrow import ArrowSource
from triplane.unified_ir.data.sources.csv_files import CsvSource
from triplane.unified_ir.data.sources.digits import DigitsSource
from triplane.unified_ir.data.sources.folder import ImageFolderSource
from triplane.unified_ir.data.sources.idx import IdxSource, is_idx_images
from triplane.unified_ir.data.sources.npy import NpySource
from triplane.unified_ir.data.sources.npz import NpzSource
from triplane.unified_ir.data.sources.sqlite import SqliteSource
from triplane.unified_ir.data.sources.text import TextSource
from triplane.unified_ir.data.storing import restored
from triplane.unified_ir.data.transforms import Cast, Rename
from triplane.unified_ir.files import bounded
from triplane.unified_ir.files.npz import opened_npz

DIGITS: Final = "digits"
PIPELINE: Final = ".json"
FILE: Final = "file"
"""The column with the name of the file that each character of a folder of texts is from."""
TRAINING_KEYS: Final = ("x_train", "y_train")
HELD_OUT_KEYS: Final = ("x_test", "y_test")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """What `load` may be told about a source.

    x, y: the columns of inputs and targets, one choice or several, by default x and y (see
    `choosing`). keep: more columns
    to keep, such as the file of each text of a folder; no window crosses a change in them. pixels:
    whether bytes are pixels, which become x / 255; None: those in two axes or more are. window:
    characters of a sample of text, or rows of a sample of a series. query: of a database. size:
    (H, W) that images are resized to, or (C, H, W) with C = 1 (grey) or 3 (RGB).
    """

    x: Sequence[str] = ()
    y: Sequence[str] = ()
    keep: Sequence[str] = ()
    pixels: bool | None = None
    window: int | None = None
    query: str | None = None
    size: tuple[int, int] | tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("x", "y", "keep"):
            # One choice may stand alone; a text is a sequence of its characters to Python.
            if isinstance(choice := getattr(self, name), str):
                object.__setattr__(self, name, (choice,))

    @property
    def choices(self) -> list[ColumnChoice]:
        """The choices of all columns that are read."""
        return wanted(self.x, self.y, self.keep)


Reader = Callable[[Path, ReadingOptions], tuple[Dataset, ...]]
"""From a path to the datasets of its parts, without any step."""


def stored(source: str | Path, **options: Any) -> Dataset:
    """Return the dataset of a source with its columns as they are stored, without any step."""
    return _parts(source, ReadingOptions(**options))[0]


def digits() -> Dataset:
    """Return the 1,797 handwritten digits of 8 by 8 pixels that ship with the package.

    x: (1797, 1, 8, 8) in 0..1. `digits().split()` gives the usual 1437 to train and 360 held out.
    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository 1998, doi:10.24432/C50P49, CC BY 4.0; unchanged (see digits.txt).
    """
    return load(DIGITS)


def load(source: str | Path, **options: Any) -> Dataset:
    """Return the dataset that `source` names; its training part if it has two.

    source: the name digits, or the path of a file or folder, see `KINDS`. options: the fields of
    `ReadingOptions`. Texts in a target become classes, integers in it int64. What was assumed is in
    the dataset's `notes`. Raises NotFound, InvalidInput (a kind or size that is not supported) or
    Corrupt.
    """
    return _prepared(source, ReadingOptions(**options))[0]


def load_held_out(source: str | Path, *, group: str = "", **options: Any) -> Dataset:
    """Return the dataset that `source` names; its held-out part if it has two. See `load`.

    group: a column to keep beside inputs and targets.
    """
    return _prepared(source, _keeping(source, group, ReadingOptions(**options)))[-1]


def load_split(
    source: str | Path, *, fraction: float = 0.2, seed: int = 0, group: str = "", **options: Any
) -> tuple[Dataset, Dataset]:
    """Return (train, held out): the two parts of the source, else `fraction` of it split off.

    Sources with two parts: MNIST's `train-*` and `t10k-*` files in one folder, an .npz with keys
    x_train ... y_test, or a folder that contains `train` and `test`. group: a column whose values,
    such as persons, are held out whole. options: as `load` takes them.
    """
    parts = _prepared(source, _keeping(source, group, ReadingOptions(**options)))
    if len(parts) == 1:
        return parts[0].split(fraction, seed=seed, group=group or None)
    if group:
        raise InvalidInput(f"{source} has a held-out part of its own, so no {group!r} is held out")
    return parts[0], parts[1]


def load_both(source: str | Path, held_out: str | Path, **options: Any) -> tuple[Dataset, Dataset]:
    """Return the datasets of a source and of another that holds samples of the same kind.

    options: as `load` takes them, for both. Texts in both have the numbers that `source` gives
    them, and numbers in a target its type. InvalidInput: the classes of the two differ.
    """
    reading = ReadingOptions(**options)
    train, other = (_parts(path, reading)[0] for path in (source, held_out))
    steps = _preparation(source, train, reading)
    pair = steps.of(train), _preparation(held_out, other, reading).numbered_as(steps).of(other)
    for name in pair[0].targets:
        kinds = [np.dtype(part.schema[name].dtype).kind for part in pair]
        # Classes against other numbers: each file of text has the types of its own values.
        if kinds == ["i", "f"]:
            raise InvalidInput(
                f"{name} holds whole numbers in {source}, but others in {held_out}; write those of "
                f"{source} with a decimal point if they are no classes"
            )
        if kinds == ["f", "i"]:
            pair = pair[0], pair[1].then(Cast(name, pair[0].schema[name].dtype))
    return pair


def size_like(
    source: str | Path, shapes: Sequence[Sequence[object]]
) -> tuple[int, int, int] | None:
    """Return the size (C, H, W) that the images of a folder need for a model.

    shapes: of its inputs; sizes that are open are no ints. None for any other source, and unless
    the one input is (N, C, H, W) with C = 1 or 3.
    """
    if len(shapes) != 1 or len(shapes[0]) != 4 or not Path(source).is_dir():
        return None
    match shapes[0]:
        case (_, 1 | 3 as channels, int(height), int(width)):
            return channels, height, width
    return None


def _prepared(source: str | Path, options: ReadingOptions) -> tuple[Dataset, ...]:
    parts = _parts(source, options)
    # Of the training part alone: a class that only the held-out part has must be refused.
    steps = _preparation(source, parts[0], options)
    return tuple(steps.of(part) for part in parts)


def _preparation(
    source: str | Path, dataset: Dataset, options: ReadingOptions
) -> ColumnPreparation:
    if _is_pipeline(source):
        if options != ReadingOptions():
            raise InvalidInput(
                f"{source} is a pipeline, which says itself which columns it reads and how; "
                "options of the source cannot be given beside it"
            )
        return ColumnPreparation((), dataset.inputs, dataset.targets, dataset.labels, dataset.notes)
    return preparation(
        dataset,
        options.x,
        options.y,
        keep=options.keep,
        pixels=options.pixels,
        window=options.window,
    )


def _keeping(source: str | Path, group: str, options: ReadingOptions) -> ReadingOptions:
    """Return the options with one more column kept; a pipeline itself says which it keeps."""
    if not group or _is_pipeline(source):
        return options
    return replace(options, keep=(*options.keep, group))


def _is_pipeline(source: str | Path) -> bool:
    return Path(source).suffix == PIPELINE


def _parts(source: str | Path, options: ReadingOptions) -> tuple[Dataset, ...]:
    """Return the datasets of a source with its own columns, without any step."""
    if source == DIGITS:
        return (of_source(DigitsSource(), DIGITS),)
    path = Path(source)
    if not path.exists():
        raise NotFound(f"{path} does not exist; data is {ways()}")
    if path.is_dir():
        return _folder_parts(path, options)
    name = path.name.lower().removesuffix(".gz")
    for suffix, (_, read) in KINDS.items():
        if name.endswith(suffix):
            return read(path, options)
    if is_idx_images(path):
        return (of_source(IdxSource(str(path)), path.name),)
    raise InvalidInput(f"{path.name} is not a supported kind of data; data is {ways()}")


def _folder_parts(path: Path, options: ReadingOptions) -> tuple[Dataset, ...]:
    if is_records(path):
        return (restored(of_source(RecordSource(str(path)), path.name)),)
    files = sorted(p for p in path.iterdir() if p.is_file() and is_idx_images(p))
    by_role = {p.name.partition("-")[0]: p for p in files}
    if by_role.keys() == {"train", "t10k"}:
        pair = (by_role["train"], by_role["t10k"])
        return tuple(of_source(IdxSource(str(p)), p.name) for p in pair)
    if len(files) > 1:
        raise InvalidInput(f"{path} has {len(files)} files of IDX images; name one of them")
    if files:
        return (of_source(IdxSource(str(files[0])), files[0].name),)
    folders = {p.name for p in path.iterdir() if p.is_dir()}
    if not folders and any(p.suffix == ".txt" for p in path.iterdir()):
        # Only where it is asked for: a name for each character takes more memory than the text.
        column = FILE if FILE in options.keep else ""
        return (of_source(TextSource(str(path), files=column), path.name),)
    if folders == {"train", "test"}:
        return tuple(_images(path / part, options) for part in ("train", "test"))
    return (_images(path, options),)


def _images(path: Path, options: ReadingOptions) -> Dataset:
    size = options.size
    match size:
        case None | (_, _):
            source = ImageFolderSource(str(path), size)
        case (channels, height, width):
            source = ImageFolderSource(str(path), (height, width), channels)
    return of_source(source, path.name)


def _npz_parts(path: Path, options: ReadingOptions) -> tuple[Dataset, ...]:
    with opened_npz(path) as npz:
        names = npz.names
    if all(key in names for key in (*TRAINING_KEYS, *HELD_OUT_KEYS)) and "x" not in names:
        return tuple(
            with_default_roles(
                of_source(NpzSource(str(path), keys), path.name).then(
                    Rename(keys[0], "x"), Rename(keys[1], "y")
                )
            )
            for keys in (TRAINING_KEYS, HELD_OUT_KEYS)
        )
    # Only these are read: an archive may hold others of any size.
    present = dict.fromkeys(names, Field("uint8"))
    columns = [name for choice in options.choices for name in choice.matching(present)]
    return (of_source(NpzSource(str(path), tuple(dict.fromkeys(columns))), path.name),)


def _table(source: Callable[[str], CsvSource | ArrowSource]) -> Reader:
    """Return the reader of a kind of tables, of which only chosen columns are read.

    Empty cells and unusual types in other columns are no fault of the samples.
    """

    def read(path: Path, options: ReadingOptions) -> tuple[Dataset, ...]:
        table = source(str(path))
        if options.x:
            present = table.names()
            fields = dict.fromkeys(present, Field("text"))
            chosen = {n for c in options.choices for n in c.matching(fields, options.keep)}
            table = replace(table, columns=tuple(n for n in present if n in chosen))
        return (of_source(table, path.name),)

    return read


def _sqlite_parts(path: Path, options: ReadingOptions) -> tuple[Dataset, ...]:
    if options.query is None:
        raise InvalidInput(
            f"{path.name} is a database; give the query whose rows are the samples, as query= "
            "(--sql on the command line), with an ORDER BY that makes their order the same always"
        )
    return (of_source(SqliteSource(str(path), options.query), path.name),)


def _pipeline_parts(path: Path, _: ReadingOptions) -> tuple[Dataset, ...]:
    with bounded.opened(path, limit_bytes=MAX_TEXT) as file:
        text = file.read()
    return (from_json(text.decode(errors="replace"), folder=path.parent),)


def _reader(source: Callable[[str], Any]) -> Reader:
    """Return the reader of a kind of file whose source takes its path alone."""
    return lambda path, _: (of_source(source(str(path)), path.name),)


KINDS: Final[Mapping[str, tuple[str, Reader]]] = {
    ".npz": ("numpy's .npz", _npz_parts),
    ".npy": (".npy", _reader(NpySource)),
    ".csv": (".csv", _table(CsvSource)),
    ".tsv": (".tsv", _table(lambda path: CsvSource(path, delimiter="\t"))),
    ".parquet": (".parquet", _table(ArrowSource)),
    ".arrow": (".arrow", _table(ArrowSource)),
    ".feather": (".feather", _table(ArrowSource)),
    ".db": (".db", _sqlite_parts),
    ".sqlite": (".sqlite", _sqlite_parts),
    ".sqlite3": (".sqlite3", _sqlite_parts),
    ".txt": (".txt", _reader(TextSource)),
    PIPELINE: ("a pipeline as .json", _pipeline_parts),
}
"""Suffix of a file -> its name in messages, and how it is read."""


def ways() -> str:
    """Return the kinds of data that can be loaded by name, for messages."""
    kinds = ", ".join(text for text, _ in KINDS.values())
    return (
        f"the name digits, a file ({kinds}, or IDX images), a record set NAME.tpr, or a folder of "
        "images with one sub-folder per class"
    )
