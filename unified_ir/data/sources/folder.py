"""A folder of images as a source: one sub-folder per class, named after it, or images alone.

Such folders may stand beside each other in another one, as FOLDER/CLASS/IMAGE: one for each person
or camera. Folders, classes and images are ordered by name. Names that start with a dot are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.columns import Column, Columns, Field, Rows
from triplane.unified_ir.data.sources.decoding import DECODERS, with_channels
from triplane.unified_ir.files import bounded
from triplane.unified_ir.files.images import MAX_IMAGES
from triplane.unified_ir.files.pixels import TOP
from triplane.unified_ir.files.resize import MAX_RESIZED_SIDE, resized
from triplane.unified_ir.files.samples import MAX_CLASSES

MAX_IMAGE_FILE_BYTES: Final = 64 << 20
FOLDER: Final = "folder"
"""The column with the name of the folder in which an image's class folder stands."""


@dataclass(frozen=True)
class ImageFolderSource:
    """Images as the column x, (C, H, W) uint8, and their class as y, int64, if there are classes.

    Folders of class folders also give the column folder, the name of the outer one, as text.

    size: (H, W) that every image is resized to (`files.resize`); by default all have one size.
    channels: 1 (grey) or 3 (RGB) that every image is converted to; by default those of the first.
    PNG, PGM and PPM are read without an extra, JPEG and unusual kinds of PNG with `images`
    (`decoding` states the rules). Only names are kept: images are decoded when they are taken.
    """

    path: str
    size: tuple[int, int] | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        if self.channels not in {None, 1, 3}:
            raise InvalidInput(f"channels is 1 (grey) or 3 (RGB), got {self.channels}")
        size = self.size or (1, 1)
        if not all(1 <= n <= MAX_RESIZED_SIDE for n in size):
            raise InvalidInput(f"size is (H, W) of 1..{MAX_RESIZED_SIDE} pixels, got {size}")

    def open(self) -> ImageFolderTable:
        """List the images and decode the first one. NotFound, InvalidInput or Corrupt."""
        folder = Path(self.path)
        try:
            tree = _tree(folder)
            files = list(_files(folder, tree))
        except OSError as error:
            raise Unavailable(f"{folder} could not be listed: {error.strerror}") from error
        if not files:
            raise NotFound(f"{folder} has no image ({', '.join(DECODERS)}) in its class folders")
        paths = tuple(path for path, _, _ in files)
        y = np.array([label for _, _, label in files], np.int64) if tree.classes else None
        folders = np.array([name for _, name, _ in files], object) if tree.outer else None
        first = decoded_image(paths[0], self.size, self.channels)
        return ImageFolderTable(self, paths, y, first.shape, tree.classes, folders)


@dataclass(frozen=True, eq=False)
class ImageFolderTable:
    """The images of a folder, decoded when they are taken.

    shape: (C, H, W) of each image. labels: names of the classes, none if there are no classes.
    folders: (N,) names of folders of class folders, if there are some.
    """

    source: ImageFolderSource
    paths: tuple[str, ...]
    y: NDArray[np.int64] | None
    shape: tuple[int, ...]
    labels: tuple[str, ...]
    folders: NDArray[np.object_] | None = None

    @property
    def pixels(self) -> Mapping[str, int]:
        """The byte that means 1.0, by column."""
        return {"x": TOP}

    @property
    def schema(self) -> dict[str, Field]:
        """See `Table`."""
        x = {"x": Field("uint8", self.shape)}
        return x | {name: columns.field_of(column) for name, column in self._known.items()}

    def __len__(self) -> int:
        return len(self.paths)

    def column(self, name: str) -> Column | None:
        """Return the classes or folders of all rows, known without decoding an image."""
        return self._known.get(name)

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        x = np.empty((len(rows), *self.shape), np.uint8)
        for k, row in enumerate(rows):
            x[k] = self._image(self.paths[row])
        return {"x": x, **{name: column[rows] for name, column in self._known.items()}}

    @property
    def _known(self) -> dict[str, NDArray[Any]]:
        own = {"y": self.y, FOLDER: self.folders}
        return {name: column for name, column in own.items() if column is not None}

    def _image(self, path: str) -> NDArray[np.uint8]:
        image = decoded_image(path, self.source.size, self.source.channels)
        if image.shape != self.shape:
            raise InvalidInput(
                f"{path} is (C, H, W) = {image.shape}, {self.paths[0]} is {self.shape}; state the "
                "size=(H, W) or (C, H, W) that all images are converted to (on the command line "
                "--size 32x32, or 3x32x32 if some are grey)"
            )
        return image


