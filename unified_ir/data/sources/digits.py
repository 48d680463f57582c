"""The handwritten digits that ship with the package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Final

from triplane.unified_ir.data.columns import Column
from triplane.unified_ir.data.sources.npz import NpzSource
from triplane.unified_ir.data.table import ArrayTable

TOP: Final = 16  # a pixel counts the dark points of a 4 by 4 block


@dataclass(frozen=True)
class DigitsSource:
    """1,797 handwritten digits of 8 by 8 pixels: x (1797, 1, 8, 8) uint8 in 0..16, y int64."""

    def open(self) -> ArrayTable:
        """Read the digits."""
        package = __package__.rpartition(".")[0]
        with as_file(files(package) / "digits.npz") as path:
            table = NpzSource(str(path)).open()
        columns: dict[str, Column] = {
            "x": table.columns["x"].reshape(-1, 1, 8, 8),  # type: ignore[union-attr]
            "y": table.columns["y"].astype("int64"),  # type: ignore[union-attr]
        }
        return ArrayTable(columns, tuple("0123456789"), {"x": TOP})
