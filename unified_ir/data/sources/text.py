"""Texts as sources: the characters, words or lines of a file or of a folder of files."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, Unavailable
from triplane.unified_ir.data.columns import TEXT, Array, Columns, Field
from triplane.unified_ir.data.sources.lines import LimitedLines
from triplane.unified_ir.data.sources.memory import table_of_feed
from triplane.unified_ir.data.table import MAX_MEMORY_BYTES, ArrayTable
from triplane.unified_ir.files import bounded

MAX_TEXT_BYTES: Final = 64 << 30
"""Limit for each file, and for what a compressed one inflates to."""
MAX_TEXT_FILES: Final = 1 << 20
CHARACTERS: Final = "characters"
WORDS: Final = "words"
LINES: Final = "lines"
BLOCK_WORDS: Final = 4096
BLOCK_CHARS: Final = 16 << 20


@dataclass(frozen=True)
class TextSource:
    """The texts in UTF-8 of a file (through gzip if its name ends in .gz), or of a folder.

    A folder's texts are its files *.txt in order of name, one behind the other. unit is what makes
    a sample:

    "characters": the column token, int32, a Unicode code point. To train a model of characters,
    replace code points by indices into a vocabulary (step `Lookup`), then cut sequences and those
    that are one character ahead of them (step `Window` with ahead=1), which are x and y.
    "words": the column text, what stands between white space. `Lookup` and `Window` follow alike.
    "lines": the column text, without line ends; empty lines are samples too.

    files: name of one more column, which holds the name of a sample's file without .txt, such as
    its author; "" for none. Texts that take more than `MAX_MEMORY_BYTES` are a `Feed`.
    """

    path: str
    unit: str = CHARACTERS
    files: str = ""

    def __post_init__(self) -> None:
        if self.unit not in {CHARACTERS, WORDS, LINES}:
            raise InvalidInput(
                f"unit is one of {CHARACTERS}, {WORDS}, {LINES}, got {self.unit[:40]!r}"
            )
        if self.files in {"token", "text"}:
            raise InvalidInput(f"the column of files needs another name than {self.files!r}")

    def open(self) -> ArrayTable | TextFeed:
        """Read the texts once to count samples, and again if they fit in memory."""
        feed = TextFeed(self, _paths(Path(self.path)))
        rows = n_bytes = 0
        for units, names in feed.pieces():
            rows += len(units)
            n_bytes += units.nbytes + names.nbytes
            if units.dtype == object:
                n_bytes += sum(map(sys.getsizeof, units))
        if not rows:
            raise InvalidInput(f"{self.path} is empty: it has no {self.unit}")
        return feed if n_bytes > MAX_MEMORY_BYTES else table_of_feed(self.path, feed, rows)


@dataclass(frozen=True, eq=False)
class TextFeed:
    """The units of texts, read again for each epoch."""

    source: TextSource
    paths: tuple[Path, ...]

    @property
    def schema(self) -> dict[str, Field]:
        """See `Feed`."""
        is_character = self.source.unit == CHARACTERS
        units = {"token": Field("int32")} if is_character else {"text": Field(TEXT)}
        return {**units, self.source.files: Field(TEXT)} if self.source.files else units

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`."""
        names = tuple(self.schema)
        for piece in self.pieces():
            n = len(piece[0])
            if start < n:
                yield {name: x[start:] for name, x in zip(names, piece, strict=False)}
            start = max(0, start - n)

    def pieces(self) -> Iterator[tuple[Array, Array]]:
        """Yield units, (n,) int32 or object each, of all texts, and the names of their files."""
        if not self.source.files:
            for units in self._pieces(self.paths):
                yield units, np.zeros(0, object)
            return
        for path in self.paths:
            name = path.name.removesuffix(".gz").removesuffix(".txt")
            for units in self._pieces((path,)):
                yield units, np.full(len(units), name, object)

    def _pieces(self, paths: tuple[Path, ...]) -> Iterator[Array]:
        if self.source.unit == CHARACTERS:
            return chain.from_iterable(map(_characters, paths))
        return _gathered(chain.from_iterable(map(self._units, paths)))

    def _units(self, path: Path) -> Iterator[list[str]]:
        with bounded.inflated(path, limit_bytes=MAX_TEXT_BYTES) as file:
            lines = LimitedLines(path, file, MAX_TEXT_BYTES)
            for line in lines:
                lines.start_record()
                yield line.split() if self.source.unit == WORDS else [line.removesuffix("\n")]


def _gathered(lists: Iterator[list[str]]) -> Iterator[Array]:
    units: list[str] = []
    chars = 0
    for several in lists:
        units += several
        chars += sum(map(len, several))
        if len(units) >= BLOCK_WORDS or chars > BLOCK_CHARS:
            yield np.array(units, object)
            units, chars = [], 0
    if units:
        yield np.array(units, object)


def _characters(path: Path) -> Iterator[Array]:
    """Yield the code points of a file, (n,) int32, a piece of it at a time."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    at = 0
    with bounded.inflated(path, limit_bytes=MAX_TEXT_BYTES) as file:
        final = False
        while not final:
            piece = file.read(bounded.PIECE_BYTES)
            final = not piece
            try:
                text = decoder.decode(piece, final=final)
            except UnicodeDecodeError as error:
                raise Corrupt(
                    f"{path} is not UTF-8 text in the {bounded.PIECE_BYTES} bytes from {at} on: "
                    f"{error.reason}; convert it"
                ) from error
            at += len(piece)
            if at > MAX_TEXT_BYTES:
                raise InvalidInput(f"{path} inflates to more than {MAX_TEXT_BYTES} bytes")
            yield np.frombuffer(text.encode("utf-32-le"), "<i4").astype(np.int32, copy=False)


def _paths(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    try:
        paths = sorted(p for p in path.iterdir() if p.suffix == ".txt" and p.name[0] != ".")
    except OSError as error:
        raise Unavailable(f"{path} could not be listed: {error.strerror}") from error
    if not paths:
        raise NotFound(f"{path} has no file *.txt")
    if len(paths) > MAX_TEXT_FILES:
        raise InvalidInput(f"{path} has {len(paths)} files; at most {MAX_TEXT_FILES} are read")
    return tuple(paths)
