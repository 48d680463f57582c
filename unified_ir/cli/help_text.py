"""Help that fits the terminal: also blocks that click would print as they are written.

Epilogs have such blocks (after a line with a backspace) for examples and for prose with options in
it, which click would break at their hyphens. They are written for 100 columns.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Final

import click

RAW: Final = "\b"
_TWO_COLUMNS: Final = re.compile(r"(\s+\S.*?\s{2,})(\S.*)")
_PART: Final = r"""(?:'[^']*'|"[^"]*"|\S)"""
_UNIT: Final = re.compile(rf"--?\w{_PART}* (?!-){_PART}+|{_PART}+")
"""An option with its value, or a word; a quoted text is part of one."""
HANGING: Final = " " * 4


class NarrowFormatter(click.HelpFormatter):
    """A formatter that wraps every line that is too wide."""

    def write_text(self, text: str) -> None:
        """See `click.HelpFormatter`."""
        super().write_text(narrowed(text, self.width - self.current_indent))


class NarrowContext(click.Context):
    """The context of commands whose help fits the terminal."""

    formatter_class = NarrowFormatter


def fit_help(command: click.Command) -> click.Command:
    """Have the command, and those of a group, print help that fits the terminal; return it."""
    command.context_class = NarrowContext
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        fit_help(inner)
    return command


def narrowed(text: str, width: int) -> str:
    """Return the text with raw blocks as wide as `width`; other paragraphs are wrapped by click."""
    return "\n\n".join(
        "\n".join(_block(part.split("\n"), width)) if part.startswith(RAW) else part
        for part in re.split(r"\n{2,}", text.expandtabs())
    )


def _block(lines: list[str], width: int) -> Iterator[str]:
    if max(map(len, lines)) <= width:
        yield from lines
        return
    yield lines[0]
    for is_indented, group in groupby(lines[1:], key=lambda line: line.startswith(" ")):
        if is_indented:
            for line in re.sub(r" \\\n *", " ", "\n".join(group)).split("\n"):
                yield from [line] if len(line) <= width else _indented(line, width)
        else:
            yield from _filled(" ".join(group), width, "", "")


def _indented(line: str, width: int) -> Iterator[str]:
    """Wrap a row of two columns below its second one, or a command so that it can be copied."""
    indent = line[: len(line) - len(line.lstrip())]
    columns = _TWO_COLUMNS.fullmatch(line)
    if columns is None:
        yield from _command(line, width, indent)
    elif len(columns[1]) <= width // 2:
        yield from _filled(columns[2], width, columns[1], " " * len(columns[1]))
    else:
        first = columns[1].rstrip()
        yield from [first] if len(first) <= width else _command(first, width, indent)
        yield from _filled(columns[2], width, indent + HANGING, indent + HANGING)


def _command(line: str, width: int, indent: str) -> Iterator[str]:
    """Break a command between words, which a quoted text is, with a backslash before the break."""
    row = indent
    for word in _UNIT.findall(line):
        if row.strip() and len(row) + 1 + len(word) + 2 > width:
            yield f"{row} \\"
            row = indent + HANGING
        row = f"{row} {word}" if row.strip() else row + word
    yield row


def _filled(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
