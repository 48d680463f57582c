"""Load a Dataset by name: `digits`, an npz file, IDX files, or a folder of images."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data import folder, idx, npz
from triplane.unified_ir.data.dataset import Dataset

DIGITS: Final = "digits"
DIGITS_TOP: Final = 16  # a pixel counts the dark points of a 4 by 4 block
WAYS: Final = "the name digits, an .npz file, IDX images, or a folder with one sub-folder per class"


def digits() -> Dataset:
    """Return the 1,797 handwritten digits of 8 by 8 pixels that ship with the package.

    x: (1797, 1, 8, 8) in 0..1. `digits().split()` gives the usual 1437 to train and 360 held out.
    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository 1998, doi:10.24432/C50P49, CC BY 4.0; unchanged (see digits.txt).
    """
    with as_file(files(__package__) / "digits.npz") as path:
        (dataset,) = npz.read(path, top=DIGITS_TOP)
    return dataset


def load(source: str | Path) -> Dataset:
    """Return the dataset that `source` names; its training part if it has two.

    Takes the name digits, an .npz file (keys x and y; uint8 pixels are divided by 255, floats stay
    as they are), IDX images with their labels beside them, or a folder: of IDX files, or of one
    sub-folder per class with PNG, PGM or PPM images. Limits are constants of `files.images`,
    `files.npz` and `folder`. Raises NotFound, InvalidInput (a kind or size that is not supported)
    or Corrupt.
    """
    return _parts(source)[0]


def load_split(
    source: str | Path, *, fraction: float = 0.2, seed: int = 0
) -> tuple[Dataset, Dataset]:
    """Return (train, held out): the two parts of the source, else `fraction` of it split off.

    Sources with two parts: MNIST's `train-*` and `t10k-*` files in one folder, an .npz with keys
    x_train ... y_test, or a folder that contains `train` and `test`.
    """
    parts = _parts(source)
    if len(parts) == 2:
        return parts[0], parts[1]
    return parts[0].split(fraction, seed=seed)


def _parts(source: str | Path) -> tuple[Dataset, ...]:
    if source == DIGITS:
        return (digits(),)
    path = Path(source)
    if not path.exists():
        raise NotFound(f"{path} does not exist; data is {WAYS}")
    if path.is_dir():
        return _folder_parts(path)
    if path.suffix == ".npz":
        return npz.read(path)
    if idx.is_images(path):
        return (idx.read(path),)
    raise InvalidInput(f"{path.name} is not a supported kind of data; data is {WAYS}")


def _folder_parts(path: Path) -> tuple[Dataset, ...]:
    files = sorted(p for p in path.iterdir() if p.is_file() and idx.is_images(p))
    by_role = {p.name.partition("-")[0]: p for p in files}
    if by_role.keys() == {"train", "t10k"}:
        return idx.read(by_role["train"]), idx.read(by_role["t10k"])
    if len(files) > 1:
        raise InvalidInput(f"{path} has {len(files)} files of IDX images; name one of them")
    if files:
        return (idx.read(files[0]),)
    if {p.name for p in path.iterdir() if p.is_dir()} == {"train", "test"}:
        return folder.read(path / "train"), folder.read(path / "test")
    return (folder.read(path),)
