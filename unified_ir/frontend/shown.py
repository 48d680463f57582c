"""A cell as an indented tree of its parts with their sizes, on one screen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from triplane.unified_ir.frontend.binding import LEARNT, StateTree

MAX_LINES: Final = 32
"""Lines of parts; a deeper tree shows only as many levels as fit."""
WIDTH: Final = 110
SHOWN: Final = 4
"""Number of tensors of one part that are shown."""


def shown_lines(cell: StateTree) -> Iterator[str]:
    """Yield the lines: NAME: Class(tensor: type, ...), and the elements of parts with parts."""
    parts = [(path.split(".") if path else [], part) for path, part in cell.cells()]
    levels = [0] * (1 + max(len(path) for path, _ in parts))
    for path, _ in parts:
        levels[len(path)] += 1
    # The first level is shown even where it alone has too many parts.
    depth = max(1, sum(lines <= MAX_LINES for lines in accumulate(levels)) - 1)
    shown = [(path, part) for path, part in parts if len(path) <= depth]
    for path, part in shown[:MAX_LINES]:
        name = f"{'  ' * len(path)}{path[-1]}: " if path else ""
        text = name + _part(part)
        yield text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
    if len(shown) > MAX_LINES:
        yield f"  and {len(shown) - MAX_LINES} more"


def _part(part: StateTree) -> str:
    own = [f"{name}: {p.type}" for name, p in part._parameters.items()]  # noqa: SLF001 - state of a tree
    more = [f"and {len(own) - SHOWN} more"] if len(own) > SHOWN else []
    text = f"{type(part).__name__}({', '.join([*own[:SHOWN], *more])})"
    if not part._cells:  # noqa: SLF001 - likewise
        return text
    learnt = sum(p.array.size for p in part.parameters().values() if p.role in LEARNT)
    return f"{text}, {learnt:,} parameters"
