"""Arrays of a `numpy.savez` archive as columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from triplane.unified_ir.data.sources.memory import array_table, native, selection
from triplane.unified_ir.data.table import MAX_MEMORY_BYTES, ArrayTable
from triplane.unified_ir.files.npz import opened_npz


@dataclass(frozen=True)
class NpzSource:
    """Arrays of one .npz file, read into memory as they are stored.

    columns: the arrays to read, by default all; they agree in the first axis, which counts samples.
    Their types are numbers of at most 8 bytes, their sizes at most `MAX_MEMORY_BYTES` together.
    """

    path: str
    columns: tuple[str, ...] = ()

    def open(self) -> ArrayTable:
        """Read the arrays; NotFound, InvalidInput or Corrupt."""
        path = Path(self.path)
        limits = {"file_bytes": MAX_MEMORY_BYTES, "total_bytes": MAX_MEMORY_BYTES}
        with opened_npz(path, **limits) as npz:
            names = selection(path, npz.names, self.columns)
            return array_table(path, {name: native(npz.array(name)) for name in names})