@dataclass(frozen=True, slots=True)
class _Tree:
    """Where the images of a folder stand: directly, in class folders, or in folders of these."""

    outer: tuple[Path, ...]
    classes: tuple[str, ...]


def _tree(folder: Path) -> _Tree:
    folders = _folders(folder)
    inner = {path: _folders(path) for path in folders}
    if not any(inner.values()):
        return _Tree((), _limited(folder, [path.name for path in folders]))
    if bare := [path for path in folders if not inner[path]]:
        deep = next(path for path in folders if inner[path])
        raise InvalidInput(
            f"{deep} holds class folders, but {bare[0]} beside it does not; either all images "
            "stand in CLASS/IMAGE, or all in FOLDER/CLASS/IMAGE"
        )
    names = {path.name for paths in inner.values() for path in paths}
    return _Tree(tuple(folders), _limited(folder, sorted(names)))


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a folder")
    # Sorted by name: `iterdir` has the order of the file system, which differs between machines.
    with os.scandir(folder) as entries:  # knows what is a folder without a call for each image
        names = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    return [folder / name for name in names]


def _limited(folder: Path, classes: list[str]) -> tuple[str, ...]:
    if len(classes) > MAX_CLASSES:
        raise InvalidInput(f"{folder} has {len(classes)} classes; at most {MAX_CLASSES} are read")
    return tuple(classes)


def _files(folder: Path, tree: _Tree) -> Iterator[tuple[str, str, int]]:
    """Yield (path, outer folder, class) of each image in order."""
    if tree.outer:
        _refuse_images_beside(folder)
    n = 0
    for outer in tree.outer or (folder,):
        for path, label in _class_files(outer, tree.classes):
            n += 1
            if n > MAX_IMAGES:
                raise InvalidInput(f"{folder} has more than {MAX_IMAGES} images")
            yield str(path), outer.name, label


def _class_files(folder: Path, classes: tuple[str, ...]) -> Iterator[tuple[Path, int]]:
    if classes:
        _refuse_images_beside(folder)
    for label, name in enumerate(classes or ("",)):
        class_folder = folder / name
        if not class_folder.is_dir():
            continue  # a person without photos of this class
        for path in sorted(class_folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.suffix.lower() not in DECODERS:
                raise InvalidInput(
                    f"unsupported image format: {path} is not {' or '.join(DECODERS)}; convert it "
                    "or remove it from the folder"
                )
            yield path, label


def _refuse_images_beside(folder: Path) -> None:
    beside = [p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in DECODERS]
    if beside:
        raise InvalidInput(
            f"{min(beside)} is beside the class folders of {folder}; move it into one of them"
        )


def decoded_image(
    path: str, size: tuple[int, int] | None = None, channels: int | None = None
) -> NDArray[np.uint8]:
    """Return the image in a file as (C, H, W), resized and with the channels that are stated."""
    file_path = Path(path)
    with bounded.opened(file_path, limit_bytes=MAX_IMAGE_FILE_BYTES) as file:
        image = DECODERS[file_path.suffix.lower()](file.read(), path)
    if channels is not None:
        image = with_channels(image, channels)
    return image if size is None else resized(image[None], size)[0]
