"""Rows of text as lines whose columns stand under each other."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, texts: int | None = None) -> list[str]:
    """Return a line for each row, its columns as wide as their widest cells.

    texts: how many columns, from the first on, stand to the left; the others, which hold numbers,
    stand to the right. None for all. All rows have as many cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if texts is None else texts
    return [
        "  ".join(
            cell.ljust(width) if k < left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
