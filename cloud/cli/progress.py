"""Progress of a transfer on standard error: a bar on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Final

from triplane.cloud.cli.text import size
from triplane.unified_ir.cli.shell import CommandOutput

Progress = Callable[[int, int], None]
TENTHS: Final = 10


@contextlib.contextmanager
def reported(output: CommandOutput, what: str) -> Iterator[Progress]:
    """Gives a function of (bytes done, bytes in all) that shows how far `what` is."""
    if output.as_json or not sys.stderr.isatty():
        yield lines(output.note, what)
        return
    with _bar(what) as progress:
        yield progress


def lines(note: Callable[[str], None], what: str) -> Progress:
    """A line whenever another tenth is done; a small file gives one line."""
    shown = 0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        tenth = TENTHS if done >= total else done * TENTHS // total
        if tenth > shown:
            shown = tenth
            note(f"{what}: {tenth * 10}% of {size(total)}")

    return progress


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
