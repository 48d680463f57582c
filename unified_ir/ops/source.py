"""The place in the user's code that called this package: file (below its import root) and line."""

from __future__ import annotations

import linecache
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Final

from triplane.unified_ir.ir.graph import Location

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_COMMAND: Final = f"{_PACKAGE / 'cli'}/"
"""Folder of the command line: what calls it is no code of the user either."""
_INTERNAL: Final = tuple(
    f"{_PACKAGE / part}/"
    for part in ("ops", "ir", "autodiff", "passes", "engines", "frontend", "nn", "optim", "train")
)


def user_location() -> Location | None:
    """Return the innermost frame outside this package's own layers, or None.

    None also where the command line called, as for a cell made of layers of this package alone.
    """
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - cheapest way to the caller
    while frame is not None:
        if _is_command(frame.f_code.co_filename):
            return None
        file = _relative(frame.f_code.co_filename)
        if file is not None:
            return Location(file, frame.f_lineno)
        frame = frame.f_back
    return None


def unreadable_caller() -> str | None:
    """Return the name of the innermost function outside this package if it has no source."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - cheapest way to the caller
    while frame is not None:
        code = frame.f_code
        ours = str(frame.f_globals.get("__name__", "")).startswith("triplane.")
        if code.co_filename.startswith("<") and not ours:  # dataclasses generate code
            readable = linecache.getlines(code.co_filename, frame.f_globals)
            return None if readable else f"{code.co_qualname!r} ({code.co_filename})"
        if _relative(code.co_filename) is not None:
            return None
        frame = frame.f_back
    return None


def location_of(frame: FrameType) -> Location:
    """Return the place of any frame."""
    file = frame.f_code.co_filename
    return Location(_relative(file) or file, frame.f_lineno)


def is_internal(path: str) -> bool:
    """Return whether a resolved path is in one of this package's own layers."""
    return path.startswith(_INTERNAL)


@lru_cache(maxsize=4096)
def _is_command(filename: str) -> bool:
    return str(Path(filename).resolve()).startswith(_COMMAND)


@lru_cache(maxsize=4096)
def _relative(filename: str) -> str | None:
    """Return the path below its import root; None for this package and frames without file."""
    if filename.startswith("<"):
        return None
    path = Path(filename).resolve()
    if is_internal(str(path)):
        return None
    # Import roots may be nested; the longest one that matches gives the path as it is imported.
    roots = sorted((Path(p).resolve() for p in sys.path if p), key=lambda p: -len(p.parts))
    for root in roots:
        if path.is_relative_to(root) and root != path:
            return path.relative_to(root).as_posix()
    return path.name
