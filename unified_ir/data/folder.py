"""A folder of images: one sub-folder per class, named after it.

Classes and images are ordered by name. All images have one size and one number of channels. Names
that start with a dot are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data.dataset import Dataset, from_arrays
from triplane.unified_ir.files import bounded, png, pnm
from triplane.unified_ir.files.images import check_sizes
from triplane.unified_ir.files.samples import MAX_CLASSES

MAX_IMAGE_FILE_BYTES: Final = 16 * 2**20
DECODERS: Final[dict[str, Callable[[bytes, str], NDArray[np.uint8]]]] = {
    ".png": png.decode,
    ".pgm": pnm.decode,
    ".ppm": pnm.decode,
}


def read(folder: Path) -> Dataset:
    """Read every image below the class folders; the folders' names become the labels."""
    # Sorted by name: `iterdir` has the order of the file system, which differs between machines.
    classes = class_folders(folder)
    images: list[NDArray[np.uint8]] = []
    y: list[int] = []
    for label, class_folder in enumerate(classes):
        for path, image in _images(class_folder):
            if images and image.shape != images[0].shape:
                raise InvalidInput(
                    f"{path} is (C, H, W) = {image.shape}, the images before are "
                    f"{images[0].shape}; convert them to one size and one number of channels"
                )
            # After every image, so that a folder of too many stops before it fills the memory.
            check_sizes((len(images) + 1, *image.shape), str(folder))
            images.append(image)
            y.append(label)
    if not images:
        raise NotFound(f"{folder} has no image in its class folders ({', '.join(DECODERS)})")
    return from_arrays(np.stack(images), np.array(y), labels=tuple(c.name for c in classes))


def class_folders(folder: Path) -> list[Path]:
    """Return the sub-folders in order of name; NotFound if there are none."""
    folders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise NotFound(f"{folder} has no sub-folders; each class has one, named after it")
    if len(folders) > MAX_CLASSES:
        raise InvalidInput(f"{folder} has {len(folders)} classes; at most {MAX_CLASSES} are read")
    return folders


def _images(folder: Path) -> Iterator[tuple[Path, NDArray[np.uint8]]]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        decode = DECODERS.get(path.suffix.lower())
        if decode is None:
            raise InvalidInput(
                f"unsupported image format: {path} is not {' or '.join(DECODERS)}; convert it or "
                "remove it from the folder"
            )
        with bounded.opened(path, limit_bytes=MAX_IMAGE_FILE_BYTES) as file:
            yield path, decode(file.read(), str(path))
