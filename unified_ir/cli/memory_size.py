"""Numbers of bytes on the command line, such as 16GiB."""

from __future__ import annotations

import re
from typing import Any, Final

import click

UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
                "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


class MemorySize(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes such as 16GiB or 800MB, or one of some words."""

    name = "bytes"

    def __init__(self, *words: str) -> None:
        self._words = words

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Return the bytes, or the word."""
        if isinstance(value, int) or value in self._words:
            return value  # type: ignore[no-any-return]
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?) ?([A-Za-z]{0,3})", value.strip())
        if match is None or match[2].upper() not in UNITS or not float(match[1]):
            others = "".join(f"{word}, or " for word in self._words)
            what = param.name if param is not None and param.name else "memory"
            self.fail(f"{what} is {others}a number with a unit, such as 16GiB or 800MB, got "
                      f"{value!r}", param, ctx)  # fmt: skip
        return round(float(match[1]) * UNITS[match[2].upper()])
