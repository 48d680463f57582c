"""Where the user's code called us: file and line, the file relative to its import root."""

from __future__ import annotations

import linecache
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Final

from triplane.unified_ir.ir.graph import Location

_INTERNAL: Final = tuple(
    f"{Path(__file__).resolve().parents[1] / part}/"
    for part in ("ops", "ir", "autodiff", "passes", "engines", "frontend", "nn", "optim", "train")
)


def user_location() -> Location | None:
    """The innermost frame outside this package's own layers; None when there is none."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - cheapest way to the caller
    while frame is not None:
        file = _relative(frame.f_code.co_filename)
        if file is not None:
            return Location(file, frame.f_lineno)
        frame = frame.f_back
    return None


def unreadable_caller() -> str | None:
    """Name of the innermost function outside this package where its source cannot be read."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - cheapest way to the caller
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<") and not _is_ours(frame):  # dataclasses generate code
            readable = linecache.getlines(code.co_filename, frame.f_globals)
            return None if readable else f"{code.co_qualname!r} ({code.co_filename})"
        if _relative(code.co_filename) is not None:
            return None
        frame = frame.f_back
    return None


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("triplane.")


def location_of(frame: FrameType) -> Location:
    """Where a frame stands, whosever it is."""
    file = frame.f_code.co_filename
    return Location(_relative(file) or file, frame.f_lineno)


def is_internal(path: str) -> bool:
    """Whether a resolved path lies in one of this package's own layers."""
    return path.startswith(_INTERNAL)


@lru_cache(maxsize=4096)
def _relative(filename: str) -> str | None:
    """The path below its import root, or None for this package and for frames without a file."""
    if filename.startswith("<"):
        return None
    path = Path(filename).resolve()
    if is_internal(str(path)):
        return None
    roots = sorted((Path(p).resolve() for p in sys.path if p), key=lambda p: -len(p.parts))
    for root in roots:
        if path.is_relative_to(root) and root != path:
            return path.relative_to(root).as_posix()
    return path.name
