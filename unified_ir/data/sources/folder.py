"""A folder of images as a source: one sub-folder per class, named after it, or images alone.

Classes and images are ordered by name. Names that start with a dot are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.unified_ir.data.columns import Column, Columns, Field, Rows
from triplane.unified_ir.data.sources.decoding import DECODERS, with_channels
from triplane.unified_ir.files import bounded
from triplane.unified_ir.files.images import MAX_IMAGES
from triplane.unified_ir.files.pixels import TOP
from triplane.unified_ir.files.resize import MAX_RESIZED_SIDE, resized
from triplane.unified_ir.files.samples import MAX_CLASSES

MAX_IMAGE_FILE_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class ImageFolderSource:
    """Images as the column x, (C, H, W) uint8, and their class as y, int64, if there are classes.

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
            classes = _class_folders(folder)
            files = list(_files(folder, classes))
        except OSError as error:
            raise Unavailable(f"{folder} could not be listed: {error.strerror}") from error
        if not files:
            raise NotFound(f"{folder} has no image ({', '.join(DECODERS)}) in its class folders")
        paths = tuple(path for path, _ in files)
        y = np.array([label for _, label in files], np.int64) if classes else None
        first = decoded_image(paths[0], self.size, self.channels)
        return ImageFolderTable(self, paths, y, first.shape, tuple(c.name for c in classes))


@dataclass(frozen=True, eq=False)
class ImageFolderTable:
    """The images of a folder, decoded when they are taken.

    shape: (C, H, W) of each image. labels: names of the classes, none if there are no classes.
    """

    source: ImageFolderSource
    paths: tuple[str, ...]
    y: NDArray[np.int64] | None
    shape: tuple[int, ...]
    labels: tuple[str, ...]

    @property
    def pixels(self) -> Mapping[str, int]:
        """The byte that means 1.0, by column."""
        return {"x": TOP}

    @property
    def schema(self) -> dict[str, Field]:
        """See `Table`."""
        x = {"x": Field("uint8", self.shape)}
        return x if self.y is None else x | {"y": Field("int64")}

    def __len__(self) -> int:
        return len(self.paths)

    def column(self, name: str) -> Column | None:
        """Return the classes of all rows, which are known without decoding an image."""
        return self.y if name == "y" else None

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        x = np.empty((len(rows), *self.shape), np.uint8)
        for k, row in enumerate(rows):
            x[k] = self._image(self.paths[row])
        return {"x": x} if self.y is None else {"x": x, "y": self.y[rows]}

    def _image(self, path: str) -> NDArray[np.uint8]:
        image = decoded_image(path, self.source.size, self.source.channels)
        if image.shape != self.shape:
            raise InvalidInput(
                f"{path} is (C, H, W) = {image.shape}, {self.paths[0]} is {self.shape}; state the "
                "size=(H, W) or (C, H, W) that all images are converted to (on the command line "
                "--size 32x32, or 3x32x32 if some are grey)"
            )
        return image


def _class_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a folder")
    # Sorted by name: `iterdir` has the order of the file system, which differs between machines.
    folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(folders) > MAX_CLASSES:
        raise InvalidInput(f"{folder} has {len(folders)} classes; at most {MAX_CLASSES} are read")
    return folders


def _files(folder: Path, classes: list[Path]) -> Iterator[tuple[str, int]]:
    """Yield (path, class) of each image in order."""
    if classes:
        beside = [p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in DECODERS]
        if beside:
            raise InvalidInput(
                f"{min(beside)} is beside the class folders of {folder}; move it into one of them"
            )
    n = 0
    for label, class_folder in enumerate(classes or [folder]):
        for path in sorted(class_folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.suffix.lower() not in DECODERS:
                raise InvalidInput(
                    f"unsupported image format: {path} is not {' or '.join(DECODERS)}; convert it "
                    "or remove it from the folder"
                )
            n += 1
            if n > MAX_IMAGES:
                raise InvalidInput(f"{folder} has more than {MAX_IMAGES} images")
            yield str(path), label


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
