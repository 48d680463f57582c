"""Arrays of a `numpy.savez` archive, read without numpy's own loader, and written.

Numpy's loader inflates whatever the archive holds. Here sizes are checked against limits before a
byte is inflated; `files.npy` says how the header of an array is read.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.files import bounded
from triplane.unified_ir.files.npy import read_header

MAX_TOTAL_BYTES: Final = 4 * 2**30  # of all arrays that are read from one file
MAX_DIRECTORY_BYTES: Final = 64 * 2**10  # of the archive's list of members, about a thousand
# Errors of `zipfile` on a damaged archive; NotImplementedError: an unusual compression method.
DAMAGE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
    ValueError,  # also of sizes that no array can have
    OverflowError,
    struct.error,
)
END: Final = struct.Struct("<4sHHHHIIH")  # the zip format's end record, without a comment
LOCATOR_BYTES: Final = 20


@dataclass(slots=True)
class NpzReader:
    """An open archive. names: its arrays, sorted; left_bytes: how many bytes may still be read."""

    path: Path
    archive: zipfile.ZipFile
    names: tuple[str, ...]
    left_bytes: int

    def check(self, keys: Iterable[str]) -> None:
        """Raise NotFound for the first of these names that is absent."""
        for name in keys:
            if name not in self.names:
                present = ", ".join(self.names[:8]) or "nothing"
                raise NotFound(f"{self.path} has no array {name!r}; it holds {present}")

    def array(
        self, name: str, check_shape: Callable[[str, tuple[int, ...]], None] | None = None
    ) -> NDArray[Any]:
        """Return one array as it is stored; NotFound names the arrays that exist.

        check_shape: called with a description of the array and its shape before values are read.
        """
        self.check([name])
        what = f"{self.path}: {name}"
        try:
            with self.archive.open(f"{name}.npy") as member:
                header = read_header(member, what)
                if check_shape is not None:
                    check_shape(what, header.shape)
                n_bytes = header.n_bytes
                # A zip bomb: a few kilobytes can announce, and inflate to, terabytes.
                if n_bytes > self.left_bytes:
                    raise InvalidInput(
                        f"{what} announces {n_bytes} bytes as {header.dtype}{header.shape}; "
                        f"at most {self.left_bytes} bytes are read"
                    )
                data = np.empty(n_bytes, np.uint8)
                bounded.fill(member, data.data, what)
                # Reading to the end also makes `zipfile` compare the member's CRC-32.
                bounded.ended(member, what)
            array = header.array(data)
        except TriplaneError:
            raise
        except DAMAGE as error:
            raise Corrupt(f"{what}: {error}") from error
        self.left_bytes -= n_bytes
        return array


def write_npz(file: IO[bytes], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays as an archive, the same bytes for the same arrays.

    Not by `numpy.savez`, which takes names as keywords and so refuses one called "file".
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, x in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(x, order="C"), allow_pickle=False)


@contextmanager
def opened_npz(
    path: Path,
    *,
    file_bytes: int = bounded.MAX_FILE_BYTES,
    total_bytes: int = MAX_TOTAL_BYTES,
) -> Iterator[NpzReader]:
    """Open an archive of at most `file_bytes`, of which at most `total_bytes` are inflated.

    Raises NotFound, InvalidInput (a limit, or something that numpy.savez does not write) or
    Corrupt.
    """
    with bounded.opened(path, limit_bytes=file_bytes) as file:
        # `zipfile` builds an object for each entry of the directory, so millions of empty members
        # would fill the memory before any limit of ours applies.
        _check_end(path, file)
        try:
            archive = zipfile.ZipFile(file)
        except DAMAGE as error:
            raise Corrupt(f"{path} is not a complete npz file: {error}") from error
        with archive:
            members = {name for name in archive.namelist() if name.endswith(".npy")}
            names = tuple(sorted(name.removesuffix(".npy") for name in members))
            yield NpzReader(path, archive, names, total_bytes)


def _check_end(path: Path, file: IO[bytes]) -> None:
    """Check the list of members against its limit before `zipfile` builds an object for each."""
    tail_bytes = END.size + LOCATOR_BYTES
    size = file.seek(0, 2)
    file.seek(max(0, size - tail_bytes))
    tail = file.read(tail_bytes)
    if len(tail) < END.size or not tail[-END.size :].startswith(b"PK\5\6"):
        raise Corrupt(
            f"{path} is not a complete npz file: no end record in its last {END.size} bytes "
            "(a zip comment is not read: write it with numpy.savez)"
        )
    *_, directory_bytes, _, comment_bytes = END.unpack(tail[-END.size :])
    if comment_bytes or tail.startswith(b"PK\6\7"):
        raise InvalidInput(f"{path} has a comment or zip64 records; write it with numpy.savez")
    if directory_bytes > MAX_DIRECTORY_BYTES:
        raise InvalidInput(
            f"{path} lists its members in {directory_bytes} bytes; "
            f"at most {MAX_DIRECTORY_BYTES} are read"
        )
