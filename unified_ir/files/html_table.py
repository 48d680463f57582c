"""Tables as HTML for notebooks: self-contained, at most a screen, the same in light and dark.

Names in models, reports and studies come from outside, so every text is escaped and cut, and no
colour is set: the notebook's own stand. There is no script, style sheet or reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import Final

MAX_ROWS: Final = 20
MAX_COLUMNS: Final = 8
MAX_CELL_CHARS: Final = 80
MAX_LINES: Final = 8
MAX_LINE_CHARS: Final = 240


def html_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    count: int,
    notes: Sequence[str] = (),
) -> str:
    """Return a heading, a table of the first rows and columns, and lines below it.

    heads: none for a table of names and values. count: number of rows; those that are left out are
    counted.
    """
    shown = list(islice(rows, MAX_ROWS))
    more = count - len(shown)
    lines = [*([f"and {more:,} more"] if more > 0 else []), *notes][:MAX_LINES]
    left = [not all(map(_is_number, column)) for column in zip(*shown, strict=True)]
    table = [_row("th", heads, left)] if heads else []
    table += [_row("td", row, left) for row in shown]
    return (
        f"<div style='overflow-x:auto'><p><b>{_text(title, MAX_LINE_CHARS)}</b></p>"
        + (f"<table style='color:inherit'>{''.join(table)}</table>" if table else "")
        + "".join(f"<p>{_text(line, MAX_LINE_CHARS)}</p>" for line in lines)
        + "</div>"
    )


def printable(text: str) -> str:
    """Return the text with a space for what does not print.

    A control character is no XML, and a mark that reverses the direction changes what is read.
    """
    return "".join(c if c.isprintable() else " " for c in text)


def _text(value: str, most: int = MAX_CELL_CHARS) -> str:
    """Return escaped text on one line, of at most `most` characters before escaping."""
    plain = printable(value[: most + 1])
    return escape(plain if len(plain) <= most else f"{plain[: most - 1]}…", quote=False)


def _row(tag: str, cells: Sequence[str], left: Sequence[bool]) -> str:
    # Notebooks align cells to the right, which suits numbers only.
    aligned = [" style='text-align:left'" if text else "" for text in left] or [""] * len(cells)
    shown = [
        f"<{tag}{style}>{_text(cell)}</{tag}>"
        for cell, style in zip(cells[:MAX_COLUMNS], aligned, strict=False)
    ]
    more = [f"<{tag}>…</{tag}>"] if len(cells) > MAX_COLUMNS else []
    return f"<tr>{''.join([*shown, *more])}</tr>"


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "") or 0)
    except ValueError:
        return False
    return True
