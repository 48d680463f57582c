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

MISSING: Final = (
    "`if`, `while`, `for`, `and`, `or` and `not` become graph operators only in code whose source "
    "is kept, and the source of {name!r} ({file}) cannot be read: put the function into a file and "
    "import it, or into a cell of a notebook; or use ops.where, ops.cond, ops.while_loop, "
    "ops.fori_loop or ops.scan"
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


def caller_place() -> str:
    """Return file and line of the innermost frame outside this package, as "<stdin>:3" too."""
    frame = _outside(sys._getframe(2))  # noqa: SLF001 - cheapest way to the caller
    return "an unknown line" if frame is None else str(location_of(frame))


def missing_source() -> str:
    """Return what to do if the innermost function outside this package has no source, or ""."""
    frame = _outside(sys._getframe(2))  # noqa: SLF001 - cheapest way to the caller
    if frame is None or not frame.f_code.co_filename.startswith("<") or _is_readable(frame):
        return ""
    return MISSING.format(name=frame.f_code.co_qualname, file=frame.f_code.co_filename)


def _outside(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not of this package."""
    while frame is not None:
        file = frame.f_code.co_filename
        ours = str(frame.f_globals.get("__name__", "")).startswith("triplane.")
        # Code in "<string>" may be this package's own: dataclasses generate methods.
        if not ours if file.startswith("<") else _relative(file) is not None:
            return frame
        frame = frame.f_back
    return None


def _is_readable(frame: FrameType) -> bool:
    """Return whether the text that is kept under the code's name has the function at its line.

    Python 3.13 keeps the program of `python -c` as "<string>", the name of code in `exec` too.
    """
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    text = "".join(lines[code.co_firstlineno - 1 :])
    return bool(text) and (code.co_name.startswith("<") or f"def {code.co_name}" in text)


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
