"""One array of a .npy file as a column, mapped and not read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput, Unavailable
from triplane.unified_ir.data.sources.memory import array_table, native
from triplane.unified_ir.data.table import MAX_MEMORY_BYTES, ArrayTable
from triplane.unified_ir.files import bounded
from triplane.unified_ir.files.npy import NpyHeader, read_header

MAX_NPY_BYTES: Final = 1 << 44


@dataclass(frozen=True)
class NpySource:
    """The array of one .npy file, (N, ...), as the column `name`.

    The file is mapped, so it may be larger than memory; it must not be cut or rewritten while it is
    in use. An array in the other byte order is read into memory, up to `MAX_MEMORY_BYTES`.
    """

    path: str
    name: str = "x"

    def open(self) -> ArrayTable:
        """Map the array; NotFound, InvalidInput or Corrupt."""
        path = Path(self.path)
        with bounded.opened(path, limit_bytes=MAX_NPY_BYTES) as file:
            header = read_header(file, str(path))
            size = os.fstat(file.fileno()).st_size
            if size != header.header_bytes + header.n_bytes:
                raise Corrupt(
                    f"{path} announces {header.n_bytes} bytes as {header.dtype}{header.shape}, "
                    f"{size - header.header_bytes} are present; is it complete?"
                )
            array = _mapped(file, header, path)
        if not array.dtype.isnative:
            if array.nbytes > MAX_MEMORY_BYTES:
                raise InvalidInput(
                    f"{path} is in the other byte order ({array.dtype}) and has {array.nbytes} "
                    f"bytes; at most {MAX_MEMORY_BYTES} are converted, write it in native order"
                )
            array = native(array)
        return array_table(path, {self.name: array})


def _mapped(file: IO[bytes], header: NpyHeader, path: Path) -> NDArray[Any]:
    try:
        if not header.n_bytes:  # an empty file part cannot be mapped
            return header.array(np.empty(0, np.uint8))
        raw = np.memmap(file, np.uint8, "r", header.header_bytes, (header.n_bytes,))
        return header.array(np.asarray(raw))
    except ValueError as error:  # sizes that no array can have; a header of odd length
        raise Corrupt(f"{path}: {error}") from error
    except OSError as error:
        raise Unavailable(f"{path} could not be mapped: {error.strerror}") from error
