"""A cell as an indented tree of its parts with their sizes, on one screen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from shutil import get_terminal_size
from typing import Final

from triplane.unified_ir.frontend.binding import LEARNT, StateTree

MAX_LINES: Final = 32
"""Lines of parts; a deeper tree shows only as many levels as fit."""
SHOWN: Final = 4
"""Largest number of tensors of one part that are shown."""


def shown_lines(cell: StateTree, *, indent: str = "") -> Iterator[str]:
    """Yield the lines: NAME: Class(tensor: type, ...), and the elements of parts with parts.

    They are no wider than the terminal, or 80 columns without one.
    """
    parts = [(path.split(".") if path else [], part) for path, part in cell.cells()]
    levels = [0] * (1 + max(len(path) for path, _ in parts))
    for path, _ in parts:
        levels[len(path)] += 1
    # The first level is shown even where it alone has too many parts.
    depth = max(1, sum(lines <= MAX_LINES for lines in accumulate(levels)) - 1)
    shown = [(path, part) for path, part in parts if len(path) <= depth]
    width = get_terminal_size().columns
    for path, part in shown[:MAX_LINES]:
        name = f"{'  ' * len(path)}{path[-1]}: " if path else ""
        # As many tensors as fit; the number of the others says more than a part of a name.
        texts = (f"{indent}{name}{_part(part, count)}" for count in range(SHOWN, -1, -1))
        fitting = next((text for text in texts if len(text) <= width), "")
        yield fitting or f"{indent}{name}{_part(part, 0)}"[: width - 3] + "..."
    if len(shown) > MAX_LINES:
        yield f"{indent}  and {len(shown) - MAX_LINES} more"


def _part(part: StateTree, count: int) -> str:
    """Return the class of a part with its first `count` tensors."""
    own = [f"{name}: {p.type}" for name, p in part._parameters.items()]  # noqa: SLF001 - state of a tree
    rest = len(own) - count
    others = f"and {rest} more" if count else f"{rest} tensor{'' if rest == 1 else 's'}"
    more = [others] if rest > 0 else []
    text = f"{type(part).__name__}({', '.join([*own[:count], *more])})"
    if not part._cells:  # noqa: SLF001 - likewise
        return text
    learnt = sum(p.array.size for p in part.parameters().values() if p.role in LEARNT)
    return f"{text}, {learnt:,} parameters"
